"""Tensors of one forward. Built by the workers from a plan, read by the model and the attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """A ragged batch: the tokens of request 0, then those of request 1, and so on.

    Within a request the tokens are consecutive and end at `seq_lens[i]`, so query j of request i
    sits at position `seq_lens[i] - query_lens[i] + j` and sees every position up to its own.
    """

    input_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    slot_mapping: Tensor  # [num_tokens] int64, block_id * block_size + offset, where the KV goes
    block_tables: Tensor  # [batch, max_blocks] int32, physical block of each logical one
    query_lens: tuple[int, ...]  # [batch] tokens fed per request
    seq_lens: tuple[int, ...]  # [batch] tokens with valid KV after this forward

    @staticmethod
    def build(
        *,
        token_ids: list[Tensor],  # batch x [query_len] int64, the tokens fed per request
        starts: list[int],  # [batch] position of each request's first token
        block_tables: Tensor,  # [batch, max_blocks] int32
        block_size: int,
    ) -> ForwardBatch:
        # NumPy: on index arrays of this size torch's CPU kernels cost more than the work.
        query_lens = [len(t) for t in token_ids]
        rows = np.repeat(np.arange(len(starts)), query_lens)
        offsets = np.arange(len(rows)) - np.repeat(np.cumsum(query_lens) - query_lens, query_lens)
        positions = np.array(starts)[rows] + offsets
        blocks = block_tables.numpy()[rows, positions // block_size].astype(np.int64)
        return ForwardBatch(
            input_ids=torch.cat(token_ids),
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(blocks * block_size + positions % block_size),
            block_tables=block_tables,
            query_lens=tuple(query_lens),
            seq_lens=tuple(s + n for s, n in zip(starts, query_lens, strict=True)),
        )
