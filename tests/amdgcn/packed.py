"""Packed arithmetic (two floats of 32 bits, two halves of 16), mixed precision, dot2, bitop3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .numerics import bf16_value, fma16, fma32, fmax, fmin
from .operands import Layout, Operand, Reader, parse_operand
from .parser import Instruction
from .wave import (
    DTYPES,
    F16,
    F16H,
    F32,
    I16,
    I16H,
    LANES,
    POISON,
    U16,
    U16H,
    U32,
    Array,
    Wave,
    put,
)

Run = Callable[[Wave], None]
u16, i16 = np.uint16, np.int16

PACKED32: dict[str, Callable[..., Array]] = {
    "v_pk_add_f32": np.add,
    "v_pk_mul_f32": np.multiply,
    "v_pk_fma_f32": fma32,
}


def _word(ins: Instruction, layout: Layout, operand: Operand, high: int, negate: int) -> Reader:
    """One word of a packed 32 bit source."""
    if operand.constant:
        if high:  # what the high word of a constant is, no source that we know says
            raise ins.refuse("high word of a constant")
        row = layout.row(operand, F32)
    else:
        if operand.count != 2:
            raise ins.refuse(f"'{operand.text}' is no pair")
        row = layout.row(operand, F32, high)
    if not operand.plain:
        raise ins.refuse("sign modifier")
    if negate:
        return lambda w: np.negative(w.rows[F32][row])
    return lambda w: w.rows[F32][row]


def decode_packed32(ins: Instruction, layout: Layout) -> Run:
    ins.accept("op_sel", "op_sel_hi", "neg_lo", "neg_hi")
    target, *sources = (parse_operand(o) for o in ins.operands)
    n = len(sources)
    low_sel, high_sel = ins.bits("op_sel", n, 0), ins.bits("op_sel_hi", n, 1)
    low_neg, high_neg = ins.bits("neg_lo", n, 0), ins.bits("neg_hi", n, 0)
    function = PACKED32[ins.mnemonic]
    low = [_word(ins, layout, s, h, g) for s, h, g in zip(sources, low_sel, low_neg, strict=True)]
    high = [
        _word(ins, layout, s, h, g) for s, h, g in zip(sources, high_sel, high_neg, strict=True)
    ]
    if target.kind not in "va" or target.count != 2:
        raise ins.refuse("target")
    d, e = layout.row(target, F32), layout.row(target, F32, 1)

    if n == 2:
        (low_a, low_b), (high_a, high_b) = low, high

        def run2(w: Wave) -> None:
            first = function(low_a(w), low_b(w))
            second = function(high_a(w), high_b(w))  # before the first is written
            rows = w.rows[F32]
            put(rows[d], first, w.where)
            put(rows[e], second, w.where)

        return run2

    def run(w: Wave) -> None:
        first = function(*[read(w) for read in low])
        second = function(*[read(w) for read in high])
        rows = w.rows[F32]
        put(rows[d], first, w.where)
        put(rows[e], second, w.where)

    return run


def decode_packed_move(ins: Instruction, layout: Layout) -> Run:
    """The low word from the first source by op_sel[0], the high from the second by op_sel[1]."""
    ins.accept("op_sel", "op_sel_hi")
    target, a, b = (parse_operand(o) for o in ins.operands)
    select = ins.bits("op_sel", 2, 0)
    first, second = (_word(ins, layout, s, h, 0) for s, h in zip((a, b), select, strict=True))
    d, e = layout.row(target, F32), layout.row(target, F32, 1)

    def run(w: Wave) -> None:
        low, high = first(w).copy(), second(w).copy()
        rows = w.rows[F32]
        put(rows[d], low, w.where)
        put(rows[e], high, w.where)

    return run


PACKED16: dict[str, tuple[int, Callable[..., Array]]] = {
    "v_pk_add_f16": (F16, np.add),
    "v_pk_mul_f16": (F16, np.multiply),
    "v_pk_max_f16": (F16, fmax),
    "v_pk_min_f16": (F16, fmin),
    "v_pk_fma_f16": (F16, fma16),
    "v_pk_add_u16": (U16, np.add),
    "v_pk_sub_u16": (U16, np.subtract),
    "v_pk_add_i16": (I16, np.add),
    "v_pk_sub_i16": (I16, np.subtract),
    "v_pk_mul_lo_u16": (U16, np.multiply),
    "v_pk_max_u16": (U16, np.maximum),
    "v_pk_min_u16": (U16, np.minimum),
    "v_pk_max_i16": (I16, np.maximum),
    "v_pk_min_i16": (I16, np.minimum),
    "v_pk_lshlrev_b16": (U16, lambda a, b: b << (a & u16(15))),
    "v_pk_lshrrev_b16": (U16, lambda a, b: b >> (a & u16(15))),
    "v_pk_ashrrev_i16": (I16, lambda a, b: b >> (a & i16(15))),
    "v_pk_mad_u16": (U16, lambda a, b, c: a * b + c),
    "v_pk_mad_i16": (I16, lambda a, b, c: a * b + c),
}
_SATURATING: dict[str, Callable[..., Array]] = {
    "v_pk_add_u16": lambda a, b: np.where(a + b < a, u16(0xFFFF), a + b),
    "v_pk_sub_u16": lambda a, b: np.where(a < b, u16(0), a - b),
}
_HIGH = {F16: F16H, U16: U16H, I16: I16H}


def _half(
    ins: Instruction, layout: Layout, operand: Operand, kind: int, high: int, negate: int
) -> Reader:
    inline = operand.kind == "float" or (operand.kind == "int" and -16 <= operand.number <= 64)
    if inline and high:  # literals have 32 bits, inline constants no high half that we know of
        raise ins.refuse("high half of an inline constant")
    if not operand.plain or (negate and kind != F16):
        raise ins.refuse("sign modifier")
    if operand.count != 1:
        raise ins.refuse("wide source")
    row = layout.row(operand, kind if inline else U32)
    view = _HIGH[kind] if high else kind
    if negate:
        return lambda w: np.negative(w.rows[view][row])
    return lambda w: w.rows[view][row]


def decode_packed16(ins: Instruction, layout: Layout) -> Run:
    ins.accept("op_sel", "op_sel_hi", "neg_lo", "neg_hi", "clamp")
    kind, function = PACKED16[ins.mnemonic]
    if "clamp" in ins.modifiers:
        if ins.mnemonic not in _SATURATING:
            raise ins.refuse("clamp")
        function = _SATURATING[ins.mnemonic]
    target, *sources = (parse_operand(o) for o in ins.operands)
    n = len(sources)
    parts = []
    for select, default, sign in (("op_sel", 0, "neg_lo"), ("op_sel_hi", 1, "neg_hi")):
        chosen, negated = ins.bits(select, n, default), ins.bits(sign, n, 0)
        parts.append(
            [
                _half(ins, layout, s, kind, h, g)
                for s, h, g in zip(sources, chosen, negated, strict=True)
            ]
        )
    d = layout.row(target, U32)
    layout.writer(ins, target, U32, keep_high=False)  # checks the operand

    def run(w: Wave) -> None:
        low, high = (function(*[read(w) for read in part]) for part in parts)
        np.copyto(w.rows[kind][d], low, where=w.where)
        np.copyto(w.rows[_HIGH[kind]][d], high, where=w.where)

    return run


def decode_mix(ins: Instruction, layout: Layout) -> Run:
    """fma of sources that are each a float32 or one half of a register (op_sel_hi)."""
    ins.accept("op_sel", "op_sel_hi")
    target, *sources = (parse_operand(o) for o in ins.operands)
    select, is_half = ins.bits("op_sel", 3, 0), ins.bits("op_sel_hi", 3, 0)
    readers = []
    for operand, high, half in zip(sources, select, is_half, strict=True):
        if half and operand.constant and (high or operand.kind != "float"):
            raise ins.refuse("this half of a constant")
        kind = (F16H if high else F16) if half else F32
        if not half and high:
            raise ins.refuse("op_sel of a whole register")
        readers.append(_mixed(layout, operand, kind))
    d = layout.row(target, U32)
    name = ins.mnemonic

    def run(w: Wave) -> None:
        value = fma32(*[read(w) for read in readers])
        if name == "v_fma_mix_f32":
            np.copyto(w.rows[F32][d], value, where=w.where)
        else:  # rounds twice, as the separate instructions would
            kind = F16H if name == "v_fma_mixhi_f16" else F16
            np.copyto(w.rows[kind][d], value.astype(np.float16), where=w.where)

    return run


def _mixed(layout: Layout, operand: Operand, kind: int) -> Reader:
    row = layout.row(operand, F32 if kind == F32 else F16)

    def read(w: Wave) -> Array:
        value = w.rows[kind][row].astype(np.float32)
        if operand.absolute:
            value = np.abs(value)
        return np.negative(value) if operand.negate else value

    return read


def decode_dot2(ins: Instruction, layout: Layout) -> Run:
    """low * low + high * high + addend, here exact but for one rounding at the end.

    The order in which hardware rounds is not documented.
    """
    ins.accept()
    bf16 = "bf16" in ins.mnemonic
    target, a, b, *rest = (parse_operand(o) for o in ins.operands)
    addend = rest[0] if rest else target  # v_dot2c adds to its target
    for operand in (a, b):
        if operand.constant or not operand.plain or operand.count != 1:
            raise ins.refuse("source")
    rows = [layout.row(o, U32) for o in (a, b)]
    read_addend = layout.reader(ins, addend, F32)
    write = layout.writer(ins, target, F32, keep_high=False)

    def values(w: Wave, row: int, high: bool) -> Array:
        if bf16:
            return bf16_value(w.rows[U16H if high else U16][row]).astype(np.float64)
        return w.rows[F16H if high else F16][row].astype(np.float64)

    def run(w: Wave) -> None:
        total = read_addend(w).astype(np.float64)
        for high in (False, True):
            total = total + values(w, rows[0], high) * values(w, rows[1], high)
        write(w, total.astype(np.float32))

    return run


def decode_bitop3(ins: Instruction, layout: Layout) -> Run:
    """Any function of three bits, given as its truth table (the first source is bit 2)."""
    ins.accept("bitop3")
    table = ins.number("bitop3")
    kind = U32 if ins.mnemonic.endswith("b32") else U16
    target, *sources = (parse_operand(o) for o in ins.operands)
    readers = [layout.reader(ins, s, kind) for s in sources]
    write = layout.writer(ins, target, kind, keep_high=True)
    d = layout.row(target, U32)
    dtype: Any = DTYPES[kind]

    def run(w: Wave) -> None:
        bits = [read(w) for read in readers]
        result = np.zeros(LANES, dtype)
        for k in range(8):
            if table >> k & 1:
                a, b, c = (x if k & m else ~x for x, m in zip(bits, (4, 2, 1), strict=True))
                result |= a & b & c
        write(w, result)
        if kind == U16:  # whether the high half is kept or cleared is not documented: neither
            np.copyto(w.rows[U16H][d], u16(POISON >> 16), where=w.where)

    return run


Decoder = Callable[[Instruction, Layout], Run]
DECODERS: dict[str, Decoder] = {
    **dict.fromkeys(PACKED32, decode_packed32),
    "v_pk_mov_b32": decode_packed_move,
    **dict.fromkeys(PACKED16, decode_packed16),
    **dict.fromkeys(("v_fma_mix_f32", "v_fma_mixlo_f16", "v_fma_mixhi_f16"), decode_mix),
    **dict.fromkeys(
        ("v_dot2_f32_f16", "v_dot2_f32_bf16", "v_dot2c_f32_f16", "v_dot2c_f32_bf16"), decode_dot2
    ),
    **dict.fromkeys(("v_bitop3_b32", "v_bitop3_b16"), decode_bitop3),
}
