"""Linear layers of few rows, by each of our kernels, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from spectrue.kernels.dispatch import linear

from .conftest import BACKEND, SLOW_BACKEND, TIER
from .test_layers import rand

NAN = float("nan")
TRITON = BACKEND != "reference"
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if TIER.bf16 else [])]
# How many outputs and inputs: whole blocks, ends of blocks, less than one.
SIZES = [(64, 128), (100, 328), (3, 24)]
PLANS = [  # vector, block_n, block_k, num_warps, num_stages, splits
    (True, 1, 64, 1, 1, 1),
    (True, 2, 128, 2, 1, 1),
    (False, 32, 32, 4, 2, 1),
    (False, 64, 64, 4, 4, 1),
    (False, 32, 32, 4, 2, 4),
]
if not SLOW_BACKEND:
    SIZES += [(1536, 576), (4096, 4096), (1000, 5120)]


def exact(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    gated: bool,
) -> torch.Tensor:
    out = x.double() @ weight.double().T
    if bias is not None:
        out = out + bias.double()
    if gated:
        gate, up = out.chunk(2, 1)
        out = F.silu(gate) * up
    return out if residual is None else out + residual.double()


def check(
    rows: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    *,
    gated: bool = False,
    bias: bool = False,
    residual: bool = False,
    plan: tuple[bool, int, int, int, int, int] | None = None,
) -> None:
    wide = rand(rows, k + 8, dtype=dtype)
    wide[:, k:] = NAN  # rows have a stride, and what lies between them is not read
    x = wide[:, :k]
    weight = rand(n * (1 + gated), k, dtype=dtype, seed=1) * k**-0.5
    b = rand(len(weight), dtype=dtype, seed=2) if bias else None
    r = rand(rows, n + 8, dtype=dtype, seed=3)[:, :n] if residual else None
    want = exact(x, weight, b, r, gated)
    if plan is None or not TRITON:
        got = linear(x, weight, b, r, gated=gated)
    else:
        from spectrue.kernels.triton_linear import Plan, run

        got = run(Plan(*plan), x, weight, b, r, gated)
    assert got.shape == (rows, n)
    assert got.dtype == dtype
    # One rounding of the result; before it float32 sums, and for cuBLAS one more before the gate.
    tolerance = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}[dtype]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_linear(rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    check(rows, n, k, dtype)
    check(rows, n, k, dtype, gated=True)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(p, marks=[pytest.mark.core] if p in (PLANS[1], PLANS[2], PLANS[4]) else [])
        for p in PLANS
    ],
)
def test_every_kernel(plan: tuple[bool, int, int, int, int, int]) -> None:
    """With all that is done on the way, whatever the platform's own plan would be."""
    dtype = DTYPES[-1] if not plan[0] or BACKEND != "interpret" else torch.float32
    for rows, n, k in ((2, 37, 136), (1, 64, 128)) if plan[0] else ((5, 70, 136), (19, 64, 64)):
        gated = plan[-1] == 1
        check(rows, n, k, dtype, gated=gated, bias=True, residual=True, plan=plan)
        check(rows, n, k, dtype, bias=True, plan=plan)


def test_a_row_does_not_depend_on_the_others() -> None:
    x, weight = rand(2, 136, dtype=torch.float32), rand(40, 136, dtype=torch.float32, seed=1)
    both = linear(x, weight)
    x[1] = NAN
    assert linear(x, weight)[0].equal(both[0])
    assert linear(x, weight)[1].isnan().all()


def test_no_rows() -> None:
    assert linear(rand(0, 16, dtype=torch.float32), rand(6, 16, dtype=torch.float32)).shape == (
        0,
        6,
    )


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("x", {"x": torch.zeros(4, 16).T}),
        ("weight", {"weight": torch.zeros(6, 17)}),
        ("weight", {"weight": torch.zeros(5, 16), "gated": True}),
        ("bias", {"bias": torch.zeros(5)}),
        ("residual", {"residual": torch.zeros(4, 5)}),
    ],
)
def test_bad_arguments_are_named(name: str, change: dict[str, object]) -> None:
    good = {"x": torch.zeros(4, 16), "weight": torch.zeros(6, 16)}
    with pytest.raises(ValueError, match=name):
        linear(**{**good, **change})  # type: ignore[arg-type]
