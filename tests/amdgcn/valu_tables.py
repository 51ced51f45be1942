"""What each plain vector instruction computes: result type, source types, a function of arrays.

"Plain" means: sources in, one result out, lane by lane. Instructions that also read or write VCC,
other lanes, or packed halves have their own decoders in valu.py, packed.py and crosslane.py.
Sources are arrays of 64 lanes or of one element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .division import DOUBLE, SINGLE, div_fixup
from .numerics import (
    bf16_bits,
    exp2_approx,
    f16_toward_zero,
    fma16,
    fma32,
    fma64,
    fmax,
    fmed3,
    fmin,
    log2_approx,
    rcp_approx,
    rsq_approx,
    sqrt_approx,
    to_integer,
)
from .wave import F16, F32, F64, I16, I32, I64, U16, U32, U64, Array

TYPES = {
    "f32": F32,
    "i32": I32,
    "u32": U32,
    "b32": U32,
    "f16": F16,
    "i16": I16,
    "u16": U16,
    "b16": U16,
    "f64": F64,
    "i64": I64,
    "u64": U64,
    "b64": U64,
}


@dataclass(frozen=True)
class Plain:
    """A row of the table."""

    result: int
    sources: tuple[int, ...]
    compute: Callable[..., Array]
    keep_high: bool = False  # of a 16 bit result's register


PLAIN: dict[str, Plain] = {}


def _add(result: int, sources: str, *, keep_high: Any = False, **functions: Any) -> None:
    kinds = tuple(TYPES[s] for s in sources.split())
    for name, function in functions.items():
        assert f"v_{name}" not in PLAIN
        PLAIN[f"v_{name}"] = Plain(result, kinds, function, keep_high)


u8, u16, u32, u64 = np.uint8, np.uint16, np.uint32, np.uint64
i32, i64, f32, f64 = np.int32, np.int64, np.float32, np.float64


def _low5(a: Array) -> Array:
    return a & u32(31)


def _reverse(function: Any) -> Callable[[Array, Array], Array]:
    return lambda a, b: function(b, a)


def _mul_legacy(a: Array, b: Array) -> Array:
    return np.where((a == 0) | (b == 0), f32(0), a * b)


def _fract(a: Array) -> Array:
    one_less = np.nextafter(a.dtype.type(1), a.dtype.type(0))
    value: Array = np.where(
        np.isinf(a), a.dtype.type(np.nan), np.minimum(a - np.floor(a), one_less)
    )
    return value


def _ldexp(a: Array, b: Array) -> Array:
    # float64 first: numpy's own rounding of float32 denormals is then one exact step
    if a.dtype == f32:
        value: Array = np.ldexp(a.astype(f64), np.clip(b, -600, 600)).astype(f32)
        return value
    value = np.ldexp(a, np.clip(b, -4000, 4000))
    return value


def _frexp_exp(a: Array) -> Array:
    return np.where(np.isfinite(a), np.frexp(a)[1], 0).astype(i32)


def _frexp_mant(a: Array) -> Array:
    return np.where(np.isfinite(a), np.frexp(a)[0], a)


def _mul_hi_u32(a: Array, b: Array) -> Array:
    return ((a.astype(u64) * b.astype(u64)) >> u64(32)).astype(u32)


def _mul_hi_i32(a: Array, b: Array) -> Array:
    return ((a.astype(i64) * b.astype(i64)) >> i64(32)).astype(i32)


def _low24(a: Array) -> Array:
    return a & u32(0xFFFFFF)


def _signed24(a: Array) -> Array:
    return (a << i32(8)) >> i32(8)


def _mul_hi_u24(a: Array, b: Array) -> Array:
    return ((_low24(a).astype(u64) * _low24(b).astype(u64)) >> u64(32)).astype(u32)


def _bfe_u32(a: Array, b: Array, c: Array) -> Array:
    width = _low5(c)
    return (a >> _low5(b)) & ((u32(1) << width) - u32(1))


def _bfe_i32(a: Array, b: Array, c: Array) -> Array:
    offset, width = b & i32(31), c & i32(31)
    field = (a >> offset).view(u32) & ((u32(1) << width.view(u32)) - u32(1))
    sign = np.where(width == 0, u32(0), u32(1) << ((width - i32(1)) & i32(31)).view(u32))
    extended = ((field ^ sign) - sign).view(i32)
    value: Array = np.where(offset + width > 32, a >> offset, extended)
    return value


def _perm(a: Array, b: Array, c: Array) -> Array:
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


def _bfrev(a: Array) -> Array:
    for shift, mask in (
        (1, 0x55555555),
        (2, 0x33333333),
        (4, 0x0F0F0F0F),
        (8, 0x00FF00FF),
        (16, 0xFFFF),
    ):
        a = ((a >> u32(shift)) & u32(mask)) | ((a & u32(mask)) << u32(shift))
    return a


def _highest_bit(a: Array) -> Array:
    """Leading zeros, or -1 for 0."""
    length = np.frexp(a.astype(f64))[1]
    return np.where(a == 0, i32(-1), i32(32) - length).astype(i32).view(u32)


def _lowest_bit(a: Array) -> Array:
    lowest = a & (~a + u32(1))
    return np.where(a == 0, i32(-1), np.frexp(lowest.astype(f64))[1] - 1).astype(i32).view(u32)


def _highest_bit_signed(a: Array) -> Array:
    return np.where(
        (a == 0) | (a == -1), u32(0xFFFFFFFF), _highest_bit((a ^ (a >> i32(31))).view(u32))
    )


def _alignbit(a: Array, b: Array, c: Array) -> Array:
    both = (a.astype(u64) << u64(32)) | b.astype(u64)
    return (both >> _low5(c).astype(u64)).astype(u32)


def _alignbyte(a: Array, b: Array, c: Array) -> Array:
    return _alignbit(a, b, (c & u32(3)) << u32(3))


def _byte_to_f32(k: int) -> Callable[[Array], Array]:
    return lambda a: ((a >> u32(8 * k)) & u32(255)).astype(f32)


def _pack_bf16(a: Array, b: Array) -> Array:
    value: Array = bf16_bits(a) | (bf16_bits(b) << u32(16))
    return value


def _pack_f16_rtz(a: Array, b: Array) -> Array:
    low, high = (f16_toward_zero(x).view(u16).astype(u32) for x in (a, b))
    return low | (high << u32(16))


def _pack_f16(a: Array, b: Array) -> Array:
    return _pack_halves(a.astype(np.float16), b.astype(np.float16))


def _pack_halves(a: Array, b: Array) -> Array:
    return a.view(u16).astype(u32) | (b.view(u16).astype(u32) << u32(16))


def _med3(a: Array, b: Array, c: Array) -> Array:
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def _same(a: Array) -> Array:
    return a


for _t in ("f32", "f64"):
    _k = TYPES[_t]
    _add(_k, f"{_t} {_t}", **{f"add_{_t}": np.add, f"mul_{_t}": np.multiply})
    _add(_k, f"{_t} {_t}", **{f"max_{_t}": fmax, f"min_{_t}": fmin})
    _add(_k, _t, **{f"floor_{_t}": np.floor, f"ceil_{_t}": np.ceil, f"trunc_{_t}": np.trunc})
    _add(_k, _t, **{f"rndne_{_t}": np.rint, f"fract_{_t}": _fract, f"frexp_mant_{_t}": _frexp_mant})
    _add(_k, f"{_t} i32", **{f"ldexp_{_t}": _ldexp})
    _add(I32, _t, **{f"frexp_exp_i32_{_t}": _frexp_exp})
    _add(I32, _t, **{f"cvt_i32_{_t}": lambda a: to_integer(a, -(2**31), 2**31 - 1, i32)})
    _add(U32, _t, **{f"cvt_u32_{_t}": lambda a: to_integer(a, 0, 2**32 - 1, u32)})
    _add(_k, "i32", **{f"cvt_{_t}_i32": lambda a, _d=(f32 if _t == "f32" else f64): a.astype(_d)})
    _add(_k, "u32", **{f"cvt_{_t}_u32": lambda a, _d=(f32 if _t == "f32" else f64): a.astype(_d)})
_add(F32, "f32 f32", sub_f32=np.subtract, subrev_f32=_reverse(np.subtract))
_add(F32, "f32 f32", mul_legacy_f32=_mul_legacy)
_add(F32, "f32 f32 f32", fma_f32=fma32, med3_f32=fmed3)
_add(F32, "f32 f32 f32", max3_f32=lambda a, b, c: fmax(fmax(a, b), c))
_add(F32, "f32 f32 f32", min3_f32=lambda a, b, c: fmin(fmin(a, b), c))
_add(F32, "f32 f32 f32", div_fixup_f32=lambda a, b, c: div_fixup(SINGLE, a, b, c))
_add(F32, "f32", exp_f32=exp2_approx, log_f32=log2_approx, rcp_f32=rcp_approx)
_add(F32, "f32", rcp_iflag_f32=rcp_approx, rsq_f32=rsq_approx, sqrt_f32=sqrt_approx)
_add(F64, "f64 f64 f64", fma_f64=fma64)
_add(F64, "f64 f64 f64", div_fixup_f64=lambda a, b, c: div_fixup(DOUBLE, a, b, c))
# Hardware gives about 26 good bits here; the code that uses them refines the result.
_add(F64, "f64", rcp_f64=lambda a: 1.0 / a, sqrt_f64=np.sqrt, rsq_f64=lambda a: 1.0 / np.sqrt(a))
_add(F16, "f16 f16", add_f16=np.add, sub_f16=np.subtract, mul_f16=np.multiply)
_add(F16, "f16 f16", subrev_f16=_reverse(np.subtract), max_f16=fmax, min_f16=fmin)
_add(F16, "f16 f16 f16", keep_high=True, fma_f16=fma16)

_add(F32, "f64", cvt_f32_f64=lambda a: a.astype(f32))
_add(F64, "f32", cvt_f64_f32=lambda a: a.astype(f64))
_add(F32, "f16", cvt_f32_f16=lambda a: a.astype(f32))
_add(F16, "f32", cvt_f16_f32=lambda a: a.astype(np.float16))
_add(F16, "u16", cvt_f16_u16=lambda a: a.astype(np.float16))
_add(F16, "i16", cvt_f16_i16=lambda a: a.astype(np.float16))
for _n in range(4):
    _add(F32, "u32", **{f"cvt_f32_ubyte{_n}": _byte_to_f32(_n)})
_add(U32, "f32 f32", cvt_pk_bf16_f32=_pack_bf16, cvt_pkrtz_f16_f32=_pack_f16_rtz)
_add(U32, "f32 f32", cvt_pk_f16_f32=_pack_f16)
_add(U32, "f16 f16", pack_b32_f16=_pack_halves)

_add(U32, "u32 u32", add_u32=np.add, sub_u32=np.subtract, subrev_u32=_reverse(np.subtract))
_add(U32, "u32 u32", and_b32=np.bitwise_and, or_b32=np.bitwise_or, xor_b32=np.bitwise_xor)
_add(U32, "u32 u32", xnor_b32=lambda a, b: ~(a ^ b), mul_lo_u32=np.multiply)
_add(U32, "u32 u32", lshlrev_b32=lambda a, b: b << _low5(a), lshrrev_b32=lambda a, b: b >> _low5(a))
_add(I32, "i32 i32", ashrrev_i32=lambda a, b: b >> (a & i32(31)))
_add(U32, "u32 u32", max_u32=np.maximum, min_u32=np.minimum, mul_hi_u32=_mul_hi_u32)
_add(I32, "i32 i32", max_i32=np.maximum, min_i32=np.minimum, mul_hi_i32=_mul_hi_i32)
_add(I32, "i32 i32", add_i32=np.add, sub_i32=np.subtract)
_add(U32, "u32 u32", mul_u32_u24=lambda a, b: _low24(a) * _low24(b), mul_hi_u32_u24=_mul_hi_u24)
_add(I32, "i32 i32", mul_i32_i24=lambda a, b: _signed24(a) * _signed24(b))
_add(U32, "u32 u32", bcnt_u32_b32=lambda a, b: np.bitwise_count(a).astype(u32) + b)
_add(U32, "u32 u32", bfm_b32=lambda a, b: ((u32(1) << _low5(a)) - u32(1)) << _low5(b))
_add(U32, "u32", mov_b32=_same, not_b32=np.invert, bfrev_b32=_bfrev)
_add(U32, "u32", accvgpr_read_b32=_same, accvgpr_write_b32=_same, accvgpr_mov_b32=_same)
_add(U32, "u32", ffbh_u32=_highest_bit, ffbl_b32=_lowest_bit)
_add(U32, "i32", ffbh_i32=_highest_bit_signed)
_add(U32, "u32 u32 u32", add3_u32=lambda a, b, c: a + b + c, xad_u32=lambda a, b, c: (a ^ b) + c)
_add(U32, "u32 u32 u32", lshl_add_u32=lambda a, b, c: (a << _low5(b)) + c)
_add(U32, "u32 u32 u32", add_lshl_u32=lambda a, b, c: (a + b) << _low5(c))
_add(U32, "u32 u32 u32", lshl_or_b32=lambda a, b, c: (a << _low5(b)) | c)
_add(U32, "u32 u32 u32", and_or_b32=lambda a, b, c: (a & b) | c, or3_b32=lambda a, b, c: a | b | c)
_add(U32, "u32 u32 u32", bfi_b32=lambda a, b, c: (a & b) | (~a & c), bfe_u32=_bfe_u32)
_add(U32, "u32 u32 u32", max3_u32=lambda a, b, c: np.maximum(np.maximum(a, b), c), med3_u32=_med3)
_add(U32, "u32 u32 u32", min3_u32=lambda a, b, c: np.minimum(np.minimum(a, b), c), perm_b32=_perm)
_add(U32, "u32 u32 u32", mad_u32_u24=lambda a, b, c: _low24(a) * _low24(b) + c)
_add(U32, "u32 u32 u32", alignbit_b32=_alignbit, alignbyte_b32=_alignbyte)
_add(I32, "i32 i32 i32", max3_i32=lambda a, b, c: np.maximum(np.maximum(a, b), c), med3_i32=_med3)
_add(I32, "i32 i32 i32", min3_i32=lambda a, b, c: np.minimum(np.minimum(a, b), c), bfe_i32=_bfe_i32)
_add(I32, "i32 i32 i32", mad_i32_i24=lambda a, b, c: _signed24(a) * _signed24(b) + c)

_add(U16, "u16 u16", add_u16=np.add, sub_u16=np.subtract, subrev_u16=_reverse(np.subtract))
_add(U16, "u16 u16", mul_lo_u16=np.multiply, max_u16=np.maximum, min_u16=np.minimum)
_add(U16, "u16 u16", lshlrev_b16=lambda a, b: b << (a & u16(15)))
_add(U16, "u16 u16", lshrrev_b16=lambda a, b: b >> (a & u16(15)))
_add(I16, "i16 i16", ashrrev_i16=lambda a, b: b >> (a & np.int16(15)))
_add(I16, "i16 i16", max_i16=np.maximum, min_i16=np.minimum)
_add(U16, "u16 u16 u16", keep_high=True, mad_u16=lambda a, b, c: a * b + c)

_add(U64, "u32 u64", lshlrev_b64=lambda a, b: b << (a & u32(63)).astype(u64))
_add(U64, "u32 u64", lshrrev_b64=lambda a, b: b >> (a & u32(63)).astype(u64))
_add(I64, "u32 i64", ashrrev_i64=lambda a, b: b >> (a & u32(63)).astype(i64))
_add(U64, "u64", mov_b64=_same)
_add(U64, "u64 u32 u64", lshl_add_u64=lambda a, b, c: (a << (b & u32(7)).astype(u64)) + c)
