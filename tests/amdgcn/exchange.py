"""ds_* instructions that only use LDS's crossbar between lanes, and its transposing reads."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from .lds_ops import lanes_and, vector_row
from .operands import Layout, parse_operand
from .parser import Instruction
from .wave import LANE, LANES, U32, Array, Wave, put

Run = Callable[[Wave], None]


def decode_bpermute(ins: Instruction, layout: Layout) -> Run:
    """Each lane reads the lane that its address (in bytes) names; lanes that are off give 0."""
    ins.accept("offset")
    target, address, source = (parse_operand(o) for o in ins.operands)
    d, at, row = (vector_row(ins, layout, o) for o in (target, address, source))
    offset = np.uint32(ins.number("offset"))

    def run(w: Wave) -> None:
        words = w.rows[U32]
        lane = ((words[at] + offset) >> np.uint32(2)) & np.uint32(63)
        value = words[row][lane]
        if w.where is not True:
            value = np.where(w.where[lane], value, np.uint32(0))
        put(words[d], value, w.where)

    return run


def decode_permute(ins: Instruction, layout: Layout) -> Run:
    """Each lane sends to the lane that its address names; of several, the highest lane wins."""
    ins.accept("offset")
    target, address, source = (parse_operand(o) for o in ins.operands)
    d, at, row = (vector_row(ins, layout, o) for o in (target, address, source))
    offset = np.uint32(ins.number("offset"))

    def run(w: Wave) -> None:
        words = w.rows[U32]
        lane = ((words[at] + offset) >> np.uint32(2)) & np.uint32(63)
        on = w.active()
        value = np.zeros(LANES, np.uint32)
        value[lane[on]] = words[row][on]
        put(words[d], value, w.where)

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
    d, row = vector_row(ins, layout, target), vector_row(ins, layout, source)

    def run(w: Wave) -> None:
        words = w.rows[U32]
        value = words[row][source_lane]
        if w.where is not True:
            value = np.where(w.where[source_lane], value, np.uint32(0))
        put(words[d], value, w.where)

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
    d, at, offset = (
        vector_row(ins, layout, target, 2),
        vector_row(ins, layout, address),
        ins.number("offset"),
    )

    def run(w: Wave) -> None:
        lanes, base = lanes_and(w, at, offset)
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
    "ds_bpermute_b32": decode_bpermute,
    "ds_permute_b32": decode_permute,
    "ds_swizzle_b32": decode_swizzle,
    "ds_read_b64_tr_b16": decode_transpose,
    "ds_read_b64_tr_b8": decode_transpose,
}
