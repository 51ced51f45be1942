"""Scalar instructions, on Python integers. Branches are in machine.py."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

from .operands import Layout, parse_operand, scalar_reader, scalar_writer
from .parser import Instruction
from .salu_tables import BITWISE, TABLE, overflows, signed16, signed32
from .wave import M32, M64, Wave

Run = Callable[[Wave], None]


def decode_table(ins: Instruction, layout: Layout) -> Run:
    ins.accept()
    width, widths, function = TABLE[ins.mnemonic]
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
    function = BITWISE[op]

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
        number = signed16(b.number) if match[2] == "i" else b.number & 0xFFFF
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
    number, name = signed16(constant.number), ins.mnemonic
    read, write = scalar_reader(ins, target, 32), scalar_writer(ins, target, 32)

    def run(w: Wave) -> None:
        if name == "s_movk_i32":
            write(w, number & M32)
        elif name == "s_mulk_i32":
            write(w, signed32(read(w)) * number & M32)
        else:
            total = signed32(read(w)) + number
            write(w, total & M32)
            w.scc = overflows(total)

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


IGNORED = (
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
    **dict.fromkeys(TABLE, decode_table),
    **dict.fromkeys((f"s_{op}_saveexec_b64" for op in BITWISE), decode_saveexec),
    **dict.fromkeys((*COMPARE, *COMPARE_K), decode_compare),
    **dict.fromkeys((f"s_bitcmp{k}_b{n}" for k in "01" for n in (32, 64)), decode_bitcmp),
    **dict.fromkeys(("s_movk_i32", "s_addk_i32", "s_mulk_i32"), decode_immediate),
    **dict.fromkeys(("s_cmov_b32", "s_cmov_b64"), decode_cmov),
    **dict.fromkeys(IGNORED, decode_ignored),
    "s_setreg_imm32_b32": decode_setreg,
}
