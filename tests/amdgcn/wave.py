"""The state of one wave: registers, EXEC, VCC, SCC.

One typed list per element type holds a numpy view of every register: VGPRs and AGPRs are rows of 64
lanes, scalar registers and constants are arrays of one element that broadcast. An operand is then
only an index into such a list, whatever it is, and an instruction is a numpy call on list items.
Scalar registers are also an array of Python's own, whose items are plain integers.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray

LANES = 64
LANE = np.arange(LANES)
FULL = (1 << LANES) - 1
M32 = 0xFFFFFFFF
M64 = FULL
SCALARS = 128  # s0..s101, then the special ones below
VCC, TTMP0, M0, EXEC = 106, 108, 124, 126
# Registers and LDS start with this, so that using what was never written shows: a NaN, and as an
# integer a number far out of any tensor.
POISON = 0xFFF7A5A5

# Positions of the typed lists in Wave.rows. 16 bit types see the low half; H marks the high half.
U32, I32, F32, U16, I16, F16, U16H, I16H, F16H = range(9)
DTYPES: list[Any] = [
    np.uint32,
    np.int32,
    np.float32,
    np.uint16,
    np.int16,
    np.float16,
    np.uint16,
    np.int16,
    np.float16,
]
# 64 bit types have no rows: they are put together from two.
U64, I64, F64 = 9, 10, 11
DTYPES += [np.uint64, np.int64, np.float64]

Array = NDArray[Any]


# Lane masks as arrays, by number: most are used again at once, and converting takes longer than an
# instruction. The arrays are never written to.
_MASKS: dict[int, Array] = {}
_MASKS_KEPT = 20_000
_DIGITS = bytes([48, 49]) + bytes(254)  # 0 and 1 to their characters
_VALUES = bytes(48) + bytes([0, 1]) + bytes(206)  # and back


def lanes_of_number(mask: int) -> Array:
    """64 bits as 64 booleans, by way of text: faster than numpy's functions for so few."""
    lanes = _MASKS.get(mask)
    if lanes is None:
        if len(_MASKS) >= _MASKS_KEPT:
            _MASKS.clear()
        lanes = np.frombuffer(f"{mask:064b}".encode().translate(_VALUES)[::-1], bool)
        _MASKS[mask] = lanes
    return lanes


def number_of_lanes(lanes: Array) -> int:
    return int(lanes.tobytes()[::-1].translate(_DIGITS), 2)


def any_of(flags: Array) -> bool:
    """Is any boolean set? A tenth of the time of flags.any() for 64 of them."""
    return 1 in flags.tobytes()


def all_of(flags: Array) -> bool:
    return 0 not in flags.tobytes()


def put(target: Array, value: Array, where: Any) -> None:
    """Write the lanes that are on; without a mask, numpy has a much shorter way."""
    if where is True:
        target[...] = value
    else:
        np.copyto(target, value, where=where)


def views_of(words: Array) -> list[Array]:
    """The nine typed views of an array of 32 bit words."""
    halves = words.view(np.uint16)
    low, high = halves[..., ::2], halves[..., 1::2]
    return [
        words,
        words.view(np.int32),
        words.view(np.float32),
        low,
        low.view(np.int16),
        low.view(np.float16),
        high,
        high.view(np.int16),
        high.view(np.float16),
    ]


class Wave:
    """Registers of one wave. Built once and reset for each workgroup."""

    def __init__(self, index: int, vgprs: int, agprs: int, constants: list[int]) -> None:
        self.index = index
        self.vectors = np.empty((vgprs + agprs, LANES), np.uint32)
        self.s = array("I", [0] * SCALARS)
        self.q = memoryview(self.s).cast("B").cast("Q")  # 64 bit pairs: q[i >> 1]
        scalars = np.frombuffer(self.s, np.uint32)
        self._scalars = scalars
        fixed = np.array(constants, np.uint32)
        self.rows: list[list[Array]] = [
            list(v) + [s[i : i + 1] for i in range(SCALARS)] + [c[i : i + 1] for i in range(len(c))]
            for v, s, c in zip(
                views_of(self.vectors), views_of(scalars), views_of(fixed), strict=True
            )
        ]
        self.scc = 0
        self.block = 0
        self.done = False
        self.fp16_overflow_clamps = False
        self.machine: Any = None
        self.where: Any = True  # True when all lanes are on, else an array of bool

    def reset(self, machine: Any, lanes: int) -> None:
        self.vectors.fill(POISON)
        self._scalars.fill(POISON)
        self.machine, self.block, self.done, self.scc = machine, 0, False, 0
        self.fp16_overflow_clamps = False
        self.set_exec((1 << lanes) - 1)

    @property
    def exec(self) -> int:
        return self.q[EXEC >> 1]

    def set_exec(self, mask: int) -> None:
        self.q[EXEC >> 1] = mask
        self.refresh_exec()

    def refresh_exec(self) -> None:
        """To be called after any write to EXEC."""
        mask = self.q[EXEC >> 1]
        self.where = True if mask == FULL else lanes_of_number(mask)

    def active(self) -> Array:
        """EXEC as 64 booleans."""
        return np.ones(LANES, bool) if self.where is True else self.where

    def lanes_of(self, pair: int) -> Array:
        """A scalar pair as 64 booleans."""
        return lanes_of_number(self.s[pair] | self.s[pair + 1] << 32)

    def set_lanes(self, pair: int, lanes: Array) -> None:
        """A comparison's result, for 64 lanes or one for all: lanes that are off get 0."""
        if lanes.shape[0] != LANES:
            lanes = np.broadcast_to(lanes, (LANES,))
        if self.where is not True:
            lanes = lanes & self.where
        mask = number_of_lanes(lanes)
        self.s[pair], self.s[pair + 1] = mask & M32, mask >> 32
        if pair == EXEC:
            self.refresh_exec()

    def wide(self, row: int, kind: int) -> Array:
        """Two rows as 64 bit elements."""
        words = self.rows[U32]
        low = words[row]
        out = np.empty((low.shape[0], 2), np.uint32)
        out[:, 0] = low
        out[:, 1] = words[row + 1]
        value: Array = out.view(DTYPES[kind])[:, 0]
        return value

    def set_wide(self, row: int, value: Array, where: Any) -> None:
        # Two 32 bit copies; the value may be one element or 64.
        words = np.ascontiguousarray(value).view(np.uint32).reshape(-1, 2)
        rows = self.rows[U32]
        put(rows[row], words[:, 0], where)
        put(rows[row + 1], words[:, 1], where)
