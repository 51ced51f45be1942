"""Which lanes of a global_*, flat_* or buffer_* instruction access memory, and where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .faults import Fault
from .operands import Layout, Operand, parse_operand, scalar_reader
from .parser import Instruction
from .wave import LANE, LANES, U32, Array, Wave, all_of

# What Triton puts in the offset of a lane that is masked off, to fail the buffer's range check.
MASKED_OFFSET = 1 << 31
_MASKED_SPAN = 1 << 24  # constants are added to it
CACHE = ("glc", "slc", "sc0", "sc1", "nt")  # cache policy: no effect here, but glc/sc0 of atomics
# A function of the wave: which lanes access memory, and their addresses.
Addresses = Callable[[Wave, int], tuple[Array, Array]]


def all_lanes(w: Wave) -> Array:
    return LANE if w.where is True else np.nonzero(w.where)[0]


def global_addresses(
    ins: Instruction, layout: Layout, vector: Operand, scalar: Operand
) -> Addresses:
    offset = np.int64(ins.number("offset"))
    if scalar.kind == "off":
        if vector.kind != "v" or vector.count != 2:
            raise ins.refuse("address")
        row = layout.row(vector, U32)
        layout.row(vector, U32, 1)

        def wide(w: Wave, size: int) -> tuple[Array, Array]:
            lanes = all_lanes(w)
            address = w.wide(row, 10)
            return lanes, (address if len(lanes) == LANES else address[lanes]) + offset

        return wide
    base = scalar_reader(ins, scalar, 64)
    if vector.kind != "v" or vector.count != 1:
        raise ins.refuse("address")
    row = layout.row(vector, U32)

    def based(w: Wave, size: int) -> tuple[Array, Array]:
        lanes = all_lanes(w)
        # the vector offset is unsigned; the sum wraps at 64 bits
        start = np.uint64((base(w) + int(offset)) & ((1 << 64) - 1))
        address = (w.rows[U32][row].astype(np.uint64) + start).view(np.int64)
        return lanes, address if len(lanes) == LANES else address[lanes]

    return based


def buffer_addresses(
    ins: Instruction, layout: Layout, vector: Operand, resource: Operand, scalar: Operand
) -> Addresses:
    if resource.kind != "s" or resource.count != 4 or resource.index % 4:
        raise ins.refuse("resource")
    first, fixed = resource.index, ins.number("offset")
    soffset = scalar_reader(ins, scalar, 32)
    offen = "offen" in ins.modifiers
    if offen != (vector.kind == "v") or (offen and vector.count != 1):
        raise ins.refuse("address")
    row = layout.row(vector, U32) if offen else 0

    def addresses(w: Wave, size: int) -> tuple[Array, Array]:
        low, high, records = w.s[first], w.s[first + 1], w.s[first + 2]
        if high >> 16:
            raise Fault(f"stride or swizzle in the resource of {ins}: not implemented")
        start = fixed + soffset(w)
        if offen:
            offset = w.rows[U32][row].astype(np.int64) + start
        else:
            offset = np.full(LANES, start, np.int64)
        lanes = all_lanes(w)
        if len(lanes) != LANES:
            offset = offset[lanes]
        inside = offset <= records - size
        if not all_of(inside):
            outside = offset[~inside] - MASKED_OFFSET
            if outside.min() < 0 or outside.max() >= _MASKED_SPAN:
                # Hardware would drop the access; no offset that the kernel meant gets here.
                lane = int(lanes[~inside][0])
                raise Fault(
                    f"buffer offset out of range and not a masked lane's: wave {w.index}, "
                    f"lane {lane}, offset {int(offset[~inside][0]):#x}, {ins}"
                )
            lanes, offset = lanes[inside], offset[inside]
        return lanes, offset + (low | high << 32)

    return addresses


def operands_of(ins: Instruction, layout: Layout, space: str, data_first: bool) -> Any:
    """(data operand or None, function that gives the addresses)"""
    operands = [parse_operand(o) for o in ins.operands]
    if space == "buffer":
        ins.accept("offen", "offset", *CACHE)
        if len(operands) != 4:
            raise ins.refuse("operands")
        data, vector, resource, scalar = operands
        return data, buffer_addresses(ins, layout, vector, resource, scalar)
    ins.accept("offset", *CACHE)
    off = Operand("off", "off")
    data, vector = operands[:2] if data_first else operands[1::-1]
    rest = operands[2:]
    if (space == "flat" and rest) or len(rest) > 1:
        raise ins.refuse("operands")
    return data, global_addresses(ins, layout, vector, rest[0] if rest else off)
