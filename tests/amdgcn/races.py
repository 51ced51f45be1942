"""Find data that waves of one workgroup share without a barrier between them.

Every access of an interval between barriers is noted, and the notes are compared when the interval
ends: the order in which the waves happened to run then does not matter. Two accesses of different
waves to one byte race unless both read, both are atomic, or both write the same value. A plain
read of what other waves change atomically is let pass if the wave does so too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .faults import Fault
from .parser import Instruction
from .wave import Array, any_of

READ, WRITE, ATOMIC = range(3)
# Each kind is compared with the kinds before it.
_ORDER = {WRITE: 0, ATOMIC: 1, READ: 2}


@dataclass(slots=True)
class Access:
    ins: Instruction
    wave: int
    kind: int
    addresses: Array  # int64, of the lanes that are on
    size: int  # bytes each
    data: Array | None = None  # of a write: one row of bytes a lane


class RaceLog:
    """The accesses of one interval to one memory."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.accesses: list[Access] = []
        self.writers = 0  # a bit for each wave that has written

    def note(self, access: Access) -> None:
        self.accesses.append(access)
        if access.kind != READ:
            self.writers |= 1 << access.wave

    def close(self) -> None:
        """End the interval: raise Fault if two waves raced in it."""
        accesses, writers = self.accesses, self.writers
        self.accesses, self.writers = [], 0
        if not writers or all(a.wave == accesses[0].wave for a in accesses):
            return
        for part in self._parts(accesses):
            self._compare(part)

    @staticmethod
    def _parts(accesses: list[Access]) -> list[list[Access]]:
        """Groups that lie apart in memory; those without writes or with one wave are left out."""
        every = np.concatenate([a.addresses for a in accesses])
        ends = np.cumsum([len(a.addresses) for a in accesses])
        starts = np.concatenate([[0], ends[:-1]])
        lows = np.minimum.reduceat(every, starts).tolist()
        highs = np.maximum.reduceat(every, starts).tolist()
        spans = sorted(
            (low, high + a.size, i)
            for i, (low, high, a) in enumerate(zip(lows, highs, accesses, strict=True))
        )
        parts: list[list[int]] = []
        end = -1
        for low, high, i in spans:
            if low >= end or not parts:
                parts.append([])
            parts[-1].append(i)
            end = max(end, high)
        groups = [[accesses[i] for i in sorted(part)] for part in parts]
        return [
            g
            for g in groups
            if any(a.kind != READ for a in g) and any(a.wave != g[0].wave for a in g)
        ]

    def _compare(self, accesses: list[Access]) -> None:
        base = min(int(a.addresses.min()) for a in accesses)
        end = max(int(a.addresses.max()) + a.size for a in accesses)
        # Bits of the waves that have accessed each byte, by kind, and the value last written.
        # Words instead of bytes where all are whole.
        unit = 1
        if not any(a.size & 3 or np.count_nonzero(a.addresses & 3) for a in accesses):
            unit = 4
        seen = np.zeros((3, (end - base) // unit), np.uint32)
        value = np.zeros((end - base) // unit, f"u{unit}")
        for access in sorted(accesses, key=lambda a: _ORDER[a.kind]):
            first = (access.addresses - base) // unit
            places = first[:, None] + np.arange(access.size // unit)
            own = np.uint32(1 << access.wave)
            written, atomic = seen[WRITE][places], seen[ATOMIC][places]
            if access.kind == WRITE:
                assert access.data is not None
                data = np.ascontiguousarray(access.data).view(value.dtype)
                bad = ((written & ~own) != 0) & (value[places] != data)
                value[places] = data
            elif access.kind == ATOMIC:
                bad = (written & ~own) != 0
            else:
                # A wave that wrote the same value itself reads its own.
                bad = ((written & ~own) != 0) & ((written & own) == 0)
                # A loop of compare-and-swap begins with a plain read of its cell.
                bad |= ((atomic & ~own) != 0) & ((atomic & own) == 0)
            seen[access.kind][places] |= own
            if any_of(bad):
                self._report(access, accesses, places[bad] * unit + base)

    def _report(self, access: Access, accesses: list[Access], places: Array) -> None:
        place = int(places.flat[0])
        others = {
            f"wave {a.wave} at {a.ins}"
            for a in accesses
            if a.wave != access.wave
            and ((a.addresses <= place) & (place < a.addresses + a.size)).any()
        }
        raise Fault(
            f"{self.name} race at {place:#x}: wave {access.wave} at {access.ins} against "
            + ", ".join(sorted(others))
        )
