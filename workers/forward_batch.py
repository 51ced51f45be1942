"""Tensors of one forward. Built by the workers from a plan, read by the model and the attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spectrue.workers.packed import PackedTensors


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
    # The same for the paged kernel; the lengths above may then be bounds, as in a captured graph.
    cu_query_lens: Tensor | None = None  # [batch + 1] int32, rows before each request
    kv_lens: Tensor | None = None  # [batch] int32, `seq_lens`

    @staticmethod
    def build(
        *,
        token_ids: list[Tensor],  # batch x [query_len] int64, the tokens fed per request
        starts: list[int],  # [batch] position of each request's first token
        block_tables: Tensor,  # [batch, max_blocks] int32, on the CPU
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> ForwardBatch:
        # NumPy: on index arrays of this size torch's CPU kernels cost more than the work.
        query_lens = [len(t) for t in token_ids]
        rows = np.repeat(np.arange(len(starts)), query_lens)
        ends = np.cumsum(query_lens)
        offsets = np.arange(len(rows)) - np.repeat(ends - query_lens, query_lens)
        positions = np.array(starts)[rows] + offsets
        blocks = block_tables.numpy()[rows, positions // block_size].astype(np.int64)
        slot_mapping = blocks * block_size + positions % block_size
        seq_lens = tuple(s + n for s, n in zip(starts, query_lens, strict=True))
        if torch.device(device).type == "cpu":
            return ForwardBatch(
                input_ids=torch.cat(token_ids),
                positions=torch.from_numpy(positions),
                slot_mapping=torch.from_numpy(slot_mapping),
                block_tables=block_tables,
                query_lens=tuple(query_lens),
                seq_lens=seq_lens,
                cu_query_lens=torch.from_numpy(np.array([0, *ends], dtype=np.int32)),
                kv_lens=torch.from_numpy(np.array(seq_lens, dtype=np.int32)),
            )
        used = block_tables[:, : -(-max(seq_lens) // block_size)].numpy()
        packed = PackedTensors(
            {
                "input_ids": (torch.int64, len(rows)),
                "positions": (torch.int64, len(rows)),
                "slot_mapping": (torch.int64, len(rows)),
                "cu_query_lens": (torch.int32, len(starts) + 1),
                "kv_lens": (torch.int32, len(starts)),
                "block_tables": (torch.int32, used.size),
            },
            torch.device(device),
        )
        host, at = packed.host, packed.device
        host["input_ids"][:] = torch.cat(token_ids).numpy()
        host["positions"][:], host["slot_mapping"][:] = positions, slot_mapping
        host["cu_query_lens"][1:], host["kv_lens"][:] = ends, seq_lens
        host["block_tables"][:] = used.ravel()
        packed.upload()
        return ForwardBatch(
            input_ids=at["input_ids"],
            positions=at["positions"],
            slot_mapping=at["slot_mapping"],
            block_tables=at["block_tables"].view(used.shape),
            query_lens=tuple(query_lens),
            seq_lens=seq_lens,
            cu_query_lens=at["cu_query_lens"],
            kv_lens=at["kv_lens"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutput:
    """What a forward of a model computed, one row a token of its batch.

    `aux_hidden_states` are the outputs of the decoder layers that the model's `aux_layers` name,
    side by side in that order: what an EAGLE3 head reads.
    """

    hidden_states: Tensor  # [num_tokens, hidden], after the final norm
    aux_hidden_states: Tensor | None = None  # [num_tokens, len(aux_layers) * hidden]
    persistent: bool = False  # the engine's own memory, the same at every step; longer than a batch
