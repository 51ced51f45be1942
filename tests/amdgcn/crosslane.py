"""Vector instructions that move data between lanes or between lanes and scalars."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .operands import Layout, parse_operand, scalar_reader, scalar_writer
from .parser import Instruction
from .wave import LANE, U32, Array, Wave

Run = Callable[[Wave], None]
# For lane l, a mask of the lanes below it, as the two words that v_mbcnt takes one by one.
_BELOW = (np.uint64(1) << LANE.astype(np.uint64)) - np.uint64(1)
_BELOW_LOW = (_BELOW & np.uint64(0xFFFFFFFF)).astype(np.uint32)
_BELOW_HIGH = (_BELOW >> np.uint64(32)).astype(np.uint32)


def _vector_row(ins: Instruction, layout: Layout, text: str) -> int:
    operand = parse_operand(text)
    if not operand.vector or not operand.plain or operand.count != 1:
        raise ins.refuse(f"'{text}' is no vector register")
    return layout.row(operand, U32)


def decode_readfirstlane(ins: Instruction, layout: Layout) -> Run:
    ins.accept()
    write = scalar_writer(ins, parse_operand(ins.operands[0]), 32)
    row = _vector_row(ins, layout, ins.operands[1])

    def run(w: Wave) -> None:
        mask = w.exec
        lane = (mask & -mask).bit_length() - 1 if mask else 0
        write(w, w.rows[U32][row].item(lane))

    return run


def decode_readlane(ins: Instruction, layout: Layout) -> Run:
    """Ignores EXEC."""
    ins.accept()
    write = scalar_writer(ins, parse_operand(ins.operands[0]), 32)
    row = _vector_row(ins, layout, ins.operands[1])
    lane = scalar_reader(ins, parse_operand(ins.operands[2]), 32)
    return lambda w: write(w, w.rows[U32][row].item(lane(w) & 63))


def decode_writelane(ins: Instruction, layout: Layout) -> Run:
    """Ignores EXEC."""
    ins.accept()
    row = _vector_row(ins, layout, ins.operands[0])
    value = scalar_reader(ins, parse_operand(ins.operands[1]), 32)
    lane = scalar_reader(ins, parse_operand(ins.operands[2]), 32)

    def run(w: Wave) -> None:
        w.rows[U32][row][lane(w) & 63] = value(w)

    return run


def decode_mbcnt(ins: Instruction, layout: Layout) -> Run:
    """Count the mask's bits of lower lanes, and add."""
    ins.accept()
    target, mask, addend = (parse_operand(o) for o in ins.operands)
    below = _BELOW_LOW if "_lo_" in ins.mnemonic else _BELOW_HIGH
    read_mask, read_addend = layout.reader(ins, mask, U32), layout.reader(ins, addend, U32)
    write = layout.writer(ins, target, U32, keep_high=False)

    def run(w: Wave) -> None:
        count: Array = np.bitwise_count(read_mask(w) & below).astype(np.uint32)
        write(w, count + read_addend(w))

    return run


def decode_permlane_swap(ins: Instruction, layout: Layout) -> Run:
    """Swap the odd groups of lanes of the first register with the even ones of the second."""
    ins.accept()
    size = 32 if "permlane32" in ins.mnemonic else 16
    first, second = (_vector_row(ins, layout, o) for o in ins.operands)
    odd = np.nonzero(LANE // size % 2)[0]
    even = odd - size

    def run(w: Wave) -> None:
        if w.where is not True:
            raise ins.refuse("with lanes off")
        a, b = w.rows[U32][first], w.rows[U32][second]
        a[odd], b[even] = b[even], a[odd]

    return run


Decoder = Callable[[Instruction, Layout], Run]
DECODERS: dict[str, Decoder] = {
    "v_readfirstlane_b32": decode_readfirstlane,
    "v_readlane_b32": decode_readlane,
    "v_writelane_b32": decode_writelane,
    "v_mbcnt_lo_u32_b32": decode_mbcnt,
    "v_mbcnt_hi_u32_b32": decode_mbcnt,
    "v_permlane16_swap_b32": decode_permlane_swap,
    "v_permlane32_swap_b32": decode_permlane_swap,
}
