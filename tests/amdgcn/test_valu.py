"""Vector instructions, one at a time, against plain Python on edge values."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from .coverage import TESTED, covers
from .faults import Unsupported
from .snippet import run

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
EDGES: dict[str, list[Any]] = {
    "u32": [
        0,
        1,
        2,
        5,
        31,
        32,
        33,
        63,
        0x7FFF,
        0x8000,
        0xFFFF,
        0x10000,
        0xFFFFFF,
        0x1000000,
        0x7FFFFFFF,
        0x80000000,
        0x80000001,
        0xFFFFFFFE,
        0xFFFFFFFF,
        0x12345678,
        0xDEADBEEF,
    ],
    "u16": [0, 1, 2, 7, 15, 16, 255, 256, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF, 0x1234],
    "u64": [0, 1, 0xFFFFFFFF, 0x100000000, 1 << 63, (1 << 63) - 1, M64, 0x123456789ABCDEF0],
    "f32": [
        0.0,
        -0.0,
        1.0,
        -1.0,
        0.5,
        1.5,
        2.5,
        -2.5,
        3.999,
        1e-45,
        -1e-40,
        2.0**-126,
        3.4e38,
        -3.4e38,
        math.inf,
        -math.inf,
        math.nan,
        65504.0,
        1e10,
        -3e9,
        5e9,
        0.1,
        1 / 3,
        1e-30,
    ],
    "f16": [0.0, -0.0, 1.0, -1.0, 0.5, 2.5, 65504.0, -65504.0, 6e-8, math.inf, math.nan, 0.1],
    "f64": [
        0.0,
        -0.0,
        1.0,
        -1.5,
        2.5,
        1e-320,
        2.0**-1022,
        1.7e308,
        -1e300,
        math.inf,
        -math.inf,
        math.nan,
        0.1,
        1 / 3,
        1e10,
        -3e9,
        5e9,
        7.0,
    ],
}
EDGES["i32"] = [x - (1 << 32) if x >> 31 else x for x in EDGES["u32"]]
EDGES["i16"] = [x - (1 << 16) if x >> 15 else x for x in EDGES["u16"]]
EDGES["i64"] = [x - (1 << 64) if x >> 63 else x for x in EDGES["u64"]]
DTYPE: dict[str, Any] = {
    "u32": np.uint32,
    "i32": np.int32,
    "u16": np.uint16,
    "i16": np.int16,
    "u64": np.uint64,
    "i64": np.int64,
    "f32": np.float32,
    "f16": np.float16,
    "f64": np.float64,
}
BITS = {"u32": 32, "i32": 32, "u16": 16, "i16": 16, "u64": 64, "i64": 64}


def f32(x: float) -> float:
    """Round to float32."""
    if math.isnan(x) or math.isinf(x):
        return x
    try:
        return float(struct.unpack("<f", struct.pack("<f", x))[0])
    except OverflowError:
        return math.copysign(math.inf, x)


def f16(x: float) -> float:
    try:
        return float(struct.unpack("<e", struct.pack("<e", x))[0])
    except OverflowError:
        return math.copysign(math.inf, x)


def round_fraction(x: Fraction, mantissa: int, lowest: int) -> float:
    """Nearest float with so many bits and that lowest exponent, ties to even, no overflow."""
    if x == 0:
        return 0.0
    exponent = x.numerator.bit_length() - x.denominator.bit_length() + 1
    if abs(x) < Fraction(2) ** (exponent - 1):
        exponent -= 1
    unit = Fraction(2) ** max(exponent - mantissa, lowest)
    rounded = round(x / unit) * unit
    return float(rounded) if abs(rounded) < 2**1024 else (math.inf if x > 0 else -math.inf)


def fma(a: float, b: float, c: float, mantissa: int, lowest: int, largest: float) -> float:
    if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
        if math.isfinite(a) and math.isfinite(b):
            return c
        return a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        zero = math.copysign(1, a) * math.copysign(1, b)
        product_zero = a == 0 or b == 0
        if c == 0 and product_zero and zero == math.copysign(1, c):
            return c
        return 0.0
    result = round_fraction(exact, mantissa, lowest) if abs(exact) < 2 * Fraction(largest) else None
    if result is None or abs(result) > largest:
        return math.inf if exact > 0 else -math.inf
    return result or (0.0 if exact > 0 else -0.0)


def fma32(a: float, b: float, c: float) -> float:
    return fma(a, b, c, 24, -149, f32(3.4028234663852886e38))


def fma64(a: float, b: float, c: float) -> float:
    return fma(a, b, c, 53, -1074, 1.7976931348623157e308)


def fma16(a: float, b: float, c: float) -> float:
    return fma(a, b, c, 11, -24, 65504.0)


def fmax(a: float, b: float) -> float:
    if math.isnan(a):
        return b
    if math.isnan(b):
        return a
    if a == b == 0:
        return 0.0 if math.copysign(1, a) > 0 or math.copysign(1, b) > 0 else -0.0
    return max(a, b)


def fmin(a: float, b: float) -> float:
    return -fmax(-a, -b)


def med3(a: float, b: float, c: float) -> float:
    if any(math.isnan(x) for x in (a, b, c)):
        return fmin(fmin(a, b), c)
    return fmax(fmin(a, b), fmin(fmax(a, b), c))


def flush(x: float) -> float:
    return math.copysign(0.0, x) if abs(x) < 2.0**-126 else x


def quiet(function: Callable[..., float]) -> Callable[..., float]:
    """Python raises where IEEE gives NaN or infinity."""

    def wrapped(*x: float) -> float:
        try:
            return function(*x)
        except (ValueError, OverflowError, ZeroDivisionError):
            return math.nan

    return wrapped


def exp2(x: float) -> float:
    x = flush(x)
    return math.inf if x > 1000 else flush(f32(2.0**x)) if x > -1000 or math.isnan(x) else 0.0


def log2(x: float) -> float:
    x = flush(x)
    return -math.inf if x == 0 else math.log2(x)


def rcp(x: float) -> float:
    x = flush(x)
    return math.copysign(math.inf, x) if x == 0 else flush(f32(1 / x))


def rsq(x: float) -> float:
    x = flush(x)
    return math.copysign(math.inf, x) if x == 0 else 1 / math.sqrt(x)


def add(a: float, b: float) -> float:
    return a + b


def mul(a: float, b: float) -> float:
    try:
        return a * b
    except OverflowError:
        return math.inf


def rint(x: float) -> float:
    if not math.isfinite(x):
        return x
    return math.copysign(float(round(x)), x)


def trunc(x: float) -> float:
    return math.copysign(float(math.trunc(x)), x) if math.isfinite(x) else x


def floor(x: float) -> float:
    return math.copysign(float(math.floor(x)), x) if math.isfinite(x) else x


def ceil(x: float) -> float:
    return -floor(-x)


def fract(x: float) -> float:
    return x - floor(x) if math.isfinite(x) else math.nan


def ldexp(x: float, n: int) -> float:
    try:
        return math.ldexp(x, max(-5000, min(n, 5000)))
    except OverflowError:
        return math.copysign(math.inf, x)


def clamp_integer(x: float, low: int, high: int) -> int:
    if math.isnan(x):
        return 0
    return max(low, min(high, math.trunc(x))) if math.isfinite(x) else (high if x > 0 else low)


def signed(x: int, n: int = 32) -> int:
    x &= (1 << n) - 1
    return x - (1 << n) if x >> (n - 1) else x


def perm(a: int, b: int, c: int) -> int:
    octets = [*struct.pack("<I", b), *struct.pack("<I", a)]
    result = 0
    for k in range(4):
        s = c >> 8 * k & 255
        if s < 8:
            byte = octets[s]
        elif s < 12:
            byte = 255 if octets[2 * (s - 8) + 1] & 128 else 0
        else:
            byte = 0 if s == 12 else 255
        result |= byte << 8 * k
    return result


def bfe(a: int, b: int, c: int) -> int:
    return (a & M32) >> (b & 31) & ((1 << (c & 31)) - 1)


def bfe_i(a: int, b: int, c: int) -> int:
    offset, width = b & 31, c & 31
    if width == 0:
        return 0
    if offset + width > 32:
        return signed(a) >> offset
    return signed(bfe(a, b, c), width)


def bf16(x: float) -> int:
    word = int(struct.unpack("<I", struct.pack("<f", x))[0])
    if math.isnan(x):
        return word >> 16 | 0x40
    low, high = word & 0xFFFF, word >> 16
    return high + (low > 0x8000 or (low == 0x8000 and high & 1 == 1))


def half_bits(x: float) -> int:
    return int(struct.unpack("<H", struct.pack("<e", f16(x)))[0])


def half_toward_zero(x: float) -> int:
    word = half_bits(x)
    value = f16(x)
    if math.isfinite(x) and (abs(value) > abs(x)):
        word -= 1
    return word


def s24(x: int) -> int:
    return signed(x, 24)


def u24(x: int) -> int:
    return x & 0xFFFFFF


# mnemonic -> "sources -> result", reference
CASES: dict[str, tuple[str, Callable[..., Any]]] = {
    "v_add_f32": ("f32 f32 -> f32", add),
    "v_sub_f32": ("f32 f32 -> f32", lambda a, b: a - b),
    "v_subrev_f32": ("f32 f32 -> f32", lambda a, b: b - a),
    "v_mul_f32": ("f32 f32 -> f32", mul),
    "v_mul_legacy_f32": ("f32 f32 -> f32", lambda a, b: 0.0 if a == 0 or b == 0 else a * b),
    "v_max_f32": ("f32 f32 -> f32", fmax),
    "v_min_f32": ("f32 f32 -> f32", fmin),
    "v_max3_f32": ("f32 f32 f32 -> f32", lambda a, b, c: fmax(fmax(a, b), c)),
    "v_min3_f32": ("f32 f32 f32 -> f32", lambda a, b, c: fmin(fmin(a, b), c)),
    "v_med3_f32": ("f32 f32 f32 -> f32", med3),
    "v_fma_f32": ("f32 f32 f32 -> f32", fma32),
    "v_floor_f32": ("f32 -> f32", floor),
    "v_ceil_f32": ("f32 -> f32", ceil),
    "v_trunc_f32": ("f32 -> f32", trunc),
    "v_rndne_f32": ("f32 -> f32", rint),
    "v_fract_f32": ("f32 -> f32", lambda x: min(fract(x), 1 - 2.0**-24) if x == x else x),
    "v_exp_f32": ("f32 -> f32", exp2),
    "v_log_f32": ("f32 -> f32", quiet(log2)),
    "v_rcp_f32": ("f32 -> f32", rcp),
    "v_rcp_iflag_f32": ("f32 -> f32", rcp),
    "v_rsq_f32": ("f32 -> f32", quiet(rsq)),
    "v_sqrt_f32": ("f32 -> f32", quiet(lambda x: math.sqrt(flush(x)))),
    "v_ldexp_f32": ("f32 i32 -> f32", ldexp),
    "v_frexp_mant_f32": ("f32 -> f32", lambda x: math.frexp(x)[0]),
    "v_frexp_exp_i32_f32": ("f32 -> i32", lambda x: math.frexp(x)[1] if math.isfinite(x) else 0),
    "v_cvt_i32_f32": ("f32 -> i32", lambda x: clamp_integer(x, -(2**31), 2**31 - 1)),
    "v_cvt_u32_f32": ("f32 -> u32", lambda x: clamp_integer(x, 0, 2**32 - 1)),
    "v_cvt_f32_i32": ("i32 -> f32", float),
    "v_cvt_f32_u32": ("u32 -> f32", float),
    "v_cvt_f32_f16": ("f16 -> f32", float),
    "v_cvt_f16_f32": ("f32 -> f16", f16),
    "v_cvt_f16_u16": ("u16 -> f16", lambda x: f16(float(x))),
    "v_cvt_f16_i16": ("i16 -> f16", lambda x: f16(float(x))),
    "v_cvt_pk_bf16_f32": ("f32 f32 -> u32", lambda a, b: bf16(a) | bf16(b) << 16),
    "v_cvt_pkrtz_f16_f32": (
        "f32 f32 -> u32",
        lambda a, b: half_toward_zero(a) | half_toward_zero(b) << 16,
    ),
    "v_cvt_pk_f16_f32": ("f32 f32 -> u32", lambda a, b: half_bits(a) | half_bits(b) << 16),
    "v_pack_b32_f16": ("f16 f16 -> u32", lambda a, b: half_bits(a) | half_bits(b) << 16),
    "v_add_f64": ("f64 f64 -> f64", add),
    "v_mul_f64": ("f64 f64 -> f64", mul),
    "v_max_f64": ("f64 f64 -> f64", fmax),
    "v_min_f64": ("f64 f64 -> f64", fmin),
    "v_fma_f64": ("f64 f64 f64 -> f64", fma64),
    "v_floor_f64": ("f64 -> f64", floor),
    "v_ceil_f64": ("f64 -> f64", ceil),
    "v_trunc_f64": ("f64 -> f64", trunc),
    "v_rndne_f64": ("f64 -> f64", rint),
    "v_fract_f64": ("f64 -> f64", lambda x: min(fract(x), 1 - 2.0**-53) if x == x else x),
    "v_ldexp_f64": ("f64 i32 -> f64", ldexp),
    "v_frexp_mant_f64": ("f64 -> f64", lambda x: math.frexp(x)[0]),
    "v_frexp_exp_i32_f64": ("f64 -> i32", lambda x: math.frexp(x)[1] if math.isfinite(x) else 0),
    "v_rcp_f64": ("f64 -> f64", lambda x: math.copysign(math.inf, x) if x == 0 else 1 / x),
    "v_rsq_f64": (
        "f64 -> f64",
        quiet(lambda x: math.copysign(math.inf, x) if x == 0 else 1 / math.sqrt(x)),
    ),
    "v_sqrt_f64": ("f64 -> f64", quiet(math.sqrt)),
    "v_cvt_f64_f32": ("f32 -> f64", float),
    "v_cvt_f32_f64": ("f64 -> f32", f32),
    "v_cvt_f64_i32": ("i32 -> f64", float),
    "v_cvt_f64_u32": ("u32 -> f64", float),
    "v_cvt_i32_f64": ("f64 -> i32", lambda x: clamp_integer(x, -(2**31), 2**31 - 1)),
    "v_cvt_u32_f64": ("f64 -> u32", lambda x: clamp_integer(x, 0, 2**32 - 1)),
    "v_add_f16": ("f16 f16 -> f16", lambda a, b: f16(a + b)),
    "v_sub_f16": ("f16 f16 -> f16", lambda a, b: f16(a - b)),
    "v_subrev_f16": ("f16 f16 -> f16", lambda a, b: f16(b - a)),
    "v_mul_f16": ("f16 f16 -> f16", lambda a, b: f16(a * b)),
    "v_max_f16": ("f16 f16 -> f16", fmax),
    "v_min_f16": ("f16 f16 -> f16", fmin),
    "v_fma_f16": ("f16 f16 f16 -> f16", fma16),
    "v_add_u32": ("u32 u32 -> u32", lambda a, b: a + b),
    "v_sub_u32": ("u32 u32 -> u32", lambda a, b: a - b),
    "v_subrev_u32": ("u32 u32 -> u32", lambda a, b: b - a),
    "v_add_i32": ("i32 i32 -> i32", lambda a, b: a + b),
    "v_sub_i32": ("i32 i32 -> i32", lambda a, b: a - b),
    "v_and_b32": ("u32 u32 -> u32", lambda a, b: a & b),
    "v_or_b32": ("u32 u32 -> u32", lambda a, b: a | b),
    "v_xor_b32": ("u32 u32 -> u32", lambda a, b: a ^ b),
    "v_xnor_b32": ("u32 u32 -> u32", lambda a, b: ~(a ^ b)),
    "v_not_b32": ("u32 -> u32", lambda a: ~a),
    "v_mov_b32": ("u32 -> u32", lambda a: a),
    "v_mov_b64": ("u64 -> u64", lambda a: a),
    "v_bfrev_b32": ("u32 -> u32", lambda a: int(f"{a:032b}"[::-1], 2)),
    "v_ffbh_u32": ("u32 -> u32", lambda a: 32 - a.bit_length() if a else M32),
    "v_ffbh_i32": (
        "i32 -> u32",
        lambda a: M32 if a in (0, -1) else 32 - (a if a > 0 else ~a).bit_length(),
    ),
    "v_ffbl_b32": ("u32 -> u32", lambda a: (a & -a).bit_length() - 1 if a else M32),
    "v_lshlrev_b32": ("u32 u32 -> u32", lambda a, b: b << (a & 31)),
    "v_lshrrev_b32": ("u32 u32 -> u32", lambda a, b: b >> (a & 31)),
    "v_ashrrev_i32": ("i32 i32 -> i32", lambda a, b: b >> (a & 31)),
    "v_lshlrev_b64": ("u32 u64 -> u64", lambda a, b: b << (a & 63)),
    "v_lshrrev_b64": ("u32 u64 -> u64", lambda a, b: b >> (a & 63)),
    "v_ashrrev_i64": ("u32 i64 -> i64", lambda a, b: b >> (a & 63)),
    "v_max_u32": ("u32 u32 -> u32", max),
    "v_min_u32": ("u32 u32 -> u32", min),
    "v_max_i32": ("i32 i32 -> i32", max),
    "v_min_i32": ("i32 i32 -> i32", min),
    "v_max3_u32": ("u32 u32 u32 -> u32", max),
    "v_min3_u32": ("u32 u32 u32 -> u32", min),
    "v_max3_i32": ("i32 i32 i32 -> i32", max),
    "v_min3_i32": ("i32 i32 i32 -> i32", min),
    "v_med3_i32": ("i32 i32 i32 -> i32", lambda *x: sorted(x)[1]),
    "v_med3_u32": ("u32 u32 u32 -> u32", lambda *x: sorted(x)[1]),
    "v_mul_lo_u32": ("u32 u32 -> u32", lambda a, b: a * b),
    "v_mul_hi_u32": ("u32 u32 -> u32", lambda a, b: a * b >> 32),
    "v_mul_hi_i32": ("i32 i32 -> i32", lambda a, b: a * b >> 32),
    "v_mul_u32_u24": ("u32 u32 -> u32", lambda a, b: u24(a) * u24(b)),
    "v_mul_hi_u32_u24": ("u32 u32 -> u32", lambda a, b: u24(a) * u24(b) >> 32),
    "v_mul_i32_i24": ("i32 i32 -> i32", lambda a, b: s24(a) * s24(b)),
    "v_mad_u32_u24": ("u32 u32 u32 -> u32", lambda a, b, c: u24(a) * u24(b) + c),
    "v_mad_i32_i24": ("i32 i32 i32 -> i32", lambda a, b, c: s24(a) * s24(b) + c),
    "v_bcnt_u32_b32": ("u32 u32 -> u32", lambda a, b: a.bit_count() + b),
    "v_bfm_b32": ("u32 u32 -> u32", lambda a, b: ((1 << (a & 31)) - 1) << (b & 31)),
    "v_add3_u32": ("u32 u32 u32 -> u32", lambda a, b, c: a + b + c),
    "v_xad_u32": ("u32 u32 u32 -> u32", lambda a, b, c: (a ^ b) + c),
    "v_lshl_add_u32": ("u32 u32 u32 -> u32", lambda a, b, c: (a << (b & 31)) + c),
    "v_add_lshl_u32": ("u32 u32 u32 -> u32", lambda a, b, c: (a + b & M32) << (c & 31)),
    "v_lshl_or_b32": ("u32 u32 u32 -> u32", lambda a, b, c: (a << (b & 31)) | c),
    "v_and_or_b32": ("u32 u32 u32 -> u32", lambda a, b, c: (a & b) | c),
    "v_or3_b32": ("u32 u32 u32 -> u32", lambda a, b, c: a | b | c),
    "v_bfi_b32": ("u32 u32 u32 -> u32", lambda a, b, c: (a & b) | (~a & c)),
    "v_bfe_u32": ("u32 u32 u32 -> u32", bfe),
    "v_bfe_i32": ("i32 i32 i32 -> i32", bfe_i),
    "v_perm_b32": ("u32 u32 u32 -> u32", perm),
    "v_alignbit_b32": ("u32 u32 u32 -> u32", lambda a, b, c: (a << 32 | b) >> (c & 31)),
    "v_alignbyte_b32": ("u32 u32 u32 -> u32", lambda a, b, c: (a << 32 | b) >> 8 * (c & 3)),
    "v_lshl_add_u64": ("u64 u32 u64 -> u64", lambda a, b, c: (a << (b & 7)) + c),
    "v_add_u16": ("u16 u16 -> u16", lambda a, b: a + b),
    "v_sub_u16": ("u16 u16 -> u16", lambda a, b: a - b),
    "v_subrev_u16": ("u16 u16 -> u16", lambda a, b: b - a),
    "v_mul_lo_u16": ("u16 u16 -> u16", lambda a, b: a * b),
    "v_max_u16": ("u16 u16 -> u16", max),
    "v_min_u16": ("u16 u16 -> u16", min),
    "v_max_i16": ("i16 i16 -> i16", max),
    "v_min_i16": ("i16 i16 -> i16", min),
    "v_lshlrev_b16": ("u16 u16 -> u16", lambda a, b: b << (a & 15)),
    "v_lshrrev_b16": ("u16 u16 -> u16", lambda a, b: b >> (a & 15)),
    "v_ashrrev_i16": ("i16 i16 -> i16", lambda a, b: b >> (a & 15)),
    "v_mad_u16": ("u16 u16 u16 -> u16", lambda a, b, c: a * b + c),
}
for _k in range(4):
    CASES[f"v_cvt_f32_ubyte{_k}"] = ("u32 -> f32", lambda x, k=_k: float(x >> 8 * k & 255))
TESTED.update(CASES)


def values(kind: str, seed: int) -> list[Any]:
    """64 edge and random values, in an order that depends on the seed."""
    source = random.Random(f"{kind}{seed}")
    pool = list(EDGES[kind])
    while len(pool) < 40:
        if kind[0] == "f":
            pool.append(source.uniform(-8, 8) * 2.0 ** source.randint(-6, 6))
        else:
            number = source.getrandbits(BITS[kind])
            pool.append(signed(number, BITS[kind]) if kind[0] == "i" else number)
    chosen = [source.choice(pool) for _ in range(64 - len(EDGES[kind]))] + EDGES[kind]
    source.shuffle(chosen)
    return [float(DTYPE[kind](x)) if kind[0] == "f" else x for x in chosen]


def assert_lanes(found: Any, wanted: list[Any], kind: str, inputs: Any = None) -> None:
    want: list[Any]
    got: list[Any]
    if kind[0] != "f":
        n = BITS[kind]
        got = [int(x) & ((1 << n) - 1) for x in found]
        want = [int(x) & ((1 << n) - 1) for x in wanted]
        bad = [k for k in range(64) if got[k] != want[k]]
    else:
        want = [x if math.isnan(x) else float(DTYPE[kind](x)) for x in wanted]
        got = [float(x) for x in found]

        def same(a: float, b: float) -> bool:
            if math.isnan(a) or math.isnan(b):
                return math.isnan(a) and math.isnan(b)
            return a == b and math.copysign(1, a) == math.copysign(1, b)

        bad = [k for k in range(64) if not same(got[k], want[k])]
    assert not bad, [(k, got[k], want[k], inputs and [x[k] for x in inputs]) for k in bad[:5]]


@pytest.mark.parametrize("mnemonic", CASES)
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_plain(mnemonic: str, partial: bool) -> None:
    signature, reference = CASES[mnemonic]
    kinds, result = signature.split(" -> ")
    inputs = [values(kind, 10 * k + partial) for k, kind in enumerate(kinds.split())]
    registers, operands = {}, []
    for k, (kind, column) in enumerate(zip(kinds.split(), inputs, strict=True)):
        registers[10 + 2 * k] = np.array(column, DTYPE[kind])
        wide = DTYPE[kind]().itemsize == 8
        operands.append(f"v[{10 + 2 * k}:{11 + 2 * k}]" if wide else f"v{10 + 2 * k}")
    target = "v[2:3]" if DTYPE[result]().itemsize == 8 else "v2"
    before = np.full(64, 0xABCD1234, np.uint32)
    registers |= {2: before, 3: before}
    mask = 0xF0F0_0000_FFFF_1357 if partial else M64
    out = run(f"{mnemonic} {target}, {', '.join(operands)}", v=registers, exec_mask=mask)
    wanted = [reference(*x) for x in zip(*inputs, strict=True)]
    off = [k for k in range(64) if not mask >> k & 1]
    found = out.v(2, DTYPE[result])
    for k in off:  # untouched
        assert out.v(2)[k] == 0xABCD1234
        wanted[k] = found[k]
    assert_lanes(found, wanted, result, inputs)
    if DTYPE[result]().itemsize == 2:
        high = 0xABCD if mnemonic in ("v_fma_f16", "v_mad_u16") else 0
        assert all(out.v(2)[k] >> 16 == high for k in range(64) if k not in off)


@covers("v_accvgpr_read_b32", "v_accvgpr_write_b32", "v_accvgpr_mov_b32")
def test_accumulators() -> None:
    lanes = np.arange(64, dtype=np.uint32)
    code = "v_accvgpr_write_b32 a3, v1\nv_accvgpr_mov_b32 a4, a3\nv_accvgpr_read_b32 v2, a4"
    out = run(code, v={1: lanes})
    assert (out.v(2) == lanes).all()


COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "eq": lambda a, b: a == b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "ne": lambda a, b: a != b,
    "lg": lambda a, b: a < b or a > b,
    "neq": lambda a, b: a != b,
    "nlt": lambda a, b: not a < b,
    "nle": lambda a, b: not a <= b,
    "ngt": lambda a, b: not a > b,
    "nge": lambda a, b: not a >= b,
    "nlg": lambda a, b: not (a < b or a > b),
    "o": lambda a, b: a == a and b == b,
    "u": lambda a, b: a != a or b != b,
}
COMPARISONS = [
    (op, kind)
    for kind in DTYPE
    for op in COMPARE
    if (op != "ne" if kind[0] == "f" else op in ("eq", "ne", "lt", "le", "gt", "ge"))
]
TESTED.update(f"v_cmp{x}_{op}_{kind}" for op, kind in COMPARISONS for x in ("", "x"))


@pytest.mark.parametrize(("op", "kind"), COMPARISONS)
def test_comparison(op: str, kind: str) -> None:
    a, b = values(kind, 1), values(kind, 2)
    b[:8] = a[:8]
    wide = DTYPE[kind]().itemsize == 8
    operands = "v[10:11], v[12:13]" if wide else "v10, v12"
    registers = {10: np.array(a, DTYPE[kind]), 12: np.array(b, DTYPE[kind])}
    wanted = [COMPARE[op](x, y) for x, y in zip(a, b, strict=True)]
    mask = 0x00FF_FFFF_0FFF_FFFF
    out = run(
        f"v_cmp_{op}_{kind}_e64 s[4:5], {operands}\nv_cmpx_{op}_{kind}_e32 vcc, {operands}",
        v=registers,
        exec_mask=mask,
    )
    number = sum(1 << k for k in range(64) if wanted[k] and mask >> k & 1)
    assert out.s64(4) == number
    assert out.s64(106) == number
    assert out.wave.exec == number


@covers("v_cmp_class_f32", "v_cmp_class_f64")
def test_class() -> None:
    pool = [math.nan, -math.inf, -1.0, -1e-40, -0.0, 0.0, 1e-40, 1.0, math.inf]
    bit = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    a = np.array([pool[k % 9] for k in range(64)], np.float32)
    for k in range(10):
        out = run(f"v_cmp_class_f32 vcc, v1, {1 << k}", v={1: a})
        assert list(out.mask(106)) == [bit[i % 9] == k for i in range(64)]
    wide = [math.nan, -math.inf, -1.0, -1e-320, -0.0, 0.0, 1e-320, 1.0, math.inf]
    b = np.array([wide[k % 9] for k in range(64)])
    for k in range(10):
        out = run(f"v_cmp_class_f64_e64 s[2:3], v[4:5], {1 << k}", v={4: b})
        assert list(out.mask(2)) == [bit[i % 9] == k for i in range(64)]
    signalling = np.full(64, 0x7F800001, np.uint32)
    assert run("v_cmp_class_f32 vcc, v1, 1", v={1: signalling}).s64(106) == M64


@covers("v_cndmask_b32")
def test_select() -> None:
    a, b = np.arange(64, dtype=np.uint32), np.arange(64, 128, dtype=np.uint32)
    mask = 0x0123_4567_89AB_CDEF
    bits = np.array([mask >> k & 1 for k in range(64)], bool)
    out = run("v_cndmask_b32_e32 v3, v1, v2, vcc", v={1: a, 2: b}, s={106: mask})
    assert (out.v(3) == np.where(bits, b, a)).all()
    code = "v_cndmask_b32_e64 v3, -v1, |v2|, s[4:5]"
    x, y = np.linspace(-3, 3, 64, dtype=np.float32), np.linspace(5, -5, 64, dtype=np.float32)
    out = run(code, v={1: x, 2: y}, s={4: mask})
    assert (out.v(3, np.float32) == np.where(bits, np.abs(y), -x)).all()
    code = "v_cndmask_b32_dpp v3, v1, v2, vcc quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf"
    out = run(code, v={1: a, 2: b}, s={106: mask})
    assert (out.v(3) == np.where(bits, b, a ^ 1)).all()


@covers("v_fmac_f32", "v_mac_f32", "v_fmac_f64", "v_fmac_f16", "v_fmamk_f32", "v_fmaak_f32")
def test_multiply_accumulate() -> None:
    a, b, c = (values("f32", k) for k in (3, 4, 5))
    registers = {k: np.array(x, np.float32) for k, x in zip((1, 2, 3), (a, b, c), strict=True)}
    out = run("v_fmac_f32_e32 v3, v1, v2", v=registers)
    assert_lanes(out.v(3, np.float32), [fma32(*x) for x in zip(a, b, c, strict=True)], "f32")
    out = run("v_fmamk_f32 v4, v1, 0x40400000, v3", v=registers)
    assert_lanes(out.v(4, np.float32), [fma32(x, 3.0, z) for x, z in zip(a, c, strict=True)], "f32")
    out = run("v_fmaak_f32 v4, v1, v2, 0x40400000", v=registers)
    assert_lanes(out.v(4, np.float32), [fma32(x, y, 3.0) for x, y in zip(a, b, strict=True)], "f32")
    out = run("v_mac_f32_e32 v3, v1, v2", v={1: np.float32(3), 2: np.float32(5), 3: np.float32(1)})
    assert (out.v(3, np.float32) == 16).all()
    a, b, c = (values("f64", k) for k in (3, 4, 5))
    registers = {2: np.array(a), 4: np.array(b), 6: np.array(c)}
    out = run("v_fmac_f64_e32 v[6:7], v[2:3], v[4:5]", v=registers)
    assert_lanes(out.v(6, np.float64), [fma64(*x) for x in zip(a, b, c, strict=True)], "f64")
    a, b, c = (values("f16", k) for k in (3, 4, 5))
    registers = {k: np.array(x, np.float16) for k, x in zip((1, 2, 3), (a, b, c), strict=True)}
    out = run("v_fmac_f16_e32 v3, v1, v2", v=registers)
    assert_lanes(out.v(3, np.float16), [fma16(*x) for x in zip(a, b, c, strict=True)], "f16")


CARRIES = {
    "v_add_co_u32": (1, 1, 0),
    "v_sub_co_u32": (1, -1, 0),
    "v_subrev_co_u32": (-1, 1, 0),
    "v_addc_co_u32": (1, 1, 1),
    "v_subb_co_u32": (1, -1, -1),
    "v_subbrev_co_u32": (-1, 1, -1),
}
TESTED.update(CARRIES)


@pytest.mark.parametrize("mnemonic", CARRIES)
def test_carry(mnemonic: str) -> None:
    ka, kb, kc = CARRIES[mnemonic]
    a, b = values("u32", 6), values("u32", 7)
    mask, lanes_on = 0xAAAA_5555_FFFF_0000, 0xFFFF_FFFF_FFFF_FFF0
    carry = ", s[6:7]" if kc else ""
    registers = {1: np.array(a, np.uint32), 2: np.array(b, np.uint32)}
    out = run(
        f"{mnemonic}_e64 v3, s[4:5], v1, v2{carry}",
        v=registers,
        s={6: mask},
        exec_mask=lanes_on,
    )
    for k in range(4, 64):
        total = ka * a[k] + kb * b[k] + kc * (mask >> k & 1)
        assert out.v(3)[k] == total & M32
        assert bool(out.s64(4) >> k & 1) == (total < 0 or total > M32)
    assert out.s64(4) & 15 == 0


@covers("v_mad_u64_u32", "v_mad_i64_i32")
def test_wide_multiply_add() -> None:
    a, b, c = values("u32", 8), values("u32", 9), values("u64", 10)
    registers = {
        1: np.array(a, np.uint32),
        2: np.array(b, np.uint32),
        4: np.array(c, np.uint64),
    }
    out = run("v_mad_u64_u32 v[6:7], s[4:5], v1, v2, v[4:5]", v=registers)
    for k in range(64):
        total = a[k] * b[k] + c[k]
        assert out.v(6, np.uint64)[k] == total & M64
        assert bool(out.s64(4) >> k & 1) == (total > M64)
    out = run("v_mad_i64_i32 v[6:7], s[4:5], v1, v2, v[4:5]", v=registers)
    for k in range(64):
        total = signed(a[k]) * signed(b[k]) + signed(c[k], 64)
        assert out.v(6, np.uint64)[k] == total & M64
        assert bool(out.s64(4) >> k & 1) == (not -(1 << 63) <= total < 1 << 63)


DIVISIONS = [
    (a, b)
    for a in (1.0, -3.5, 1e-44, 1e38, 3e38, 1e-38, 7.0, 0.0, math.inf, math.nan, 6e-39, 2.0**127)
    for b in (1.0, 3.0, -7.0, 1e-45, 1e-40, 3e38, 0.0, math.inf, 1e-20, 2.0**-126, 0.3, math.nan)
]
F64_DIVISIONS = [
    (a, b)
    for a in (1.0, -3.5, 1e-320, 1e308, 1.7e308, 1e-308, 7.0, 0.0, math.inf, math.nan)
    for b in (1.0, 3.0, -7.0, 5e-324, 1e-310, 1.7e308, 0.0, math.inf, 1e-200, 0.3, math.nan)
]
# What the compiler emits for a division (v1 / v2), with refinement steps between.
DIVIDE32 = """
v_div_scale_f32 v3, s[0:1], v2, v2, v1
v_rcp_f32_e32 v4, v3
v_div_scale_f32 v5, vcc, v1, v2, v1
v_fma_f32 v6, -v3, v4, 1.0
v_fmac_f32_e32 v4, v6, v4
v_mul_f32_e32 v6, v5, v4
v_fma_f32 v7, -v3, v6, v5
v_fmac_f32_e32 v6, v7, v4
v_fma_f32 v3, -v3, v6, v5
v_div_fmas_f32 v3, v3, v4, v6
v_div_fixup_f32 v8, v3, v2, v1
"""
DIVIDE64 = """
v_div_scale_f64 v[6:7], s[0:1], v[4:5], v[4:5], v[2:3]
v_rcp_f64_e32 v[8:9], v[6:7]
v_fma_f64 v[10:11], -v[6:7], v[8:9], 1.0
v_fma_f64 v[8:9], v[8:9], v[10:11], v[8:9]
v_fma_f64 v[10:11], -v[6:7], v[8:9], 1.0
v_fma_f64 v[8:9], v[8:9], v[10:11], v[8:9]
v_div_scale_f64 v[10:11], vcc, v[2:3], v[4:5], v[2:3]
v_mul_f64 v[12:13], v[10:11], v[8:9]
v_fma_f64 v[6:7], -v[6:7], v[12:13], v[10:11]
v_div_fmas_f64 v[6:7], v[6:7], v[8:9], v[12:13]
v_div_fixup_f64 v[14:15], v[6:7], v[4:5], v[2:3]
"""


@covers("v_div_scale_f32", "v_div_fmas_f32", "v_div_fixup_f32")
@covers("v_div_scale_f64", "v_div_fmas_f64", "v_div_fixup_f64")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_division() -> None:
    """The steps together give the correctly rounded quotient."""
    generator = np.random.default_rng(0)
    random_pairs = np.exp2(generator.uniform(-126, 127, (2, 1024))).astype(np.float32)
    edge = np.array((DIVISIONS * 8)[:1024], np.float32).T
    for a, b in zip(*np.concatenate([edge, random_pairs], 1).reshape(2, -1, 64), strict=True):
        out = run(DIVIDE32, v={1: a, 2: b})
        assert_lanes(out.v(8, np.float32), list((a / b).astype(float)), "f32", (a, b))
    wide = np.exp2(generator.uniform(-1000, 1000, (2, 512)))
    edges = np.array((F64_DIVISIONS * 8)[:512]).T
    for a, b in zip(*np.concatenate([edges, wide], 1).reshape(2, -1, 64), strict=True):
        out = run(DIVIDE64, v={2: a, 4: b})
        assert_lanes(out.v(14, np.float64), list(a / b), "f64", (a, b))


def test_modifiers() -> None:
    a, b = values("f32", 11), values("f32", 12)
    registers = {1: np.array(a, np.float32), 2: np.array(b, np.float32)}
    out = run("v_add_f32_e64 v3, -v1, |v2|", v=registers)
    assert_lanes(out.v(3, np.float32), [-x + abs(y) for x, y in zip(a, b, strict=True)], "f32")
    out = run("v_mul_f32_e64 v3, v1, -|v2| mul:2", v=registers)
    wanted = [f32(2 * f32(x * -abs(y))) for x, y in zip(a, b, strict=True)]
    assert_lanes(out.v(3, np.float32), wanted, "f32")
    out = run("v_add_f32_e64 v3, v1, v2 clamp", v=registers)
    sums = [x + y for x, y in zip(a, b, strict=True)]
    wanted = [0.0 if math.isnan(x) else max(0.0, min(1.0, x)) for x in sums]
    assert (out.v(3, np.float32) == np.array(wanted, np.float32)).all()
    u = values("u32", 13), values("u32", 14)
    registers = {1: np.array(u[0], np.uint32), 2: np.array(u[1], np.uint32)}
    out = run("v_sub_u32_e64 v3, v1, v2 clamp\nv_add_u32_e64 v4, v1, v2 clamp", v=registers)
    assert_lanes(out.v(3), [max(0, x - y) for x, y in zip(*u, strict=True)], "u32")
    assert_lanes(out.v(4), [min(M32, x + y) for x, y in zip(*u, strict=True)], "u32")


def test_constants_and_scalars() -> None:
    out = run(
        "v_add_f32_e32 v1, 0.5, v0\nv_add_f32_e32 v2, s3, v0\nv_add_u32_e32 v3, -1, v4\n"
        "v_add_f64 v[6:7], v[8:9], 0.5\nv_add_f64 v[10:11], v[8:9], s[6:7]\n"
        "v_mul_f32_e32 v12, 0x40490fdb, v0\nv_lshlrev_b64 v[14:15], 3, s[4:5]",
        v={0: np.float32(2), 4: 0, 8: np.float64(1)},
        s={3: 0x40400000, 6: 0x4000000000000000, 4: 0x1_0000_0001},
    )
    assert out.v(1, np.float32)[0] == 2.5
    assert out.v(2, np.float32)[5] == 5.0
    assert out.v(3)[63] == M32
    assert out.v(6, np.float64)[1] == 1.5
    assert out.v(10, np.float64)[1] == 3.0
    assert out.v(12, np.float32)[1] == np.float32(2) * np.float32(math.pi)
    assert out.v(14, np.uint64)[9] == 0x8_0000_0008


@pytest.mark.parametrize(
    "code",
    [
        "v_frobnicate_b32 v1, v2",
        "v_add_f32_e64 v1, v2, v3 div:8",
        "v_add_f32_e32 v1, v2, v3 quux",
        "v_add_f32_e32 v1, v2",
        "v_add_u32_e64 v1, -v2, v3",
        "v_add_u32_e32 v[1:2], v2, v3",
        "v_mov_b32_e32 v95, v200",
        "v_and_b32_e64 v1, v2, v3 clamp",
        "v_add_f32_dpp v1, v2, v3 row_share:3 row_mask:0xf bank_mask:0xf",
        "v_pk_add_f32 v[0:1], v[2:3], 1.0",
        "v_mfma_f32_16x16x16_f16 v[0:3], v[4:5], v[6:7], 0 cbsz:1",
        "v_mfma_f32_16x16x32_bf16 v[0:3], v[4:7], v[8:11], 0",
        "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 4), 3",
        "scratch_load_dword v1, off, off",
        "s_mov_b64 s[3:4], 0",
    ],
)
def test_refused(code: str) -> None:
    with pytest.raises(Unsupported, match="line 4"):
        run(code)
