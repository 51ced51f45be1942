"""Paged attention against float64 softmax token by token, with NaN in every slot not the request's.

The expected rows are computed one query at a time, from the keys and values as they were before
they were scattered into the pool.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from spectrue.kernels.dispatch import paged_attention

from .conftest import BACKEND, FP8, TIER

NAN = float("nan")
SMALL = BACKEND.startswith("gfx")
HALVES = [torch.float16, torch.bfloat16] if TIER.bf16 else []
DTYPES = [torch.float32, *HALVES]
# Half precision: inputs are exact, weights and the output are rounded.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
Shape = tuple[int, int]  # query_len, seq_len
core = pytest.mark.core


@dataclass
class Case:
    """A ragged batch in a pool of NaN, and what its attention must be."""

    shapes: list[Shape]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    window: int = 0
    scale: float | None = None
    tree: list[list[set[int]]] | None = None  # for each query of each request the queries it sees
    padding: int = 0  # rows after the last request
    seed: int = 0
    kv_dtype: torch.dtype | None = None  # of the pool; None: the queries'
    k_scale: float = 1.0
    v_scale: float = 1.0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def rand(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device="cpu").to(self.dtype)

        pool = self.kv_dtype or self.dtype
        used = [-(-seq_len // self.block_size) for _, seq_len in self.shapes]
        num_blocks = sum(used) + 3
        free = torch.randperm(num_blocks, generator=generator, device="cpu").tolist()
        with torch.device("cpu"):
            self.kv = torch.full(
                (num_blocks * self.block_size, 2, self.num_kv_heads, self.head_dim), NAN
            ).to(pool)
            # What lies beyond a request's blocks points at a block of NaN.
            self.tables = torch.full((len(used), max(used, default=1) + 1), free.pop()).int()
            self.keys, self.values = [], []
            for i, (_, seq_len) in enumerate(self.shapes):
                blocks = [free.pop() for _ in range(used[i])]
                self.tables[i, : used[i]] = torch.tensor(blocks, dtype=torch.int32)
                key = rand(seq_len, self.num_kv_heads, self.head_dim).to(pool)
                value = rand(seq_len, self.num_kv_heads, self.head_dim).to(pool)
                self.keys.append(key.double() * self.k_scale)
                self.values.append(value.double() * self.v_scale)
                for at in range(seq_len):
                    slot = blocks[at // self.block_size] * self.block_size + at % self.block_size
                    self.kv[slot, 0], self.kv[slot, 1] = key[at], value[at]
            self.num_tokens = sum(query_len for query_len, _ in self.shapes)
            # The query is a slice of a fused projection.
            fused = rand(self.num_tokens + self.padding, self.num_heads + 2, self.head_dim)
            fused[self.num_tokens :] = NAN
            self.fused = fused

    def tree_mask(self) -> Tensor | None:
        if self.tree is None:
            return None
        width = -(-max(query_len for query_len, _ in self.shapes) // 32)
        rows = []
        for visible in [row for request in self.tree for row in request]:
            words = [sum(1 << j for j in range(32) if 32 * w + j in visible) for w in range(width)]
            rows.append([w - (1 << 32) if w >> 31 else w for w in words])
        rows += [[-1] * width] * self.padding
        return torch.tensor(rows, dtype=torch.int32)

    def run(self, max_seq_len: int | None = None, max_query_len: int | None = None) -> Tensor:
        device = torch.empty(0).device
        query_lens, seq_lens = zip(*self.shapes, strict=True)
        out = paged_attention(
            self.fused.to(device)[:, : self.num_heads],
            self.kv.to(device),
            block_tables=self.tables.to(device),
            block_size=self.block_size,
            cu_query_lens=torch.tensor([0, *query_lens]).cumsum(0).int(),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            max_query_len=max_query_len or max(query_lens),
            max_seq_len=max_seq_len or max(*seq_lens, 1),
            scale=self.scale,
            window=self.window,
            tree_mask=self.tree_mask(),
            k_scale=self.k_scale,
            v_scale=self.v_scale,
        )
        assert out.shape == (len(self.fused), self.num_heads * self.head_dim)
        assert out.dtype == self.dtype
        return out.cpu()

    def expected(self) -> Tensor:
        out = torch.zeros(len(self.fused), self.num_heads, self.head_dim).double().cpu()
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        row = 0
        for i, (query_len, seq_len) in enumerate(self.shapes):
            context = seq_len - query_len
            key = self.keys[i].repeat_interleave(self.num_heads // self.num_kv_heads, 1)
            value = self.values[i].repeat_interleave(self.num_heads // self.num_kv_heads, 1)
            for j in range(query_len):
                last = context + j + 1
                seen = list(range(max(last - self.window, 0) if self.window else 0, last))
                if self.tree is not None:
                    seen = [*range(context), *(context + n for n in sorted(self.tree[i][j]))]
                if seq_len:
                    query = self.fused[row, : self.num_heads].double()
                    scores = torch.einsum("hd,nhd->hn", query, key[seen]) * scale
                    out[row] = torch.einsum("hn,nhd->hd", scores.softmax(1), value[seen])
                row += 1
        return out.flatten(1)

    def check(self, **arguments: int) -> Tensor:
        got, tolerance = self.run(**arguments), TOLERANCE[self.dtype]
        with torch.device("cpu"):
            torch.testing.assert_close(
                got.double(), self.expected(), rtol=tolerance, atol=tolerance
            )
        return got


@pytest.fixture(autouse=True)
def _large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's time goes by the tile, whatever its size."""
    if BACKEND == "interpret":
        from spectrue.kernels import triton_attention_plan

        monkeypatch.setitem(triton_attention_plan.TILES, ("wave64", True), (64, 64, 2, 4))


RAGGED: dict[str, list[Shape]] = {
    "one decode": [(1, 33)],
    "first token": [(1, 1)],
    "verify": [(4, 20), (3, 131), (1, 7), (4, 4)],
    "prefill": [(40, 70)],
    "mixed": [(40, 90), (1, 150), (4, 65), (0, 0), (17, 17), (1, 2), (0, 9)],
}
if not SMALL:
    RAGGED |= {
        "equal decodes": [(1, 20)] * 5,
        "longer prefill": [(70, 70)],
        "chunk of a long prompt": [(33, 300), (1, 300)],
        "many": [(1 + i % 5, 5 + 13 * i) for i in range(8)],
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16] if SMALL else DTYPES)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=core) if name in ("one decode", "verify", "prefill") else name
        for name in RAGGED
    ],
)
def test_ragged(name: str, dtype: torch.dtype) -> None:
    Case(RAGGED[name], dtype=dtype).check()


HEADS = [(6, 2, 64), (7, 1, 80), (4, 4, 128)]
if not SMALL:
    HEADS += [(8, 2, 96), (8, 1, 32), (2, 1, 256), (9, 3, 16), (16, 1, 48), (40, 2, 16)]


@pytest.mark.parametrize("dtype", [torch.bfloat16] if SMALL else DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), HEADS)
def test_heads(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    shapes = [(5, 70), (1, 140)]
    if BACKEND in ("reference", "cuda"):
        shapes.append((19, 30))
    Case(shapes, num_heads, num_kv_heads, head_dim, dtype=dtype).check()
    if BACKEND in ("reference", "cuda"):
        Case([(2, 50), (1, 9)], num_heads, num_kv_heads, head_dim, dtype=dtype).check()


@pytest.mark.parametrize("block_size", [1, 64] if SMALL else [1, 2, 16, 64, 256])
def test_block_sizes(block_size: int) -> None:
    Case([(3, 100), (1, 64), (2, 65)], block_size=block_size).check()


EDGES = [129, 257] if SMALL else [15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511]


@pytest.mark.parametrize("seq_len", EDGES)
@pytest.mark.parametrize("query_len", [1, 4])
def test_edges_of_blocks_tiles_and_splits(seq_len: int, query_len: int) -> None:
    """Alone, and next to a request that makes the grid larger than this one needs."""
    case = Case([(query_len, seq_len)], num_heads=2, num_kv_heads=1)
    alone = case.check()
    # A captured graph has the longest sequence that the table can hold.
    torch.testing.assert_close(
        alone, case.check(max_seq_len=case.tables.shape[1] * 16), rtol=1e-5, atol=1e-5
    )
    if not SMALL:
        Case([(query_len, seq_len), (query_len, 3 * seq_len + 1)], 2, 1).check()


@pytest.mark.skipif(SMALL, reason="minutes of interpreted instructions")
@pytest.mark.parametrize("seq_len", [4097] if BACKEND == "interpret" else [4095, 4096, 4097, 6000])
def test_long_context(seq_len: int) -> None:
    Case([(1, seq_len), (1, 3)], num_heads=2, num_kv_heads=1).check()
    Case([(3, seq_len)], num_heads=2, num_kv_heads=1, block_size=64).check()


@pytest.mark.skipif(SMALL, reason="minutes of interpreted instructions")
def test_one_split_or_many_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    if BACKEND == "reference":
        pytest.skip("a plan is Triton's")
    from spectrue.kernels import triton_attention, triton_attention_plan

    shapes = [(4, 300), (1, 600), (2, 129), (0, 0), (1, 128)]
    outs = []
    for num_splits in (1, 2, 8):
        for block_m, block_n in ((16, 32), (64, 128)):
            plan = triton_attention_plan.Plan(block_m, block_n, num_splits, 4, 2)
            monkeypatch.setattr(triton_attention, "_plan", lambda plan=plan, **_: plan)
            outs.append(Case(shapes, 2, 1, padding=2).check())
    for out in outs:
        torch.testing.assert_close(out, outs[0], rtol=1e-5, atol=1e-5)


@core
def test_heads_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on RDNA: the dims of queries and keys a chunk at a time, the last one not whole."""
    if BACKEND == "reference":
        pytest.skip("a plan is Triton's")
    from spectrue.kernels import triton_attention, triton_attention_plan

    plan = triton_attention_plan.Plan(16, 32, 1, 4, 1, chunk_d=32)
    monkeypatch.setattr(triton_attention, "_plan", lambda **_: plan)
    dtype = torch.bfloat16 if TIER.bf16 else torch.float32
    Case([(3, 70), (1, 9)], 4, 1, 80, padding=2, dtype=dtype).check()
    Case([(3, 70)], 4, 1, 80, dtype=dtype, kv_dtype=FP8[0], k_scale=0.5, v_scale=3.0).check()


WINDOWS = [64] if SMALL else [1, 16, 63, 64, 65, 200]


@pytest.mark.parametrize("window", [pytest.param(5, marks=core), *WINDOWS])
def test_window(window: int) -> None:
    Case([(1, 150), (4, 130), (2, 3)], window=window).check()
    Case([(40, 100), (1, 1), (1, 70)], window=window).check()


def random_tree(size: int, rng: random.Random) -> list[set[int]]:
    """Ancestors of each node, itself included; parents come before their children."""
    seen: list[set[int]] = [{0}]
    for node in range(1, size):
        seen.append(seen[rng.randrange(max(0, node - 9), node)] | {node})
    return seen


FIRST_TREE: list[Shape] = [(7, 40), (1, 20), (5, 5)]
TREES: list[list[Shape]] = [[(40, 170)]]
if not SMALL:
    TREES += [[(33, 97), (64, 64), (2, 300)], [(65, 129), (96, 100)], [(3, 520)]]


@pytest.mark.parametrize("shapes", [pytest.param(FIRST_TREE, marks=core), *TREES], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16] if SMALL else DTYPES)
def test_trees(shapes: list[Shape], dtype: torch.dtype) -> None:
    rng = random.Random(sum(map(sum, shapes)))
    tree = [random_tree(query_len, rng) for query_len, _ in shapes]
    Case(shapes, 2, 1, tree=tree, padding=3, dtype=dtype).check()


@core
def test_siblings_do_not_see_one_another() -> None:
    """A sibling's key and value may be anything that is a number: no other row changes."""
    case = Case([(4, 30)], tree=[[{0}, {0, 1}, {0, 2}, {0, 1, 3}]])
    before = case.check()
    slot = case.tables[0, 28 // 16] * 16 + 28 % 16  # of node 2
    case.kv[slot] = 1e4
    changed = (case.run() != before).any(1).tolist()
    assert changed == [False, False, True, False]


def test_a_tree_that_is_a_chain_is_causal() -> None:
    shapes = [(5, 90), (3, 3)]
    chain = [[set(range(j + 1)) for j in range(query_len)] for query_len, _ in shapes]
    torch.testing.assert_close(
        Case(shapes, tree=chain).run(), Case(shapes).run(), rtol=1e-5, atol=1e-5
    )


@pytest.fixture
def _unwritten_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty then fills with NaN
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_unwritten_memory_is_nan")
@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize("padding", [7] if SMALL else [1, 7, 40])
@pytest.mark.parametrize("longest", [100, 300])  # one split, and more
def test_padding_is_zero(padding: int, longest: int) -> None:
    """Rows after the last request, requests without rows, and requests without KV."""
    shapes = [(1, longest), (1, 0), (0, 0), (1, 5), (0, 7)]
    got = Case(shapes, padding=padding).check()
    assert not bool(got[[1, *range(3, 3 + padding)]].any())
    assert not bool(Case([(1, 0), (0, 0)], padding=padding).check().any())
    Case([(20, 40), (0, 0), (1, longest)], padding=padding).check()


def test_a_larger_bound_of_the_query_length() -> None:
    Case([(1, 30), (4, 70)], padding=2).check(max_query_len=100)


def test_scale_and_large_scores() -> None:
    Case([(2, 90)], scale=0.3).check()
    Case([(2, 90), (1, 300)], scale=0.0).check()
    got = Case([(2, 90), (1, 300)], scale=1e3).run()  # as good as an argmax; no overflow
    assert bool(got.isfinite().all())


@pytest.mark.parametrize("head_dim", [16, pytest.param(80, marks=core)])
@pytest.mark.parametrize("fp8", FP8)
def test_an_fp8_pool(fp8: torch.dtype, head_dim: int) -> None:
    pool: dict[str, Any] = {"kv_dtype": fp8, "k_scale": 0.6, "v_scale": 2.5}
    dtype = torch.bfloat16 if TIER.bf16 else torch.float32
    for shapes in ([(1, 150), (4, 65), (0, 0), (1, 2)], [(40, 70)]):
        Case(shapes, head_dim=head_dim, dtype=dtype, padding=1, **pool).check()
    if not SMALL:
        for other in DTYPES:
            Case([(3, 300)], head_dim=head_dim, dtype=other, window=9, **pool).check()


def test_a_pool_of_another_dtype_than_the_queries() -> None:
    Case([(4, 65), (1, 2)], dtype=torch.float32, kv_dtype=torch.float16).check()


@pytest.mark.parametrize("kv_dtype", [pytest.param(None, marks=core), FP8[0]])
@pytest.mark.filterwarnings("ignore:All-NaN slice")  # NumPy, in the interpreter
def test_a_request_does_not_depend_on_its_neighbours(kv_dtype: torch.dtype | None) -> None:
    """Same sizes, so the same plan: equal to the bit, whatever the other requests hold."""
    one = Case([(2, 70), (2, 300), (1, 9)], kv_dtype=kv_dtype)
    before = one.run()
    two = Case([(2, 70), (2, 300), (1, 9)], kv_dtype=kv_dtype)
    at = torch.arange(300, device=two.tables.device)
    slots = two.tables[1, at // 16].long() * 16 + at % 16
    two.kv[slots] = NAN
    after = two.run()
    assert after[[0, 1, 4]].equal(before[[0, 1, 4]])
    assert bool(after[[2, 3]].isnan().all())


def test_float64_is_computed_in_float64() -> None:
    if BACKEND != "reference":
        pytest.skip("the reference's")
    case = Case([(3, 50), (1, 20)], dtype=torch.float64)
    torch.testing.assert_close(case.run(), case.expected(), rtol=1e-13, atol=1e-13)


def test_wrong_arguments_are_named() -> None:
    good: dict[str, Any] = {
        "query": torch.zeros(3, 4, 16),
        "kv": torch.zeros(32, 2, 2, 16),
        "block_tables": torch.zeros(2, 2, dtype=torch.int32),
        "block_size": 16,
        "cu_query_lens": torch.tensor([0, 1, 3], dtype=torch.int32),
        "seq_lens": torch.tensor([1, 2], dtype=torch.int32),
        "max_query_len": 2,
        "max_seq_len": 2,
    }
    bad: dict[str, list[Any]] = {
        "query": [torch.zeros(3, 64), torch.zeros(3, 4, 8), torch.zeros(3, 16, 4).transpose(1, 2)],
        "kv": [torch.zeros(32, 2, 3, 16), torch.zeros(32, 2, 2, 32), good["kv"].int()],
        "block_tables": [torch.zeros(2, 2).long(), torch.zeros(3, 2).int()],
        "block_size": [0, 24],
        "cu_query_lens": [torch.tensor([0, 1, 3]), torch.tensor([0, 3]).int()],
        "seq_lens": [torch.tensor([1.0, 2.0])],
        "max_query_len": [0],
        "max_seq_len": [0, 33],
        "window": [-1],
        "tree_mask": [torch.zeros(2, 1).int(), torch.zeros(3, 1), torch.zeros(3, 0).int()],
    }
    assert not bool(paged_attention(**good).any())
    for name, values in bad.items():
        for value in values:
            with pytest.raises(ValueError, match=name):
                paged_attention(**good | {name: value})
    tree = torch.zeros(3, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="tree_mask"):
        paged_attention(**good, window=4, tree_mask=tree)
