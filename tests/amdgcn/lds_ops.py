"""ds_* instructions that read, write or update LDS; the others are in exchange.py."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from .atomics import OPERATIONS, update
from .memory_ops import register_bytes
from .operands import Layout, Operand, parse_operand
from .parser import Instruction
from .wave import LANE, LANES, U16, U16H, U32, Array, Wave

Run = Callable[[Wave], None]


def vector_row(ins: Instruction, layout: Layout, operand: Operand, words: int = 1) -> int:
    """The first row of a vector operand of so many words."""
    if not operand.vector or not operand.plain or operand.count != words:
        raise ins.refuse(f"'{operand.text}' is no vector operand of {words} words")
    layout.row(operand, U32, words - 1)
    return layout.row(operand, U32)


def lanes_and(w: Wave, row: int, offset: int) -> tuple[Array, Array]:
    """The lanes that are on and their LDS addresses."""
    address = w.rows[U32][row].astype(np.int64)
    if w.where is True:
        return LANE, address + offset
    lanes = np.nonzero(w.where)[0]
    return lanes, address[lanes] + offset


def _put(w: Wave, row: int, lanes: Array, value: Array, kind: int = U32) -> None:
    if len(lanes) == LANES:
        w.rows[kind][row][...] = value
    else:
        w.rows[kind][row][lanes] = value


_WIDE = {
    f"ds_{op}{two}{st}_b{n}"
    for op in ("read", "write")
    for two, st in (("", ""), ("2", ""), ("2", "st64"))
    for n in (32, 64, 96, 128)
    if not two or n in (32, 64)
}


def decode_wide(ins: Instruction, layout: Layout) -> Run:
    """ds_read/write of words: one address, or two at multiples of an element or of 64 of them."""
    match = re.fullmatch(r"ds_(read|write)(2?)(st64)?_b(\d+)", ins.mnemonic)
    assert match
    size = int(match[4]) // 8
    words = size // 4
    if match[2]:
        ins.accept("offset0", "offset1")
        step = size * (64 if match[3] else 1)
        offsets = [ins.number("offset0") * step, ins.number("offset1") * step]
    else:
        ins.accept("offset")
        offsets = [ins.number("offset")]
    operands = [parse_operand(o) for o in ins.operands]
    if match[1] == "read":
        target, address = operands
        first = vector_row(ins, layout, target, words * len(offsets))
        at = vector_row(ins, layout, address)

        def read(w: Wave) -> None:
            lanes, base = lanes_and(w, at, 0)
            if not len(lanes):
                return
            lds = w.machine.lds
            loaded = [lds.load(ins, w, lanes, base + o, size) for o in offsets]
            for j, data in enumerate(loaded):
                for k in range(words):
                    _put(w, first + j * words + k, lanes, data[:, k])

        return read
    address, *sources = operands
    if len(sources) != len(offsets):
        raise ins.refuse("operands")
    at = vector_row(ins, layout, address)
    firsts = [vector_row(ins, layout, s, words) for s in sources]
    rows = [list(range(f, f + words)) for f in firsts]

    def write(w: Wave) -> None:
        lanes, base = lanes_and(w, at, 0)
        if len(lanes):
            for places, offset in zip(rows, offsets, strict=True):
                data = register_bytes(w, places, lanes)
                w.machine.lds.store(ins, w, lanes, base + offset, data)

    return write


# bytes, signed, half of the target that is written (None: all of it)
_NARROW: dict[str, tuple[int, bool, int | None]] = {
    "ds_read_u8": (1, False, None),
    "ds_read_i8": (1, True, None),
    "ds_read_u16": (2, False, None),
    "ds_read_i16": (2, True, None),
    "ds_read_u8_d16": (1, False, U16),
    "ds_read_u8_d16_hi": (1, False, U16H),
    "ds_read_i8_d16": (1, True, U16),
    "ds_read_i8_d16_hi": (1, True, U16H),
    "ds_read_u16_d16": (2, False, U16),
    "ds_read_u16_d16_hi": (2, False, U16H),
}
# bytes, and the first byte of the register
_NARROW_WRITE = {
    "ds_write_b8": (1, 0),
    "ds_write_b8_d16_hi": (1, 2),
    "ds_write_b16": (2, 0),
    "ds_write_b16_d16_hi": (2, 2),
}


def decode_narrow(ins: Instruction, layout: Layout) -> Run:
    ins.accept("offset")
    size, signed, half = _NARROW[ins.mnemonic]
    target, address = (parse_operand(o) for o in ins.operands)
    row, at, offset = (
        vector_row(ins, layout, target),
        vector_row(ins, layout, address),
        ins.number("offset"),
    )
    dtype = {(1, False): "u1", (1, True): "i1", (2, False): "u2", (2, True): "i2"}[size, signed]

    def run(w: Wave) -> None:
        lanes, base = lanes_and(w, at, offset)
        if not len(lanes):
            return
        data = w.machine.lds.load(ins, w, lanes, base, size)
        value = np.ascontiguousarray(data).view(dtype)[:, 0].astype(np.int32).view(np.uint32)
        if half is None:
            _put(w, row, lanes, value)
        else:
            _put(w, row, lanes, value.astype(np.uint16), half)

    return run


def decode_narrow_write(ins: Instruction, layout: Layout) -> Run:
    ins.accept("offset")
    size, first = _NARROW_WRITE[ins.mnemonic]
    address, source = (parse_operand(o) for o in ins.operands)
    at, row, offset = (
        vector_row(ins, layout, address),
        vector_row(ins, layout, source),
        ins.number("offset"),
    )

    def run(w: Wave) -> None:
        lanes, base = lanes_and(w, at, offset)
        if len(lanes):
            data = register_bytes(w, [row], lanes)[:, first : first + size]
            w.machine.lds.store(ins, w, lanes, base, data)

    return run


# mnemonic -> (operation of atomics.py, returns the old value)
_ATOMIC: dict[str, tuple[str, bool]] = {}
for _name, _type, _operation in (
    ("add", "u32", "add"),
    ("sub", "u32", "sub"),
    ("min", "i32", "smin"),
    ("max", "i32", "smax"),
    ("min", "u32", "umin"),
    ("max", "u32", "umax"),
    ("and", "b32", "and"),
    ("or", "b32", "or"),
    ("xor", "b32", "xor"),
    ("add", "f32", "add_f32"),
    ("min", "f32", "min_f32"),
    ("max", "f32", "max_f32"),
    ("add", "u64", "add_x2"),
    ("add", "f64", "add_f64"),
):
    _ATOMIC[f"ds_{_name}_{_type}"] = (_operation, False)
    _ATOMIC[f"ds_{_name}_rtn_{_type}"] = (_operation, True)
_ATOMIC["ds_wrxchg_rtn_b32"] = ("swap", True)


def decode_atomic(ins: Instruction, layout: Layout) -> Run:
    ins.accept("offset")
    operation, returns = _ATOMIC[ins.mnemonic]
    dtype, function = OPERATIONS[operation]
    size = np.dtype(dtype).itemsize
    words, offset = size // 4, ins.number("offset")
    operands = [parse_operand(o) for o in ins.operands]
    target = vector_row(ins, layout, operands.pop(0), words) if returns else 0
    address, source = operands
    at, first = vector_row(ins, layout, address), vector_row(ins, layout, source, words)
    rows = list(range(first, first + words))

    def run(w: Wave) -> None:
        lanes, base = lanes_and(w, at, offset)
        if not len(lanes):
            return
        lds = w.machine.lds
        lds.cells(ins, w, lanes, base, size)
        cells = lds.data[: lds.size // size * size].view(dtype)
        operand = register_bytes(w, rows, lanes).view(dtype)[:, 0]
        old = update(cells, base // size, operand, function)
        if returns:
            halves = old.view(np.uint32).reshape(len(lanes), words)
            for k in range(words):
                _put(w, target + k, lanes, halves[:, k])

    return run


Decoder = Callable[[Instruction, Layout], Run]
DECODERS: dict[str, Decoder] = {
    **dict.fromkeys(_WIDE, decode_wide),
    **dict.fromkeys(_NARROW, decode_narrow),
    **dict.fromkeys(_NARROW_WRITE, decode_narrow_write),
    **dict.fromkeys(_ATOMIC, decode_atomic),
}
