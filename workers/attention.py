"""Attention over the paged KV, for prefill chunks, decode and verify rows in one ragged batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrue.workers.forward_batch import ForwardBatch

MAX_GROUPED_QUERIES = 16  # longer query lengths are prefill: one call per request
GROUP_SLACK = 1.25  # requests share a call while the longest KV is at most this times the shortest
GROUP_TOKENS = 64  # ... plus this
KV_MULTIPLE = 64  # tokens; see _attend on why decode and verify shall see one KV length


@dataclass(frozen=True, slots=True)
class _Group:
    """Requests of one query length that share one SDPA call, KV padded to the longest."""

    size: int
    query_len: int
    kv_len: int
    slots: Tensor  # [size * kv_len] int64
    mask: Tensor | None  # additive, [size, 1, queries, kv_len]
    causal: bool  # a whole prompt: SDPA's own causal mask
    rows: Tensor | None  # [size * query_len] int64, None when the group is the whole batch in order


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """What does not depend on the layer: built once per forward."""

    groups: tuple[_Group, ...]

    @staticmethod
    def build(
        batch: ForwardBatch, block_size: int, queries_per_kv: int, dtype: torch.dtype
    ) -> AttentionMetadata:
        members = _group(batch.query_lens, batch.seq_lens)
        starts = torch.tensor((0, *batch.query_lens)).cumsum(0)
        whole = len(members) == 1
        return AttentionMetadata(
            tuple(
                _make(batch, m, starts, whole, block_size, queries_per_kv, dtype) for m in members
            )
        )


def _group(query_lens: tuple[int, ...], seq_lens: tuple[int, ...]) -> list[list[int]]:
    """Indices of the requests of each call. One group is always in batch order."""
    groups: list[list[int]] = []
    order = sorted(range(len(query_lens)), key=lambda i: (query_lens[i], seq_lens[i]))
    for i in order:
        first = groups[-1][0] if groups else -1
        if (
            first >= 0
            and query_lens[first] == query_lens[i] <= MAX_GROUPED_QUERIES
            and seq_lens[i] <= seq_lens[first] * GROUP_SLACK + GROUP_TOKENS
        ):
            groups[-1].append(i)
        else:
            groups.append([i])
    return [sorted(group) for group in groups]


def _make(
    batch: ForwardBatch,
    members: list[int],
    starts: Tensor,  # [batch + 1] first row of each request
    whole: bool,
    block_size: int,
    queries_per_kv: int,
    dtype: torch.dtype,
) -> _Group:
    device = batch.input_ids.device
    query_len = batch.query_lens[members[0]]
    lens = [batch.seq_lens[i] for i in members]
    kv_len = max(lens)
    if query_len <= MAX_GROUPED_QUERIES:
        kv_len = -(-kv_len // KV_MULTIPLE) * KV_MULTIPLE
    seq_lens = torch.tensor(lens, device=device)[:, None]
    # Padding reads the request's own last token, never a slot that may hold another's NaN: a masked
    # weight is 0, and 0 * NaN is NaN.
    kv_positions = torch.arange(kv_len, device=device)
    valid = torch.minimum(kv_positions, seq_lens - 1)
    tables = batch.block_tables if whole else batch.block_tables[members]
    blocks = tables.gather(1, valid // block_size).long()
    slots = (blocks * block_size + valid % block_size).flatten()

    rows = None
    if not whole:
        rows = (starts[members][:, None] + torch.arange(query_len)).flatten().to(device)
    causal = query_len > MAX_GROUPED_QUERIES and query_len == kv_len
    mask = None
    if not causal and (query_len > 1 or min(lens) < kv_len):
        query_positions = seq_lens - query_len + torch.arange(query_len, device=device)
        hidden = kv_positions > query_positions[:, :, None]  # [size, query_len, kv_len]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
        mask = mask.masked_fill_(hidden, float("-inf"))[:, None]
        if 1 < query_len <= MAX_GROUPED_QUERIES:  # query heads are folded into the query axis
            mask = mask.repeat(1, 1, queries_per_kv, 1)
    return _Group(len(members), query_len, kv_len, slots, mask, causal, rows)


def paged_attention(
    query: Tensor,  # [num_tokens, num_heads, head_dim]
    kv: Tensor,  # [num_slots, 2, num_kv_heads, head_dim], one layer of the pool, already written
    metadata: AttentionMetadata,
) -> Tensor:
    """Causal softmax attention by position, [num_tokens, num_heads * head_dim]."""
    groups = metadata.groups
    if len(groups) == 1 and groups[0].rows is None:
        return _attend(query, kv, groups[0])
    out = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
    for group in groups:
        assert group.rows is not None
        out.index_copy_(0, group.rows, _attend(query.index_select(0, group.rows), kv, group))
    return out


def _attend(query: Tensor, kv: Tensor, group: _Group) -> Tensor:
    _, num_heads, head_dim = query.shape
    num_kv_heads = kv.shape[2]
    fold = num_heads // num_kv_heads
    size, query_len, kv_len = group.size, group.query_len, group.kv_len
    gathered = kv.index_select(0, group.slots).view(size, kv_len, 2, num_kv_heads, head_dim)
    key, value = gathered.permute(2, 0, 3, 1, 4).unbind(0)  # [size, num_kv_heads, kv_len, head_dim]

    if query_len <= MAX_GROUPED_QUERIES:
        # Query heads of one KV head go into the query axis, so that K and V are read once.
        grouped = query.view(size, query_len, num_kv_heads, fold, head_dim)
        grouped = grouped.permute(0, 2, 3, 1, 4).reshape(size, num_kv_heads, -1, head_dim)
        if query_len == 1:
            # Twice the same row: a product with few rows is summed in another order, and in bf16
            # one last bit here is 0.3 of a logit thirty layers on. So decode equals verify.
            grouped = grouped.repeat(1, 1, 2, 1)
        out = F.scaled_dot_product_attention(grouped, key, value, group.mask)
        if query_len == 1:
            out = out[:, :, :fold]
        else:
            out = out.view(size, num_kv_heads, fold, query_len, head_dim).permute(0, 3, 1, 2, 4)
        return out.reshape(size * query_len, num_heads * head_dim)

    # One request: KV heads are the batch axis, their query heads share K and V by a stride of 0.
    heads = query.view(query_len, num_kv_heads, fold, head_dim).permute(1, 2, 0, 3)
    shape = (num_kv_heads, fold, kv_len, head_dim)
    out = F.scaled_dot_product_attention(
        heads,
        key.transpose(0, 1).expand(shape),
        value.transpose(0, 1).expand(shape),
        group.mask,
        is_causal=group.causal,
    )
    return out.permute(2, 0, 1, 3).reshape(query_len, num_heads * head_dim)
