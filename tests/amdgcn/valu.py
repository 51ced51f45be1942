"""Vector instructions that work lane by lane: the plain table, comparisons, carries, division.

A decoder turns an instruction into a function of the wave. The frequent form (32 bit rows, no
modifiers) becomes one numpy call; everything else goes through readers and writers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .division import DOUBLE, SINGLE, Format, div_fmas, div_scale
from .dpp import DPP_MODIFIERS, SDWA_MODIFIERS, decode_dpp, sdwa_reader, sdwa_writer
from .numerics import fma16, fma32, fma64
from .operands import Layout, Operand, Reader, Writer, parse_operand
from .parser import Instruction
from .valu_tables import PLAIN, TYPES, Plain
from .wave import DTYPES, F16, F32, F64, I16, I32, I64, LANES, U16, U32, U64, VCC, Array, Wave

Run = Callable[[Wave], None]
_OUTPUT = {"mul:2": 2.0, "mul:4": 4.0, "div:2": 0.5}


def decode_plain(ins: Instruction, layout: Layout) -> Run:
    plain = PLAIN[ins.mnemonic]
    operands = [parse_operand(o) for o in ins.operands]
    if len(operands) != 1 + len(plain.sources):
        raise ins.refuse(f"{len(operands)} operands")
    return compute(ins, layout, plain, operands[0], operands[1:])


def compute(
    ins: Instruction, layout: Layout, plain: Plain, target: Operand, sources: list[Operand]
) -> Run:
    """Any function of source operands to one result, with DPP, SDWA, clamp and output scale."""
    extra = {"dpp": DPP_MODIFIERS, "sdwa": SDWA_MODIFIERS}.get(ins.encoding, ())
    ins.accept("clamp", "mul", "div", *extra)
    if ins.encoding == "dpp":
        return _with_dpp(ins, layout, plain, target, sources)
    narrow = not any(k in (U64, I64, F64) for k in (plain.result, *plain.sources))
    if not ins.modifiers and narrow and all(s.plain for s in sources):
        return _fast(ins, layout, plain, target, sources)
    if ins.encoding == "sdwa":
        readers = _sdwa_readers(ins, layout, sources, plain.sources)
        write = sdwa_writer(ins, layout.row(target, U32))
    else:
        readers = [layout.reader(ins, s, k) for s, k in zip(sources, plain.sources, strict=True)]
        write = layout.writer(ins, target, plain.result, keep_high=plain.keep_high)
    function = _scaled(ins, plain)

    def run(w: Wave) -> None:
        write(w, function(*[read(w) for read in readers]))

    return run


def _fast(
    ins: Instruction, layout: Layout, plain: Plain, target: Operand, sources: list[Operand]
) -> Run:
    function, kind = plain.compute, plain.result
    layout.writer(ins, target, kind, keep_high=plain.keep_high)  # checks the operand
    d = layout.row(target, kind)
    rows = [layout.row(s, k) for s, k in zip(sources, plain.sources, strict=True)]
    for source in sources:
        if source.count != 1:
            raise ins.refuse(f"'{source.text}' is not 32 bits wide")
    if kind in (U16, I16, F16):
        write = layout.writer(ins, target, kind, keep_high=plain.keep_high)
        places = list(zip(plain.sources, rows, strict=True))
        return lambda w: write(w, function(*[w.rows[k][i] for k, i in places]))
    if isinstance(function, np.ufunc):
        if len(rows) == 2:
            (ka, kb), (a, b) = plain.sources, rows

            def run_ufunc(w: Wave) -> None:
                r = w.rows
                if w.where is True:
                    function(r[ka][a], r[kb][b], out=r[kind][d])
                else:
                    function(r[ka][a], r[kb][b], r[kind][d], where=w.where)

            return run_ufunc
        (ka,), (a,) = plain.sources, rows
        return lambda w: function(w.rows[ka][a], w.rows[kind][d], where=w.where)
    copy = np.copyto
    if len(rows) == 1:
        (ka,), (a,) = plain.sources, rows
        return lambda w: copy(w.rows[kind][d], function(w.rows[ka][a]), where=w.where)
    if len(rows) == 2:
        (ka, kb), (a, b) = plain.sources, rows

        def run2(w: Wave) -> None:
            r = w.rows
            copy(r[kind][d], function(r[ka][a], r[kb][b]), where=w.where)

        return run2
    (ka, kb, kc), (a, b, c) = plain.sources, rows

    def run3(w: Wave) -> None:
        r = w.rows
        copy(r[kind][d], function(r[ka][a], r[kb][b], r[kc][c]), where=w.where)

    return run3


def _with_dpp(
    ins: Instruction, layout: Layout, plain: Plain, target: Operand, sources: list[Operand]
) -> Run:
    dpp = decode_dpp(ins)
    kinds = (plain.result, *plain.sources)
    if any(DTYPES[k]().itemsize != 4 for k in kinds):
        raise ins.refuse("DPP of other than 32 bit elements")
    if not sources[0].vector:
        raise ins.refuse("DPP of no vector register")
    readers = [layout.reader(ins, s, k) for s, k in zip(sources, plain.sources, strict=True)]
    layout.writer(ins, target, plain.result, keep_high=False)  # checks the operand
    row, kind, function = layout.row(target, U32), plain.result, _scaled(ins, plain)

    def run(w: Wave) -> None:
        moved, write = dpp.read(w, readers[0](w))
        value = function(moved, *[read(w) for read in readers[1:]])
        np.copyto(w.rows[kind][row], value, where=write)

    return run


def _sdwa_readers(
    ins: Instruction, layout: Layout, sources: list[Operand], kinds: tuple[int, ...]
) -> list[Reader]:
    if len(sources) > 2:
        raise ins.refuse("SDWA of more than two sources")
    readers = []
    for i, (source, kind) in enumerate(zip(sources, kinds, strict=True)):
        if source.count != 1 or kind in (U64, I64, F64):
            raise ins.refuse("SDWA of a wide operand")
        row = layout.row(source, kind)

        def words(w: Wave, row: int = row) -> Array:
            return w.rows[U32][row]

        selection = ins.modifiers.get(f"src{i}_sel", "DWORD")
        readers.append(sdwa_reader(ins, words, source, kind, selection))
    return readers


def _scaled(ins: Instruction, plain: Plain) -> Callable[..., Array]:
    """The function with clamp and output scale applied."""
    function = plain.compute
    name = ins.mnemonic
    for key in ("mul", "div"):
        if key in ins.modifiers:
            factor = _OUTPUT[f"{key}:{ins.modifiers[key]}"]
            if plain.result not in (F32, F64):
                raise ins.refuse("output scale of an integer")
            unscaled, number = function, DTYPES[plain.result](factor)
            function = lambda *x: unscaled(*x) * number  # noqa: E731
    if "clamp" not in ins.modifiers:
        return function
    if plain.result in (F16, F32, F64):
        dtype = DTYPES[plain.result]

        def clamp_float(*x: Array) -> Array:  # NaN becomes 0
            return np.fmin(np.fmax(function(*x), dtype(0)), dtype(1))

        return clamp_float
    kind = DTYPES[plain.result]
    if name in ("v_add_u32", "v_add_u16"):

        def add(a: Array, b: Array) -> Array:
            s = a + b
            return np.where(s < a, kind(~kind(0)), s)

        return add
    if name in ("v_sub_u32", "v_sub_u16"):
        return lambda a, b: np.where(a < b, kind(0), a - b)
    if name == "v_subrev_u32":
        return lambda a, b: np.where(b < a, kind(0), b - a)
    raise ins.refuse("clamp")


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
        read_a, read_b = _sdwa_readers(ins, layout, sources, (kind, kind))
    else:
        read_a, read_b = (layout.reader(ins, s, kind) for s in sources)
    function = _ORDERED[op]

    def run(w: Wave) -> None:
        lanes = function(read_a(w), read_b(w))
        if lanes.shape[0] != LANES:
            lanes = np.broadcast_to(lanes, (LANES,))
        w.set_lanes(pair, lanes)
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
        w.set_lanes(pair, np.broadcast_to(lanes, (LANES,)))

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
        first, second = _sdwa_readers(ins, layout, sources, plain.sources)
        write: Writer = sdwa_writer(ins, layout.row(operands[0], U32))
    else:
        ins.accept()
        first, second = (layout.reader(ins, s, plain.result) for s in sources)
        write = layout.writer(ins, operands[0], plain.result, keep_high=False)

    def run(w: Wave) -> None:
        write(w, np.where(w.lanes_of(pair), second(w), first(w)))

    return run


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
        w.set_lanes(out, np.broadcast_to((total >> 32) != 0, (LANES,)))

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
        if signed:
            overflow = ((product ^ total) & (addend ^ total)) < 0
        else:
            overflow = total < addend
        write(w, total)
        w.set_lanes(out, np.broadcast_to(overflow, (LANES,)))

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
    **dict.fromkeys(PLAIN, decode_plain),
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
