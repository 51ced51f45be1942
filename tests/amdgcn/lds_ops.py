"""ds_* instructions: LDS, and the exchanges between lanes that use its crossbar."""

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


def _row(ins: Instruction, layout: Layout, operand: Operand, words: int = 1) -> int:
    """The first row of a vector operand of so many words."""
    if not operand.vector or not operand.plain or operand.count != words:
        raise ins.refuse(f"'{operand.text}' is no vector operand of {words} words")
    layout.row(operand, U32, words - 1)
    return layout.row(operand, U32)


def _lanes_and(w: Wave, row: int, offset: int) -> tuple[Array, Array]:
    """The lanes that are on and their LDS addresses."""
    address = w.rows[U32][row].astype(np.int64)
    if w.where is True:
        return LANE, address + offset
    lanes = np.nonzero(w.where)[0]
    return lanes, address[lanes] + offset


def _put(w: Wave, row: int, lanes: Array, value: Array, kind: int = U32) -> None:
    if len(lanes) == LANES:
        w.rows[kind][row][:] = value
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
        first = _row(ins, layout, target, words * len(offsets))
        at = _row(ins, layout, address)

        def read(w: Wave) -> None:
            lanes, base = _lanes_and(w, at, 0)
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
    at = _row(ins, layout, address)
    firsts = [_row(ins, layout, s, words) for s in sources]
    rows = [list(range(f, f + words)) for f in firsts]

    def write(w: Wave) -> None:
        lanes, base = _lanes_and(w, at, 0)
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
    row, at, offset = _row(ins, layout, target), _row(ins, layout, address), ins.number("offset")
    dtype = {(1, False): "u1", (1, True): "i1", (2, False): "u2", (2, True): "i2"}[size, signed]

    def run(w: Wave) -> None:
        lanes, base = _lanes_and(w, at, offset)
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
    at, row, offset = _row(ins, layout, address), _row(ins, layout, source), ins.number("offset")

    def run(w: Wave) -> None:
        lanes, base = _lanes_and(w, at, offset)
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
    target = _row(ins, layout, operands.pop(0), words) if returns else 0
    address, source = operands
    at, first = _row(ins, layout, address), _row(ins, layout, source, words)
    rows = list(range(first, first + words))

    def run(w: Wave) -> None:
        lanes, base = _lanes_and(w, at, offset)
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


def decode_bpermute(ins: Instruction, layout: Layout) -> Run:
    """Each lane reads the lane that its address (in bytes) names; lanes that are off give 0."""
    ins.accept("offset")
    target, address, source = (parse_operand(o) for o in ins.operands)
    d, at, row = (_row(ins, layout, o) for o in (target, address, source))
    offset = np.uint32(ins.number("offset"))

    def run(w: Wave) -> None:
        words = w.rows[U32]
        lane = ((words[at] + offset) >> np.uint32(2)) & np.uint32(63)
        value = words[row][lane]
        if w.where is not True:
            value = np.where(w.where[lane], value, np.uint32(0))
        np.copyto(words[d], value, where=w.where)

    return run


def decode_permute(ins: Instruction, layout: Layout) -> Run:
    """Each lane sends to the lane that its address names; of several, the highest lane wins."""
    ins.accept("offset")
    target, address, source = (parse_operand(o) for o in ins.operands)
    d, at, row = (_row(ins, layout, o) for o in (target, address, source))
    offset = np.uint32(ins.number("offset"))

    def run(w: Wave) -> None:
        words = w.rows[U32]
        lane = ((words[at] + offset) >> np.uint32(2)) & np.uint32(63)
        on = w.active()
        value = np.zeros(LANES, np.uint32)
        value[lane[on]] = words[row][on]
        np.copyto(words[d], value, where=w.where)

    return run


def _swizzle(ins: Instruction) -> Array:
    """The lane that each lane reads."""
    text = ins.modifiers.get("offset", "0")
    match = re.fullmatch(r"swizzle\((\w+),(.*)\)", text)
    if not match:
        offset = int(text, 0)
    else:
        numbers = [x.strip() for x in match[2].split(",")]
        if match[1] == "QUAD_PERM":
            offset = 0x8000 | sum(int(x) << (2 * i) for i, x in enumerate(numbers))
        elif match[1] == "SWAP":
            offset = (int(numbers[0]) << 10) | 31
        elif match[1] == "REVERSE":
            offset = ((int(numbers[0]) - 1) << 10) | 31
        elif match[1] == "BROADCAST":
            offset = (31 & ~(int(numbers[0]) - 1)) | (int(numbers[1]) << 5)
        elif match[1] == "BITMASK_PERM":
            # five characters, high bit first: 0, 1, p(ass) or i(nvert)
            letters = numbers[0].strip('"')
            bit = [16, 8, 4, 2, 1]
            keep = sum(b for b, c in zip(bit, letters, strict=True) if c in "pi")
            force = sum(b for b, c in zip(bit, letters, strict=True) if c == "1")
            flip = sum(b for b, c in zip(bit, letters, strict=True) if c == "i")
            offset = keep | force << 5 | flip << 10
        else:
            raise ins.refuse("swizzle")
    if offset & 0x8000:
        if offset & 0x7F00:
            raise ins.refuse("swizzle mode")
        order = np.array([(offset >> (2 * k)) & 3 for k in range(4)])
        value: Array = (LANE & ~3) + order[LANE & 3]
        return value
    keep, force, flip = offset & 31, (offset >> 5) & 31, (offset >> 10) & 31
    return (LANE & 32) + ((((LANE & 31) & keep) | force) ^ flip)


def decode_swizzle(ins: Instruction, layout: Layout) -> Run:
    ins.accept("offset")
    source_lane = _swizzle(ins)
    target, source = (parse_operand(o) for o in ins.operands)
    d, row = _row(ins, layout, target), _row(ins, layout, source)

    def run(w: Wave) -> None:
        words = w.rows[U32]
        value = words[row][source_lane]
        if w.where is not True:
            value = np.where(w.where[source_lane], value, np.uint32(0))
        np.copyto(words[d], value, where=w.where)

    return run


def decode_transpose(ins: Instruction, layout: Layout) -> Run:
    """ds_read_b64_tr_b16 and _b8 (gfx950): eight bytes a lane, transposed in groups of 16 lanes.

    What the 16 lanes of a group read, one after the other, is a matrix of 16 columns; lane j of the
    group gets column j: four halves, or eight bytes.
    """
    ins.accept("offset")
    if ins.arch != "gfx950":
        raise ins.refuse(f"not on {ins.arch}")
    element = np.uint16 if ins.mnemonic.endswith("b16") else np.uint8
    target, address = (parse_operand(o) for o in ins.operands)
    d, at, offset = _row(ins, layout, target, 2), _row(ins, layout, address), ins.number("offset")

    def run(w: Wave) -> None:
        lanes, base = _lanes_and(w, at, offset)
        if len(lanes) != LANES:
            raise ins.refuse("with lanes off")
        data = w.machine.lds.load(ins, w, lanes, base, 8)
        matrix = np.ascontiguousarray(data).view(element).reshape(4, -1, 16)  # group, row, column
        columns = np.ascontiguousarray(matrix.transpose(0, 2, 1)).reshape(LANES, -1)
        words = columns.view(np.uint32)
        w.rows[U32][d][:] = words[:, 0]
        w.rows[U32][d + 1][:] = words[:, 1]

    return run


Decoder = Callable[[Instruction, Layout], Run]
DECODERS: dict[str, Decoder] = {
    **dict.fromkeys(_WIDE, decode_wide),
    **dict.fromkeys(_NARROW, decode_narrow),
    **dict.fromkeys(_NARROW_WRITE, decode_narrow_write),
    **dict.fromkeys(_ATOMIC, decode_atomic),
    "ds_bpermute_b32": decode_bpermute,
    "ds_permute_b32": decode_permute,
    "ds_swizzle_b32": decode_swizzle,
    "ds_read_b64_tr_b16": decode_transpose,
    "ds_read_b64_tr_b8": decode_transpose,
}
