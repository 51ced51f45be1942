"""global_*, flat_* and buffer_* instructions."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .atomics import OPERATIONS, compare_and_swap, update
from .faults import Fault
from .operands import Layout, Operand, parse_operand, scalar_reader
from .parser import Instruction
from .wave import LANE, LANES, M0, U16, U16H, U32, Array, Wave

Run = Callable[[Wave], None]
# What Triton puts in the offset of a lane that is masked off, to fail the buffer's range check.
MASKED_OFFSET = 1 << 31
_MASKED_SPAN = 1 << 24  # constants are added to it
_CACHE = ("glc", "slc", "sc0", "sc1", "nt")  # cache policy: no effect here, but glc/sc0 of atomics

# bytes, signed, half written (None: the whole register)
_LOADS: dict[str, tuple[int, bool, int | None]] = {
    "ubyte": (1, False, None),
    "sbyte": (1, True, None),
    "ushort": (2, False, None),
    "sshort": (2, True, None),
    "dword": (4, False, None),
    "dwordx2": (8, False, None),
    "dwordx3": (12, False, None),
    "dwordx4": (16, False, None),
    "short_d16": (2, False, U16),
    "short_d16_hi": (2, False, U16H),
    "ubyte_d16": (1, False, U16),
    "ubyte_d16_hi": (1, False, U16H),
    "sbyte_d16": (1, True, U16),
    "sbyte_d16_hi": (1, True, U16H),
}
# bytes, and by how many bits the register is shifted first
_STORES: dict[str, tuple[int, int]] = {
    "byte": (1, 0),
    "short": (2, 0),
    "byte_d16_hi": (1, 16),
    "short_d16_hi": (2, 16),
    "dword": (4, 0),
    "dwordx2": (8, 0),
    "dwordx3": (12, 0),
    "dwordx4": (16, 0),
}
_TO_LDS = {"dword": 4, "dwordx3": 12, "dwordx4": 16}
# A function of the wave: which lanes access memory, and their addresses.
Addresses = Callable[[Wave, int], tuple[Array, Array]]


def _all_lanes(w: Wave) -> Array:
    return LANE if w.where is True else np.nonzero(w.where)[0]


def _global_addresses(
    ins: Instruction, layout: Layout, vector: Operand, scalar: Operand
) -> Addresses:
    offset = np.int64(ins.number("offset"))
    if scalar.kind == "off":
        if vector.kind != "v" or vector.count != 2:
            raise ins.refuse("address")
        row = layout.row(vector, U32)
        layout.row(vector, U32, 1)

        def wide(w: Wave, size: int) -> tuple[Array, Array]:
            lanes = _all_lanes(w)
            address = w.wide(row, 10)
            return lanes, (address if len(lanes) == LANES else address[lanes]) + offset

        return wide
    base = scalar_reader(ins, scalar, 64)
    if vector.kind != "v" or vector.count != 1:
        raise ins.refuse("address")
    row = layout.row(vector, U32)

    def based(w: Wave, size: int) -> tuple[Array, Array]:
        lanes = _all_lanes(w)
        # the vector offset is unsigned; the sum wraps at 64 bits
        start = np.uint64((base(w) + int(offset)) & ((1 << 64) - 1))
        address = (w.rows[U32][row].astype(np.uint64) + start).view(np.int64)
        return lanes, address if len(lanes) == LANES else address[lanes]

    return based


def _buffer_addresses(
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
        offset = np.full(LANES, fixed + soffset(w), np.int64)
        if offen:
            offset += w.rows[U32][row]
        lanes = _all_lanes(w)
        if len(lanes) != LANES:
            offset = offset[lanes]
        inside = offset + size <= records
        if not inside.all():
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


def _operands(ins: Instruction, layout: Layout, space: str, data_first: bool) -> Any:
    """(data operand or None, function that gives the addresses)"""
    operands = [parse_operand(o) for o in ins.operands]
    if space == "buffer":
        ins.accept("offen", "offset", *_CACHE)
        if len(operands) != 4:
            raise ins.refuse("operands")
        data, vector, resource, scalar = operands
        return data, _buffer_addresses(ins, layout, vector, resource, scalar)
    ins.accept("offset", *_CACHE)
    off = Operand("off", "off")
    data, vector = operands[:2] if data_first else operands[1::-1]
    rest = operands[2:]
    if (space == "flat" and rest) or len(rest) > 1:
        raise ins.refuse("operands")
    return data, _global_addresses(ins, layout, vector, rest[0] if rest else off)


def decode_load_to_lds(ins: Instruction, layout: Layout) -> Run:
    """Loads that bypass the registers: lane l's data goes to LDS at M0 + offset + l * size.

    Lanes beyond the buffer's range write 0, lanes that are off write nothing.
    """
    space, _, kind = ins.mnemonic.replace("load_lds", "load").split("_", 2)
    size = _TO_LDS[kind]
    if size > 4 and ins.arch != "gfx950":
        raise ins.refuse(f"not on {ins.arch}")
    operands = [parse_operand(o) for o in ins.operands]
    if space == "buffer":
        ins.accept("offen", "offset", "lds", *_CACHE)
        addresses = _buffer_addresses(ins, layout, *operands)
    else:
        ins.accept("offset", *_CACHE)
        addresses = _global_addresses(ins, layout, *operands)
    fixed = ins.number("offset")

    def run(w: Wave) -> None:
        lanes, address = addresses(w, size)
        target = _all_lanes(w)
        data = np.zeros((LANES, size // 4), np.uint32)
        if len(lanes):
            data[lanes] = w.machine.memory.load(ins, w.index, lanes, address, size)
        if len(target):
            places = target * size + (w.s[M0] + fixed)
            w.machine.lds.store(ins, w, target, places, data[target].view(np.uint8))

    return run


def decode_load(ins: Instruction, layout: Layout) -> Run:
    if "lds" in ins.modifiers:
        return decode_load_to_lds(ins, layout)
    space, _, kind = ins.mnemonic.split("_", 2)
    size, signed, half = _LOADS[kind]
    target, addresses = _operands(ins, layout, space, True)
    words = max(1, size // 4)
    if target.kind not in "va" or target.count != words:
        raise ins.refuse("target")
    rows = [layout.row(target, U32, k) for k in range(words)]
    dropped = space == "buffer"  # lanes beyond the buffer read 0

    def run(w: Wave) -> None:
        lanes, address = addresses(w, size)
        registers = w.rows[half or U32]
        full = len(lanes) == LANES
        if dropped and not full:
            for row in rows:
                np.copyto(registers[row], 0, where=w.where)
        if not len(lanes):
            return
        data = w.machine.memory.load(ins, w.index, lanes, address, size)
        if size < 4:
            data = _extend(data, size, signed, half)[:, None]
        for k, row in enumerate(rows):
            if full:
                registers[row][:] = data[:, k]
            else:
                registers[row][lanes] = data[:, k]

    return run


def _extend(data: Array, size: int, signed: bool, half: int | None) -> Array:
    unsigned = np.ascontiguousarray(data).view(np.uint8 if size == 1 else np.uint16)[:, 0]
    value = unsigned.view(np.int8 if size == 1 else np.int16) if signed else unsigned
    return value.astype(np.int32).view(np.uint32) if half is None else value.astype(np.uint16)


def register_bytes(w: Wave, rows: list[int], lanes: Array) -> Array:
    """The registers' contents, one row of bytes a lane."""
    words = w.rows[U32]
    columns = [words[row][lanes] for row in rows]
    return np.stack(columns, 1).view(np.uint8)


def decode_store(ins: Instruction, layout: Layout) -> Run:
    space, _, kind = ins.mnemonic.split("_", 2)
    size, shift = _STORES[kind]
    source, addresses = _operands(ins, layout, space, space == "buffer")
    words = max(1, size // 4)
    if source.kind not in "va" or source.count != words:
        raise ins.refuse("source")
    rows = [layout.row(source, U32, k) for k in range(words)]
    first = shift // 8

    def run(w: Wave) -> None:
        lanes, address = addresses(w, size)
        if len(lanes):
            data = register_bytes(w, rows, lanes)[:, first : first + size]
            w.machine.memory.store(ins, w.index, lanes, address, data)

    return run


def decode_atomic(ins: Instruction, layout: Layout) -> Run:
    space, _, kind = ins.mnemonic.split("_", 2)
    returns = "glc" in ins.modifiers or "sc0" in ins.modifiers
    swap = kind.startswith("cmpswap")
    wide = kind.endswith(("_x2", "f64"))
    size = 8 if wide else 4
    if space == "buffer":
        source, addresses = _operands(ins, layout, space, True)
        target = source
    else:
        operands = list(ins.operands)
        target = parse_operand(operands.pop(0)) if returns else None
        if len(operands) < 2:
            raise ins.refuse("operands")
        source, addresses = _operands(_with(ins, tuple(operands)), layout, space, False)
    words = size // 4
    if source.kind not in "va" or source.count != words * (2 if swap else 1):
        raise ins.refuse("source")
    rows = [layout.row(source, U32, k) for k in range(source.count)]
    results = [layout.row(target, U32, k) for k in range(words)] if returns else []
    dtype, function = (np.uint64 if wide else np.uint32, None) if swap else OPERATIONS[kind]

    def run(w: Wave) -> None:
        lanes, address = addresses(w, size)
        if space == "buffer" and returns and len(lanes) != LANES:
            raise Fault(f"returning buffer atomic with lanes off: not implemented, {ins}")
        if not len(lanes):
            return
        operand = register_bytes(w, rows, lanes).view(dtype)
        old = np.empty(len(lanes), dtype)
        for region, where in w.machine.memory.cells(ins, w.index, lanes, address, size):
            if region.base % size:
                raise Fault(f"misaligned tensor for {ins}")
            cells = region.data[: region.size // size * size].view(dtype)
            places = (address[where] - region.base) // size
            if function is None:
                old[where] = compare_and_swap(cells, places, operand[where, 0], operand[where, 1])
            else:
                old[where] = update(cells, places, operand[where, 0], function)
        halves = old.view(np.uint32).reshape(len(lanes), words)
        for k, row in enumerate(results):
            w.rows[U32][row][lanes] = halves[:, k]

    return run


def _with(ins: Instruction, operands: tuple[str, ...]) -> Instruction:
    return Instruction(
        ins.line, ins.text, ins.mnemonic, ins.encoding, operands, ins.modifiers, ins.arch
    )


def decode_scalar_load(ins: Instruction, layout: Layout) -> Run:
    """Scalar loads ignore EXEC."""
    ins.accept("glc")
    target, base, offset = (parse_operand(o) for o in ins.operands)
    count = int(re.sub(r"\D", "", ins.mnemonic[len("s_load_dword") :]) or 1)
    if target.kind != "s" or target.count != count or target.index % min(count, 4):
        raise ins.refuse("target")
    read_base, read_offset = scalar_reader(ins, base, 64), scalar_reader(ins, offset, 32)
    first = target.index
    lanes = np.zeros(1, np.int64)

    def run(w: Wave) -> None:
        # An immediate is signed (21 bits); a register is not.
        number = offset.number if offset.constant else read_offset(w)
        address = np.array([(read_base(w) + number) & ~3], np.uint64).view(np.int64)
        data = w.machine.memory.load(ins, w.index, lanes, address, 4 * count)
        for k in range(count):
            w.s[first + k] = int(data[0, k])

    return run


Decoder = Callable[[Instruction, Layout], Run]
_SPACES = ("global", "flat", "buffer")
DECODERS: dict[str, Decoder] = {
    **{f"{s}_load_{k}": decode_load for s in _SPACES for k in _LOADS},
    **{f"global_load_lds_{k}": decode_load_to_lds for k in _TO_LDS},
    **{f"{s}_store_{k}": decode_store for s in _SPACES for k in _STORES},
    **{
        f"{s}_atomic_{k}": decode_atomic
        for s in _SPACES
        for k in (*OPERATIONS, "cmpswap", "cmpswap_x2")
        if k not in ("min_f32", "max_f32")  # LDS only on GFX9
    },
    **{f"s_load_dword{n}": decode_scalar_load for n in ("", "x2", "x4", "x8", "x16")},
}
