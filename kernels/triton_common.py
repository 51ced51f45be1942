"""What the Triton kernels of rows share: loads, supports, an order of floats, random numbers."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def await_previous(PDL: tl.constexpr):
    """Where a kernel may be started before the one ahead of it has ended (CUDA's programmatic
    dependent launch, see `triton_launch`): let the next one start, wait for the previous one.

    First in every kernel that has it, on every path: the next kernel's wait covers this one alone,
    and what was before is only over because this one has waited too.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def load_logits(pointers, mask):
    """float32, -inf where masked. NaN becomes +inf: a maximum then shows both kinds of bad row."""
    x = tl.load(pointers, mask=mask, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("inf"))


@triton.jit
def exp2_scale(temperature, row):
    """Weights are exp2((logit - peak) * scale). 1 stands in for temperature 0, or for None."""
    if temperature is None:
        return LOG2E
    else:
        t = tl.load(temperature + row).to(tl.float32)
        return LOG2E / tl.where(t > 0, t, 1.0)


@triton.jit
def load_support(pivot, last_tie, row, vocab_size):
    """(pivot, last tie) of a row, such that `in_support` holds for all where nothing is cut."""
    if pivot is None:
        return float("-inf"), vocab_size
    else:
        return tl.load(pivot + row), tl.load(last_tie + row)


@triton.jit
def in_support(x, column, pivot, last_tie):
    return (x > pivot) | ((x == pivot) & (column <= last_tie))


@triton.jit
def order_key(x, SHIFT: tl.constexpr):
    """An int32 that orders as x does, -0 as 0. The low SHIFT bits of a half float say nothing."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def from_order_key(key, SHIFT: tl.constexpr):
    """The x of an `order_key`."""
    full = tl.where(key < 0, (key << SHIFT) | ((1 << SHIFT) - 1), key << SHIFT)
    return (full ^ ((full >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def pack(x, index):
    """An int64 that orders by x, then by the lowest index: one reduction finds both."""
    return (order_key(x, 0).to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def unpack(packed):
    """(x, index) of a `pack`."""
    x = from_order_key((packed >> 32).to(tl.int32), 0)
    return x, 0x7FFFFFFF - (packed & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def not_above(a, b):
    """1 where a <= b, 0 elsewhere, of small ints: by shifts, since masks fill AMD's registers."""
    return ((a - b - 1) >> 31) & 1


@triton.jit
def middle(low, high):
    """Between two int32, rounded up, without the overflow of their sum."""
    return low + ((high - low).to(tl.uint32, bitcast=True) + 1 >> 1).to(tl.int32, bitcast=True)


@triton.jit
def words(seed, block, position, choice, STREAM: tl.constexpr):
    """Four uint32 for each block, keyed as kernels/philox.py says."""
    block = block.to(tl.uint32)
    zero = tl.zeros_like(block)
    c1 = zero + position.to(tl.uint32)
    c2 = zero + choice.to(tl.uint32)
    return tl.philox(seed, block, c1, c2, zero + STREAM)


@triton.jit
def to_uniform(word):
    """[0, 1), a multiple of 2^-24."""
    return (word >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def exponential(word):
    """-log of an odd multiple of 2^-24. Near 1 by a series: fast logarithms lose it there."""
    odd = ((word >> 8) | 1).to(tl.int32)
    rest = (16777216 - odd).to(tl.float32) * 5.9604644775390625e-08
    series = rest * (1 + rest * (0.5 + rest * (0.33333334 + rest * (0.25 + rest * 0.2))))
    return tl.where(rest < 0.03125, series, -tl.log(odd.to(tl.float32) * 5.9604644775390625e-08))
