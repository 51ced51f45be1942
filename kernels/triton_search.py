"""The cuts of a row by bisection over all of it: right for any row, and slow.

For the rows whose answer is not among the candidates of triton_truncate.py. Also what both need:
what a row asks for, and where min_p cuts.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from spectrue.kernels.row_law import CHUNK
from spectrue.kernels.triton_common import (
    exp2_scale,
    from_order_key,
    load_logits,
    middle,
    order_key,
)
from spectrue.kernels.triton_launch import launch


@triton.jit
def wanted(top_k, top_p, min_p, row, vocab_size):
    """(k, p, min_p) of a row; vocab_size, 1 and 0 cut nothing."""
    k = vocab_size
    p = 1.0
    low = 0.0
    if top_k is not None:
        k = tl.load(top_k + row).to(tl.int32)
        k = tl.where((k <= 0) | (k > vocab_size), vocab_size, k)
    if top_p is not None:
        p = tl.load(top_p + row).to(tl.float32)
    if min_p is not None:
        low = tl.load(min_p + row).to(tl.float32)
    return k, p, low


@triton.jit
def ties_within(mass_missing, weight):
    """How many entries of one weight reach the mass, at least 1."""
    return tl.maximum(tl.ceil(mass_missing / weight), 1.0).to(tl.int32)


@triton.jit
def min_p_floor(low, peak, scale):
    """(log2 of min_p, a logit just below what min_p cuts); candidates are judged exactly later."""
    log_low = tl.where(low > 0, tl.log2(tl.maximum(low, 1e-37)), float("-inf"))
    floor = tl.where(low > 0, peak + log_low / scale, float("-inf"))
    return log_low, floor - tl.abs(floor) * 1e-6 - 1e-6 / scale


@triton.jit
def _from_up(
    logits,
    peak,
    scale,
    key,  # three keys from here, `step` apart
    step,
    vocab_size,
    WEIGHTS: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of the tokens from each of three keys up, the number or the weight: one pass over the row."""
    one = tl.zeros([BLOCK], tl.float32)
    two = tl.zeros([BLOCK], tl.float32)
    three = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < vocab_size
        x = load_logits(logits + column, mask)
        keys = order_key(x, SHIFT)
        value = tl.where(mask, 1.0, 0.0)
        if WEIGHTS:
            value = tl.where(mask, tl.exp2((x - peak) * scale), 0.0)
        one += tl.where(keys >= key, value, 0.0)
        two += tl.where(keys >= key + step, value, 0.0)
        three += tl.where(keys >= key + 2 * step, value, 0.0)
    return tl.sum(one, 0), tl.sum(two, 0), tl.sum(three, 0)


@triton.jit
def _search(
    logits,
    peak,
    scale,
    low,
    high,
    enough,
    vocab_size,
    WEIGHTS: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest key in [low, high] from which up there is `enough`; low must do."""
    while low < high:
        # Four parts; the last takes the rest. Halving twice keeps the difference unsigned.
        step = tl.maximum((middle(low, high) - low) // 2, 1)
        one, two, three = _from_up(
            logits, peak, scale, low + step, step, vocab_size, WEIGHTS, SHIFT, BLOCK
        )
        part = (one >= enough).to(tl.int32)
        part += (two >= enough).to(tl.int32) + (three >= enough).to(tl.int32)
        top = tl.where(part == 3, high, tl.minimum(low + (part + 1) * step - 1, high))
        low = tl.minimum(low + part * step, high)
        high = tl.maximum(top, low)
    return low


@triton.jit
def _whole_row_kernel(
    pivot_out,
    last_tie_out,
    flag,
    logits,
    stride,
    temperature,
    chunk_peak,
    chunk_sum,
    top_k,
    top_p,
    min_p,
    vocab_size,
    num_chunks,
    SHIFT: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(flag + row) != 0:
        TILE: tl.constexpr = CHUNKS * CHUNK
        k, p, low = wanted(top_k, top_p, min_p, row, vocab_size)
        scale = exp2_scale(temperature, row)
        logits += row * stride
        i = tl.arange(0, BLOCK)
        peaks = tl.load(chunk_peak + row * num_chunks + i, mask=i < num_chunks, other=float("-inf"))
        peak = tl.max(peaks, 0)
        high_key = order_key(peak, SHIFT)
        low_key = order_key(float("-inf"), SHIFT)
        pivot = float("-inf")
        ties = vocab_size
        if k < vocab_size:
            low_key = _search(
                logits, peak, scale, low_key, high_key, k, vocab_size, False, SHIFT, TILE
            )
            pivot = from_order_key(low_key, SHIFT)
            above = _from_up(logits, peak, scale, low_key + 1, 0, vocab_size, False, SHIFT, TILE)[0]
            ties = k - above.to(tl.int32)
        if p < 1:
            from_pivot, over_pivot, _ = _from_up(
                logits, peak, scale, low_key, 1, vocab_size, True, SHIFT, TILE
            )
            if k < vocab_size:
                tie_weight = tl.exp2((pivot - peak) * scale)
                from_pivot = over_pivot + ties.to(tl.float32) * tie_weight
            aim = p * from_pivot
            key = _search(
                logits, peak, scale, low_key, high_key, aim, vocab_size, True, SHIFT, TILE
            )
            over = _from_up(logits, peak, scale, key + 1, 0, vocab_size, True, SHIFT, TILE)[0]
            at_key = from_order_key(key, SHIFT)
            if at_key > float("-inf"):
                few = ties_within(aim - over, tl.exp2((at_key - peak) * scale))
                ties = tl.where(at_key > pivot, few, tl.minimum(few, ties))
            pivot = at_key
        # min_p; then the id of the last tie, and the sums of the cut law.
        if low > 0:
            log_low = min_p_floor(low, peak, scale)[0]
            smallest = peak
            for start in range(0, vocab_size, TILE):
                column = start + tl.arange(0, TILE)
                x = load_logits(logits + column, column < vocab_size)
                stays = (x - peak) * scale >= log_low
                smallest = tl.minimum(smallest, tl.min(tl.where(stays, x, peak), 0))
            ties = tl.where(smallest > pivot, vocab_size, ties)
            pivot = tl.maximum(pivot, smallest)
        seen = 0
        last_tie = 0
        for start in range(0, num_chunks, CHUNKS):
            chunk = start + tl.arange(0, CHUNKS)
            columns = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
            xs = load_logits(logits + columns, columns < vocab_size)
            flat = tl.reshape(xs, [TILE])
            ids = tl.reshape(columns, [TILE])
            is_tie = ((flat == pivot) & (ids < vocab_size)).to(tl.int32)
            rank = seen + tl.cumsum(is_tie, 0)
            last_tie = tl.maximum(
                last_tie, tl.max(tl.where((is_tie > 0) & (rank <= ties), ids, 0), 0)
            )
            keep = (flat > pivot) | ((is_tie > 0) & (rank <= ties))
            seen += tl.sum(is_tie, 0)
            of_chunk = tl.max(xs, 1)
            shift = tl.where(of_chunk > float("-inf"), of_chunk, 0.0)
            weight = tl.exp2((xs - shift[:, None]) * scale)
            weight = tl.where(tl.reshape(keep, [CHUNKS, CHUNK]), weight, 0.0)
            tl.store(
                chunk_sum + row * num_chunks + chunk, tl.sum(weight, 1), mask=chunk < num_chunks
            )
        tl.store(pivot_out + row, pivot)
        tl.store(last_tie_out + row, last_tie)


def search_whole_rows(
    rows: tuple[Any, ...],  # what the kernel takes, in its order
    shift: int,
    num_chunks: int,
) -> None:
    """The cuts of every row whose flag is set."""
    block = triton.next_power_of_2(num_chunks)
    launch(
        _whole_row_kernel,
        (len(rows[0]),),
        *rows,
        SHIFT=shift,
        CHUNKS=min(32, block),
        CHUNK=CHUNK,
        BLOCK=block,
        num_warps=8,
    )
