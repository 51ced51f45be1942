"""Inputs of a captured graph that count from how long a request is when the graph runs.

The host may launch a step before it knows what the one before has committed. So it writes
distances, and from which slot's length on the device they count; what it does know counts from a
slot that is always empty. The graph adds them up in its first launch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spectrue.kernels import dispatch
from spectrue.workers.core import SchedulerOutput
from spectrue.workers.input_buffers import InputBuffers

_FIELDS = "offset", "base", "request"


class SlotLengths:
    """Committed tokens of each slot, on the device. Of two slots that are none one is written by
    requests that are not there, the other is always 0."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.tensor = torch.zeros(num_slots + 2, dtype=torch.int64, device=device)
        self.nobody = num_slots
        self.empty = num_slots + 1

    def origins(self, plan: SchedulerOutput) -> tuple[list[int], list[int]]:
        """Of each request of a decode step the slot whose length counts, and what is added to it to
        give its committed tokens before the step."""
        bases = [s.slot if s.ahead else self.empty for s in plan.scheduled]
        return bases, [0 if s.ahead else s.num_computed_tokens + 1 for s in plan.scheduled]


@dataclass(frozen=True, slots=True)
class Placed:
    """One range of a graph's entries, on the device."""

    positions: Tensor  # int64
    slots: Tensor  # int64, where the KV of these positions goes, or -1
    narrow: Tensor  # int32, the positions again


class Places:
    """Named ranges of such entries, a few fields of a graph's packed inputs."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.ranges: dict[str, slice] = {}
        self.size = 0
        for name, size in sizes.items():
            self.ranges[name] = slice(self.size, self.size + size)
            self.size += size

    @property
    def fields(self) -> dict[str, tuple[torch.dtype, int]]:
        return dict.fromkeys(_FIELDS, (torch.int64, self.size))

    def clear(self, host: Mapping[str, NDArray[np.generic]], lengths: SlotLengths) -> None:
        """Every entry is 0 and has no KV: padding, and what a capture runs with."""
        host["offset"][:], host["base"][:], host["request"][:] = 0, lengths.empty, -1

    def of(
        self, host: Mapping[str, NDArray[np.generic]], name: str, rows: int = 1
    ) -> tuple[NDArray[np.generic], NDArray[np.generic], NDArray[np.generic]]:
        """(offset, base, request) of a range, [rows, -1], to be written."""
        at = self.ranges[name]
        offset, base, request = (host[field][at].reshape(rows, -1) for field in _FIELDS)
        return offset, base, request

    def place(
        self,
        device: Mapping[str, Tensor],
        lengths: SlotLengths,
        block_tables: Tensor,  # [requests, blocks] int32
        block_size: int,
    ) -> dict[str, Placed]:
        """Within the graph: positions and KV slots of every range."""
        positions, slots, narrow = dispatch.place_tokens(
            device["offset"],
            device["base"],
            lengths.tensor,
            device["request"],
            block_tables,
            block_size,
        )
        return {
            name: Placed(positions[at], slots[at], narrow[at]) for name, at in self.ranges.items()
        }


def copy_tables(
    host: Mapping[str, NDArray[np.generic]], buffers: InputBuffers, slots: list[int]
) -> None:
    """The block tables of these slots, as far as anybody reads."""
    width = buffers.block_tables.shape[1]
    used = max(buffers.num_blocks[slot] for slot in slots)
    tables = host["block_tables"].reshape(-1, width)
    tables[: len(slots), :used] = buffers.block_tables.numpy()[slots, :used]
