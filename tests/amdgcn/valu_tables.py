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
    exp2_approx,
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
from .valu_functions import (
    alignbit,
    alignbyte,
    bfe_i32,
    bfe_u32,
    bfrev,
    byte_to_f32,
    f32,
    f64,
    fract,
    frexp_exp,
    frexp_mant,
    highest_bit,
    highest_bit_signed,
    i32,
    i64,
    ldexp,
    low5,
    low24,
    lowest_bit,
    med3,
    mul_hi_i32,
    mul_hi_u24,
    mul_hi_u32,
    mul_legacy,
    pack_bf16,
    pack_f16,
    pack_f16_rtz,
    pack_halves,
    perm,
    reverse,
    same,
    signed24,
    u16,
    u32,
    u64,
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


for _t in ("f32", "f64"):
    _k = TYPES[_t]
    _add(_k, f"{_t} {_t}", **{f"add_{_t}": np.add, f"mul_{_t}": np.multiply})
    _add(_k, f"{_t} {_t}", **{f"max_{_t}": fmax, f"min_{_t}": fmin})
    _add(_k, _t, **{f"floor_{_t}": np.floor, f"ceil_{_t}": np.ceil, f"trunc_{_t}": np.trunc})
    _add(_k, _t, **{f"rndne_{_t}": np.rint, f"fract_{_t}": fract, f"frexp_mant_{_t}": frexp_mant})
    _add(_k, f"{_t} i32", **{f"ldexp_{_t}": ldexp})
    _add(I32, _t, **{f"frexp_exp_i32_{_t}": frexp_exp})
    _add(I32, _t, **{f"cvt_i32_{_t}": lambda a: to_integer(a, -(2**31), 2**31 - 1, i32)})
    _add(U32, _t, **{f"cvt_u32_{_t}": lambda a: to_integer(a, 0, 2**32 - 1, u32)})
    _add(_k, "i32", **{f"cvt_{_t}_i32": lambda a, _d=(f32 if _t == "f32" else f64): a.astype(_d)})
    _add(_k, "u32", **{f"cvt_{_t}_u32": lambda a, _d=(f32 if _t == "f32" else f64): a.astype(_d)})
_add(F32, "f32 f32", sub_f32=np.subtract, subrev_f32=reverse(np.subtract))
_add(F32, "f32 f32", mul_legacy_f32=mul_legacy)
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
_add(F16, "f16 f16", subrev_f16=reverse(np.subtract), max_f16=fmax, min_f16=fmin)
_add(F16, "f16 f16 f16", keep_high=True, fma_f16=fma16)

_add(F32, "f64", cvt_f32_f64=lambda a: a.astype(f32))
_add(F64, "f32", cvt_f64_f32=lambda a: a.astype(f64))
_add(F32, "f16", cvt_f32_f16=lambda a: a.astype(f32))
_add(F16, "f32", cvt_f16_f32=lambda a: a.astype(np.float16))
_add(F16, "u16", cvt_f16_u16=lambda a: a.astype(np.float16))
_add(F16, "i16", cvt_f16_i16=lambda a: a.astype(np.float16))
for _n in range(4):
    _add(F32, "u32", **{f"cvt_f32_ubyte{_n}": byte_to_f32(_n)})
_add(U32, "f32 f32", cvt_pk_bf16_f32=pack_bf16, cvt_pkrtz_f16_f32=pack_f16_rtz)
_add(U32, "f32 f32", cvt_pk_f16_f32=pack_f16)
_add(U32, "f16 f16", pack_b32_f16=pack_halves)

_add(U32, "u32 u32", add_u32=np.add, sub_u32=np.subtract, subrev_u32=reverse(np.subtract))
_add(U32, "u32 u32", and_b32=np.bitwise_and, or_b32=np.bitwise_or, xor_b32=np.bitwise_xor)
_add(U32, "u32 u32", xnor_b32=lambda a, b: ~(a ^ b), mul_lo_u32=np.multiply)
_add(U32, "u32 u32", lshlrev_b32=lambda a, b: b << low5(a), lshrrev_b32=lambda a, b: b >> low5(a))
_add(I32, "i32 i32", ashrrev_i32=lambda a, b: b >> (a & i32(31)))
_add(U32, "u32 u32", max_u32=np.maximum, min_u32=np.minimum, mul_hi_u32=mul_hi_u32)
_add(I32, "i32 i32", max_i32=np.maximum, min_i32=np.minimum, mul_hi_i32=mul_hi_i32)
_add(I32, "i32 i32", add_i32=np.add, sub_i32=np.subtract)
_add(U32, "u32 u32", mul_u32_u24=lambda a, b: low24(a) * low24(b), mul_hi_u32_u24=mul_hi_u24)
_add(I32, "i32 i32", mul_i32_i24=lambda a, b: signed24(a) * signed24(b))
_add(U32, "u32 u32", bcnt_u32_b32=lambda a, b: np.bitwise_count(a).astype(u32) + b)
_add(U32, "u32 u32", bfm_b32=lambda a, b: ((u32(1) << low5(a)) - u32(1)) << low5(b))
_add(U32, "u32", mov_b32=same, not_b32=np.invert, bfrev_b32=bfrev)
_add(U32, "u32", accvgpr_read_b32=same, accvgpr_write_b32=same, accvgpr_mov_b32=same)
_add(U32, "u32", ffbh_u32=highest_bit, ffbl_b32=lowest_bit)
_add(U32, "i32", ffbh_i32=highest_bit_signed)
_add(U32, "u32 u32 u32", add3_u32=lambda a, b, c: a + b + c, xad_u32=lambda a, b, c: (a ^ b) + c)
_add(U32, "u32 u32 u32", lshl_add_u32=lambda a, b, c: (a << low5(b)) + c)
_add(U32, "u32 u32 u32", add_lshl_u32=lambda a, b, c: (a + b) << low5(c))
_add(U32, "u32 u32 u32", lshl_or_b32=lambda a, b, c: (a << low5(b)) | c)
_add(U32, "u32 u32 u32", and_or_b32=lambda a, b, c: (a & b) | c, or3_b32=lambda a, b, c: a | b | c)
_add(U32, "u32 u32 u32", bfi_b32=lambda a, b, c: (a & b) | (~a & c), bfe_u32=bfe_u32)
_add(U32, "u32 u32 u32", max3_u32=lambda a, b, c: np.maximum(np.maximum(a, b), c), med3_u32=med3)
_add(U32, "u32 u32 u32", min3_u32=lambda a, b, c: np.minimum(np.minimum(a, b), c), perm_b32=perm)
_add(U32, "u32 u32 u32", mad_u32_u24=lambda a, b, c: low24(a) * low24(b) + c)
_add(U32, "u32 u32 u32", alignbit_b32=alignbit, alignbyte_b32=alignbyte)
_add(I32, "i32 i32 i32", max3_i32=lambda a, b, c: np.maximum(np.maximum(a, b), c), med3_i32=med3)
_add(I32, "i32 i32 i32", min3_i32=lambda a, b, c: np.minimum(np.minimum(a, b), c), bfe_i32=bfe_i32)
_add(I32, "i32 i32 i32", mad_i32_i24=lambda a, b, c: signed24(a) * signed24(b) + c)

_add(U16, "u16 u16", add_u16=np.add, sub_u16=np.subtract, subrev_u16=reverse(np.subtract))
_add(U16, "u16 u16", mul_lo_u16=np.multiply, max_u16=np.maximum, min_u16=np.minimum)
_add(U16, "u16 u16", lshlrev_b16=lambda a, b: b << (a & u16(15)))
_add(U16, "u16 u16", lshrrev_b16=lambda a, b: b >> (a & u16(15)))
_add(I16, "i16 i16", ashrrev_i16=lambda a, b: b >> (a & np.int16(15)))
_add(I16, "i16 i16", max_i16=np.maximum, min_i16=np.minimum)
_add(U16, "u16 u16 u16", keep_high=True, mad_u16=lambda a, b, c: a * b + c)

_add(U64, "u32 u64", lshlrev_b64=lambda a, b: b << (a & u32(63)).astype(u64))
_add(U64, "u32 u64", lshrrev_b64=lambda a, b: b >> (a & u32(63)).astype(u64))
_add(I64, "u32 i64", ashrrev_i64=lambda a, b: b >> (a & u32(63)).astype(i64))
_add(U64, "u64", mov_b64=same)
_add(U64, "u64 u32 u64", lshl_add_u64=lambda a, b, c: (a << (b & u32(7)).astype(u64)) + c)
