"""Run a few hand-written instructions on one wave, for tests of single instructions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .machine import Machine, Program, decode
from .memory import Memory
from .wave import FULL, LANES, U32, Wave

Array = NDArray[Any]
_HEAD = '\t.amdgcn_target "amdgcn-amd-amdhsa--{arch}"\n'
_DESCRIPTOR = "\t.amdhsa_next_free_vgpr 96\n\t.amdhsa_accum_offset 64\n"


@lru_cache(maxsize=64)
def program(code: str, arch: str) -> Program:
    """One instruction a line; labels end with a colon. The waves of a program are reused."""
    lines = [x.strip() for x in code.strip().split("\n")]
    body = "\n".join(x if x.endswith(":") else "\t" + x for x in lines)
    return decode(_HEAD.format(arch=arch) + _DESCRIPTOR + body + "\n\ts_endpgm\n")


def bits(values: Any) -> Array:
    """Any array as 32 bit words: 64 bit elements give two rows, 16 bit ones are zero-extended."""
    array = np.broadcast_to(np.atleast_1d(np.asarray(values)), (LANES,))
    if array.dtype == np.int64 and not isinstance(values, np.ndarray):
        array = array.astype(np.uint32)  # plain Python integers
    if array.dtype.itemsize == 8:
        return np.ascontiguousarray(np.ascontiguousarray(array).view(np.uint32).reshape(-1, 2).T)
    if array.dtype.itemsize == 2:
        return array.view(np.uint16).astype(np.uint32)
    return np.ascontiguousarray(array).view(np.uint32)


class Result:
    """The wave after the run, until the same code runs again."""

    def __init__(self, wave: Wave, machine: Machine) -> None:
        self.wave, self.machine = wave, machine

    def v(self, index: int, dtype: Any = np.uint32) -> Array:
        """A register, or a pair for a 64 bit type, or the low half for a 16 bit one."""
        size = np.dtype(dtype).itemsize
        words = self.wave.rows[U32]
        if size == 8:
            pair = np.stack([words[index], words[index + 1]], 1)
            value: Array = np.ascontiguousarray(pair).view(dtype)[:, 0]
            return value
        if size == 2:
            return (words[index] & np.uint32(0xFFFF)).astype(np.uint16).view(dtype)
        return words[index].copy().view(dtype)

    def s(self, index: int) -> int:
        return self.wave.s[index]

    def s64(self, index: int) -> int:
        return self.wave.q[index >> 1]

    def mask(self, index: int) -> Array:
        return np.array([self.s64(index) >> k & 1 for k in range(LANES)], bool)


def run(
    code: str,
    *,
    v: Mapping[int, Any] | None = None,
    a: Mapping[int, Any] | None = None,
    s: Mapping[int, int] | None = None,
    exec_mask: int = FULL,
    scc: int = 0,
    arch: str = "gfx942",
    memory: Sequence[Array] = (),
    lds: Array | None = None,
    lds_size: int = 65536,
) -> Result:
    """Set registers (vector 0..63, AGPR 0..31, scalars), run, and return the state.

    Scalars that are wider than 32 bits fill a pair.
    """
    decoded = program(code, arch)
    space = Memory()
    for i, array in enumerate(memory):
        space.add_array(array, f"array {i}")
    machine = Machine(decoded, space, lds_size, 1, limit=10_000)
    (wave,) = machine.waves
    wave.reset(machine, LANES)
    if lds is not None:
        raw = lds.view(np.uint8)
        machine.lds.data[: raw.size] = raw
    for first, registers in ((0, v or {}), (decoded.layout.vgprs, a or {})):
        for index, value in registers.items():
            words = bits(value)
            wave.vectors[first + index : first + index + words.ndim] = words
    for index, number in (s or {}).items():
        if number >> 32:
            wave.q[index >> 1] = number
        else:
            wave.s[index] = number
    wave.scc = scc
    wave.set_exec(exec_mask)
    with np.errstate(all="ignore"):
        machine._run(wave)
    return Result(wave, machine)
