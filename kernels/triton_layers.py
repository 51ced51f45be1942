"""Norms, rotation and gating in Triton: each one launch, memory-bound, float32 inside."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spectrue.kernels.fp8 import FP8_DTYPES, fp8_max
from spectrue.kernels.reference_layers import check_norm, check_rope, check_scales, check_swiglu
from spectrue.kernels.triton_attention_plan import gpu_kind as _gpu
from spectrue.kernels.triton_common import await_previous
from spectrue.kernels.triton_launch import launch

ROPE_ELEMENTS = 1024  # a program: halves of as many heads as fit
SWIGLU_BLOCK = 1024


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    check_norm(x, weight)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch_norm(x, None, weight, out, None, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    check_norm(x, weight, residual)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = torch.empty_like(out)
    _launch_norm(x, residual, weight, out, total, eps)
    return out, total


def _launch_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    out: Tensor,
    total: Tensor | None,
    eps: float,
) -> None:
    size = x.shape[1]
    block = triton.next_power_of_2(size)
    _, kind = _gpu(x.device)
    launch(
        _rms_norm,
        (x.shape[0],),
        x,
        residual,
        weight,
        out,
        total,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        # 16 elements a thread, of a wave of 64 or a warp of 32
        num_warps=min(max(block // (512 if kind.startswith("sm_") else 1024), 1), 16),
        SIZE=size,
        BLOCK=block,
        ADD=residual is not None,
    )


@triton.jit
def _rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    x_stride,
    residual_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr = False,
):
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        residual_row = residual_ptr + row * residual_stride
        x += tl.load(residual_row + columns, mask=mask, other=0.0).to(tl.float32)
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * SIZE + columns, total, mask=mask)
        x = total.to(tl.float32)
    # 1 / sqrt and not rsqrt: as exact as the square root itself on every platform
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, 0) / SIZE + eps)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    out = (x * inverse * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * SIZE + columns, out, mask=mask)


def rope_write_kv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv: Tensor,
    slot_mapping: Tensor,
    *,
    num_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    check_rope(qkv, cos, sin, kv, slot_mapping, num_heads, q_norm, k_norm)
    check_scales(kv, k_scale, v_scale)
    fp8 = kv.dtype in FP8_DTYPES
    num_tokens, all_heads, head_dim = qkv.shape
    block_half = triton.next_power_of_2(head_dim // 2)
    block_heads = min(max(ROPE_ELEMENTS // block_half, 1), triton.next_power_of_2(all_heads))
    launch(
        _rope_write_kv,
        (num_tokens, triton.cdiv(all_heads, block_heads)),
        qkv,
        cos,
        sin,
        kv,
        slot_mapping,
        q_norm,
        k_norm,
        qkv.stride(0),
        cos.stride(0),
        eps,
        1 / k_scale if fp8 else None,
        1 / v_scale if fp8 else None,
        # No element in two waves: one could store it before the other has loaded it.
        num_warps=min(max(block_heads * block_half // 256, 1), 4),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=kv.shape[2],
        HALF=head_dim // 2,
        BLOCK_HALF=block_half,
        BLOCK_HEADS=block_heads,
        NORM=q_norm is not None,
        FP8_MAX=fp8_max(kv.dtype) if fp8 else 0.0,
    )


@triton.jit
def _rope_write_kv(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    kv_ptr,
    slot_ptr,
    q_norm_ptr,
    k_norm_ptr,
    qkv_stride,
    table_stride,
    eps,
    k_inverse,
    v_inverse,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    NORM: tl.constexpr,
    FP8_MAX: tl.constexpr,  # 0: the pool is not fp8
    PDL: tl.constexpr = False,
):
    await_previous(PDL)
    KEYS_END: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    HEAD_DIM: tl.constexpr = 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    low = tl.arange(0, BLOCK_HALF)[None, :]  # a dim of the first half; its partner is HALF on
    mask = (head < KEYS_END + NUM_KV_HEADS) & (low < HALF)
    source = qkv_ptr + token * qkv_stride + head * HEAD_DIM + low
    raw_first = tl.load(source, mask=mask, other=0.0)
    raw_second = tl.load(source + HALF, mask=mask, other=0.0)
    first = raw_first.to(tl.float32)
    second = raw_second.to(tl.float32)
    if NORM:
        squares = tl.sum(first * first + second * second, 1)
        inverse = (1.0 / tl.sqrt(squares / HEAD_DIM + eps))[:, None]
        is_query = head < NUM_HEADS
        first = first * inverse * _norm_weight(q_norm_ptr, k_norm_ptr, is_query, low, mask)
        at = low + HALF
        second = second * inverse * _norm_weight(q_norm_ptr, k_norm_ptr, is_query, at, mask)
        first = first.to(raw_first.dtype).to(tl.float32)
        second = second.to(raw_first.dtype).to(tl.float32)

    tables = token * table_stride + low
    inside = low < HALF
    cos_first = tl.load(cos_ptr + tables, mask=inside, other=0.0)
    cos_second = tl.load(cos_ptr + tables + HALF, mask=inside, other=0.0)
    sin_first = tl.load(sin_ptr + tables, mask=inside, other=0.0)
    sin_second = tl.load(sin_ptr + tables + HALF, mask=inside, other=0.0)
    rotated_first = (first * cos_first + second * sin_first).to(raw_first.dtype)
    rotated_second = (second * cos_second + first * sin_second).to(raw_first.dtype)
    is_value = head >= KEYS_END
    new_first = tl.where(is_value, raw_first, rotated_first)
    new_second = tl.where(is_value, raw_second, rotated_second)
    tl.store(source, new_first, mask=mask & (head < KEYS_END))
    tl.store(source + HALF, new_second, mask=mask & (head < KEYS_END))

    # Keys, then values: in a slot they lie as in the row.
    slot = tl.load(slot_ptr + token)
    target = kv_ptr + slot * (2 * NUM_KV_HEADS * HEAD_DIM) + (head - NUM_HEADS) * HEAD_DIM + low
    if FP8_MAX > 0:
        inverse = tl.where(is_value, v_inverse, k_inverse)
        new_first = _saturated(new_first, inverse, FP8_MAX)
        new_second = _saturated(new_second, inverse, FP8_MAX)
    if slot >= 0:
        tl.store(target, new_first, mask=mask & (head >= NUM_HEADS))
        tl.store(target + HALF, new_second, mask=mask & (head >= NUM_HEADS))


@triton.jit
def _saturated(x, inverse, FP8_MAX: tl.constexpr):
    """float32 for fp8: `fp8.quantize_fp8` without the cast."""
    x = x.to(tl.float32)
    scaled = x * inverse
    scaled = tl.where(scaled > FP8_MAX, FP8_MAX, scaled)
    scaled = tl.where(scaled < -FP8_MAX, -FP8_MAX, scaled)
    return scaled + x * 0.0  # infinity becomes NaN


@triton.jit
def _norm_weight(q_norm_ptr, k_norm_ptr, is_query, dim, mask):
    of_query = tl.load(q_norm_ptr + dim, mask=mask & is_query, other=0.0)
    of_key = tl.load(k_norm_ptr + dim, mask=mask & (is_query == 0), other=0.0)
    return tl.where(is_query, of_query, of_key).to(tl.float32)


def swiglu(gate_up: Tensor) -> Tensor:
    check_swiglu(gate_up)
    num_tokens, width = gate_up.shape
    size = width // 2
    out = gate_up.new_empty(num_tokens, size)
    launch(
        _swiglu,
        (num_tokens, triton.cdiv(size, SWIGLU_BLOCK)),
        gate_up,
        out,
        gate_up.stride(0),
        size,
        num_warps=4,
        BLOCK=SWIGLU_BLOCK,
    )
    return out


@triton.jit
def _swiglu(gate_up_ptr, out_ptr, stride, size, BLOCK: tl.constexpr, PDL: tl.constexpr = False):
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    gate = tl.load(gate_up_ptr + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + size + columns, mask=mask, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * size + columns, out.to(out_ptr.dtype.element_ty), mask=mask)
