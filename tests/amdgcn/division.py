"""The three steps of a correctly rounded division: v_div_scale, v_div_fmas, v_div_fixup."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .numerics import fma32, fma64

Array = NDArray[Any]


class Format:
    """What the steps need to know of a float format."""

    def __init__(self, dtype: Any, unsigned: Any, mantissa: int, exponent: int) -> None:
        self.dtype = dtype
        self.unsigned = unsigned
        self.mantissa = mantissa
        self.mask = (1 << exponent) - 1
        self.bias = self.mask >> 1
        self.single = mantissa == 23
        self.scale = 64 if self.single else 128
        self.far = 96 if self.single else 768  # exponents so far apart that the quotient overflows
        self.small = 23 if self.single else 53
        # Exponents of operands whose quotient needs no scaling, whichever they are: low and count.
        self.safe = (unsigned(self.bias - self.far // 2 + 1), unsigned(self.far - 2))
        self.tiny = np.longdouble(2) ** (1 - self.bias)

    def exponent(self, x: Array) -> Array:
        value: Array = ((x.view(self.unsigned) >> self.unsigned(self.mantissa)) & self.mask).astype(
            np.int64
        )
        return value

    def harmless(self, x: Array) -> bool:
        """All exponents are so near to 0 that no step has anything special to do."""
        low, count = self.safe
        exponent = (x.view(self.unsigned) >> self.unsigned(self.mantissa)) & self.unsigned(
            self.mask
        )
        return bool(((exponent - low) < count).all())


_NONE = np.zeros(64, bool)
SINGLE = Format(np.float32, np.uint32, 23, 8)
DOUBLE = Format(np.float64, np.uint64, 52, 11)


def _denormal(x: Array, f: Format) -> Array:
    value: Array = (f.exponent(x) == 0) & (x != 0)
    return value


def div_scale(f: Format, s0: Array, s1: Array, s2: Array) -> tuple[Array, Array]:
    """Scale s0, which is the denominator s1 or the numerator s2, away from extremes.

    The second result (VCC) says that the quotient has to be scaled back by v_div_fmas. Where both
    the reciprocal and the quotient are denormal, documents scale the denominator up; it is larger
    than half of the largest number then, so this scales it down, which makes divisions right.
    """
    if f.harmless(s1) and f.harmless(s2):
        return s0, _NONE
    s0, s1, s2 = (np.broadcast_to(x, (64,)) for x in (s0, s1, s2))
    e1, e2 = f.exponent(s1), f.exponent(s2)
    # longdouble has the exponent range to tell a denormal quotient of doubles
    wide1, wide2 = s1.astype(np.longdouble), s2.astype(np.longdouble)
    reciprocal_denormal = (np.abs(1 / wide1) < f.tiny) & np.isfinite(s1) & (s1 != 0)
    quotient = np.abs(wide2 / wide1)
    quotient_denormal = (quotient < f.tiny) & (quotient != 0)
    is_denominator = s0.view(f.unsigned) == s1.view(f.unsigned)
    is_numerator = s0.view(f.unsigned) == s2.view(f.unsigned)
    up, down = np.ldexp(s0, f.scale), np.ldexp(s0, -f.scale)
    nan = np.full(64, np.nan, f.dtype)
    conditions = [
        (s2 == 0) | (s1 == 0),
        e2 - e1 >= f.far,
        _denormal(s1, f),
        reciprocal_denormal & quotient_denormal,
        reciprocal_denormal,
        quotient_denormal,
        e2 <= f.small,
    ]
    scaled = [
        nan,
        np.where(is_denominator, up, s0),
        up,
        np.where(is_denominator, down, s0),
        down,
        np.where(is_numerator, up, s0),
        up,
    ]
    false, true = np.zeros(64, bool), np.ones(64, bool)
    flags = [false, true, false, true, false, true, false]
    return np.select(conditions, scaled, s0).astype(f.dtype), np.select(conditions, flags, false)


def div_fmas(f: Format, a: Array, b: Array, c: Array, vcc: Array) -> Array:
    """Fused multiply-add, scaled back where VCC says so."""
    fused: Array = fma32(a, b, c) if f.single else fma64(a, b, c)
    if not vcc.any():
        return fused
    c = np.broadcast_to(c, (64,))
    up = f.exponent(c) > f.bias
    back = np.where(up, np.ldexp(fused, f.scale), np.ldexp(fused, -f.scale))
    return np.where(vcc, back, fused).astype(f.dtype)


def div_fixup(f: Format, quotient: Array, s1: Array, s2: Array) -> Array:
    """Put the special cases of s2 / s1 in place of the computed quotient.

    When the quotient overflows, the refinement steps give NaN (infinity less infinity): infinity
    is put in its place. The documents do not say so, but division on hardware is right.
    """
    if f.harmless(s1) and f.harmless(s2):
        sign = np.where(np.signbit(s1) ^ np.signbit(s2), f.dtype(-1), f.dtype(1))
        result: Array = np.copysign(quotient, sign)
        return result
    quotient, s1, s2 = (np.broadcast_to(x, (64,)) for x in (quotient, s1, s2))
    negative = np.signbit(s1) ^ np.signbit(s2)
    infinity = np.where(negative, f.dtype(-np.inf), f.dtype(np.inf))
    zero = np.where(negative, f.dtype(-0.0), f.dtype(0.0))
    nan = np.full(64, np.nan, f.dtype)
    limit = 150 if f.single else 1075
    conditions = [
        np.isnan(s2),
        np.isnan(s1),
        ((s1 == 0) & (s2 == 0)) | (np.isinf(s1) & np.isinf(s2)),
        (s1 == 0) | np.isinf(s2),
        np.isinf(s1) | (s2 == 0),
        f.exponent(s2) - f.exponent(s1) < -limit,  # underflows
        np.isnan(quotient) & (np.abs(s2.astype(np.longdouble) / s1) > np.finfo(f.dtype).max),
    ]
    values = [s2, s1, nan, infinity, zero, zero, infinity]
    signed = np.where(negative, -np.abs(quotient), np.abs(quotient))
    value: Array = np.select(conditions, values, signed).astype(f.dtype)
    return value
