"""The functions of the plain vector instructions that numpy does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .numerics import bf16_bits, f16_toward_zero
from .wave import Array

u8, u16, u32, u64 = np.uint8, np.uint16, np.uint32, np.uint64
i32, i64, f32, f64 = np.int32, np.int64, np.float32, np.float64


def low5(a: Array) -> Array:
    return a & u32(31)


def reverse(function: Any) -> Callable[[Array, Array], Array]:
    return lambda a, b: function(b, a)


def mul_legacy(a: Array, b: Array) -> Array:
    return np.where((a == 0) | (b == 0), f32(0), a * b)


def fract(a: Array) -> Array:
    one_less = np.nextafter(a.dtype.type(1), a.dtype.type(0))
    value: Array = np.where(
        np.isinf(a), a.dtype.type(np.nan), np.minimum(a - np.floor(a), one_less)
    )
    return value


def ldexp(a: Array, b: Array) -> Array:
    # float64 first: numpy's own rounding of float32 denormals is then one exact step
    if a.dtype == f32:
        value: Array = np.ldexp(a.astype(f64), np.clip(b, -600, 600)).astype(f32)
        return value
    value = np.ldexp(a, np.clip(b, -4000, 4000))
    return value


def frexp_exp(a: Array) -> Array:
    return np.where(np.isfinite(a), np.frexp(a)[1], 0).astype(i32)


def frexp_mant(a: Array) -> Array:
    return np.where(np.isfinite(a), np.frexp(a)[0], a)


def mul_hi_u32(a: Array, b: Array) -> Array:
    return ((a.astype(u64) * b.astype(u64)) >> u64(32)).astype(u32)


def mul_hi_i32(a: Array, b: Array) -> Array:
    return ((a.astype(i64) * b.astype(i64)) >> i64(32)).astype(i32)


def low24(a: Array) -> Array:
    return a & u32(0xFFFFFF)


def signed24(a: Array) -> Array:
    return (a << i32(8)) >> i32(8)


def mul_hi_u24(a: Array, b: Array) -> Array:
    return ((low24(a).astype(u64) * low24(b).astype(u64)) >> u64(32)).astype(u32)


def bfe_u32(a: Array, b: Array, c: Array) -> Array:
    width = low5(c)
    return (a >> low5(b)) & ((u32(1) << width) - u32(1))


def bfe_i32(a: Array, b: Array, c: Array) -> Array:
    offset, width = b & i32(31), c & i32(31)
    field = (a >> offset).view(u32) & ((u32(1) << width.view(u32)) - u32(1))
    sign = np.where(width == 0, u32(0), u32(1) << ((width - i32(1)) & i32(31)).view(u32))
    extended = ((field ^ sign) - sign).view(i32)
    value: Array = np.where(offset + width > 32, a >> offset, extended)
    return value


def perm(a: Array, b: Array, c: Array) -> Array:
    """Each byte of c picks a byte of {a, b}, a sign byte, 0x00 or 0xff."""
    a, b, c = np.broadcast_arrays(a, b, c)
    both = (a.astype(u64) << u64(32)) | b.astype(u64)
    result = np.zeros(a.shape, u32)
    for k in range(4):
        select = (c >> u32(8 * k)) & u32(255)
        byte = (both >> (np.minimum(select, u32(7)).astype(u64) * u64(8))) & u64(255)
        # 8..11: the sign of byte 1, 3, 5 or 7, repeated
        signs = (both >> ((select.astype(u64) & u64(3)) * u64(16) + u64(15))) & u64(1)
        byte = np.where((select >= 8) & (select < 12), signs * u64(255), byte)
        byte = np.where(select == 12, u64(0), np.where(select > 12, u64(255), byte))
        result |= byte.astype(u32) << u32(8 * k)
    return result


def bfrev(a: Array) -> Array:
    for shift, mask in (
        (1, 0x55555555),
        (2, 0x33333333),
        (4, 0x0F0F0F0F),
        (8, 0x00FF00FF),
        (16, 0xFFFF),
    ):
        a = ((a >> u32(shift)) & u32(mask)) | ((a & u32(mask)) << u32(shift))
    return a


def highest_bit(a: Array) -> Array:
    """Leading zeros, or -1 for 0."""
    length = np.frexp(a.astype(f64))[1]
    return np.where(a == 0, i32(-1), i32(32) - length).astype(i32).view(u32)


def lowest_bit(a: Array) -> Array:
    lowest = a & (~a + u32(1))
    return np.where(a == 0, i32(-1), np.frexp(lowest.astype(f64))[1] - 1).astype(i32).view(u32)


def highest_bit_signed(a: Array) -> Array:
    return np.where(
        (a == 0) | (a == -1), u32(0xFFFFFFFF), highest_bit((a ^ (a >> i32(31))).view(u32))
    )


def alignbit(a: Array, b: Array, c: Array) -> Array:
    both = (a.astype(u64) << u64(32)) | b.astype(u64)
    return (both >> low5(c).astype(u64)).astype(u32)


def alignbyte(a: Array, b: Array, c: Array) -> Array:
    return alignbit(a, b, (c & u32(3)) << u32(3))


def byte_to_f32(k: int) -> Callable[[Array], Array]:
    return lambda a: ((a >> u32(8 * k)) & u32(255)).astype(f32)


def pack_bf16(a: Array, b: Array) -> Array:
    value: Array = bf16_bits(a) | (bf16_bits(b) << u32(16))
    return value


def pack_f16_rtz(a: Array, b: Array) -> Array:
    low, high = (f16_toward_zero(x).view(u16).astype(u32) for x in (a, b))
    return low | (high << u32(16))


def pack_f16(a: Array, b: Array) -> Array:
    return pack_halves(a.astype(np.float16), b.astype(np.float16))


def pack_halves(a: Array, b: Array) -> Array:
    return a.view(u16).astype(u32) | (b.view(u16).astype(u32) << u32(16))


def med3(a: Array, b: Array, c: Array) -> Array:
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def same(a: Array) -> Array:
    return a
