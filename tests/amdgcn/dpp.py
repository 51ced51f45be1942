"""Source and destination selection: DPP (other lanes of a row) and SDWA (bytes and words)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .operands import Operand, Reader, Writer
from .parser import Instruction
from .wave import DTYPES, F16, F32, I16, LANE, LANES, U16, U32, Array, Wave, put

_ROW, _IN_ROW = LANE & ~15, LANE & 15
_CONTROLS = (
    "quad_perm",
    "row_shl",
    "row_shr",
    "row_ror",
    "row_bcast",
    "row_newbcast",
    "row_mirror",
    "row_half_mirror",
    "wave_shl",
    "wave_shr",
    "wave_rol",
    "wave_ror",
)
DPP_MODIFIERS = (*_CONTROLS, "row_mask", "bank_mask", "bound_ctrl")
SDWA_MODIFIERS = ("dst_sel", "dst_unused", "src0_sel", "src1_sel")


@dataclass(frozen=True)
class Dpp:
    """Which lane each lane reads, whether that lane exists, and which lanes may be written."""

    source: Array
    exists: Array
    enabled: Array
    zero_fill: bool
    missing: Array  # ~exists
    complete: bool
    write_full: Any  # the lanes written when all are on; True for all of them

    def read(self, w: Wave, value: Array) -> tuple[Array, Any]:
        """The moved value of 64 lanes, and the lanes to write (True for all).

        A lane whose source does not exist or is off gets 0 if bound_ctrl says so, else it is not
        written.
        """
        moved = value[self.source]
        if w.where is True:
            if self.zero_fill and not self.complete:
                moved[self.missing] = 0
            return moved, self.write_full
        valid = self.exists & w.where[self.source]
        moved[~valid] = 0
        write = self.enabled if self.zero_fill else self.enabled & valid
        return moved, write & w.where


def _source(ins: Instruction, control: str, argument: str) -> tuple[Array, Array]:
    everywhere = np.ones(LANES, bool)
    if control == "quad_perm":
        order = np.array([int(x) for x in argument.strip("[]").split(",")])
        return (LANE & ~3) + order[LANE & 3], everywhere
    if control == "row_mirror":
        return _ROW + 15 - _IN_ROW, everywhere
    if control == "row_half_mirror":
        return (LANE & ~7) + 7 - (LANE & 7), everywhere
    n = int(argument)
    if control == "row_shl":
        return LANE + n, _IN_ROW + n < 16
    if control == "row_shr":
        return LANE - n, _IN_ROW - n >= 0
    if control == "row_ror":
        return _ROW + (_IN_ROW - n) % 16, everywhere
    if control == "row_newbcast":
        return _ROW + n, everywhere
    if control == "row_bcast" and n == 15:  # the last lane of each row to the next row
        return _ROW - 1, LANE >= 16
    if control == "row_bcast" and n == 31:  # lane 31 to the upper half
        return np.full(LANES, 31), LANE >= 32
    if n == 1:
        return {
            "wave_shl": (LANE + 1, LANE + 1 < LANES),
            "wave_shr": (LANE - 1, LANE >= 1),
            "wave_rol": ((LANE + 1) % LANES, everywhere),
            "wave_ror": ((LANE - 1) % LANES, everywhere),
        }[control]
    raise ins.refuse(f"{control}:{argument}")


def decode_dpp(ins: Instruction) -> Dpp:
    found = [c for c in _CONTROLS if c in ins.modifiers]
    if len(found) != 1:
        raise ins.refuse("not one DPP control")
    source, exists = _source(ins, found[0], ins.modifiers[found[0]])
    rows, banks = ins.number("row_mask", 15), ins.number("bank_mask", 15)
    enabled = ((rows >> (LANE >> 4)) & (banks >> ((LANE & 15) >> 2)) & 1).astype(bool)
    zero_fill = "bound_ctrl" in ins.modifiers
    written = enabled if zero_fill else enabled & exists
    return Dpp(
        np.where(exists, source, 0),
        exists,
        enabled,
        zero_fill,
        ~exists,
        bool(exists.all()),
        True if written.all() else written,
    )


def _selection(ins: Instruction, name: str) -> tuple[int, int]:
    """Shift and width in bits."""
    kind, _, number = name.partition("_")
    if kind == "DWORD" and not number:
        return 0, 32
    if kind == "WORD" and number in ("0", "1"):
        return 16 * int(number), 16
    if kind == "BYTE" and number in ("0", "1", "2", "3"):
        return 8 * int(number), 8
    raise ins.refuse(f"selection {name}")


def sdwa_reader(
    ins: Instruction, read_words: Reader, operand: Operand, kind: int, selection: str
) -> Reader:
    """Part of a register as a value of the instruction's type."""
    shift, width = _selection(ins, selection)
    if width == 32 and kind in (U16, I16, F16):
        width = 16
    if kind == F32 and width < 32:
        raise ins.refuse("a part of a float")
    if kind == F16 and width != 16:
        raise ins.refuse("a part of a half float")
    mask, sign = np.uint32((1 << width) - 1), np.uint32(1 << (width - 1))
    sext = operand.sext

    def read(w: Wave) -> Array:
        bits = (read_words(w) >> np.uint32(shift)) & mask
        if sext:
            bits = (bits ^ sign) - sign
        return typed(bits, kind)

    if operand.negate or operand.absolute:
        if kind not in (F16, F32):
            raise ins.refuse("sign modifier of an integer")

        def read_signed(w: Wave) -> Array:
            value = np.abs(read(w)) if operand.absolute else read(w)
            return np.negative(value) if operand.negate else value

        return read_signed
    return read


def typed(bits: Array, kind: int) -> Array:
    """32 bit words as the elements of a 16 or 32 bit type."""
    if kind in (U16, I16, F16):
        return bits.astype(np.uint16).view(DTYPES[kind])
    return bits.view(DTYPES[kind])


def words_of(value: Array) -> Array:
    """The value's bits, zero-extended to 32 bit words."""
    if value.dtype.itemsize == 2:
        return value.view(np.uint16).astype(np.uint32)
    return value.view(np.uint32)


def sdwa_writer(ins: Instruction, row: int) -> Writer:
    """Put a result into part of the register."""
    shift, width = _selection(ins, ins.modifiers.get("dst_sel", "DWORD"))
    unused = ins.modifiers.get("dst_unused", "UNUSED_PAD")
    mask = np.uint32((1 << width) - 1)
    field = np.uint32(int(mask) << shift)
    if unused not in ("UNUSED_PAD", "UNUSED_PRESERVE"):
        raise ins.refuse(unused)

    def write(w: Wave, value: Array) -> None:
        register = w.rows[U32][row]
        bits = (words_of(value) & mask) << np.uint32(shift)
        if unused == "UNUSED_PRESERVE":
            bits = bits | (register & ~field)
        put(register, bits, w.where)

    return write
