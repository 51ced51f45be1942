"""Scalar instructions, on Python integers. Branches are in machine.py."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

from .operands import Layout, parse_operand, scalar_reader, scalar_writer
from .parser import Instruction
from .wave import M32, M64, Wave

Run = Callable[[Wave], None]
Binary = Callable[[int, int], int]


def signed32(x: int) -> int:
    return x - (1 << 32) if x & 0x80000000 else x


def signed64(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _signed16(x: int) -> int:
    x &= 0xFFFF
    return x - 0x10000 if x & 0x8000 else x


def _overflows(x: int) -> int:
    return int(not -(2**31) <= x < 2**31)


# name -> (result width, widths of the sources, function of them and SCC to (result, SCC or None));
# SCC None leaves it as it is.
Function = Callable[..., tuple[int, int | None]]
_TABLE: dict[str, tuple[int, tuple[int, ...], Function]] = {}


def _add(name: str, width: int, sources: tuple[int, ...], function: Function) -> None:
    assert name not in _TABLE
    _TABLE[name] = (width, sources, function)


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


_BITWISE: dict[str, Binary] = {
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
        for name, function in _BITWISE.items():
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
            return r & M32, _overflows(r)

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
    _add("s_sext_i32_i16", 32, (32,), _quiet(lambda a: _signed16(a) & M32))
    _add("s_sext_i32_i8", 32, (32,), _quiet(lambda a: (_signed16(a << 8) >> 8) & M32))
    _add("s_pack_ll_b32_b16", 32, two, _quiet(lambda a, b: (a & 0xFFFF) | ((b & 0xFFFF) << 16)))
    _add("s_pack_lh_b32_b16", 32, two, _quiet(lambda a, b: (a & 0xFFFF) | (b & 0xFFFF0000)))
    _add("s_pack_hh_b32_b16", 32, two, _quiet(lambda a, b: (a >> 16) | (b & 0xFFFF0000)))
    _add("s_bitset1_b32", 32, (32, 32), lambda a, b, scc: (b | 1 << (a & 31), None))
    _add("s_bitset0_b32", 32, (32, 32), lambda a, b, scc: (b & ~(1 << (a & 31)), None))


_fill()


def decode_table(ins: Instruction, layout: Layout) -> Run:
    ins.accept()
    width, widths, function = _TABLE[ins.mnemonic]
    target, *sources = (parse_operand(o) for o in ins.operands)
    if ins.mnemonic.startswith("s_bitset"):  # also reads its target
        sources = [*sources, target]
    if len(sources) != len(widths):
        raise ins.refuse("operands")
    readers = [scalar_reader(ins, s, n) for s, n in zip(sources, widths, strict=True)]
    write = scalar_writer(ins, target, width)
    if ins.mnemonic.startswith("s_mov_b"):
        (source,) = readers
        return lambda w: write(w, source(w))
    if len(readers) == 1:
        (read,) = readers

        def run1(w: Wave) -> None:
            result, scc = function(read(w), w.scc)
            write(w, result)
            if scc is not None:
                w.scc = scc

        return run1
    first, second = readers

    def run2(w: Wave) -> None:
        result, scc = function(first(w), second(w), w.scc)
        write(w, result)
        if scc is not None:
            w.scc = scc

    return run2


def decode_saveexec(ins: Instruction, layout: Layout) -> Run:
    """Save EXEC, combine it with the source; SCC: is any lane left?"""
    ins.accept()
    op = ins.mnemonic[2:].removesuffix("_saveexec_b64")
    write = scalar_writer(ins, parse_operand(ins.operands[0]), 64)
    read = scalar_reader(ins, parse_operand(ins.operands[1]), 64)
    function = _BITWISE[op]

    def run(w: Wave) -> None:
        old, source = w.exec, read(w)
        write(w, old)
        w.set_exec(function(source, old) & M64)
        w.scc = int(w.exec != 0)

    return run


_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": operator.eq,
    "lg": operator.ne,
    "gt": operator.gt,
    "ge": operator.ge,
    "lt": operator.lt,
    "le": operator.le,
}
COMPARE = {
    f"s_cmp_{op}_{t}{n}"
    for op in _COMPARE
    for t, n in (("i", 32), ("u", 32), ("u", 64))
    if n == 32 or op in ("eq", "lg")
}
COMPARE_K = {f"s_cmpk_{op}_{t}32" for op in _COMPARE for t in "iu"}


def decode_compare(ins: Instruction, layout: Layout) -> Run:
    ins.accept()
    match = re.fullmatch(r"s_cmpk?_(\w\w)_([iu])(\d\d)", ins.mnemonic)
    assert match
    function, width = _COMPARE[match[1]], int(match[3])
    a, b = (parse_operand(o) for o in ins.operands)
    read_a = scalar_reader(ins, a, width)
    if ins.mnemonic in COMPARE_K:  # 16 bits, extended as the comparison is signed
        if b.kind != "int":
            raise ins.refuse("operand")
        number = _signed16(b.number) if match[2] == "i" else b.number & 0xFFFF
        if match[2] == "i":
            return lambda w: setattr(w, "scc", int(function(signed32(read_a(w)), number)))
        return lambda w: setattr(w, "scc", int(function(read_a(w), number)))
    read_b = scalar_reader(ins, b, width)

    def run_unsigned(w: Wave) -> None:
        w.scc = int(function(read_a(w), read_b(w)))

    def run_signed(w: Wave) -> None:
        w.scc = int(function(signed32(read_a(w)), signed32(read_b(w))))

    return run_signed if match[2] == "i" else run_unsigned


def decode_bitcmp(ins: Instruction, layout: Layout) -> Run:
    ins.accept()
    wanted, width = int(ins.mnemonic[8]), int(ins.mnemonic[-2:])
    value = scalar_reader(ins, parse_operand(ins.operands[0]), width)
    bit = scalar_reader(ins, parse_operand(ins.operands[1]), 32)

    def run(w: Wave) -> None:
        w.scc = int((value(w) >> (bit(w) & (width - 1)) & 1) == wanted)

    return run


def decode_immediate(ins: Instruction, layout: Layout) -> Run:
    """s_movk, s_addk, s_mulk: a signed 16 bit constant."""
    ins.accept()
    target, constant = (parse_operand(o) for o in ins.operands)
    if constant.kind != "int":
        raise ins.refuse("operand")
    number, name = _signed16(constant.number), ins.mnemonic
    read, write = scalar_reader(ins, target, 32), scalar_writer(ins, target, 32)

    def run(w: Wave) -> None:
        if name == "s_movk_i32":
            write(w, number & M32)
        elif name == "s_mulk_i32":
            write(w, signed32(read(w)) * number & M32)
        else:
            total = signed32(read(w)) + number
            write(w, total & M32)
            w.scc = _overflows(total)

    return run


def decode_cmov(ins: Instruction, layout: Layout) -> Run:
    ins.accept()
    width = int(ins.mnemonic[-2:])
    write = scalar_writer(ins, parse_operand(ins.operands[0]), width)
    read = scalar_reader(ins, parse_operand(ins.operands[1]), width)

    def run(w: Wave) -> None:
        if w.scc:
            write(w, read(w))

    return run


_IGNORED = (
    "s_nop",
    "s_waitcnt",  # loads complete at once here
    "s_waitcnt_depctr",
    "s_setprio",
    "s_sleep",
    "s_sched_barrier",
    "s_dcache_wb",
    "s_dcache_inv",
    "s_icache_inv",
    "buffer_inv",
    "buffer_wbl2",
    "buffer_wbinvl1",
    "buffer_wbinvl1_vol",
)


def decode_ignored(ins: Instruction, layout: Layout) -> Run:
    return lambda w: None


def decode_setreg(ins: Instruction, layout: Layout) -> Run:
    """Of the MODE register: float32 denormals on (as always here), and overflow clamping."""
    ins.accept()
    register, value = ins.operands
    field = re.fullmatch(r"hwreg\(HW_REG_MODE, ?(\d+), ?(\d+)\)", register)
    number = int(value, 0)
    if field and (field[1], field[2]) == ("23", "1") and number in (0, 1):
        return lambda w: setattr(w, "fp16_overflow_clamps", bool(number))
    if field and (field[1], field[2], number) == ("4", "2", 3):
        return lambda w: None
    raise ins.refuse("this register field")


Decoder = Callable[[Instruction, Layout], Run]
DECODERS: dict[str, Decoder] = {
    **dict.fromkeys(_TABLE, decode_table),
    **dict.fromkeys((f"s_{op}_saveexec_b64" for op in _BITWISE), decode_saveexec),
    **dict.fromkeys((*COMPARE, *COMPARE_K), decode_compare),
    **dict.fromkeys((f"s_bitcmp{k}_b{n}" for k in "01" for n in (32, 64)), decode_bitcmp),
    **dict.fromkeys(("s_movk_i32", "s_addk_i32", "s_mulk_i32"), decode_immediate),
    **dict.fromkeys(("s_cmov_b32", "s_cmov_b64"), decode_cmov),
    **dict.fromkeys(_IGNORED, decode_ignored),
    "s_setreg_imm32_b32": decode_setreg,
}
