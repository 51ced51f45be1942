"""global_*, flat_* and buffer_* instructions."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .addressing import CACHE, all_lanes, buffer_addresses, global_addresses, operands_of
from .atomics import OPERATIONS, compare_and_swap, update
from .faults import Fault
from .operands import Layout, parse_operand, scalar_reader
from .parser import Instruction
from .wave import LANES, M0, U16, U16H, U32, Array, Wave, put

Run = Callable[[Wave], None]
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
        ins.accept("offen", "offset", "lds", *CACHE)
        addresses = buffer_addresses(ins, layout, *operands)
    else:
        ins.accept("offset", *CACHE)
        addresses = global_addresses(ins, layout, *operands)
    fixed = ins.number("offset")

    def run(w: Wave) -> None:
        lanes, address = addresses(w, size)
        target = all_lanes(w)
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
    target, addresses = operands_of(ins, layout, space, True)
    words = max(1, size // 4)
    if target.kind not in "va" or target.count != words:
        raise ins.refuse("target")
    rows = [layout.row(target, U32, k) for k in range(words)]
    zero: Any = np.uint16(0) if half else np.uint32(0)
    dropped = space == "buffer"  # lanes beyond the buffer read 0

    def run(w: Wave) -> None:
        lanes, address = addresses(w, size)
        registers = w.rows[half or U32]
        full = len(lanes) == LANES
        if dropped and not full:
            for row in rows:
                put(registers[row], zero, w.where)
        if not len(lanes):
            return
        data = w.machine.memory.load(ins, w.index, lanes, address, size)
        if size < 4:
            data = _extend(data, size, signed, half)[:, None]
        for k, row in enumerate(rows):
            if full:
                registers[row][...] = data[:, k]
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
    out = np.empty((len(lanes), len(rows)), np.uint32)
    for k, row in enumerate(rows):
        out[:, k] = words[row] if len(lanes) == LANES else words[row][lanes]
    return out.view(np.uint8)


def decode_store(ins: Instruction, layout: Layout) -> Run:
    space, _, kind = ins.mnemonic.split("_", 2)
    size, shift = _STORES[kind]
    source, addresses = operands_of(ins, layout, space, space == "buffer")
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
        source, addresses = operands_of(ins, layout, space, True)
        target = source
    else:
        operands = list(ins.operands)
        target = parse_operand(operands.pop(0)) if returns else None
        if len(operands) < 2:
            raise ins.refuse("operands")
        source, addresses = operands_of(_with(ins, tuple(operands)), layout, space, False)
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
