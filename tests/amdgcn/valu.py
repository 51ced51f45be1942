"""Vector instructions of the plain table: sources in, one result out, lane by lane.

A decoder turns an instruction into a function of the wave. The frequent form (32 bit rows, no
modifiers) becomes one numpy call; everything else goes through readers and writers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .dpp import DPP_MODIFIERS, SDWA_MODIFIERS, decode_dpp, sdwa_reader, sdwa_writer
from .operands import Layout, Operand, Reader, parse_operand
from .parser import Instruction
from .valu_functions import same
from .valu_tables import PLAIN, Plain
from .wave import DTYPES, F16, F32, F64, I16, I64, U16, U32, U64, Array, Wave, put

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
        readers = sdwa_readers(ins, layout, sources, plain.sources)
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
    if isinstance(function, np.ufunc) and len(rows) == 2:
        (ka, kb), (a, b) = plain.sources, rows

        def run_ufunc(w: Wave) -> None:
            r = w.rows
            if w.where is True:
                function(r[ka][a], r[kb][b], out=r[kind][d])
            else:
                function(r[ka][a], r[kb][b], out=r[kind][d], where=w.where)

        return run_ufunc
    if len(rows) == 1:
        (ka,), (a,) = plain.sources, rows
        if function is same:

            def move(w: Wave) -> None:
                r = w.rows[U32]
                if w.where is True:
                    r[d][...] = r[a]
                else:
                    np.copyto(r[d], r[a], where=w.where)

            return move
        return lambda w: put(w.rows[kind][d], function(w.rows[ka][a]), w.where)
    if len(rows) == 2:
        (ka, kb), (a, b) = plain.sources, rows

        def run2(w: Wave) -> None:
            r = w.rows
            value = function(r[ka][a], r[kb][b])
            if w.where is True:
                r[kind][d][...] = value
            else:
                np.copyto(r[kind][d], value, where=w.where)

        return run2
    (ka, kb, kc), (a, b, c) = plain.sources, rows

    def run3(w: Wave) -> None:
        r = w.rows
        put(r[kind][d], function(r[ka][a], r[kb][b], r[kc][c]), w.where)

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

    if function is same:
        source, place = readers[0], layout.row(target, U32)

        def move(w: Wave) -> None:
            moved, write = dpp.read(w, source(w))
            put(w.rows[U32][place], moved, write)

        return move

    def run(w: Wave) -> None:
        moved, write = dpp.read(w, readers[0](w))
        value = function(moved, *[read(w) for read in readers[1:]])
        put(w.rows[kind][row], value, write)

    return run


def sdwa_readers(
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


def _times(function: Callable[..., Array], factor: Any) -> Callable[..., Array]:
    return lambda *x: function(*x) * factor


def _scaled(ins: Instruction, plain: Plain) -> Callable[..., Array]:
    """The function with clamp and output scale applied."""
    function = plain.compute
    name = ins.mnemonic
    for key in ("mul", "div"):
        if key in ins.modifiers:
            factor = _OUTPUT[f"{key}:{ins.modifiers[key]}"]
            if plain.result not in (F32, F64):
                raise ins.refuse("output scale of an integer")
            function = _times(function, DTYPES[plain.result](factor))
    if "clamp" not in ins.modifiers:
        return function
    if plain.result in (F16, F32, F64):
        dtype = DTYPES[plain.result]

        def clamp_float(*x: Array) -> Array:  # NaN becomes 0
            value: Array = np.fmin(np.fmax(function(*x), dtype(0)), dtype(1))
            return value

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


DECODERS: dict[str, Callable[[Instruction, Layout], Run]] = dict.fromkeys(PLAIN, decode_plain)
