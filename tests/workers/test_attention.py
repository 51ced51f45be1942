"""Paged attention against a plain loop over requests, with NaN in every slot that is not theirs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from spectrue.kernels import dispatch
from spectrue.workers.attention import (
    FLASH_MODULES,
    MAX_GROUPED_QUERIES,
    AttentionMetadata,
    flash_attention,
    paged_attention,
    resolve_backend,
)
from spectrue.workers.errors import ConfigError
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


def batch_of(shapes: list[tuple[int, int]], tables: Tensor, block_size: int) -> ForwardBatch:
    return ForwardBatch.build(
        token_ids=[torch.zeros(n, dtype=torch.int64) for n, _ in shapes],
        starts=[s - q for q, s in shapes],
        block_tables=tables,
        block_size=block_size,
    )


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

    batch = batch_of(RAGGED[name], tables, block_size)
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


SHAPES = [(1, 30), (4, 20), (17, 40)]
BLOCK = 16


def paged_case() -> tuple[ForwardBatch, Tensor, Tensor]:
    """A batch, its query (a slice of a fused projection) and one layer of a pool."""
    generator = torch.Generator().manual_seed(0)
    tables = torch.randperm(9, generator=generator).int().view(3, 3)
    kv = torch.randn(9 * BLOCK, 2, 3, HEAD_DIM, generator=generator)
    fused = torch.randn(22, 15, HEAD_DIM, generator=generator)
    return batch_of(SHAPES, tables, BLOCK), fused[:, :9], kv


def on_platform(monkeypatch: pytest.MonkeyPatch, platform: dispatch.Platform) -> None:
    """The tensors of this test count as that platform's; its ops run by the reference."""
    monkeypatch.setattr(dispatch, "platform_of", lambda device: platform)


@pytest.mark.parametrize("platform", ["cuda", "hip"])
def test_gpus_run_the_paged_kernel(
    monkeypatch: pytest.MonkeyPatch, platform: dispatch.Platform
) -> None:
    batch, query, kv = paged_case()
    expected = paged_attention(query, kv, AttentionMetadata.build(batch, BLOCK, 3, query.dtype))
    on_platform(monkeypatch, platform)
    metadata = AttentionMetadata.build(batch, BLOCK, 3, query.dtype)
    assert metadata.groups == ()
    paged = metadata.paged
    assert paged is not None
    assert not paged.flash
    assert paged.cu_query_lens.tolist() == [0, 1, 5, 22]
    assert paged.seq_lens.tolist() == [30, 20, 40]
    assert {x.dtype for x in (paged.cu_query_lens, paged.seq_lens)} == {torch.int32}
    assert all(x.data_ptr() % 16 == 0 for x in (paged.cu_query_lens, paged.seq_lens))
    assert (paged.max_query_len, paged.max_seq_len, paged.block_size) == (17, 40, BLOCK)
    with dispatch.use_backend("reference"):
        got = paged_attention(query, kv, metadata)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    monkeypatch.setitem(dispatch.BACKENDS, "triton", {"paged_attention": lambda *_, **__: "ours"})
    ours: object = paged_attention(query, kv, metadata)
    assert ours == "ours"


@pytest.mark.parametrize("backend", ["auto", "flash"])
def test_trees_go_by_the_paged_kernel(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    batch, query, kv = paged_case()
    chain = [(1 << (j + 1)) - 1 for query_len, _ in SHAPES for j in range(query_len)]
    tree_mask = torch.tensor(chain, dtype=torch.int32)[:, None]
    plain = AttentionMetadata.build(batch, BLOCK, 3, query.dtype)
    if backend == "flash":
        on_platform(monkeypatch, "cuda")
        fake_flash(monkeypatch, FLASH_MODULES[0])
    metadata = AttentionMetadata.build(
        batch, BLOCK, 3, query.dtype, attention_backend=backend, tree_mask=tree_mask
    )
    assert metadata.paged is not None
    assert metadata.paged.tree_mask is tree_mask
    with dispatch.use_backend("reference"):
        got = paged_attention(query, kv, metadata)
    torch.testing.assert_close(got, paged_attention(query, kv, plain), rtol=1e-5, atol=1e-5)


def fake_flash(monkeypatch: pytest.MonkeyPatch, name: str) -> list[dict[str, Any]]:
    """A module with `flash_attn_varlen_func` that checks its arguments as the real one does."""
    calls = []

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        max_seqlen_q: int,
        cu_seqlens_q: Tensor,
        max_seqlen_k: int,
        cu_seqlens_k: Tensor | None = None,
        seqused_k: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: list[int] | None = None,
        block_table: Tensor | None = None,
    ) -> Tensor:
        assert cu_seqlens_k is None
        assert window_size is None
        assert causal
        assert seqused_k is not None
        assert block_table is not None
        assert q.stride(2) == k.stride(3) == v.stride(3) == 1
        assert k.shape == v.shape == (9, BLOCK, 3, HEAD_DIM)
        assert cu_seqlens_q.dtype == seqused_k.dtype == block_table.dtype == torch.int32
        calls.append({"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k})
        out = torch.empty(q.shape)
        starts = cu_seqlens_q.tolist()
        for i, seq_len in enumerate(seqused_k.tolist()):
            rows = slice(starts[i], starts[i + 1])
            key, value = (x[block_table[i].long()].flatten(0, 1)[:seq_len] for x in (k, v))
            assert softmax_scale == HEAD_DIM**-0.5
            out[rows] = reference(q[rows], key, value).view(-1, 9, HEAD_DIM).float()
        return out

    for parent in ("vllm", *FLASH_MODULES):
        monkeypatch.setitem(sys.modules, parent, None)  # not installed
    module = ModuleType(name)
    module.__dict__["flash_attn_varlen_func"] = flash_attn_varlen_func
    if "." in name:
        monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, name, module)
    return calls


@pytest.fixture(autouse=True)
def _flash_is_looked_for_again() -> Iterator[None]:
    flash_attention.cache_clear()
    yield
    flash_attention.cache_clear()


@pytest.mark.parametrize("name", FLASH_MODULES)
def test_flash_attention_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    batch, query, kv = paged_case()
    expected = paged_attention(query, kv, AttentionMetadata.build(batch, BLOCK, 3, query.dtype))
    calls = fake_flash(monkeypatch, name)
    on_platform(monkeypatch, "cuda")
    automatic = AttentionMetadata.build(batch, BLOCK, 3, query.dtype)
    assert automatic.paged is not None
    assert not automatic.paged.flash  # not before a measurement says so
    metadata = AttentionMetadata.build(batch, BLOCK, 3, query.dtype, attention_backend="flash")
    got = paged_attention(query, kv, metadata)
    assert got.shape == expected.shape
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert calls == [{"max_seqlen_q": 17, "max_seqlen_k": 40}]


def test_a_backend_that_cannot_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vllm", *FLASH_MODULES):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"cannot be imported; vllm_flash_attn: .*; vllm\.vllm"):
        resolve_backend("flash", "cuda")
    fake_flash(monkeypatch, FLASH_MODULES[0])
    assert resolve_backend("flash", "cuda") == "flash"
    platform: dispatch.Platform
    for backend, platform in (
        ("flash", "hip"),
        ("flash", "cpu"),
        ("triton", "cpu"),
        ("sdpa", "hip"),
    ):
        with pytest.raises(ConfigError, match=f"= {backend} works on .*, not on {platform}"):
            resolve_backend(backend, platform)
    with pytest.raises(ConfigError, match="one of auto, sdpa, triton, flash, got 'xformers'"):
        resolve_backend("xformers", "cuda")
    assert resolve_backend("auto", "cpu") == "sdpa"
    assert resolve_backend("auto", "cuda") == resolve_backend("auto", "hip") == "triton"


def test_pool_size() -> None:
    pool = KVCachePool(3, 5, 16, 2, 8, torch.bfloat16)
    assert pool.bytes == 5 * KVCachePool.bytes_per_block(3, 16, 2, 8, torch.bfloat16)
    assert all(not layer.any() for layer in pool.layers)
