"""Read-modify-write of memory cells, for global memory and LDS alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .numerics import bf16_bits, bf16_value, fmax, fmin
from .wave import Array

Update = Callable[[Array, Array], Array]


def _pk_add_f16(old: Array, new: Array) -> Array:
    halves = old.view(np.float16) + new.view(np.float16)
    return halves.view(np.uint32)


def _pk_add_bf16(old: Array, new: Array) -> Array:
    sums = bf16_value(old.view(np.uint16)) + bf16_value(new.view(np.uint16))
    return bf16_bits(sums).astype(np.uint16).view(np.uint32)


# operation -> (element type, new value from old one and operand)
OPERATIONS: dict[str, tuple[Any, Update]] = {
    "swap": (np.uint32, lambda old, x: x),
    "add": (np.uint32, np.add),
    "sub": (np.uint32, np.subtract),
    "smin": (np.int32, np.minimum),
    "umin": (np.uint32, np.minimum),
    "smax": (np.int32, np.maximum),
    "umax": (np.uint32, np.maximum),
    "and": (np.uint32, np.bitwise_and),
    "or": (np.uint32, np.bitwise_or),
    "xor": (np.uint32, np.bitwise_xor),
    "add_f32": (np.float32, np.add),
    "pk_add_f16": (np.uint32, _pk_add_f16),
    "pk_add_bf16": (np.uint32, _pk_add_bf16),
    "swap_x2": (np.uint64, lambda old, x: x),
    "add_x2": (np.uint64, np.add),
    "sub_x2": (np.uint64, np.subtract),
    "smin_x2": (np.int64, np.minimum),
    "umin_x2": (np.uint64, np.minimum),
    "smax_x2": (np.int64, np.maximum),
    "umax_x2": (np.uint64, np.maximum),
    "and_x2": (np.uint64, np.bitwise_and),
    "or_x2": (np.uint64, np.bitwise_or),
    "xor_x2": (np.uint64, np.bitwise_xor),
    "add_f64": (np.float64, np.add),
    "min_f64": (np.float64, fmin),
    "max_f64": (np.float64, fmax),
    "min_f32": (np.float32, fmin),
    "max_f32": (np.float32, fmax),
}


def update(cells: Array, places: Array, new: Array, function: Update) -> Array:
    """Apply `function` lane by lane to cells[places]; returns the old values.

    Lanes of one wave that hit the same cell go in the order of their numbers. Hardware's order is
    not defined, so that only results that do not depend on it may be compared.
    """
    if len(np.unique(places)) == len(places):
        old = cells[places]
        cells[places] = function(old, new)
        return old
    old = np.empty(len(places), cells.dtype)
    for k, place in enumerate(places):
        old[k] = cells[place]
        cells[place] = function(old[k : k + 1], new[k : k + 1])[0]
    return old


def compare_and_swap(cells: Array, places: Array, new: Array, expected: Array) -> Array:
    """Write `new` where the cell holds `expected`; returns the old values."""
    old = np.empty(len(places), cells.dtype)
    for k, place in enumerate(places):
        old[k] = cells[place]
        if old[k] == expected[k]:
            cells[place] = new[k]
    return old
