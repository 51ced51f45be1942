"""Linear layers of few rows: the weights are read once, at the speed of memory.

With a handful of rows a product takes as long as its weights take to read, so what counts is that
memory is never idle. Two kernels: for one or two rows a weight is multiplied where it is loaded;
for more the weights are the tall side of a matrix product and the rows its narrow one. The gate of
an MLP and the residual are applied on the way, where others need a launch each. Where cuBLAS or
hipBLASLt is as fast, torch is called (docs/performance.md has what was measured).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from spectrue.kernels.reference_layers import check_linear
from spectrue.kernels.triton_attention_plan import gpu_kind as _gpu
from spectrue.kernels.triton_common import await_previous
from spectrue.kernels.triton_launch import launch
from spectrue.kernels.triton_layers import swiglu

VECTOR_ROWS = 2  # more make the products, not the loads, take the time
MAX_ROWS = 64  # of what is bound by memory; with a gate, whose launch is saved, twice as many
MOST_PROGRAMS = 8  # a compute unit: longer runs hide their start and end by themselves


class Plan(NamedTuple):
    vector: bool
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    splits: int = 1  # of the sum; the program that ends last adds the parts, in their order


@functools.cache
def make_plan(
    rows: int, n: int, k: int, gated: bool, half: bool, units: int, kind: str
) -> Plan | None:
    """None: torch is as fast. Measured on an H200 with the layers of an 8B Llama."""
    if rows <= VECTOR_ROWS:
        block_k = min(triton.next_power_of_2(k), 1024 if k > 8192 else 2048)
        block_n = 1 if gated else 2
        num_warps = min(max(block_n * block_k // 512, 1), 8)
        return Plan(True, block_n, block_k, num_warps, 1)
    tiles = max(n // 64, 1)
    most = 2 * MAX_ROWS if gated else MAX_ROWS
    if rows > most or not half or kind != "sm_90" or tiles > units * MOST_PROGRAMS:
        return None
    if gated:
        return Plan(False, 64, 128, 4, 4) if rows <= MAX_ROWS else Plan(False, 128, 64, 8, 4)
    small = 2 * tiles <= units
    if rows <= 16 and small:
        return Plan(False, 64, 128, 4, 6, _splits(units // tiles, k))
    if rows <= 16 and tiles <= 3 * units:
        return Plan(False, 64, 128, 4, 3, _splits(3 * units // tiles, k))
    splits = _splits(units // tiles, k)
    if splits > 1 and rows > 32 and k <= n:
        return None
    return Plan(False, 64, 128, 4, 5, splits)


def _splits(wanted: int, k: int) -> int:
    """A power of two; parts of a sum are not worth a program below 512."""
    return 1 << max(min(wanted, k // 512), 1).bit_length() - 1


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    gated: bool = False,
) -> Tensor:
    check_linear(x, weight, bias, residual, gated)
    rows, k = x.shape
    n = len(weight) // (2 if gated else 1)
    units, kind = _gpu(x.device)
    plan = make_plan(rows, n, k, gated, x.element_size() == 2, units, kind) if rows else None
    if plan is None:
        return _by_torch(x, weight, bias, residual, gated)
    return run(plan, x, weight, bias, residual, gated)


def _by_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, gated: bool
) -> Tensor:
    if gated:
        return swiglu(F.linear(x, weight, bias))
    if residual is None:
        return F.linear(x, weight, bias)
    residual.addmm_(x, weight.t())  # an epilogue instead of a launch
    return residual if bias is None else residual.add_(bias)


def run(
    plan: Plan,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    gated: bool,
) -> Tensor:
    """`linear` by one of the kernels here, whichever the plan names."""
    rows, k = x.shape
    n = len(weight) // (2 if gated else 1)
    out = x.new_empty(rows, n)
    block_m = triton.next_power_of_2(rows)
    tiles = triton.cdiv(n, plan.block_n)
    arguments = out, x, weight, bias, residual, rows, n, x.stride(0)
    residual_stride = 0 if residual is None else residual.stride(0)
    options = {
        "num_warps": plan.num_warps,
        "num_stages": plan.num_stages,
        "K": k,
        "GATED": gated,
        "BLOCK_N": plan.block_n,
        "BLOCK_K": plan.block_k,
    }
    if plan.vector:
        launch(_vector_linear, (tiles,), *arguments, residual_stride, BLOCK_M=block_m, **options)
        return out
    block_m = max(block_m, 16)
    parts = counters = None
    if plan.splits > 1:
        size = plan.splits * tiles * plan.block_n * block_m
        parts = torch.empty(size, dtype=torch.float32, device=x.device)
        counters = _counters(x.device)
        assert tiles <= len(counters)
        assert not gated
    launch(
        _tall_linear,
        (tiles, plan.splits),
        *arguments,
        parts,
        counters,
        residual_stride,
        BLOCK_M=block_m,
        SPLITS=plan.splits,
        **options,
    )
    return out


@functools.cache
def _counters(device: torch.device) -> Tensor:
    """By tile, how many parts of its sum are there; zero between kernels. One stream at a time."""
    return torch.zeros(4096, dtype=torch.int32, device=device)


@triton.jit
def _vector_linear(
    out,  # [M, N]
    x,  # [M, K]
    weight,  # [N, K], or [2 N, K] where GATED
    bias,  # [N] or [2 N], or None
    residual,  # [M, N] or None
    M,
    N,
    x_stride,
    residual_stride,
    K: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """Sums of a program's outputs stay apart in all its threads until the end."""
    await_previous(PDL)
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # A column too many reads the last one's weights: cheaper than a mask on every load.
    at = tl.minimum(n, N - 1).to(tl.int64)
    x_at = x + m[:, None, None].to(tl.int64) * x_stride + k[None, None, :]
    w_at = weight + at[None, :, None] * K + k[None, None, :]
    up_at = w_at + N.to(tl.int64) * K if GATED else w_at
    acc = tl.zeros([BLOCK_M, BLOCK_N, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N, BLOCK_K], tl.float32)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            a = tl.load(x_at + start, mask=(m < M)[:, None, None], other=0.0).to(tl.float32)
            acc += tl.load(w_at + start).to(tl.float32) * a
            if GATED:
                up += tl.load(up_at + start).to(tl.float32) * a
        else:
            inside = (start + k < K)[None, None, :]
            mask = (m < M)[:, None, None] & inside
            a = tl.load(x_at + start, mask=mask, other=0.0).to(tl.float32)
            acc += tl.load(w_at + start, mask=inside, other=0.0).to(tl.float32) * a
            if GATED:
                up += tl.load(up_at + start, mask=inside, other=0.0).to(tl.float32) * a
    total = tl.sum(acc, 2)
    total_up = tl.sum(up, 2) if GATED else total
    _finish(
        total, total_up, out, bias, residual, m[:, None], n[None, :], M, N, residual_stride, GATED
    )


@triton.jit
def _tall_linear(
    out,  # [M, N]
    x,  # [M, K]
    weight,  # [N, K], or [2 N, K] where GATED
    bias,  # [N] or [2 N], or None
    residual,  # [M, N] or None
    M,
    N,
    x_stride,
    parts,  # [SPLITS, tiles, BLOCK_N, BLOCK_M] float32, or None
    counters,  # [tiles] int32, or None
    residual_stride,
    K: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """A tile of weights is the left side of a product, as it lies in memory."""
    await_previous(PDL)
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    at = tl.minimum(n, N - 1).to(tl.int64)
    x_at = x + m[None, :].to(tl.int64) * x_stride + k[:, None]
    w_at = weight + at[:, None] * K + k[None, :]
    up_at = w_at + N.to(tl.int64) * K if GATED else w_at
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    LENGTH: tl.constexpr = (K + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
    first = tl.program_id(1) * LENGTH
    for start in range(first, min(first + LENGTH, K), BLOCK_K):
        if K % BLOCK_K == 0:
            a = tl.load(x_at + start, mask=(m < M)[None, :], other=0.0)
            acc = tl.dot(tl.load(w_at + start), a, acc, input_precision="ieee")
            if GATED:
                up = tl.dot(tl.load(up_at + start), a, up, input_precision="ieee")
        else:
            inside = start + k < K
            a = tl.load(x_at + start, mask=(m < M)[None, :] & inside[:, None], other=0.0)
            w = tl.load(w_at + start, mask=inside[None, :], other=0.0)
            acc = tl.dot(w, a, acc, input_precision="ieee")
            if GATED:
                w = tl.load(up_at + start, mask=inside[None, :], other=0.0)
                up = tl.dot(w, a, up, input_precision="ieee")
    if SPLITS == 1:
        _finish(acc, up, out, bias, residual, m[None, :], n[:, None], M, N, residual_stride, GATED)
    else:
        TILE: tl.constexpr = BLOCK_N * BLOCK_M
        tile, tiles = tl.program_id(0), tl.num_programs(0)
        at = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        tl.store(parts + (tl.program_id(1) * tiles + tile) * TILE + at, acc)
        tl.debug_barrier()  # all of the part is written before it is counted
        if tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(counters + tile, 0)
            total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for split in tl.static_range(SPLITS):
                part = parts + (split * tiles + tile) * TILE + at
                total += tl.load(part, cache_modifier=".cg")
            m_row, n_column = m[None, :], n[:, None]
            _finish(total, up, out, bias, residual, m_row, n_column, M, N, residual_stride, GATED)


@triton.jit
def _finish(acc, up, out, bias, residual, m, n, M, N, residual_stride, GATED: tl.constexpr):
    """Bias, gate and residual of a tile, then one rounding."""
    if bias is not None:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    mask = (m < M) & (n < N)
    row = m.to(tl.int64)
    if residual is not None:
        acc += tl.load(residual + row * residual_stride + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * N + n, acc.to(out.dtype.element_ty), mask=mask)
