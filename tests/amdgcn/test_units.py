"""Triton's language features, compiled for each architecture and executed, against torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton.language as tl

from . import unit_kernels as k
from .launcher import AmdLauncher, launcher_for

ARCHS = ["gfx90a", "gfx942", "gfx950"]
# num_warps and buffer operations of each architecture that are not slow.
FAST = {"gfx90a": (1, True), "gfx942": (4, False), "gfx950": (1, True)}


def combinations(*fast: str) -> list[Any]:
    """All of them; outside of the slow set one for each architecture of `fast`."""
    return [
        pytest.param(
            arch,
            warps,
            buffers,
            marks=[] if arch in fast and (warps, buffers) == FAST[arch] else [pytest.mark.slow],
            id=f"{arch}-{warps}-{'buffer' if buffers else 'global'}",
        )
        for arch in ARCHS
        for warps in (1, 2, 4, 8)
        for buffers in (True, False)
    ]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def launch(
    arch: str, warps: int, buffers: bool, kernel: Any, *args: Any, grid: int = 1, **constants: Any
) -> AmdLauncher:
    launcher = launcher_for(arch, buffer_ops=buffers)
    launcher(kernel, (grid,), args, constants, warps, 2)
    assert launcher.executed > 0
    return launcher


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


every = pytest.mark.parametrize(("arch", "warps", "buffers"), combinations(*ARCHS))
mostly_slow = pytest.mark.parametrize(("arch", "warps", "buffers"), combinations("gfx942"))


@every
def test_reductions(arch: str, warps: int, buffers: bool) -> None:
    for n in (1000, 777):
        x = torch.randn(n)
        x[[5, 70, 300, 700]] = 9.0  # ties: the first one counts
        x[[8, 64, 129]] = -9.0
        out = torch.zeros(6)
        launch(arch, warps, buffers, k.reductions, x, out, n, BLOCK=1024)
        close(out[[0, 5]], torch.stack([x.sum(), x.double().sum().float()]), 1e-5)
        assert out[1:5].tolist() == [9.0, -9.0, 5.0, 8.0]


@mostly_slow
def test_scans(arch: str, warps: int, buffers: bool) -> None:
    n = 1500
    x = torch.randn(n)
    out = torch.zeros(3, n)
    launch(arch, warps, buffers, k.scans, x, out, n, BLOCK=2048)
    close(out[0], x.cumsum(0), 1e-5)
    close(out[1], x.logcumsumexp(0), 1e-5)
    close(out[2], x.double().cumsum(0).float(), 1e-6)


@mostly_slow
def test_sort_histogram_gather(arch: str, warps: int, buffers: bool) -> None:
    x = torch.randn(256)
    out = torch.zeros(256)
    launch(arch, warps, buffers, k.sorting, x, out, BLOCK=256)
    assert torch.equal(out, x.sort().values)
    y = torch.randint(0, 16, (512,), dtype=torch.int32)
    counts = torch.zeros(16 + 512, dtype=torch.int32)
    launch(arch, warps, buffers, k.counting, y, counts, BLOCK=512)
    assert torch.equal(counts[:16], torch.bincount(y, minlength=16).int())
    assert torch.equal(counts[16:], y[(torch.arange(512) * 7 + 3) % 512])


@mostly_slow
def test_elementary_functions(arch: str, warps: int, buffers: bool) -> None:
    n = 700
    x = torch.randn(n) * 4
    x[:3] = torch.tensor([0.0, 60.0, -80.0])
    out = torch.zeros(9, n)
    launch(arch, warps, buffers, k.elementary, x, out, n, grid=2, BLOCK=512)
    a = x.abs() + 1e-3
    wanted = [x.exp(), a.log(), x.exp2(), a.log2(), x / a, a.sqrt(), a.rsqrt()]
    wanted += [x.floor() + x.ceil() + x.sin(), torch.where(x > 0, x, x.sigmoid())]
    for row, value in zip(out, wanted, strict=True):
        close(row, value, 4e-6)


@every
def test_integers(arch: str, warps: int, buffers: bool) -> None:
    x = torch.randint(-(2**62), 2**62, (256,))
    out = torch.zeros(6, 256, dtype=torch.int64)
    launch(arch, warps, buffers, k.integers, x, out, 12345678901, BLOCK=256)
    y = x.int()
    wide = [int(v) & 0xFFFFFFFF for v in y]
    assert torch.equal(out[0], x * 12345678901 + (x >> 3))
    assert torch.equal(out[1], torch.div(x, 7, rounding_mode="trunc"))
    assert torch.equal(out[2], torch.fmod(x, 1000003))
    assert out[3].tolist() == [v * 0x9E3779B9 >> 32 for v in wide]
    assert torch.equal(out[4], torch.div(y, 13, rounding_mode="trunc").long())
    assert torch.equal(out[5], (x > 0).sum() + (y & 7).cumsum(0))


def philox(seed: int, counter: int) -> list[int]:
    """Philox4x32-10."""
    c, key = [counter, 0, 0, 0], [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [
            (b >> 32) ^ c[1] ^ key[0],
            b & 0xFFFFFFFF,
            (a >> 32) ^ c[3] ^ key[1],
            a & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


@mostly_slow
def test_philox(arch: str, warps: int, buffers: bool) -> None:
    out = torch.zeros(4, 256, dtype=torch.int32)
    seed = 0x1234_5678_9ABC
    launch(arch, warps, buffers, k.random, out, seed, BLOCK=256)
    wanted = torch.tensor([philox(seed, i) for i in range(256)]).T
    assert torch.equal(out.long() & 0xFFFFFFFF, wanted)


@mostly_slow
def test_doubles(arch: str, warps: int, buffers: bool) -> None:
    x = torch.randn(256, dtype=torch.float64) * 5
    out = torch.zeros(4, 256, dtype=torch.float64)
    launch(arch, warps, buffers, k.doubles, x, out, BLOCK=256)
    a = x.abs() + 1e-6
    close(out[0], x / a + a.sqrt(), 1e-15)
    close(out[1], x.exp(), 1e-14)
    close(out[2], a.log(), 1e-14)
    close(out[3], x.cumsum(0) + x.max() + x.floor(), 1e-12)


@mostly_slow
def test_atomics(arch: str, warps: int, buffers: bool) -> None:
    n = 512
    x = torch.randint(-20, 20, (2 * n,)).float()
    i = torch.arange(2 * n)
    f, ints, longs = torch.zeros(12), torch.zeros(7, dtype=torch.int32), torch.zeros(2).long()
    f[8:] = -100
    launch(arch, warps, buffers, k.atomics, x, f, ints, longs, grid=2, BLOCK=n)
    assert torch.equal(f[:8], x.view(-1, 8).sum(0))
    assert torch.equal(f[8:], x.view(-1, 4).max(0).values)
    assert torch.equal(ints[:4], i.view(-1, 4).sum(0).int())
    assert ints[4:].tolist() == [2 * n - 1, 1 - 2 * n, 2 * n - 1]
    assert torch.equal(longs, i.view(-1, 2).sum(0) << 33)


FORMATS = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e4m3fnuz: tl.float8e4b8,
    torch.float8_e5m2: tl.float8e5,
}


@mostly_slow
def test_conversions(arch: str, warps: int, buffers: bool) -> None:
    x = torch.randn(512) * torch.logspace(-3, 2, 512)
    x = x.clamp(-200, 200)
    for dtype, name in FORMATS.items():
        out = torch.zeros(512)
        launch(arch, warps, buffers, k.conversions, x, out, T=name, BLOCK=512)
        assert torch.equal(out, x.to(dtype).float()), dtype
    for source in (torch.bfloat16, torch.float16, torch.float32):
        for target in (torch.bfloat16, torch.float16, torch.float32):
            y, result = x[:333].to(source), torch.zeros(333, dtype=target)
            launch(arch, warps, buffers, k.typed_copy, y, result, 333, BLOCK=512)
            assert torch.equal(result, (y.float() * 2 + 1).to(target)), (source, target)


@every
def test_shapes_and_loops(arch: str, warps: int, buffers: bool) -> None:
    x = torch.randn(16, 32)
    out = torch.zeros(16 * 32 * 2 + 16 * 16)
    launch(arch, warps, buffers, k.shapes, x, out, M=16, N=32)
    assert torch.equal(out[:512].view(32, 16), x.T)
    even, odd = x[:, ::2], x[:, 1::2]
    assert torch.equal(out[512:1024].view(16, 32), torch.stack([odd, even], -1).view(16, 32))
    close(out[1024:].view(16, 16), odd + even.sum(1, keepdim=True))
    y, steps = torch.randn(512), torch.zeros(1, dtype=torch.int32)
    launch(arch, warps, buffers, k.loops, y, steps, 0.37, BLOCK=512)
    total, wanted = y.abs().sum(), 0
    while total > 0.37:
        total, wanted = total * 0.5, wanted + 1
    assert steps.item() == wanted


DOTS = [(16, 16, 32, 2), (16, 64, 64, 3), (64, 64, 32, 1), (16, 128, 64, 2), (32, 32, 16, 1)]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn]
)
@every
def test_dot(arch: str, warps: int, buffers: bool, dtype: torch.dtype) -> None:
    slow = (warps, buffers) != FAST[arch]
    shapes = DOTS if slow else DOTS[:1]
    for m, n, kk, loops in shapes:
        a, b = torch.randn(m, kk * loops).to(dtype), torch.randn(kk * loops, n).to(dtype)
        c = torch.zeros(m, n)
        launch(arch, warps, buffers, k.dot, a, b, c, loops, M=m, N=n, K=kk, PRECISION="ieee")
        close(c, (a.double() @ b.double()).float(), 3e-5)


def test_dot_in_tf32() -> None:
    """Only gfx942 has such an instruction."""
    a, b, c = torch.randn(32, 64), torch.randn(64, 32), torch.zeros(32, 32)
    launch("gfx942", 4, True, k.dot, a, b, c, 2, M=32, N=32, K=32, PRECISION="tf32")
    close(c, (a.double() @ b.double()).float(), 2e-2)
