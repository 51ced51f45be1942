"""Operand text -> an index into the wave's typed lists, and readers and writers built on it."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .faults import Unsupported
from .parser import Instruction
from .wave import (
    DTYPES,
    EXEC,
    F16,
    F32,
    F64,
    I16,
    I64,
    M0,
    M32,
    M64,
    SCALARS,
    TTMP0,
    U16,
    U32,
    U64,
    VCC,
    Array,
    Wave,
    put,
)

Reader = Callable[[Wave], Array]
Writer = Callable[[Wave, Array], None]
_REGISTER = re.compile(r"([vsa])(\d+)|([vsa])\[(\d+):(\d+)\]|ttmp(\d+)|ttmp\[(\d+):(\d+)\]")
_SPECIAL = {
    "vcc": (VCC, 2),
    "vcc_lo": (VCC, 1),
    "vcc_hi": (VCC + 1, 1),
    "exec": (EXEC, 2),
    "exec_lo": (EXEC, 1),
    "exec_hi": (EXEC + 1, 1),
    "m0": (M0, 1),
    "flat_scratch": (102, 2),
    "flat_scratch_lo": (102, 1),
    "flat_scratch_hi": (103, 1),
}
_INLINE_FLOAT = {"0.5", "1.0", "2.0", "4.0", "0.15915494", "0.15915494309189532"}


@dataclass(frozen=True)
class Operand:
    """A parsed operand. `kind`: v, a, s, int, float, off, scc."""

    text: str
    kind: str
    index: int = 0
    count: int = 1
    number: int = 0
    real: float = 0.0
    negate: bool = False
    absolute: bool = False
    sext: bool = False

    @property
    def plain(self) -> bool:
        return not (self.negate or self.absolute or self.sext)

    @property
    def vector(self) -> bool:
        return self.kind in "va"

    @property
    def constant(self) -> bool:
        return self.kind in ("int", "float")


def parse_operand(text: str) -> Operand:
    body, negate, absolute, sext = text, False, False, False
    if body.startswith("sext(") and body.endswith(")"):
        body, sext = body[5:-1], True
    if body.startswith("neg(") and body.endswith(")"):  # of a constant: neg(0) is -0.0
        body, negate = body[4:-1], True
    if body.startswith("-") and not re.match(r"-[\d.]", body):
        body, negate = body[1:], True
    if body.startswith("|") and body.endswith("|"):
        body, absolute = body[1:-1], True
    flags = {"negate": negate, "absolute": absolute, "sext": sext}
    if match := _REGISTER.fullmatch(body):
        kind, one, kind2, first, last, ttmp, tfirst, tlast = match.groups()
        if kind:
            return Operand(text, kind, int(one), **flags)
        if kind2:
            return Operand(text, kind2, int(first), int(last) - int(first) + 1, **flags)
        if ttmp:
            return Operand(text, "s", TTMP0 + int(ttmp), **flags)
        return Operand(text, "s", TTMP0 + int(tfirst), int(tlast) - int(tfirst) + 1, **flags)
    if body in _SPECIAL:
        index, count = _SPECIAL[body]
        return Operand(text, "s", index, count, **flags)
    if body in ("off", "null"):
        return Operand(text, "off")
    if body in ("scc", "src_scc"):
        return Operand(text, "scc")
    if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", body):
        return Operand(text, "int", number=int(body, 0), **flags)
    if re.fullmatch(r"-?\d+\.\d*(e[-+]?\d+)?", body):
        return Operand(text, "float", real=float(body), **flags)
    raise Unsupported(f"operand '{text}'")


def constant_bits(operand: Operand, kind: int) -> int:
    """The bits that a literal or inline constant has for an operand of this type.

    A float is converted to the operand's width. A 32 bit literal of a 64 bit float is its high
    half, of a 64 bit integer it is extended by zeros; whether hardware would extend it by its sign
    depends on the instruction, so literals for which this matters are refused.
    """
    if operand.kind == "float":
        if kind in (U64, I64, F64):
            return int(struct.unpack("<Q", struct.pack("<d", operand.real))[0])
        if kind in (U16, I16, F16):
            return int(np.float16(operand.real).view(np.uint16))
        return int(np.float32(operand.real).view(np.uint32))
    number = operand.number
    if kind in (U64, I64, F64):
        if kind == F64 and not -16 <= number <= 64:
            return (number & M32) << 32
        if number < -16 or (kind == I64 and number > 0x7FFFFFFF):
            raise Unsupported(f"64 bit literal '{operand.text}'")
        return number & M64
    if kind in (U16, I16, F16):
        return number & 0xFFFF
    return number & M32


class Constants:
    """The 32 bit constants of a program, which live behind its registers in the typed lists."""

    def __init__(self) -> None:
        self.bits: list[int] = []
        self._index: dict[int, int] = {}

    def index(self, bits: int) -> int:
        if bits not in self._index:
            self._index[bits] = len(self.bits)
            self.bits.append(bits)
        return self._index[bits]


class Layout:
    """Where the registers of a program's waves are in the typed lists."""

    def __init__(self, vgprs: int, agprs: int) -> None:
        self.vgprs, self.agprs = vgprs, agprs
        self.constants = Constants()

    def row(self, operand: Operand, kind: int, word: int = 0) -> int:
        """The index of a 16 or 32 bit operand, or of a wide one's n-th word."""
        if operand.kind == "s":
            self._inside(operand, word, SCALARS)
            return self.vgprs + self.agprs + operand.index + word
        if operand.kind == "v":
            self._inside(operand, word, self.vgprs)
            return operand.index + word
        if operand.kind == "a":
            self._inside(operand, word, self.agprs)
            return self.vgprs + operand.index + word
        if operand.constant:
            bits = constant_bits(operand, kind) >> (32 * word) & M32
            return self.vgprs + self.agprs + SCALARS + self.constants.index(bits)
        raise Unsupported(f"operand '{operand.text}' of a vector instruction")

    @staticmethod
    def _inside(operand: Operand, word: int, size: int) -> None:
        if operand.index + word >= size:
            raise Unsupported(f"register '{operand.text}' is beyond those of the kernel ({size})")

    def reader(self, ins: Instruction, operand: Operand, kind: int) -> Reader:
        """A function that reads the operand as this type, with its sign modifiers."""
        if kind in (U64, I64, F64):
            read = self._wide_reader(operand, kind)
        else:
            row = self.row(operand, kind)

            def read(w: Wave) -> Array:
                return w.rows[kind][row]

        return _signed(ins, read, operand, kind)

    def _wide_reader(self, operand: Operand, kind: int) -> Reader:
        if operand.constant:
            fixed = np.array([constant_bits(operand, kind)], np.uint64).view(DTYPES[kind])
            return lambda w: fixed
        if operand.count != 2:
            raise Unsupported(f"operand '{operand.text}' is not 64 bits wide")
        self.row(operand, U32, 1)  # both words exist
        row = self.row(operand, U32)
        return lambda w: w.wide(row, kind)

    def writer(self, ins: Instruction, operand: Operand, kind: int, *, keep_high: bool) -> Writer:
        """A function that writes lanes that are on.

        A 16 bit result clears the upper half on GFX9, but for a few instructions (`keep_high`).
        """
        if not operand.vector or not operand.plain:
            raise ins.refuse(f"cannot write '{operand.text}'")
        row = self.row(operand, U32)
        if kind in (U64, I64, F64):
            if operand.count != 2:
                raise ins.refuse(f"'{operand.text}' is not 64 bits wide")
            self.row(operand, U32, 1)
            return lambda w, value: w.set_wide(row, value, w.where)
        if operand.count != 1:
            raise ins.refuse(f"'{operand.text}' is not 32 bits wide")
        if kind in (U16, I16, F16):
            zero = DTYPES[kind](0)

            def write_half(w: Wave, value: Array) -> None:
                put(w.rows[kind][row], value, w.where)
                if not keep_high:
                    put(w.rows[kind + 3][row], zero, w.where)

            return write_half

        def write(w: Wave, value: Array) -> None:
            put(w.rows[kind][row], value, w.where)

        return write


def _signed(ins: Instruction, read: Reader, operand: Operand, kind: int) -> Reader:
    if operand.plain:
        return read
    if operand.sext or kind not in (F16, F32, F64):
        raise ins.refuse(f"modifier on '{operand.text}'")
    if operand.absolute and operand.negate:
        return lambda w: np.negative(np.abs(read(w)))
    if operand.absolute:
        return lambda w: np.abs(read(w))
    return lambda w: np.negative(read(w))


def scalar_reader(ins: Instruction, operand: Operand, width: int) -> Callable[[Wave], int]:
    """A function that reads a scalar operand as a Python integer."""
    index = operand.index
    if not operand.plain:
        raise ins.refuse(f"modifier on '{operand.text}'")
    if operand.constant:
        fixed = constant_bits(operand, U64 if width == 64 else U32)
        return lambda w: fixed
    if operand.kind == "scc" and width == 32:
        return lambda w: w.scc
    if operand.kind != "s" or index + operand.count > SCALARS:
        raise ins.refuse(f"'{operand.text}' is no scalar operand")
    if width == 64:
        if operand.count != 2 or index % 2:
            raise ins.refuse(f"'{operand.text}' is no aligned pair")
        pair = index >> 1
        return lambda w: w.q[pair]
    if operand.count != 1:
        raise ins.refuse(f"'{operand.text}' is not 32 bits wide")
    return lambda w: w.s[index]


def scalar_writer(ins: Instruction, operand: Operand, width: int) -> Callable[[Wave, Any], None]:
    """A function that writes an integer, already reduced to the width."""
    index = operand.index
    if operand.kind != "s" or not operand.plain or operand.count != width // 32:
        raise ins.refuse(f"cannot write '{operand.text}'")
    if width == 64 and index % 2:
        raise ins.refuse(f"'{operand.text}' is no aligned pair")
    pair = index >> 1
    if index in (EXEC, EXEC + 1):

        def write_exec(w: Wave, value: int) -> None:
            if width == 64:
                w.q[pair] = value
            else:
                w.s[index] = value
            w.refresh_exec()

        return write_exec
    if width == 64:

        def write_pair(w: Wave, value: int) -> None:
            w.q[pair] = value

        return write_pair

    def write(w: Wave, value: int) -> None:
        w.s[index] = value

    return write


FLOATS = (F16, F32, F64)
