"""Paged attention against a plain loop over requests, with NaN in every slot that is not theirs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spectrue.workers.attention import MAX_GROUPED_QUERIES, AttentionMetadata, paged_attention
from spectrue.workers.forward_batch import ForwardBatch
from spectrue.workers.kv_cache import KVCachePool

HEAD_DIM = 16
NUM_BLOCKS = 500


def reference(
    query: Tensor,  # [query_len, num_heads, head_dim]
    key: Tensor,  # [seq_len, num_kv_heads, head_dim]
    value: Tensor,
) -> Tensor:
    fold = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(fold, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) / query.shape[-1] ** 0.5
    ahead = torch.ones(len(query), len(key)).tril(len(key) - len(query)) == 0
    weights = scores.masked_fill(ahead, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)


RAGGED = {
    "one decode": [(1, 33)],
    "first token": [(1, 1)],
    "equal decodes": [(1, 20)] * 5,
    "verify": [(4, 20), (4, 31), (4, 4)],
    "ragged k": [(1, 7), (4, 90), (2, 300), (1, 400), (4, 91), (3, 3)],
    "prefill": [(40, 40)],
    "longest grouped": [(MAX_GROUPED_QUERIES, 50), (MAX_GROUPED_QUERIES, MAX_GROUPED_QUERIES)],
    "shortest ungrouped": [(MAX_GROUPED_QUERIES + 1, 50), (MAX_GROUPED_QUERIES + 1, 60)],
    "all at once": [(33, 120), (1, 500), (4, 64), (50, 50), (1, 2), (4, 65), (17, 17)],
    "many": [(1 + i % 4, 5 + 13 * i) for i in range(32)],
}


@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (4, 4), (8, 1)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_against_reference(
    name: str,
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    generator = torch.Generator().manual_seed(0)
    query_lens, seq_lens = zip(*RAGGED[name], strict=True)
    num_blocks = max(NUM_BLOCKS, sum(seq_lens) + 50) if block_size == 1 else NUM_BLOCKS
    pool = KVCachePool(1, num_blocks, block_size, num_kv_heads, HEAD_DIM, dtype)
    pool.layers[0].fill_(float("nan"))
    free = torch.randperm(num_blocks, generator=generator).int().tolist()
    width = max(-(-n // block_size) for n in seq_lens)
    tables = torch.full((len(seq_lens), width), free[-1], dtype=torch.int32)  # padding: NaN
    keys, values = [], []
    for i, length in enumerate(seq_lens):
        used = -(-length // block_size)
        tables[i, :used] = torch.tensor([free.pop(0) for _ in range(used)])
        kv = torch.randn(length, 2, num_kv_heads, HEAD_DIM, generator=generator).to(dtype)
        at = torch.arange(length)
        slots = tables[i, at // block_size].long() * block_size + at % block_size
        pool.write(0, slots, kv)
        keys.append(kv[:, 0])
        values.append(kv[:, 1])
        assert pool.key(0).flatten(0, 1)[slots].equal(kv[:, 0])
        assert pool.value(0).flatten(0, 1)[slots].equal(kv[:, 1])

    batch = ForwardBatch.build(
        token_ids=[torch.zeros(n, dtype=torch.int64) for n in query_lens],
        starts=[s - q for q, s in RAGGED[name]],
        block_tables=tables,
        block_size=block_size,
    )
    query = torch.randn(sum(query_lens), num_heads, HEAD_DIM, generator=generator).to(dtype)
    metadata = AttentionMetadata.build(batch, block_size, num_heads // num_kv_heads, dtype)
    out = paged_attention(query, pool.layers[0], metadata)
    assert out.shape == (sum(query_lens), num_heads * HEAD_DIM)
    for rows, q, k, v in zip(
        out.split(query_lens), query.split(query_lens), keys, values, strict=True
    ):
        expected = reference(q, k, v)
        torch.testing.assert_close(rows.double(), expected, rtol=tolerance, atol=tolerance)


def test_requests_of_like_length_share_a_call() -> None:
    def groups(shapes: list[tuple[int, int]]) -> int:
        query_lens, seq_lens = zip(*shapes, strict=True)
        tables = torch.zeros(len(shapes), 64, dtype=torch.int32)
        tokens = torch.zeros(sum(query_lens), dtype=torch.int64)
        batch = ForwardBatch(
            input_ids=tokens,
            positions=tokens,
            slot_mapping=tokens,
            block_tables=tables,
            query_lens=query_lens,
            seq_lens=seq_lens,
        )
        return len(AttentionMetadata.build(batch, 16, 3, torch.float32).groups)

    assert groups([(1, 200 + i) for i in range(32)]) == 1
    assert groups([(1, 10), (1, 900)]) == 2  # padding would cost more than a call
    assert groups([(1, 100), (4, 100)]) == 2


def test_pool_size() -> None:
    pool = KVCachePool(3, 5, 16, 2, 8, torch.bfloat16)
    assert pool.bytes == 5 * KVCachePool.bytes_per_block(3, 16, 2, 8, torch.bfloat16)
    assert all(not layer.any() for layer in pool.layers)
