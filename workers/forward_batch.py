"""Tensors of one forward. Built by the workers from a plan, read by the model and the attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spectrue.workers.packed import PackedTensors
from spectrue.workers.tree_mask import depths_of, tree_mask


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """A ragged batch: the tokens of request 0, then those of request 1, and so on.

    Within a request the tokens are consecutive and end at `seq_lens[i]`, so query j of request i
    sits at position `seq_lens[i] - query_lens[i] + j` and sees every position up to its own.

    Draft trees: KV slots are still consecutive, and a row's position is that of its depth. It sees
    what its request had before this forward, itself, and of the other rows those in `tree_mask`.
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
    tree_mask: Tensor | None = None  # [num_tokens, words] int32, see `dispatch.paged_attention`

    @staticmethod
    def build(
        *,
        token_ids: list[Tensor],  # batch x [query_len] int64, the tokens fed per request
        starts: list[int],  # [batch] position of each request's first token
        block_tables: Tensor,  # [batch, max_blocks] int32, on the CPU
        block_size: int,
        device: torch.device | str = "cpu",
        parents: Sequence[Sequence[int]] | None = None,  # batch x [query_len], see tree_mask.py
    ) -> ForwardBatch:
        query_lens = [len(t) for t in token_ids]
        seq_lens = tuple(s + n for s, n in zip(starts, query_lens, strict=True))
        tables = block_tables.numpy()
        mask = places = None
        if parents is not None:
            mask = tree_mask(parents).to(device)
            places = np.concatenate(
                [s + np.array(depths_of(p)) for s, p in zip(starts, parents, strict=True)]
            )
        if torch.device(device).type == "cpu":
            positions, slot_mapping, ends = _places(starts, query_lens, tables, block_size)
            return ForwardBatch(
                input_ids=torch.cat(token_ids),
                positions=torch.from_numpy(positions if places is None else places),
                slot_mapping=torch.from_numpy(slot_mapping),
                block_tables=block_tables,
                query_lens=tuple(query_lens),
                seq_lens=seq_lens,
                cu_query_lens=torch.from_numpy(np.array([0, *ends], dtype=np.int32)),
                kv_lens=torch.from_numpy(np.array(seq_lens, dtype=np.int32)),
                tree_mask=mask,
            )
        used = tables[:, : -(-max(seq_lens) // block_size)]
        fields = feed_fields(len(starts), sum(query_lens), used.shape[1])
        packed = PackedTensors(fields, torch.device(device))
        packed.host["input_ids"][:] = torch.cat(token_ids).numpy()
        fill_feed(packed, starts, query_lens, used, block_size)
        if places is not None:
            packed.host["positions"][:] = places
        packed.upload()
        return replace(feed_batch(packed, tuple(query_lens), seq_lens), tree_mask=mask)


def feed_fields(
    num_requests: int, num_tokens: int, num_blocks: int
) -> dict[str, tuple[torch.dtype, int]]:
    """The fields that a packed batch of these sizes has."""
    return {
        "input_ids": (torch.int64, num_tokens),
        "positions": (torch.int64, num_tokens),
        "slot_mapping": (torch.int64, num_tokens),
        "cu_query_lens": (torch.int32, num_requests + 1),
        "kv_lens": (torch.int32, num_requests),
        "block_tables": (torch.int32, num_requests * num_blocks),
    }


def fill_feed(
    packed: PackedTensors,
    starts: Sequence[int],  # [batch] position of each request's first token
    counts: Sequence[int],  # [batch] tokens fed of each
    tables: NDArray[np.int32],  # [batch, blocks], as wide as the packed tables
    block_size: int,
) -> NDArray[np.int64]:  # [num_tokens] the positions
    """Write where every token goes, but not `input_ids`. Places that are left are padding: their
    tokens write no KV, their requests have no rows."""
    host, n = packed.host, len(starts)
    positions, slot_mapping, ends = _places(starts, counts, tables, block_size)
    num_tokens = len(positions)
    host["positions"][:num_tokens] = positions
    host["slot_mapping"][:num_tokens], host["slot_mapping"][num_tokens:] = slot_mapping, -1
    host["cu_query_lens"][1 : n + 1], host["cu_query_lens"][n + 1 :] = ends, num_tokens
    kv_lens = np.array(starts) + counts
    host["kv_lens"][:n], host["kv_lens"][n:] = kv_lens, 0
    used = -(-int(kv_lens.max()) // block_size)
    host["block_tables"].reshape(-1, tables.shape[1])[:n, :used] = tables[:, :used]
    return positions


def feed_batch(
    packed: PackedTensors, query_lens: tuple[int, ...], seq_lens: tuple[int, ...]
) -> ForwardBatch:
    """The batch that a packed feed holds, on its device; the lengths may be bounds."""
    at = packed.device
    return ForwardBatch(
        input_ids=at["input_ids"],
        positions=at["positions"],
        slot_mapping=at["slot_mapping"],
        block_tables=at["block_tables"].view(len(at["kv_lens"]), -1),
        query_lens=query_lens,
        seq_lens=seq_lens,
        cu_query_lens=at["cu_query_lens"],
        kv_lens=at["kv_lens"],
    )


def _places(
    starts: Sequence[int], counts: Sequence[int], tables: NDArray[np.int32], block_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(positions, slots) of every token, and how many tokens there are up to each request.

    NumPy: on index arrays of this size torch's CPU kernels cost more than the work.
    """
    first, lengths = np.array(starts, dtype=np.int64), np.array(counts, dtype=np.int64)
    ends: NDArray[np.int64] = np.cumsum(lengths)
    rows = np.repeat(np.arange(len(first)), lengths)
    positions: NDArray[np.int64] = (first + lengths - ends)[rows] + np.arange(len(rows))
    blocks = tables[rows, positions // block_size].astype(np.int64)
    return positions, blocks * block_size + positions % block_size, ends


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutput:
    """What a forward of a model computed, one row a token of its batch.

    `aux_hidden_states` are the outputs of the decoder layers that the model's `aux_layers` name,
    side by side in that order: what an EAGLE3 head reads.
    """

    hidden_states: Tensor  # [num_tokens, hidden], after the final norm
    aux_hidden_states: Tensor | None = None  # [num_tokens, len(aux_layers) * hidden]
    fed: bool = False  # to the draft head already, in the graph that computed it
