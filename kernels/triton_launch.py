"""The one door through which every Triton kernel of this package is launched.

The tests swap the launcher: the same ops then run as AMD code, compiled ahead of time and executed
on the CPU, or are only recorded, to be built for every architecture.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

# (kernel, grid, positional arguments, constexpr arguments, num_warps, num_stages)
Launcher = Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any], int, int], None]


def _launch_on_device(
    kernel: Any,
    grid: tuple[int, ...],
    args: tuple[Any, ...],
    constants: dict[str, Any],
    num_warps: int,
    num_stages: int,
) -> None:
    device = next(a.device for a in args if isinstance(a, Tensor))
    options = {**constants, "num_warps": num_warps, "num_stages": num_stages}
    if device.type != "cuda":  # the interpreter
        kernel[grid](*args, **options)
        return
    if "PDL" in kernel.arg_names and _starts_early(device):
        options |= {"PDL": True, "launch_pdl": True}
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[grid](*args, **options)
    else:
        kernel[grid](*args, **options)


@functools.cache
def _starts_early(device: torch.device) -> bool:
    """Whether a kernel may be started while the one before it ends (CUDA, from Hopper on): kernels
    that take PDL are. Half a millisecond of a 4 ms decode step were gaps between kernels."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


_launcher: ContextVar[Launcher] = ContextVar("spectrue_launcher", default=_launch_on_device)


@contextmanager
def use_launcher(launcher: Launcher) -> Iterator[None]:
    """Launch the kernels of this thread or task by another function: tests."""
    token = _launcher.set(launcher)
    try:
        yield
    finally:
        _launcher.reset(token)


def warps_for(elements: int, most: int = 4) -> int:
    """Warps of a program that reduces a power of two of elements: few for few."""
    return max(1, min(most, elements // 128))


def launch(
    kernel: Any,  # a @triton.jit function
    grid: tuple[int, ...],  # one to three sizes
    *args: Any,  # tensors, ints, floats or None, in the kernel's order
    num_warps: int = 4,
    num_stages: int = 2,
    **constants: Any,  # its tl.constexpr parameters, by name
) -> None:
    """Enqueue one kernel on the current stream. A grid with a zero launches nothing."""
    if all(grid):
        _launcher.get()(kernel, grid, args, constants, num_warps, num_stages)
