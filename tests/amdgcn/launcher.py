"""Launch Triton kernels on CPU tensors: compiled for an AMD GPU, executed by the interpreter."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .compile import CompiledKernel, Specialized, build, specialize
from .machine import Machine, Program, decode
from .memory import Memory
from .numerics import jitter
from .wave import Array

Launcher = Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any], int, int], None]
_FLOATS = {"fp16": "<e", "fp32": "<f", "fp64": "<d"}
_programs: dict[str, Program] = {}


def program_of(asm: str) -> Program:
    """Decoded once for each text."""
    if asm not in _programs:
        _programs[asm] = decode(asm)
    return _programs[asm]


def _argument(value: Any, kind: str, size: int) -> bytes:
    if kind.startswith("*"):
        return struct.pack("<Q", 0 if value is None else value.data_ptr())
    if kind in _FLOATS:
        return struct.pack(_FLOATS[kind], float(value))
    if kind == "bf16":
        return struct.pack("<f", float(torch.tensor(value).bfloat16()))[2:]
    if kind[0] in "iu":
        return (int(value) & ((1 << 64) - 1)).to_bytes(8, "little")[:size]
    raise TypeError(f"argument of type {kind}")


def _kernel_arguments(
    program: Program, compiled: CompiledKernel, values: list[Any], grid: tuple[int, ...]
) -> Array:
    """The argument segment. What no argument fills is poisoned."""
    threads = compiled.threads
    hidden = {
        "hidden_block_count_x": grid[0],
        "hidden_block_count_y": grid[1],
        "hidden_block_count_z": grid[2],
        "hidden_group_size_x": threads,
        "hidden_group_size_y": 1,
        "hidden_group_size_z": 1,
        "hidden_remainder_x": 0,
        "hidden_remainder_y": 0,
        "hidden_remainder_z": 0,
        "hidden_grid_dims": 3,
    }
    segment = np.full(max(program.source.kernarg_size, 8) + 64, 0xA5, np.uint8)
    explicit = [a for a in program.source.arguments if not a.kind.startswith("hidden_")]
    # Triton appends two pointers to scratch memory, which are null unless a kernel asks for it.
    kinds = [*compiled.parameters, *[(-1, "*i8")] * 2]
    if len(explicit) != len(kinds):
        raise ValueError(f"{len(explicit)} arguments in the metadata, expected {len(kinds)}")
    parts = [
        (slot, _argument(None if at < 0 else values[at], kind, slot.size))
        for slot, (at, kind) in zip(explicit, kinds, strict=True)
    ]
    parts += [
        (a, hidden[a.kind].to_bytes(a.size, "little"))
        for a in program.source.arguments
        if a.kind in hidden
    ]
    for slot, raw in parts:
        if len(raw) != slot.size:
            raise ValueError(f"argument of {slot.size} bytes, got {len(raw)}")
        segment[slot.offset : slot.offset + slot.size] = np.frombuffer(raw, np.uint8)
    return segment


def execute(
    compiled: CompiledKernel,
    grid: tuple[int, ...],
    values: list[Any],
    *,
    names: list[str] | None = None,
    random: np.random.Generator | None = None,
    asm: str | None = None,
    limit: int | None = None,
) -> int:
    """Run a compiled kernel on the memory of the tensors among `values`, which are all of the
    kernel's parameters in order. Returns how many wave instructions were executed. `asm` replaces
    the text: mutation tests. More than `limit` instructions are a fault, an endless loop; by
    default so many that a launch of any number of workgroups comes to its end.
    """
    if not 1 <= len(grid) <= 3:
        raise ValueError(f"grid of {len(grid)} dimensions")
    program = program_of(asm or compiled.asm)
    memory = Memory()
    for i, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            if value.device.type != "cpu":
                raise ValueError("the interpreter works on CPU tensors")
            memory.add_tensor(value, names[i] if names else f"argument {i}")
    sizes = (*grid, *(1,) * (3 - len(grid)))
    kernarg = _kernel_arguments(program, compiled, values, sizes)
    memory.add_array(kernarg, "kernel arguments")
    packet = np.zeros(64, np.uint8)
    packet[4:10] = np.frombuffer(struct.pack("<HHH", compiled.threads, 1, 1), np.uint8)
    total = struct.pack("<III", sizes[0] * compiled.threads, sizes[1], sizes[2])
    packet[12:24] = np.frombuffer(total, np.uint8)
    memory.add_array(packet, "dispatch packet")
    if limit is None:
        limit = 50_000_000 + 100_000 * math.prod(sizes)
    machine = Machine(program, memory, compiled.lds, compiled.num_warps, random, limit)
    machine.launch(
        (sizes[0], sizes[1], sizes[2]),
        compiled.threads,
        int(kernarg.ctypes.data),
        int(packet.ctypes.data),
    )
    return machine.executed


@dataclass
class AmdLauncher:
    """A launcher (kernels/triton_launch.py) that executes on one architecture."""

    arch: str
    buffer_ops: bool | None = None  # None: as the compiler's default
    seed: int | None = 0  # of the order of waves and workgroups; None: as numbered
    fp_fusion: bool | None = None
    ulp_jitter: bool = False
    max_sgpr_spills: int = 256  # to lanes of vector registers: works, and tests may want less
    executed: int = 0  # wave instructions, over all launches
    launches: int = 0
    compiled: list[CompiledKernel] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = None if self.seed is None else np.random.default_rng(self.seed)

    def __call__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        constants: dict[str, Any],
        num_warps: int,
        num_stages: int,
    ) -> None:
        work, bound = specialize(
            kernel,
            args,
            constants,
            self.arch,
            num_warps,
            num_stages,
            buffer_ops=self.buffer_ops is not False,
            fp_fusion=self.fp_fusion,
        )
        built = build(work)
        built.check_limits(max_sgpr_spills=self.max_sgpr_spills)
        if built not in self.compiled:
            self.compiled.append(built)
        if self.ulp_jitter:
            jitter.random = self._random or np.random.default_rng(0)
        try:
            self.executed += execute(
                built, grid, list(bound.values()), names=list(bound), random=self._random
            )
        finally:
            jitter.random = None
        self.launches += 1


def launcher_for(
    arch: str, *, buffer_ops: bool | None = None, seed: int | None = 0, **options: Any
) -> AmdLauncher:
    """gfx90a, gfx942 or gfx950."""
    return AmdLauncher(arch, buffer_ops, seed, **options)


@dataclass
class RecordingLauncher:
    """Executes nothing and notes what would be built, to build it later for every target."""

    arch: str = "gfx942"  # whose rules of specialisation apply
    buffer_ops: bool = True
    fp_fusion: bool | None = None
    recorded: list[Specialized] = field(default_factory=list)
    _keys: set[tuple[Any, ...]] = field(default_factory=set)

    def __call__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        constants: dict[str, Any],
        num_warps: int,
        num_stages: int,
    ) -> None:
        work, _ = specialize(
            kernel,
            args,
            constants,
            self.arch,
            num_warps,
            num_stages,
            buffer_ops=self.buffer_ops,
            fp_fusion=self.fp_fusion,
        )
        if work.key() not in self._keys:
            self._keys.add(work.key())
            self.record(work)

    def record(self, work: Specialized) -> None:
        """What is new."""
        self.recorded.append(work)
