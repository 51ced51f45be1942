"""Floating point that numpy does not have: fused multiply-add, extremes, approximations.

Not modelled: NaN payloads, and denormal modes other than IEEE for float32 and float64.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
F64 = np.float64
_TAIL = np.uint64(0x1FFFFFFF)  # the bits that rounding float64 to float32 drops
_HALF = np.uint64(0x10000000)
TINY32 = np.float32(2.0**-126)  # the smallest normal number


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """a + b as a rounded sum and its exact error."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def round_to_odd(s: Array, error: Array) -> Array:
    """The sum s + error, truncated with a sticky last bit: a later rounding is then exact."""
    s, error = np.broadcast_arrays(s, error)
    s = np.array(s, F64)
    error = np.nan_to_num(error, nan=0.0, posinf=0.0, neginf=0.0)
    bits = s.view(np.int64)
    inexact = (error != 0) & ((bits & 1) == 0) & np.isfinite(s)
    away = np.where((error > 0) == (s > 0), 1, -1)
    # An exact sum of 0 has no error, so that stepping never crosses 0.
    bits += np.where(inexact, away, 0)
    return s


def round32(total: Array, error: Array) -> Array:
    """float32 of the exact total + error."""
    return round_to_odd(total, error).astype(np.float32)


def fma32(a: Array, b: Array, c: Array) -> Array:
    """The product of two float32 is exact in float64; adding rounds there, then to float32.

    Rounding twice is wrong only when the first result lies on a tie of the second, or where
    float32 is denormal: rare enough to be looked for, and then done by rounding to odd.
    """
    product = np.multiply(a, b, dtype=F64)
    total = product + c
    result: Array = total.astype(np.float32)
    suspicious = (total.view(np.uint64) & _TAIL) == _HALF
    small = np.abs(result) <= TINY32
    if 1 in small.tobytes():  # an exact zero is not: only what rounding may have changed
        suspicious |= small & (total != 0)
    if 1 in suspicious.tobytes():  # as any(), which takes long for few lanes
        return round32(*two_sum(product, np.asarray(c, F64)))
    return result


def fma16(a: Array, b: Array, c: Array) -> Array:
    """Exact in float64: 22 bits of product and an addend at most 40 powers of two apart."""
    product = np.multiply(a, b, dtype=F64)
    total, error = two_sum(product, np.asarray(c, F64))
    return round_to_odd(total, error).astype(np.float16)


def _split(a: Array) -> tuple[Array, Array]:
    t = a * F64(134217729.0)
    high = t - (t - a)
    return high, a - high


def _fma64_exact(a: float, b: float, c: float) -> float:
    if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
        return float(F64(a) * F64(b) + F64(c))
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return float(F64(a) * F64(b) + F64(c))  # numpy knows the sign of zero
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def fma64(a: Array, b: Array, c: Array) -> Array:
    """Boldo and Melquiond: error-free product and sums, joined by one rounding to odd.

    Where an intermediate could overflow or lose bits below the denormals, exact fractions.
    """
    a, b, c = np.broadcast_arrays(a, b, c)
    product = a * b
    ah, al = _split(a)
    bh, bl = _split(b)
    low = ((ah * bh - product) + ah * bl + al * bh) + al * bl
    th, tl = two_sum(c, low)
    vh, vl = two_sum(product, th)
    z, error = two_sum(tl, vl)
    result: Array = vh + round_to_odd(z, error)

    def far(x: Array) -> Array:
        size = np.abs(x)
        return ~((size > 2.0**-400) & (size < 2.0**400))

    unsafe = far(a) | far(b) | (far(c) & (c != 0)) | (np.abs(result) < 2.0**-400)
    for i in np.nonzero(unsafe)[0]:
        result[i] = _fma64_exact(float(a[i]), float(b[i]), float(c[i]))
    return result


def fmax(a: Array, b: Array) -> Array:
    """IEEE maxNum, with +0 above -0 (numpy leaves the order of zeros open)."""
    result: Array = np.fmax(a, b)
    if np.count_nonzero(result) != result.size:
        bits = f"u{result.dtype.itemsize}"  # of equal values they differ for zeros only
        np.putmask(result.view(bits), a == b, a.view(bits) & b.view(bits))
    return result


def fmin(a: Array, b: Array) -> Array:
    result: Array = np.fmin(a, b)
    if np.count_nonzero(result) != result.size:
        bits = f"u{result.dtype.itemsize}"  # of equal values they differ for zeros only
        np.putmask(result.view(bits), a == b, a.view(bits) | b.view(bits))
    return result


def fmed3(a: Array, b: Array, c: Array) -> Array:
    """The median; with a NaN among them, the minimum, as the ISA defines it."""
    nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
    median = fmax(fmin(a, b), fmin(fmax(a, b), c))
    return np.where(nan, fmin(fmin(a, b), c), median) if 1 in nan.tobytes() else median


def flush(a: Array) -> Array:
    """Denormals to zero of the same sign, as the transcendental instructions do."""
    small = np.abs(a) < TINY32
    return np.where(small, np.copysign(np.float32(0), a), a) if 1 in small.tobytes() else a


class Jitter:
    """Transcendentals are allowed one unit in the last place: optionally use that freedom."""

    def __init__(self) -> None:
        self.random: np.random.Generator | None = None

    def __call__(self, exact: Array) -> Array:
        result: Array = exact.astype(np.float32)
        if self.random is None:
            return result
        step = self.random.integers(-1, 2, result.shape)
        up, down = (
            np.nextafter(result, np.float32(np.inf)),
            np.nextafter(result, np.float32(-np.inf)),
        )
        moved = np.where(step > 0, up, np.where(step < 0, down, result))
        # Exact powers stay exact, as they do on hardware.
        free = np.isfinite(result) & (np.frexp(result)[0] != 0.5) & (np.abs(result) > 2 * TINY32)
        return np.where(free, moved, result)


jitter = Jitter()


def exp2_approx(a: Array) -> Array:
    return flush(jitter(np.exp2(flush(a).astype(F64))))


def log2_approx(a: Array) -> Array:
    return jitter(np.log2(flush(a).astype(F64)))


def rcp_approx(a: Array) -> Array:
    return flush(jitter(1.0 / flush(a).astype(F64)))


def rsq_approx(a: Array) -> Array:
    return jitter(1.0 / np.sqrt(flush(a).astype(F64)))


def sqrt_approx(a: Array) -> Array:
    return jitter(np.sqrt(flush(a).astype(F64)))


def to_integer(a: Array, low: int, high: int, dtype: Any) -> Array:
    """Truncate and saturate; NaN becomes 0."""
    wide = np.nan_to_num(np.trunc(a.astype(F64)), nan=0.0, posinf=2.0**62, neginf=-(2.0**62))
    value: Array = np.clip(wide, low, high).astype(np.int64).astype(dtype)
    return value


def round_half_even_bits(bits: Array, drop: int) -> Array:
    """Drop low bits of an unsigned pattern, rounding to nearest even."""
    one = np.uint32(1)
    half = np.uint32((1 << (drop - 1)) - 1)
    return (bits + half + ((bits >> np.uint32(drop)) & one)) >> np.uint32(drop)


def bf16_bits(a: Array) -> Array:
    """float32 -> the 16 bits of bfloat16, in 32 bit words."""
    bits = a.view(np.uint32)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(a), quiet, round_half_even_bits(bits, 16))


def bf16_value(bits: Array) -> Array:
    """16 bits of bfloat16 (in any unsigned type) -> float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f16_toward_zero(a: Array) -> Array:
    """float32 -> float16, truncating; what overflows becomes the largest finite number."""
    near = a.astype(np.float16)
    beyond = np.isfinite(a) & (np.abs(near.astype(np.float32)) > np.abs(a))
    return np.where(beyond, np.nextafter(near, np.float16(0)), near)
