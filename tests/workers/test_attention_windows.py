"""Sliding windows, scales and capped scores of our attention, against a plain loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spectrue.kernels import dispatch
from spectrue.workers.attention import AttentionMetadata, paged_attention
from spectrue.workers.errors import ConfigError
from spectrue.workers.forward_batch import ForwardBatch

from .test_attention import RAGGED, batch_of, fake_flash, on_platform

BLOCK = 4
HEADS, KV_HEADS, DIM = 6, 2, 16


def case(shapes: list[tuple[int, int]]) -> tuple[ForwardBatch, Tensor, Tensor, Tensor]:
    """A batch, its query, one layer of a pool with NaN wherever nothing lies, block tables."""
    generator = torch.Generator().manual_seed(0)
    width = max(-(-s // BLOCK) for _, s in shapes)
    tables = torch.randperm(len(shapes) * width, generator=generator).int().view(len(shapes), -1)
    kv = torch.full((tables.numel() * BLOCK, 2, KV_HEADS, DIM), float("nan"))
    for table, (_, length) in zip(tables, shapes, strict=True):
        at = torch.arange(length)
        slots = table[at // BLOCK].long() * BLOCK + at % BLOCK
        kv[slots] = torch.randn(length, 2, KV_HEADS, DIM, generator=generator)
    query = torch.randn(sum(q for q, _ in shapes), HEADS, DIM, generator=generator)
    return batch_of(shapes, tables, BLOCK), query, kv, tables


def expected_of(
    shapes: list[tuple[int, int]],
    query: Tensor,
    kv: Tensor,
    tables: Tensor,
    *,
    scale: float | None,
    window: int,
    softcap: float | None,
) -> Tensor:
    rows = iter(query.double())
    out = []
    for table, (query_len, length) in zip(tables, shapes, strict=True):
        for position in range(length - query_len, length):
            seen = torch.arange(max(0, position + 1 - window) if window else 0, position + 1)
            key, value = kv[table[seen // BLOCK].long() * BLOCK + seen % BLOCK].double().unbind(1)
            key, value = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (key, value))
            scores = torch.einsum("hd,khd->hk", next(rows), key) * (scale or DIM**-0.5)
            if softcap is not None:
                scores = softcap * (scores / softcap).tanh()
            out.append(torch.einsum("hk,khd->hd", scores.softmax(-1), value).flatten())
    return torch.stack(out)


@pytest.mark.parametrize("name", [n for n in RAGGED if n != "many"])
@pytest.mark.parametrize(
    ("window", "scale", "softcap"),
    [(1, None, None), (7, None, None), (64, 0.1, None), (0, 0.5, 1.5), (7, None, 1.5)],
)
def test_against_a_loop(name: str, window: int, scale: float | None, softcap: float | None) -> None:
    shapes = RAGGED[name]
    batch, query, kv, tables = case(shapes)
    metadata = AttentionMetadata.build(
        batch, BLOCK, HEADS // KV_HEADS, query.dtype, windows={0, 3, window}
    )
    got = paged_attention(query, kv, metadata, scale=scale, window=window, softcap=softcap)
    expected = expected_of(shapes, query, kv, tables, scale=scale, window=window, softcap=softcap)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_window_must_be_announced() -> None:
    batch, query, kv, _ = case([(1, 9)])
    metadata = AttentionMetadata.build(batch, BLOCK, 3, query.dtype, windows={4})
    with pytest.raises(KeyError):
        paged_attention(query, kv, metadata, window=5)


@pytest.mark.parametrize("length", [5, 30, 62, 160])
def test_decode_and_verify_agree_to_the_bit(length: int) -> None:
    """With a window too a row's sums do not depend on how many rows are beside it."""
    _, query, kv, tables = case([(4, length)])

    def rows(first: int, last: int) -> Tensor:
        batch = batch_of([(last - first, length - 4 + last)], tables, BLOCK)
        metadata = AttentionMetadata.build(batch, BLOCK, 3, query.dtype, windows={24})
        return paged_attention(query[first:last], kv, metadata, window=24)

    assert torch.equal(rows(0, 4), torch.cat([rows(i, i + 1) for i in range(4)]))


def test_the_paged_kernel_gets_window_and_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(1, 30), (4, 20), (17, 40)]
    batch, query, kv, tables = case(shapes)
    on_platform(monkeypatch, "hip")
    metadata = AttentionMetadata.build(batch, BLOCK, 3, query.dtype, windows={6})
    assert metadata.paged is not None
    with dispatch.use_backend("reference"):
        got = paged_attention(query, kv, metadata, scale=0.4, window=6)
    expected = expected_of(shapes, query, kv, tables, scale=0.4, window=6, softcap=None)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ConfigError, match="caps its attention scores"):
        paged_attention(query, kv, metadata, softcap=2.0)


def test_flash_attention_gets_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, query, kv, _ = case([(1, 30)])
    fake_flash(monkeypatch, "vllm_flash_attn")
    on_platform(monkeypatch, "cuda")
    metadata = AttentionMetadata.build(batch, BLOCK, 3, query.dtype, attention_backend="flash")
    calls = []

    def flash(**arguments: object) -> Tensor:
        calls.append(arguments)
        return query

    monkeypatch.setattr("spectrue.workers.attention.flash_attention", lambda: flash)
    paged_attention(query, kv, metadata, scale=0.4, window=6, softcap=2.0)
    (call,) = calls
    assert call["softmax_scale"] == 0.4
    assert call["window_size"] == (5, 0)  # before and after the query
    assert call["softcap"] == 2.0
