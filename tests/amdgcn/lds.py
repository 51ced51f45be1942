"""The workgroup's shared memory: bounds, gather, scatter, race log."""

from __future__ import annotations

import numpy as np

from .faults import Fault
from .parser import Instruction
from .races import ATOMIC, READ, WRITE, Access, RaceLog
from .wave import POISON, Array, Wave, any_of


def _conflict(ins: Instruction, w: Wave) -> str:
    return f"lanes of wave {w.index} write different values to one LDS place: {ins}"


class Lds:
    """One workgroup's LDS. It starts poisoned: reading what was never written shows."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.words = np.full((size + 7) // 4, POISON, np.uint32)
        self.data = self.words.view(np.uint8)
        self.log = RaceLog("LDS")
        self.track = True

    def reset(self) -> None:
        self.words.fill(POISON)

    def _check(
        self, ins: Instruction, w: Wave, lanes: Array, addresses: Array, size: int, what: str
    ) -> None:
        outside = addresses.view(np.uint64) > self.size - size  # negative ones become large
        if any_of(outside):
            k = int(np.nonzero(outside)[0][0])
            raise Fault(
                f"LDS {what} of {size} bytes out of bounds at {int(addresses[k])} "
                f"(of {self.size}): wave {w.index}, lane {int(lanes[k])}, {ins}"
            )

    def load(self, ins: Instruction, w: Wave, lanes: Array, addresses: Array, size: int) -> Array:
        """Bytes, one row a lane, as uint32 (as uint8 below four bytes)."""
        self._check(ins, w, lanes, addresses, size, "read")
        if self.track:
            self.log.note(Access(ins, w.index, READ, addresses, size))
        count = size // 4
        if count and not np.count_nonzero(addresses & 3):
            if count == 1:
                value: Array = self.words[addresses >> 2][:, None]
                return value
            value = self.words[(addresses >> 2)[:, None] + np.arange(count)]
            return value
        rows = self.data[addresses[:, None] + np.arange(size)]
        return rows.view(np.uint32) if count else rows

    def store(self, ins: Instruction, w: Wave, lanes: Array, addresses: Array, data: Array) -> None:
        size = data.shape[1]
        self._check(ins, w, lanes, addresses, size, "write")
        if self.track:
            self.log.note(Access(ins, w.index, WRITE, addresses, size, data))
        if size % 4 == 0 and not np.count_nonzero(addresses & 3):  # words instead of bytes
            cells, wanted = (addresses >> 2)[:, None] + np.arange(size // 4), data.view(np.uint32)
            self.words[cells] = wanted
            if any_of(self.words[cells] != wanted):
                raise Fault(_conflict(ins, w))
            return
        places = addresses[:, None] + np.arange(size)
        self.data[places] = data
        if any_of(self.data[places] != data):
            raise Fault(_conflict(ins, w))

    def cells(self, ins: Instruction, w: Wave, lanes: Array, addresses: Array, size: int) -> None:
        """For atomics: check and note."""
        self._check(ins, w, lanes, addresses, size, "atomic")
        if np.count_nonzero(addresses % size):
            raise Fault(f"misaligned LDS atomic: wave {w.index}, {ins}")
        if self.track:
            self.log.note(Access(ins, w.index, ATOMIC, addresses, size))
