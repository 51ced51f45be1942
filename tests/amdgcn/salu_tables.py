"""What the plain scalar instructions compute, on Python integers."""

from __future__ import annotations

import operator
from collections.abc import Callable

from .wave import M32, M64

Binary = Callable[[int, int], int]


def signed32(x: int) -> int:
    return x - (1 << 32) if x & 0x80000000 else x


def signed64(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def signed16(x: int) -> int:
    x &= 0xFFFF
    return x - 0x10000 if x & 0x8000 else x


def overflows(x: int) -> int:
    return int(not -(2**31) <= x < 2**31)


# name -> (result width, widths of the sources, function of them and SCC to (result, SCC or None));
# SCC None leaves it as it is.
Function = Callable[..., tuple[int, int | None]]
TABLE: dict[str, tuple[int, tuple[int, ...], Function]] = {}


def _add(name: str, width: int, sources: tuple[int, ...], function: Function) -> None:
    assert name not in TABLE
    TABLE[name] = (width, sources, function)


def _logic(function: Binary, mask: int) -> Function:
    def run(a: int, b: int, scc: int) -> tuple[int, int]:
        r = function(a, b) & mask
        return r, int(r != 0)

    return run


def _nonzero(function: Callable[[int], int], mask: int) -> Function:
    def run(a: int, scc: int) -> tuple[int, int]:
        r = function(a) & mask
        return r, int(r != 0)

    return run


def _quiet(function: Callable[..., int]) -> Function:
    return lambda *x: (function(*x[:-1]) & M64, None)


def _reverse(a: int, width: int) -> int:
    return int(f"{a:0{width}b}"[::-1], 2)


def _shifts(width: int) -> None:
    mask, signed = (M32, signed32) if width == 32 else (M64, signed64)
    low = width - 1
    sources = (width, 32)
    _add(f"s_lshl_b{width}", width, sources, _logic(lambda a, b: a << (b & low), mask))
    _add(f"s_lshr_b{width}", width, sources, _logic(lambda a, b: a >> (b & low), mask))
    _add(f"s_ashr_i{width}", width, sources, _logic(lambda a, b: signed(a) >> (b & low), mask))

    def bfe_u(a: int, b: int) -> int:
        return (a >> (b & low)) & ((1 << (b >> 16 & 127)) - 1)

    def bfe_i(a: int, b: int) -> int:
        count = min(b >> 16 & 127, width - (b & low))
        field = bfe_u(a, b) & ((1 << count) - 1)
        return field - (1 << count) if count and field >> (count - 1) else field

    _add(f"s_bfe_u{width}", width, sources, _logic(bfe_u, mask))
    _add(f"s_bfe_i{width}", width, sources, _logic(bfe_i, mask))
    _add(
        f"s_bfm_b{width}",
        width,
        (32, 32),
        lambda a, b, scc: ((((1 << (a & low)) - 1) << (b & low)) & mask, None),
    )


BITWISE: dict[str, Binary] = {
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
}


def _fill() -> None:
    for width, mask in ((32, M32), (64, M64)):
        for name, function in BITWISE.items():
            _add(f"s_{name}_b{width}", width, (width, width), _logic(function, mask))
        _shifts(width)
        _add(f"s_mov_b{width}", width, (width,), _quiet(lambda a: a))
        _add(f"s_not_b{width}", width, (width,), _nonzero(lambda a: ~a, mask))
        _add(f"s_brev_b{width}", width, (width,), _quiet(lambda a, n=width: _reverse(a, n)))
        _add(f"s_bcnt1_i32_b{width}", 32, (width,), _nonzero(int.bit_count, mask))
        first = _quiet(lambda a: ((a & -a).bit_length() - 1 if a else -1) & M32)
        _add(f"s_ff1_i32_b{width}", 32, (width,), first)
        last = _quiet(lambda a, n=width: (n - a.bit_length() if a else -1) & M32)
        _add(f"s_flbit_i32_b{width}", 32, (width,), last)
        _add(
            f"s_cselect_b{width}",
            width,
            (width, width),
            lambda a, b, scc: (a if scc else b, None),
        )
    two = (32, 32)

    def add(sign: int, carry: int) -> Function:
        def run(a: int, b: int, scc: int) -> tuple[int, int]:
            r = a + sign * (b + carry * scc)
            return r & M32, int(r < 0 or r > M32)

        return run

    _add("s_add_u32", 32, two, add(1, 0))
    _add("s_addc_u32", 32, two, add(1, 1))
    _add("s_sub_u32", 32, two, add(-1, 0))
    _add("s_subb_u32", 32, two, add(-1, 1))

    def add_signed(sign: int) -> Function:
        def run(a: int, b: int, scc: int) -> tuple[int, int]:
            r = signed32(a) + sign * signed32(b)
            return r & M32, overflows(r)

        return run

    _add("s_add_i32", 32, two, add_signed(1))
    _add("s_sub_i32", 32, two, add_signed(-1))
    _add("s_mul_i32", 32, two, _quiet(lambda a, b: a * b & M32))
    _add("s_mul_hi_u32", 32, two, _quiet(lambda a, b: a * b >> 32))
    _add("s_mul_hi_i32", 32, two, _quiet(lambda a, b: signed32(a) * signed32(b) >> 32 & M32))

    def pick(less: bool, signed: bool) -> Function:
        def run(a: int, b: int, scc: int) -> tuple[int, int]:
            x, y = (signed32(a), signed32(b)) if signed else (a, b)
            first = x < y if less else x > y
            return (a if first else b), int(first)

        return run

    for name, less in (("min", True), ("max", False)):
        _add(f"s_{name}_i32", 32, two, pick(less, True))
        _add(f"s_{name}_u32", 32, two, pick(less, False))
    for n in (1, 2, 3, 4):

        def shift_add(a: int, b: int, scc: int, n: int = n) -> tuple[int, int]:
            r = (a << n) + b
            return r & M32, int(r > M32)

        _add(f"s_lshl{n}_add_u32", 32, two, shift_add)
    _add("s_abs_i32", 32, (32,), _nonzero(lambda a: abs(signed32(a)), M32))
    _add("s_absdiff_i32", 32, two, _logic(lambda a, b: abs(signed32(a) - signed32(b)), M32))
    _add("s_sext_i32_i16", 32, (32,), _quiet(lambda a: signed16(a) & M32))
    _add("s_sext_i32_i8", 32, (32,), _quiet(lambda a: (signed16(a << 8) >> 8) & M32))
    _add("s_pack_ll_b32_b16", 32, two, _quiet(lambda a, b: (a & 0xFFFF) | ((b & 0xFFFF) << 16)))
    _add("s_pack_lh_b32_b16", 32, two, _quiet(lambda a, b: (a & 0xFFFF) | (b & 0xFFFF0000)))
    _add("s_pack_hh_b32_b16", 32, two, _quiet(lambda a, b: (a >> 16) | (b & 0xFFFF0000)))
    _add("s_bitset1_b32", 32, (32, 32), lambda a, b, scc: (b | 1 << (a & 31), None))
    _add("s_bitset0_b32", 32, (32, 32), lambda a, b, scc: (b & ~(1 << (a & 31)), None))


_fill()
