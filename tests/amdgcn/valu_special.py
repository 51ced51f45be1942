"""Vector instructions that read or write lane masks (comparisons, selects, carries, division) or
their own target (multiply-accumulate).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .division import DOUBLE, SINGLE, Format, div_fmas, div_scale
from .dpp import DPP_MODIFIERS, SDWA_MODIFIERS, decode_dpp, sdwa_writer
from .numerics import fma16, fma32, fma64
from .operands import Layout, Operand, Writer, parse_operand
from .parser import Instruction
from .valu import Run, compute, sdwa_readers
from .valu_tables import TYPES, Plain
from .wave import DTYPES, F16, F32, F64, I32, I64, U32, U64, VCC, Array, Wave

_ORDERED: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lg": lambda a, b: (a < b) | (a > b),
    "ne": np.not_equal,
    "neq": np.not_equal,
    "nlt": lambda a, b: ~(a < b),
    "nle": lambda a, b: ~(a <= b),
    "ngt": lambda a, b: ~(a > b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
}
_INTEGER = ("eq", "ne", "lt", "le", "gt", "ge")
_FLOAT = tuple(k for k in _ORDERED if k != "ne")
COMPARISONS = {
    f"v_cmp{x}_{op}_{t}": (op, TYPES[t], bool(x))
    for x in ("", "x")
    for t in ("f16", "f32", "f64", "i16", "u16", "i32", "u32", "i64", "u64")
    for op in (_FLOAT if t[0] == "f" else _INTEGER)
}


def _pair(ins: Instruction, operand: Operand) -> int:
    if operand.kind != "s" or operand.count != 2 or not operand.plain:
        raise ins.refuse(f"'{operand.text}' is no scalar pair")
    return operand.index


def decode_compare(ins: Instruction, layout: Layout) -> Run:
    op, kind, to_exec = COMPARISONS[ins.mnemonic]
    if ins.encoding == "dpp":
        raise ins.refuse("DPP comparison")
    ins.accept(*(("src0_sel", "src1_sel") if ins.encoding == "sdwa" else ()))
    operands = [parse_operand(o) for o in ins.operands]
    pair = VCC if len(operands) == 2 else _pair(ins, operands[0])
    sources = operands[-2:]
    if ins.encoding == "sdwa":
        read_a, read_b = sdwa_readers(ins, layout, sources, (kind, kind))
    else:
        read_a, read_b = (layout.reader(ins, s, kind) for s in sources)
    function = _ORDERED[op]
    narrow = kind not in (U64, I64, F64) and ins.encoding != "sdwa" and not to_exec
    if narrow and all(s.plain for s in sources):
        a, b = (layout.row(s, kind) for s in sources)

        def run_plain(w: Wave) -> None:
            r = w.rows[kind]
            w.set_lanes(pair, function(r[a], r[b]))

        return run_plain

    def run(w: Wave) -> None:
        w.set_lanes(pair, function(read_a(w), read_b(w)))
        if to_exec:
            w.set_exec(w.q[pair >> 1])

    return run


def classify(value: Array, wanted: Array, f: Format) -> Array:
    """v_cmp_class: is the value in one of the ten classes whose bit is set?"""
    exponent = f.exponent(value)
    negative = np.signbit(value)
    quiet = (value.view(f.unsigned) >> f.unsigned(f.mantissa - 1)) & f.unsigned(1)
    nan = np.isnan(value)
    conditions = [nan & (quiet == 0), nan, np.isinf(value), value == 0, exponent == 0]
    positive = np.select(conditions, [0, 1, 9, 6, 7], 8)
    flipped = np.where(negative & ~nan, 11 - positive, positive)
    return ((wanted >> flipped.astype(np.uint32)) & np.uint32(1)).astype(bool)


def decode_class(ins: Instruction, layout: Layout) -> Run:
    ins.accept()
    kind, f = (F32, SINGLE) if ins.mnemonic.endswith("f32") else (F64, DOUBLE)
    operands = [parse_operand(o) for o in ins.operands]
    pair = VCC if len(operands) == 2 else _pair(ins, operands[0])
    value, wanted = layout.reader(ins, operands[-2], kind), layout.reader(ins, operands[-1], U32)

    def run(w: Wave) -> None:
        lanes = classify(value(w), wanted(w), f)
        w.set_lanes(pair, lanes)

    return run


def decode_cndmask(ins: Instruction, layout: Layout) -> Run:
    operands = [parse_operand(o) for o in ins.operands]
    pair = VCC if len(operands) == 3 else _pair(ins, operands[3])
    sources = operands[1:3]
    signed = not all(s.plain for s in sources) and ins.encoding != "sdwa"
    plain = Plain(F32 if signed else U32, (F32 if signed else U32,) * 2, lambda a, b: a)
    if ins.encoding == "dpp":
        ins.accept(*DPP_MODIFIERS)
        dpp, (first, second) = decode_dpp(ins), (layout.reader(ins, s, U32) for s in sources)
        row = layout.row(operands[0], U32)

        def run_dpp(w: Wave) -> None:
            moved, write = dpp.read(w, first(w))
            np.copyto(w.rows[U32][row], np.where(w.lanes_of(pair), second(w), moved), where=write)

        return run_dpp
    if ins.encoding == "sdwa":
        ins.accept(*SDWA_MODIFIERS)
        first, second = sdwa_readers(ins, layout, sources, plain.sources)
        write: Writer = sdwa_writer(ins, layout.row(operands[0], U32))
    else:
        ins.accept()
        first, second = (layout.reader(ins, s, plain.result) for s in sources)
        write = layout.writer(ins, operands[0], plain.result, keep_high=False)

    def run(w: Wave) -> None:
        write(w, np.where(w.lanes_of(pair), second(w), first(w)))

    if ins.encoding == "sdwa" or signed:
        return run
    a, b, d = (layout.row(o, U32) for o in (*sources, operands[0]))
    if b == d:
        return run

    def run_plain(w: Wave) -> None:
        if w.where is not True:
            return run(w)
        r = w.rows[U32]
        target = r[d]
        if a != d:
            target[...] = r[a]
        np.putmask(target, w.lanes_of(pair), r[b])

    return run_plain


_FMAC = {
    "v_fmac_f32": (F32, fma32),
    "v_mac_f32": (F32, lambda a, b, c: a * b + c),
    "v_fmac_f64": (F64, fma64),
    "v_fmac_f16": (F16, fma16),
}


def decode_fmac(ins: Instruction, layout: Layout) -> Run:
    """The target is also the addend."""
    kind, function = _FMAC[ins.mnemonic]
    target, *sources = (parse_operand(o) for o in ins.operands)
    if len(sources) != 2:
        raise ins.refuse("operands")
    return compute(ins, layout, Plain(kind, (kind,) * 3, function), target, [*sources, target])


def decode_fmak(ins: Instruction, layout: Layout) -> Run:
    """v_fmamk (a * K + b) and v_fmaak (a * b + K): the text has the operands in order."""
    target, *sources = (parse_operand(o) for o in ins.operands)
    if len(sources) != 3 or ins.encoding in ("dpp", "sdwa"):
        raise ins.refuse("operands")
    return compute(ins, layout, Plain(F32, (F32,) * 3, fma32), target, sources)


# sign of the second operand, whether they are swapped, whether there is a carry in
CARRY = {
    "v_add_co_u32": (1, False, False),
    "v_sub_co_u32": (-1, False, False),
    "v_subrev_co_u32": (-1, True, False),
    "v_addc_co_u32": (1, False, True),
    "v_subb_co_u32": (-1, False, True),
    "v_subbrev_co_u32": (-1, True, True),
}


def decode_carry(ins: Instruction, layout: Layout) -> Run:
    """target, carry out, a, b [, carry in]"""
    sign, swap, carry_in = CARRY[ins.mnemonic]
    if ins.encoding in ("dpp", "sdwa"):
        raise ins.refuse("encoding")
    ins.accept()
    operands = [parse_operand(o) for o in ins.operands]
    if len(operands) != 4 + carry_in:
        raise ins.refuse("operands")
    out = _pair(ins, operands[1])
    a, b = (layout.reader(ins, o, U32) for o in operands[2:4])
    if swap:
        a, b = b, a
    carry = _pair(ins, operands[4]) if carry_in else -1
    write = layout.writer(ins, operands[0], U32, keep_high=False)

    def run(w: Wave) -> None:
        total = a(w).astype(np.int64) + sign * b(w).astype(np.int64)
        if carry_in:
            total = total + sign * w.lanes_of(carry)
        write(w, total.astype(np.uint32))
        w.set_lanes(out, (total >> 32) != 0)

    return run


def decode_mad64(ins: Instruction, layout: Layout) -> Run:
    """target, carry out, a, b, 64 bit addend"""
    ins.accept()
    signed = ins.mnemonic == "v_mad_i64_i32"
    narrow, wide = (I32, I64) if signed else (U32, U64)
    operands = [parse_operand(o) for o in ins.operands]
    out = _pair(ins, operands[1])
    a, b = (layout.reader(ins, o, narrow) for o in operands[2:4])
    c = layout.reader(ins, operands[4], wide)
    write = layout.writer(ins, operands[0], wide, keep_high=False)
    dtype: Any = DTYPES[wide]

    def run(w: Wave) -> None:
        product, addend = a(w).astype(dtype) * b(w).astype(dtype), c(w)
        total = product + addend
        wrapped = (product ^ total) & (addend ^ total)
        overflow = wrapped < 0 if signed else total < addend
        write(w, total)
        w.set_lanes(out, overflow)

    return run


def decode_div_scale(ins: Instruction, layout: Layout) -> Run:
    ins.accept()
    kind, f = (F32, SINGLE) if ins.mnemonic.endswith("f32") else (F64, DOUBLE)
    operands = [parse_operand(o) for o in ins.operands]
    pair = _pair(ins, operands[1])
    readers = [layout.reader(ins, o, kind) for o in operands[2:5]]
    write = layout.writer(ins, operands[0], kind, keep_high=False)

    def run(w: Wave) -> None:
        value, flag = div_scale(f, *[read(w) for read in readers])
        write(w, value)
        w.set_lanes(pair, flag)

    return run


def decode_div_fmas(ins: Instruction, layout: Layout) -> Run:
    ins.accept()
    kind, f = (F32, SINGLE) if ins.mnemonic.endswith("f32") else (F64, DOUBLE)
    target, *sources = (parse_operand(o) for o in ins.operands)
    readers = [layout.reader(ins, o, kind) for o in sources]
    write = layout.writer(ins, target, kind, keep_high=False)

    def run(w: Wave) -> None:
        a, b, c = (read(w) for read in readers)
        write(w, div_fmas(f, a, b, c, w.lanes_of(VCC)))

    return run


Decoder = Callable[[Instruction, Layout], Run]
DECODERS: dict[str, Decoder] = {
    **dict.fromkeys(COMPARISONS, decode_compare),
    "v_cmp_class_f32": decode_class,
    "v_cmp_class_f64": decode_class,
    "v_cndmask_b32": decode_cndmask,
    **dict.fromkeys(_FMAC, decode_fmac),
    **dict.fromkeys(("v_fmamk_f32", "v_fmaak_f32"), decode_fmak),
    **dict.fromkeys(CARRY, decode_carry),
    **dict.fromkeys(("v_mad_u64_u32", "v_mad_i64_i32"), decode_mad64),
    **dict.fromkeys(("v_div_scale_f32", "v_div_scale_f64"), decode_div_scale),
    **dict.fromkeys(("v_div_fmas_f32", "v_div_fmas_f64"), decode_div_fmas),
}
