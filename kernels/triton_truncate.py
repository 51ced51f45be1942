"""top_k, top_p and min_p: which logits of a row stay, found without sorting it.

Each cut keeps the largest logits, equal ones by token id, so the answer is a pivot and the last id
that ties with it. It is found by bisection over the logits' order, counting tokens or weights, in
the few chunks whose maximum is large enough: at least n tokens are not below the n-th largest
chunk maximum. A row for which those do not suffice (a wide nucleus, a large top_k, very many ties)
is flagged, and a second kernel bisects over the whole of it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from spectrue.kernels.row_law import CHUNK, RowLaw
from spectrue.kernels.triton_common import (
    exp2_scale,
    from_order_key,
    in_support,
    load_logits,
    middle,
    order_key,
)
from spectrue.kernels.triton_launch import launch

SLOTS = 128  # chunks that the first kernel can hold
REACH = 96  # the chunk maximum, by rank, down to which it looks where top_k does not say
_SHIFT = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}


@triton.jit
def _wanted(top_k, top_p, min_p, row, vocab_size):
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
def _largest_with_count(keys, low, high, count):
    """The largest key t in [low, high] with `count` keys or more from t up; low must do."""
    while low < high:
        mid = middle(low, high)
        enough = tl.sum((keys >= mid).to(tl.int32), 0) >= count
        low = tl.where(enough, mid, low)
        high = tl.where(enough, high, mid - 1)
    return low


@triton.jit
def _largest_with_mass(keys, weights, low, high, mass):
    """The same by weight."""
    while low < high:
        mid = middle(low, high)
        enough = tl.sum(tl.where(keys >= mid, weights, 0.0), 0) >= mass
        low = tl.where(enough, mid, low)
        high = tl.where(enough, high, mid - 1)
    return low


@triton.jit
def _ties_within(mass_missing, weight):
    """How many entries of one weight reach the mass, at least 1."""
    return tl.maximum(tl.ceil(mass_missing / weight), 1.0).to(tl.int32)


@triton.jit
def _candidates_kernel(
    pivot_out,  # [M]
    last_tie_out,  # [M]
    flag,  # [M] int32, 1 for the rows that the second kernel must do
    logits,
    stride,
    temperature,
    chunk_peak,
    chunk_sum,  # rewritten where a row is cut
    top_k,
    top_p,
    min_p,
    vocab_size,
    num_chunks,
    SHIFT: tl.constexpr,
    REACH: tl.constexpr,
    SLOTS: tl.constexpr,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    k, p, low = _wanted(top_k, top_p, min_p, row, vocab_size)
    temp = tl.load(temperature + row)
    scale = exp2_scale(temperature, row)
    i = tl.arange(0, BLOCK)
    peaks_at = chunk_peak + row * num_chunks
    peaks = tl.load(peaks_at + i, mask=i < num_chunks, other=float("-inf"))
    peak = tl.max(peaks, 0)
    pivot = float("-inf")
    last_tie = vocab_size - 1
    flagged = 0
    cuts = (k < vocab_size) | (p < 1) | (low > 0)
    if cuts & (temp > 0) & (peak > float("-inf")) & (peak < float("inf")):
        sums = tl.load(chunk_sum + row * num_chunks + i, mask=i < num_chunks, other=0.0)
        row_mass = tl.sum(tl.where(sums > 0, sums * tl.exp2((peaks - peak) * scale), 0.0), 0)
        # What lies below `floor` is out by min_p, whatever the other cuts say.
        log_low = tl.where(low > 0, tl.log2(tl.maximum(low, 1e-38)), float("-inf"))
        floor = tl.where(low > 0, peak + log_low / scale, float("-inf"))
        floor -= tl.abs(floor) * 1e-6 + 1e-6 / scale  # rounding: candidates are judged exactly
        # Chunks worth reading.
        high_key = order_key(peak, SHIFT)
        reach = peak
        if (k < vocab_size) | (p < 1):
            keys = order_key(peaks, SHIFT)
            rank = tl.minimum(tl.minimum(k, REACH), num_chunks)
            lowest = tl.min(keys, 0)
            reach = from_order_key(_largest_with_count(keys, lowest, high_key, rank), SHIFT)
        else:
            reach = floor
        reach = tl.maximum(reach, floor)
        selected = peaks >= reach
        num_selected = tl.sum(selected.to(tl.int32), 0)
        # The chunk of each slot: as many chunks lie before it as have a rank not above the slot's.
        slot = tl.arange(0, SLOTS)
        slot_chunk = tl.zeros([SLOTS], tl.int32)
        seen = 0
        for start in range(0, BLOCK, PART):
            j = start + tl.arange(0, PART)
            part = tl.load(peaks_at + j, mask=j < num_chunks, other=float("-inf")) >= reach
            rank_here = seen + tl.cumsum(part.to(tl.int32), 0)
            slot_chunk += tl.sum((rank_here[None, :] <= slot[:, None]).to(tl.int32), 1)
            seen += tl.sum(part.to(tl.int32), 0)
        used = slot < num_selected
        column = slot_chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        x = load_logits(logits + row * stride + column, used[:, None] & (column < vocab_size))
        x = tl.where(x >= reach, x, float("-inf"))
        flat = tl.reshape(x, [SLOTS * CHUNK])
        ids = tl.reshape(column, [SLOTS * CHUNK])
        here = flat > float("-inf")
        keys = order_key(flat, SHIFT)
        low_key = tl.min(tl.where(here, keys, high_key), 0)
        count = tl.sum(here.to(tl.int32), 0)
        weight = tl.where(here, tl.exp2((flat - peak) * scale), 0.0)
        # top_k: its pivot, and how many of the ties there stay.
        enough = count >= k
        kept = count
        if enough:
            low_key = _largest_with_count(keys, low_key, high_key, k)
            kept = k
        pivot = from_order_key(low_key, SHIFT)
        ties = kept - tl.sum((flat > pivot).to(tl.int32), 0)
        is_tie = here & (flat == pivot)
        rank_of_tie = tl.cumsum(is_tie.to(tl.int32), 0)
        weight = tl.where((flat > pivot) | (is_tie & (rank_of_tie <= ties)), weight, 0.0)
        # top_p, of what top_k left.
        reached = False
        if p < 1:
            left = tl.sum(weight, 0)
            aim = p * tl.where(enough, left, row_mass)
            reached = left >= aim
            if reached:
                key = _largest_with_mass(keys, weight, low_key, high_key, aim)
                at_key = from_order_key(key, SHIFT)
                missing = aim - tl.sum(tl.where(flat > at_key, weight, 0.0), 0)
                few = _ties_within(missing, tl.exp2((at_key - peak) * scale))
                ties = tl.where(at_key > pivot, few, tl.minimum(few, ties))
                pivot = at_key
        # Is the answer among the candidates? Without top_k's pivot top_p has no whole to refer to,
        # unless there is no top_k. And where all from the floor up are here, no cut looks below.
        by_floor = reach <= floor
        ok = enough | ((p >= 1) & by_floor) | ((p < 1) & (k == vocab_size) & (reached | by_floor))
        ok = ok & (num_selected <= SLOTS)
        if ok:
            # min_p: the pivot may move up, to the smallest logit that is not below the floor.
            if low > 0:
                stays = here & ((flat - peak) * scale >= log_low)
                smallest = tl.min(tl.where(stays, flat, float("inf")), 0)
                ties = tl.where(smallest > pivot, SLOTS * CHUNK, ties)
                pivot = tl.maximum(pivot, smallest)
            is_tie = here & (flat == pivot)
            rank_of_tie = tl.cumsum(is_tie.to(tl.int32), 0)
            last_tie = tl.max(tl.where(is_tie & (rank_of_tie <= ties), ids, 0), 0)
            # The cut law's chunk sums: those of the slots, and nothing elsewhere.
            tl.store(
                chunk_sum + row * num_chunks + i, 0.0, mask=(i < num_chunks) & (peaks < reach)
            )
            of_slot = tl.max(x, 1)
            inside = in_support(x, column, pivot, last_tie)
            weights = tl.where(inside, tl.exp2((x - of_slot[:, None]) * scale), 0.0)
            tl.store(
                chunk_sum + row * num_chunks + slot_chunk, tl.sum(weights, 1), mask=used
            )
        else:
            flagged = 1
    tl.store(pivot_out + row, pivot)
    tl.store(last_tie_out + row, last_tie)
    tl.store(flag + row, flagged)


@triton.jit
def _above(logits, peak, scale, key, vocab_size, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """(number, weight) of a row's tokens from `key` up: one pass over the row."""
    counts = tl.zeros([BLOCK], tl.int32)
    masses = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = load_logits(logits + column, column < vocab_size)
        stays = (order_key(x, SHIFT) >= key) & (column < vocab_size)
        counts += stays.to(tl.int32)
        masses += tl.where(stays, tl.exp2((x - peak) * scale), 0.0)
    return tl.sum(counts, 0), tl.sum(masses, 0)


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
        k, p, low = _wanted(top_k, top_p, min_p, row, vocab_size)
        scale = exp2_scale(temperature, row)
        logits += row * stride
        i = tl.arange(0, BLOCK)
        peaks = tl.load(
            chunk_peak + row * num_chunks + i, mask=i < num_chunks, other=float("-inf")
        )
        peak = tl.max(peaks, 0)
        high_key = order_key(peak, SHIFT)
        low_key = order_key(float("-inf"), SHIFT)
        TILE: tl.constexpr = CHUNKS * CHUNK
        # top_k
        number, mass = _above(logits, peak, scale, low_key, vocab_size, SHIFT, TILE)
        ties = vocab_size
        if k < vocab_size:
            bottom = low_key
            top = high_key
            while bottom < top:
                mid = middle(bottom, top)
                found, _ = _above(logits, peak, scale, mid, vocab_size, SHIFT, TILE)
                bottom = tl.where(found >= k, mid, bottom)
                top = tl.where(found >= k, top, mid - 1)
            low_key = bottom
            number, mass = _above(logits, peak, scale, low_key + 1, vocab_size, SHIFT, TILE)
            ties = k - number
            tie_weight = tl.exp2((from_order_key(low_key, SHIFT) - peak) * scale)
            mass += ties.to(tl.float32) * tie_weight
        pivot = from_order_key(low_key, SHIFT)
        # top_p
        if p < 1:
            aim = p * mass
            bottom = low_key
            top = high_key
            while bottom < top:
                mid = middle(bottom, top)
                _, found = _above(logits, peak, scale, mid, vocab_size, SHIFT, TILE)
                bottom = tl.where(found >= aim, mid, bottom)
                top = tl.where(found >= aim, top, mid - 1)
            _, found = _above(logits, peak, scale, bottom + 1, vocab_size, SHIFT, TILE)
            at_key = from_order_key(bottom, SHIFT)
            if at_key > float("-inf"):
                few = _ties_within(aim - found, tl.exp2((at_key - peak) * scale))
                ties = tl.where(at_key > pivot, few, tl.minimum(few, ties))
            pivot = at_key
        # min_p, then the id of the last tie and the sums of the cut law.
        log_low = tl.where(low > 0, tl.log2(tl.maximum(low, 1e-38)), float("-inf"))
        if low > 0:
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
            column = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
            x = load_logits(logits + column, column < vocab_size)
            flat = tl.reshape(x, [TILE])
            is_tie = (flat == pivot) & (tl.reshape(column, [TILE]) < vocab_size)
            rank = seen + tl.cumsum(is_tie.to(tl.int32), 0)
            stays = (flat > pivot) | (is_tie & (rank <= ties))
            ids = tl.reshape(column, [TILE])
            last_tie = tl.maximum(last_tie, tl.max(tl.where(is_tie & stays, ids, 0), 0))
            seen += tl.sum(is_tie.to(tl.int32), 0)
            of_chunk = tl.max(x, 1)
            shift = tl.where(of_chunk > float("-inf"), of_chunk, 0.0)
            weight = tl.exp2((x - shift[:, None]) * scale)
            weight = tl.where(tl.reshape(stays, [CHUNKS, CHUNK]), weight, 0.0)
            tl.store(
                chunk_sum + row * num_chunks + chunk, tl.sum(weight, 1), mask=chunk < num_chunks
            )
        tl.store(pivot_out + row, pivot)
        tl.store(last_tie_out + row, last_tie)


def truncate(
    law: RowLaw,  # with its chunks; the sums are rewritten
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
) -> RowLaw:
    """The law with its support."""
    logits = law.logits
    assert law.temperature is not None
    assert law.chunk_peak is not None
    num_rows, num_chunks = law.chunk_peak.shape
    pivot = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    last_tie = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    flag = torch.empty_like(last_tie)
    block = triton.next_power_of_2(num_chunks)
    args = (
        pivot,
        last_tie,
        flag,
        logits,
        logits.stride(0),
        law.temperature,
        law.chunk_peak,
        law.chunk_sum,
        None if top_k is None else top_k.contiguous(),
        None if top_p is None else top_p.contiguous(),
        None if min_p is None else min_p.contiguous(),
        law.vocab_size,
        num_chunks,
    )
    launch(
        _candidates_kernel,
        (num_rows,),
        *args,
        SHIFT=_SHIFT[logits.dtype],
        REACH=REACH,
        SLOTS=min(SLOTS, block),
        PART=min(128, block),
        CHUNK=CHUNK,
        BLOCK=block,
        num_warps=16,
    )
    launch(
        _whole_row_kernel,
        (num_rows,),
        *args,
        SHIFT=_SHIFT[logits.dtype],
        CHUNKS=min(32, block),
        CHUNK=CHUNK,
        BLOCK=block,
        num_warps=8,
    )
    return replace(law, pivot=pivot, last_tie=last_tie)
