"""Norms, rotation with the KV write and gating, against float64 arithmetic written out here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from spectrue.kernels.dispatch import add_rms_norm, rms_norm, rope_write_kv, swiglu

from .conftest import BACKEND, FP8, TIER

NAN = float("nan")
SMALL = BACKEND.startswith("gfx")
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if TIER.bf16 else [])]
# What one rounding to the dtype may cost, relative; float32 sums are a little worse than one.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}
SIZES = [16, 100, 576] if SMALL else [16, 100, 576, 4096, 5120, 8192]


def grid(values: Iterable[Any], core: Any) -> list[Any]:
    """Every value in every dtype; one of them, in the last dtype, is run everywhere."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            dtype,
            marks=[pytest.mark.core] if (value, dtype) == (core, DTYPES[-1]) else [],
        )
        for value in values
        for dtype in DTYPES
    ]


def rand(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=generator, device="cpu").to(dtype)
    return values.to(torch.empty(0).device)


def assert_rounded(got: Tensor, exact: Tensor, slack: float = 1e-6) -> None:
    """`got` is `exact` rounded to its dtype, or a neighbour where float32 went the other way."""
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), exact, rtol=tolerance * 1.01, atol=slack)


def norm_of(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize(("size", "dtype"), grid(SIZES, core=100))
def test_rms_norm(size: int, dtype: torch.dtype) -> None:
    x, weight = rand(5, size, dtype=dtype), rand(size, dtype=dtype, seed=1)
    x[1] *= 1e-4 if dtype is torch.float16 else 1e-6  # where eps counts
    x[2] = 0
    x[3] *= 100
    got = rms_norm(x, weight, 1e-5)
    assert got.dtype == dtype
    assert_rounded(got, norm_of(x, weight, 1e-5))
    wide = rand(5, size + 24, dtype=dtype)
    wide[:, size:] = NAN
    assert_rounded(rms_norm(wide[:, :size], weight, 1e-6), norm_of(wide[:, :size], weight, 1e-6))


@pytest.mark.parametrize(("size", "dtype"), grid(SIZES, core=100))
def test_add_rms_norm_is_the_two_ops(size: int, dtype: torch.dtype) -> None:
    x, residual = rand(4, size, dtype=dtype), 30 * rand(4, size, dtype=dtype, seed=1)
    weight = rand(size, dtype=dtype, seed=2)
    before = x.clone(), residual.clone()
    got, total = add_rms_norm(x, residual, weight, 1e-5)
    assert total.equal((x.double() + residual.double()).to(dtype))
    assert_rounded(got, norm_of(total, weight, 1e-5))
    assert got.equal(rms_norm(total, weight, 1e-5))  # of the rounded sum, to the bit
    assert x.equal(before[0])
    assert residual.equal(before[1])


def test_a_row_of_a_norm_does_not_depend_on_its_neighbours() -> None:
    x, weight = rand(3, 576, dtype=torch.float32), rand(576, dtype=torch.float32, seed=1)
    x[1] = NAN
    got = rms_norm(x, weight, 1e-5)
    assert not bool(got[[0, 2]].isnan().any())
    assert got[2:].equal(rms_norm(x[2:], weight, 1e-5))


def rotated(heads: Tensor, angle: Tensor) -> Tensor:
    """[T, heads, D] by the angles [T, D / 2]: the two halves of a head are the coordinates."""
    first, second = heads.double().chunk(2, -1)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


ROPE_SHAPES = [(2, 1, 16), (9, 3, 64), (7, 1, 80)]  # H, Hkv, D
if not SMALL:
    ROPE_SHAPES += [(4, 4, 96), (32, 8, 128), (16, 2, 256), (3, 3, 18)]


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "norm", "dtype"),
    grid(
        [(*shape, norm) for shape in ROPE_SHAPES for norm in (False, True)], core=(7, 1, 80, True)
    ),
)
def test_rope_write_kv(
    num_heads: int, num_kv_heads: int, head_dim: int, norm: bool, dtype: torch.dtype
) -> None:
    slots = torch.tensor([5, -1, 0, 11, 7, -1])
    num_tokens, keys_end = len(slots), num_heads + num_kv_heads
    heads = keys_end + num_kv_heads
    qkv = rand(num_tokens, heads + 1, head_dim, dtype=dtype)[:, :heads]  # rows are strided
    before = qkv.clone()
    positions = torch.tensor([0, 3, 1, 100, 2047, 131071], dtype=torch.float64)
    angle = positions[:, None] * 10000 ** -torch.linspace(0, 0.9, head_dim // 2).double()
    cos, sin = angle.cos().float(), angle.sin().float()
    weights = rand(2, head_dim, dtype=dtype, seed=1)
    kv = torch.full((13, 2, num_kv_heads, head_dim), NAN, dtype=dtype)
    result = rope_write_kv(
        qkv,
        torch.cat((cos, cos), -1)[:, None],
        torch.cat((-sin, sin), -1)[:, None],
        kv,
        slots,
        num_heads=num_heads,
        q_norm=weights[0] if norm else None,
        k_norm=weights[1] if norm else None,
        eps=1e-3,
    )
    assert result is None
    query, key = before[:, :num_heads], before[:, num_heads:keys_end]
    if norm:
        query = norm_of(query, weights[0], 1e-3).to(dtype)
        key = norm_of(key, weights[1], 1e-3).to(dtype)
    exact = rotated(torch.cat((query, key), 1), angle)
    # A norm that rounds the other way moves the rotation by an ulp of it.
    slack = 1e-5 + (TOLERANCE[dtype] * 2 * float(exact.abs().max()) if norm else 0)
    assert_rounded(qkv[:, :keys_end], exact, slack)
    assert qkv[:, keys_end:].equal(before[:, keys_end:])
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert kv[slot, 0].equal(qkv[token, num_heads:keys_end])
            assert kv[slot, 1].equal(before[token, keys_end:])
    untouched = [s for s in range(13) if s not in slots.tolist()]
    assert bool(kv[untouched].isnan().all())


@pytest.mark.core
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # NumPy, in the interpreter
@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("dtype", DTYPES[-1:] if SMALL else DTYPES)
def test_rope_writes_fp8(fp8: torch.dtype, dtype: torch.dtype) -> None:
    """The nearest of all codes; beyond them the last one; what is not finite stays visible."""
    num_heads, num_kv_heads, head_dim, slots = 3, 2, 80, torch.tensor([2, -1, 0])
    qkv = rand(3, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    qkv *= 10.0 ** torch.linspace(-5, 4, head_dim, device=qkv.device)
    qkv[0, 3, 7], qkv[0, 5, 1], qkv[2, 6, 2] = NAN, float("inf"), -float("inf")
    qkv[2, 6, 3:6] = torch.tensor([0.0, -0.0, -1e-7], device=qkv.device)
    angle = torch.linspace(0, 2, 3 * head_dim // 2).view(3, -1)
    angle[0] = 0
    cos, sin = angle.cos(), angle.sin()
    kv = torch.full((4, 2, num_kv_heads, head_dim), NAN).to(fp8)
    rope_write_kv(
        qkv,
        torch.cat((cos, cos), -1)[:, None],
        torch.cat((-sin, sin), -1)[:, None],
        kv,
        slots,
        num_heads=num_heads,
        k_scale=1.7,
        v_scale=0.25,
    )
    codes = torch.arange(256, dtype=torch.uint8).view(fp8).double()
    codes = codes[codes.isfinite()]
    limit = float(codes.max())
    scales = torch.tensor([1.7, 0.25]).double()[:, None, None]
    for token, slot in ((0, 2), (2, 0)):
        given = qkv[token, num_heads:].double().view(2, num_kv_heads, head_dim)
        got = kv[slot].double()
        lost = ~given.isfinite()
        assert got.isnan().equal(lost)
        exact = (given / scales).clamp(-limit, limit)
        nearest = (exact[..., None] - codes).abs().amin(-1)
        off = ((got - exact).abs() - nearest)[~lost]
        assert bool((off <= 1e-6 * exact[~lost].abs()).all())  # float32 next to a tie
        assert float(got[~lost].max()) == limit  # saturated
    assert bool(kv[[1, 3]].float().isnan().all())


def test_a_pool_of_another_dtype_gets_the_rounded_value() -> None:
    qkv, table = rand(1, 4, 16, dtype=torch.float32), torch.ones(1, 1, 16)
    kv = torch.zeros(2, 2, 1, 16, dtype=torch.float16)
    rope_write_kv(qkv, table, 0 * table, kv, torch.tensor([1]), num_heads=2)
    assert kv[1, :, 0].equal(qkv[0, 2:].half())


GATE_SIZES = [1, 100, 1024, 1100] if SMALL else [1, 100, 1024, 1536, 14336]


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # NumPy, in the interpreter
@pytest.mark.parametrize(("size", "dtype"), grid(GATE_SIZES, core=100))
def test_swiglu(size: int, dtype: torch.dtype) -> None:
    wide = 4 * rand(3, 2 * size + 3, dtype=dtype)
    wide[:, 2 * size :] = NAN
    gate_up = wide[:, : 2 * size]
    gate_up[1, 0], gate_up[2, 0] = 200, -200  # exp overflows one way or the other
    gate, up = gate_up.double().split(size, 1)
    got = swiglu(gate_up)
    assert got.dtype == dtype
    assert_rounded(got, gate * torch.sigmoid(gate) * up)


def test_nothing_to_do() -> None:
    empty = torch.empty(0, 32)
    assert rms_norm(empty, torch.ones(32), 1e-5).shape == (0, 32)
    assert swiglu(empty).shape == (0, 16)
    kv = torch.zeros(1, 2, 1, 16)
    nobody = torch.empty(0, dtype=torch.int64)
    tables = torch.empty(0, 1, 16)
    rope_write_kv(torch.empty(0, 4, 16), tables, tables, kv, nobody, num_heads=2)
    assert not bool(kv.any())


def test_wrong_arguments_are_named() -> None:
    x, weight = torch.zeros(2, 32), torch.ones(32)
    with pytest.raises(ValueError, match="x must"):
        rms_norm(x.t(), weight, 1e-5)
    with pytest.raises(ValueError, match="weight must"):
        rms_norm(x, weight[:16], 1e-5)
    with pytest.raises(ValueError, match="residual must"):
        add_rms_norm(x, x[:1], weight, 1e-5)
    with pytest.raises(ValueError, match="gate_up must"):
        swiglu(torch.zeros(2, 31))
    qkv, table, kv = torch.zeros(2, 4, 16), torch.zeros(2, 1, 16), torch.zeros(3, 2, 1, 16)
    slots = torch.tensor([0, 1])
    with pytest.raises(ValueError, match="qkv must"):
        rope_write_kv(qkv, table, table, kv, slots, num_heads=3)
    with pytest.raises(ValueError, match="sin must"):
        rope_write_kv(qkv, table, table[:1], kv, slots, num_heads=2)
    with pytest.raises(ValueError, match="kv must"):
        rope_write_kv(qkv, table, table, kv[:, :1], slots, num_heads=2)
    with pytest.raises(ValueError, match="slot_mapping must"):
        rope_write_kv(qkv, table, table, kv, slots.int(), num_heads=2)
    with pytest.raises(ValueError, match="k_scale must be positive"):
        rope_write_kv(qkv, table, table, kv.to(FP8[0]), slots, num_heads=2, k_scale=0.0)
    with pytest.raises(ValueError, match="v_scale must be 1"):
        rope_write_kv(qkv, table, table, kv, slots, num_heads=2, v_scale=2.0)
    with pytest.raises(ValueError, match="both"):
        rope_write_kv(qkv, table, table, kv, slots, num_heads=2, q_norm=torch.ones(16))
