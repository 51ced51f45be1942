"""Global memory: the registered tensors, and nothing else."""

from __future__ import annotations

import bisect
import ctypes
from dataclasses import dataclass, field

import numpy as np
import torch

from .faults import Fault
from .parser import Instruction
from .races import ATOMIC, READ, WRITE, Access, RaceLog
from .wave import Array, any_of


@dataclass(frozen=True)
class Region:
    """Bytes of the process that kernels may touch."""

    base: int
    size: int
    name: str
    data: Array = field(repr=False)  # uint8
    words: Array = field(repr=False)  # uint32, from the first aligned address on
    shift: int  # of that address against the base
    keep: object = field(default=None, repr=False)


def _region(base: int, size: int, name: str, keep: object) -> Region:
    raw = memoryview((ctypes.c_uint8 * size).from_address(base))
    data = np.frombuffer(raw, np.uint8)
    shift = -base % 4
    usable = max(0, (size - shift) // 4 * 4)
    return Region(base, size, name, data, data[shift : shift + usable].view(np.uint32), shift, keep)


def _conflict(ins: Instruction, wave: int) -> str:
    return f"lanes of wave {wave} write different values to one place: {ins}"


class Memory:
    """Regions by address, bounds checks, gather and scatter."""

    def __init__(self) -> None:
        self._regions: list[Region] = []
        self._bases: list[int] = []
        self.log = RaceLog("global memory")
        # Where each instruction (by its line) last went: most stay within one tensor.
        self._last: dict[int, Region] = {}
        self.track = True  # false for workgroups of one wave

    def add(self, base: int, size: int, name: str, keep: object = None) -> None:
        """Overlapping ranges are merged by taking the widest one that starts first."""
        if size == 0:
            return
        at = bisect.bisect(self._bases, base)
        for near in self._regions[max(0, at - 1) : at + 1]:
            if near.base <= base and base + size <= near.base + near.size:
                return
        self._bases.insert(at, base)
        self._regions.insert(at, _region(base, size, name, keep))

    def add_tensor(self, tensor: torch.Tensor, name: str) -> None:
        """The extent of the view: from its first to its last element."""
        if tensor.numel():
            last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            self.add(tensor.data_ptr(), (last + 1) * tensor.element_size(), name, tensor)

    def add_array(self, array: Array, name: str) -> int:
        self.add(array.ctypes.data, array.nbytes, name, array)
        return int(array.ctypes.data)

    def find(self, low: int, high: int) -> Region | None:
        """The region that holds [low, high)."""
        at = bisect.bisect_right(self._bases, low)
        for region in reversed(self._regions[:at]):
            if high <= region.base + region.size:
                return region
        return None

    def _missing(
        self, ins: Instruction, wave: int, lanes: Array, addresses: Array, size: int, what: str
    ) -> Fault:
        for lane, address in zip(lanes, addresses, strict=True):
            low = int(address)
            if self.find(low, low + size) is None:
                near = bisect.bisect_right(self._bases, low) - 1
                hint = "before every tensor"
                if near >= 0:
                    region = self._regions[near]
                    hint = f"{low - region.base} bytes into {region.name} of {region.size}"
                return Fault(
                    f"global {what} of {size} bytes out of bounds at {low:#x} ({hint}): "
                    f"wave {wave}, lane {int(lane)}, {ins}"
                )
        return Fault(f"global {what} over several tensors: {ins}")

    def _groups(
        self, ins: Instruction, wave: int, lanes: Array, addresses: Array, size: int, what: str
    ) -> list[tuple[Region, Array | slice]]:
        """Regions and the positions in `addresses` that lie in each."""
        last = self._last.get(ins.line)
        if last is not None:
            # negative offsets become large numbers
            offsets = (addresses - last.base).view(np.uint64)
            if not any_of(offsets > last.size - size):
                return [(last, slice(None))]
        low, high = int(addresses.min()), int(addresses.max()) + size
        region = self.find(low, high)
        if region is not None:
            self._last[ins.line] = region
            return [(region, slice(None))]
        groups: list[tuple[Region, Array | slice]] = []
        left = np.arange(len(addresses))
        while left.size:
            first = int(addresses[left[0]])
            region = self.find(first, first + size)
            if region is None:
                raise self._missing(ins, wave, lanes, addresses, size, what)
            offsets = addresses[left] - region.base
            inside = (offsets >= 0) & (offsets <= region.size - size)
            groups.append((region, left[inside]))
            left = left[~inside]
        return groups

    def load(self, ins: Instruction, wave: int, lanes: Array, addresses: Array, size: int) -> Array:
        """Bytes at int64 addresses, one row a lane, as uint32 (as uint8 below four bytes)."""
        groups = self._groups(ins, wave, lanes, addresses, size, "load")
        if self.track:
            self.log.note(Access(ins, wave, READ, addresses, size))
        words = size // 4
        if len(groups) == 1 and words:
            region = groups[0][0]
            offsets = addresses - region.base - region.shift
            if not np.count_nonzero(offsets & 3) and not any_of(offsets < 0):
                if words == 1:
                    value: Array = region.words[offsets >> 2][:, None]
                    return value
                value = region.words[(offsets >> 2)[:, None] + np.arange(words)]
                return value
        out = np.empty((len(addresses), size), np.uint8)
        for region, where in groups:
            offsets = addresses[where] - region.base
            out[where] = region.data[offsets[:, None] + np.arange(size)]
        return out.view(np.uint32) if words else out

    def store(
        self, ins: Instruction, wave: int, lanes: Array, addresses: Array, data: Array
    ) -> None:
        """Write rows of bytes. Lanes that write different values to one place are an error."""
        size = data.shape[1]
        groups = self._groups(ins, wave, lanes, addresses, size, "store")
        if self.track:
            self.log.note(Access(ins, wave, WRITE, addresses, size, data))
        if len(groups) == 1 and size % 4 == 0:
            region = groups[0][0]
            offsets = addresses - region.base - region.shift
            if not np.count_nonzero(offsets & 3) and not any_of(offsets < 0):
                cells = (offsets >> 2)[:, None] + np.arange(size // 4)
                words = data.view(np.uint32)
                region.words[cells] = words
                if any_of(region.words[cells] != words):
                    raise Fault(_conflict(ins, wave))
                return
        for region, where in groups:
            places = (addresses[where] - region.base)[:, None] + np.arange(size)
            wanted = data[where]
            region.data[places] = wanted
            if any_of(region.data[places] != wanted):
                raise Fault(_conflict(ins, wave))

    def cells(
        self, ins: Instruction, wave: int, lanes: Array, addresses: Array, size: int
    ) -> list[tuple[Region, Array | slice]]:
        """For atomics: check, note, and say which region each lane's cell is in."""
        if np.count_nonzero(addresses % size):
            raise Fault(f"misaligned atomic: wave {wave}, {ins}")
        if self.track:
            self.log.note(Access(ins, wave, ATOMIC, addresses, size))
        return self._groups(ins, wave, lanes, addresses, size, "atomic")
