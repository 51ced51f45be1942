"""Norms, rotation and gating of Llama-like layers, float32 inside (float64 stays float64)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrue.kernels.fp8 import FP8_DTYPES, quantize_fp8


def rms_norm(
    x: Tensor,  # [T, N] floating, last dim contiguous
    weight: Tensor,  # [N] of x's dtype
    eps: float,
) -> Tensor:  # [T, N] of x's dtype
    """x / sqrt(mean(x^2) + eps) * weight, rounded once. Raises ValueError naming the argument."""
    check_norm(x, weight)
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(
    x: Tensor,  # [T, N] floating, last dim contiguous
    residual: Tensor,  # [T, N] of x's dtype
    weight: Tensor,  # [N] of x's dtype
    eps: float,
) -> tuple[Tensor, Tensor]:  # the norm of the sum, the sum; both [T, N] of x's dtype
    """The sum is rounded to the dtype before its norm is taken, as in two ops.

    Raises ValueError naming the argument.
    """
    check_norm(x, weight, residual)
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, eps), total


def rope_write_kv(
    qkv: Tensor,  # [T, H + 2 * Hkv, D] floating: query, key and value heads; changed in place
    cos: Tensor,  # [T, 1, D] float32, last dim contiguous
    sin: Tensor,  # [T, 1, D] float32, of the same strides; the first half negated
    kv: Tensor,  # [num_slots, 2, Hkv, D] floating or fp8, contiguous; changed in place
    slot_mapping: Tensor,  # [T] int64, where the KV of each token goes; < 0: nowhere
    *,
    num_heads: int,  # H
    q_norm: Tensor | None = None,  # [D] weight of an RMSNorm over each query head (Qwen3)
    k_norm: Tensor | None = None,  # [D] the same for key heads; both or none
    eps: float = 1e-6,  # of these norms
    k_scale: float = 1.0,  # of an fp8 pool: a key is what is stored * k_scale
    v_scale: float = 1.0,
) -> None:
    """Norm and rotate query and key in place, and write rotated key and value into the pool.

    An fp8 pool gets them divided by their scale and saturated (`fp8.quantize_fp8`).

    The rotation is Hugging Face's, of the two halves of a head: x * cos + swapped(x) * sin. Each
    step (norm, rotation) is computed in float32 and rounded to the dtype. No two tokens may go to
    one slot. Raises ValueError naming the argument.
    """
    check_rope(qkv, cos, sin, kv, slot_mapping, num_heads, q_norm, k_norm)
    check_scales(kv, k_scale, v_scale)
    num_kv_heads, head_dim = kv.shape[2:]
    keys_end = num_heads + num_kv_heads
    if q_norm is not None and k_norm is not None:
        query, key = qkv[:, :num_heads], qkv[:, num_heads:keys_end]
        query.copy_(F.rms_norm(query, q_norm.shape, q_norm, eps))
        key.copy_(F.rms_norm(key, k_norm.shape, k_norm, eps))
    heads = qkv[:, :keys_end]
    heads.copy_(heads * cos + heads.roll(head_dim // 2, -1) * sin)
    kept = slot_mapping >= 0
    new = qkv[kept, num_heads:].unflatten(1, (2, num_kv_heads))
    if kv.dtype in FP8_DTYPES:
        inverse = torch.tensor([1 / k_scale, 1 / v_scale], device=kv.device).view(2, 1, 1)
        new = quantize_fp8(new, kv.dtype, inverse)
    kv[slot_mapping[kept]] = new.to(kv.dtype)


def swiglu(
    gate_up: Tensor,  # [T, 2 * I] floating, gate then up; last dim contiguous
) -> Tensor:  # [T, I] of the same dtype
    """silu(gate) * up, rounded once. Raises ValueError naming the argument."""
    check_swiglu(gate_up)
    inside = torch.promote_types(gate_up.dtype, torch.float32)
    gate, up = gate_up.to(inside).chunk(2, 1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def linear(
    x: Tensor,  # [T, K] floating, last dim contiguous
    weight: Tensor,  # [N, K] of x's dtype, contiguous; [2 * N, K] where gated
    bias: Tensor | None = None,  # [N], or [2 * N]
    residual: Tensor | None = None,  # [T, N] of x's dtype, last dim contiguous; may be written over
    *,
    gated: bool = False,  # the first half of the outputs gates the second: silu(first) * second
) -> Tensor:  # [T, N] of x's dtype
    """x W^T + bias, then the gate, then + residual. Raises ValueError naming the argument.

    Sums are float32 inside, with one rounding at the end (platforms may round before the gate too).
    """
    check_linear(x, weight, bias, residual, gated)
    inside = torch.promote_types(x.dtype, torch.float32)
    out = F.linear(x.to(inside), weight.to(inside), None if bias is None else bias.to(inside))
    if gated:
        gate, up = out.chunk(2, 1)
        out = F.silu(gate) * up
    return (out if residual is None else out + residual).to(x.dtype)


def check_norm(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> None:
    if x.dim() != 2 or x.stride(1) != 1:
        raise ValueError(f"x must be [T, N] with N contiguous, not {tuple(x.shape)}")
    if weight.shape != x.shape[1:] or weight.dtype != x.dtype or not weight.is_contiguous():
        raise ValueError(f"weight must be {x.dtype} [{x.shape[1]}], not {tuple(weight.shape)}")
    if residual is not None and (
        residual.shape != x.shape or residual.dtype != x.dtype or residual.stride(1) != 1
    ):
        raise ValueError(f"residual must be {x.dtype} {list(x.shape)}, not {list(residual.shape)}")


def check_rope(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
) -> None:
    if kv.dim() != 4 or kv.shape[1] != 2 or not kv.is_floating_point() or not kv.is_contiguous():
        raise ValueError("kv must be contiguous floating [num_slots, 2, Hkv, D]")
    num_kv_heads, head_dim = kv.shape[2:]
    heads = num_heads + 2 * num_kv_heads
    if qkv.shape[1:] != (heads, head_dim) or qkv.stride()[1:] != (head_dim, 1) or head_dim % 2:
        raise ValueError(f"qkv must be [T, {heads}, {head_dim}] with even, contiguous heads")
    for name, table in (("cos", cos), ("sin", sin)):
        if table.shape != (qkv.shape[0], 1, head_dim) or table.stride(2) != 1:
            raise ValueError(f"{name} must be [{qkv.shape[0]}, 1, {head_dim}], last dim contiguous")
        if table.stride(0) != cos.stride(0):
            raise ValueError("cos and sin must have the same strides")
    if slot_mapping.shape != qkv.shape[:1] or slot_mapping.dtype != torch.int64:
        raise ValueError(f"slot_mapping must be int64 [{qkv.shape[0]}]")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm must both be given or neither")
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None and (weight.shape != (head_dim,) or weight.dtype != qkv.dtype):
            raise ValueError(f"{name} must be {qkv.dtype} [{head_dim}]")


def check_scales(kv: Tensor, k_scale: float, v_scale: float) -> None:
    """Of both ops that touch the pool."""
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if not 0 < scale < float("inf"):
            raise ValueError(f"{name} must be positive and finite, not {scale}")
        if scale != 1 and kv.dtype not in FP8_DTYPES:
            raise ValueError(f"{name} must be 1 where kv is {kv.dtype}: only fp8 is scaled")


def check_swiglu(gate_up: Tensor) -> None:
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.stride(1) != 1:
        raise ValueError(f"gate_up must be [T, 2 * I] and contiguous, not {list(gate_up.shape)}")


def check_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, gated: bool
) -> None:
    if x.dim() != 2 or x.stride(1) != 1:
        raise ValueError(f"x must be [T, K] with K contiguous, not {tuple(x.shape)}")
    size, k = weight.shape
    if k != x.shape[1] or weight.dtype != x.dtype or not weight.is_contiguous():
        raise ValueError(f"weight must be {x.dtype} [N, {x.shape[1]}], not {tuple(weight.shape)}")
    if gated and size % 2:
        raise ValueError(f"weight must have an even number of rows, half of them gates, not {size}")
    if bias is not None and (bias.shape != (size,) or bias.dtype != x.dtype):
        raise ValueError(f"bias must be {x.dtype} [{size}], not {tuple(bias.shape)}")
    shape = (x.shape[0], size // 2 if gated else size)
    if residual is not None and (
        residual.shape != shape or residual.dtype != x.dtype or residual.stride(1) != 1
    ):
        raise ValueError(f"residual must be {x.dtype} {list(shape)}, not {list(residual.shape)}")
