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
from spectrue.kernels.triton_launch import launch, warps_for
from spectrue.kernels.triton_search import min_p_floor, search_whole_rows, ties_within, wanted

SLOTS = 128  # chunks that the candidates may lie in
REACH = 120  # the chunk maximum, by rank, down to which candidates go where top_k does not say
WIDTH = 16  # slots of a program
ROOM = 128  # candidates in the chunks of WIDTH slots
_SHIFT = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}


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
def _select_kernel(
    slots,  # [M, SLOTS] the chunks to look into, ascending; after them num_chunks
    reach_out,  # [M] logits from here up are all in those chunks; inf for a row that is not cut
    mass_out,  # [M] the row's weights, relative to its peak
    flag,  # [M] int32, 1 where there are more such chunks than slots
    pivot_out,  # [M] -inf: nothing is cut yet
    last_tie_out,
    temperature,
    chunk_peak,
    chunk_sum,
    top_k,
    top_p,
    min_p,
    vocab_size,
    num_chunks,
    SHIFT: tl.constexpr,
    REACH: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    k, p, low = wanted(top_k, top_p, min_p, row, vocab_size)
    i = tl.arange(0, BLOCK)
    peaks_at = chunk_peak + row * num_chunks
    peaks = tl.load(peaks_at + i, mask=i < num_chunks, other=float("-inf"))
    peak = tl.max(peaks, 0)
    reach = float("inf")
    flagged = 0
    cuts = (k < vocab_size) | (p < 1) | (low > 0)
    if cuts & (tl.load(temperature + row) > 0) & (peak > float("-inf")) & (peak < float("inf")):
        scale = exp2_scale(temperature, row)
        sums = tl.load(chunk_sum + row * num_chunks + i, mask=i < num_chunks, other=0.0)
        mass = tl.where(sums > 0, sums * tl.exp2((peaks - peak) * scale), 0.0)
        tl.store(mass_out + row, tl.sum(mass, 0))
        floor = min_p_floor(low, peak, scale)[1]
        if (k < vocab_size) | (p < 1):
            keys = order_key(peaks, SHIFT)
            rank_of_reach = tl.minimum(tl.minimum(k, REACH), num_chunks)
            lowest = tl.min(tl.where(i < num_chunks, keys, 0x7FFFFFFF), 0)
            key = _largest_with_count(keys, lowest, order_key(peak, SHIFT), rank_of_reach)
            reach = from_order_key(key, SHIFT)
            # top_p needs the weights of all that top_k leaves, also below min_p's floor.
            if (k == vocab_size) | (p >= 1):
                reach = tl.maximum(reach, floor)
        else:
            reach = floor
        selected = peaks >= reach
        rank = tl.cumsum(selected.to(tl.int32), 0)
        found = tl.max(rank, 0)
        slots += row * SLOTS
        tl.store(slots + rank - 1, i, mask=selected & (rank <= SLOTS))
        slot = tl.arange(0, SLOTS)
        tl.store(slots + slot, num_chunks, mask=slot >= found)
        flagged = (found > SLOTS).to(tl.int32)
    tl.store(reach_out + row, reach)
    tl.store(flag + row, flagged)
    tl.store(pivot_out + row, float("-inf"))
    tl.store(last_tie_out + row, vocab_size - 1)


@triton.jit
def _gather_kernel(
    values,  # [M, PARTS, ROOM] the candidates of a row by token id, a part for some of the slots
    ids,  # [M, PARTS, ROOM]
    count,  # [M, PARTS]
    slots,
    reach_in,
    logits,
    stride,
    vocab_size,
    PARTS: tl.constexpr,
    ROOM: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    row = at // PARTS
    reach = tl.load(reach_in + row)
    if reach < float("inf"):
        # A slot too many holds a chunk too far, and its columns lie beyond the vocabulary.
        slot_chunk = tl.load(slots + at * WIDTH + tl.arange(0, WIDTH))
        columns = slot_chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        x = load_logits(logits + row * stride + columns, columns < vocab_size)
        take = ((x >= reach) & (x > float("-inf"))).to(tl.int32)
        of_slot = tl.sum(take, 1)
        before = tl.cumsum(of_slot, 0) - of_slot
        place = before[:, None] + tl.cumsum(take, 1) - 1
        fits = (take > 0) & (place < ROOM)
        tl.store(values + at * ROOM + place, x, mask=fits)
        tl.store(ids + at * ROOM + place, columns, mask=fits)
        tl.store(count + at, tl.sum(of_slot, 0))


@triton.jit
def _cut_kernel(
    values,
    ids,
    count,
    reach_in,
    mass_in,
    flag,  # set where the candidates do not suffice
    pivot_out,
    last_tie_out,
    temperature,
    top_k,
    top_p,
    min_p,
    vocab_size,
    SHIFT: tl.constexpr,
    PARTS: tl.constexpr,
    ROOM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    reach = tl.load(reach_in + row)
    if (reach < float("inf")) & (tl.load(flag + row) == 0):
        k, p, low = wanted(top_k, top_p, min_p, row, vocab_size)
        scale = exp2_scale(temperature, row)
        i = tl.arange(0, PARTS * ROOM)
        of_part = tl.load(count + row * PARTS + i // ROOM)
        here = i % ROOM < of_part
        number = tl.sum(here.to(tl.int32), 0)
        all_here = tl.max(of_part, 0) <= ROOM
        x = tl.load(values + row * PARTS * ROOM + i, mask=here, other=float("-inf"))
        token = tl.load(ids + row * PARTS * ROOM + i, mask=here, other=0)
        peak = tl.max(x, 0)
        keys = order_key(x, SHIFT)
        high_key = order_key(peak, SHIFT)
        low_key = tl.min(tl.where(here, keys, high_key), 0)
        weight = tl.exp2((x - peak) * scale)
        # top_k: its pivot, and how many of the ties there stay.
        enough = number >= k
        kept = tl.minimum(number, k)
        if enough:
            low_key = _largest_with_count(keys, low_key, high_key, k)
        pivot = from_order_key(low_key, SHIFT)
        ties = kept - tl.sum((x > pivot).to(tl.int32), 0)
        # top_p, of what top_k left.
        reached = False
        if p < 1:
            over = (x == pivot) & (tl.cumsum((x == pivot).to(tl.int32), 0) > ties)
            weight = tl.where((x < pivot) | over, 0.0, weight)
            left = tl.sum(weight, 0)
            aim = p * tl.where(enough, left, tl.load(mass_in + row))
            reached = left >= aim
            if reached:
                key = _largest_with_mass(keys, weight, low_key, high_key, aim)
                at_key = from_order_key(key, SHIFT)
                missing = aim - tl.sum(tl.where(x > at_key, weight, 0.0), 0)
                few = ties_within(missing, tl.exp2((at_key - peak) * scale))
                ties = tl.where(at_key > pivot, few, tl.minimum(few, ties))
                pivot = at_key
        # Is the answer among the candidates? Without top_k's pivot top_p has no whole to refer to,
        # unless there is no top_k. Where all from min_p's floor up are here, no cut looks below it.
        log_low, floor = min_p_floor(low, peak, scale)
        by_floor = reach <= floor
        ok = enough | ((p >= 1) & by_floor) | ((p < 1) & (k == vocab_size) & (reached | by_floor))
        if ok & all_here:
            # min_p: the pivot may move up, to the smallest logit that it keeps.
            if low > 0:
                stays = (x - peak) * scale >= log_low
                smallest = tl.min(tl.where(stays, x, peak), 0)
                ties = tl.where(smallest > pivot, PARTS * ROOM, ties)
                pivot = tl.maximum(pivot, smallest)
            stays = (x == pivot) & (tl.cumsum((x == pivot).to(tl.int32), 0) <= ties)
            tl.store(pivot_out + row, pivot)
            tl.store(last_tie_out + row, tl.max(tl.where(stays, token, 0), 0))
        else:
            tl.store(flag + row, 1)


@triton.jit
def _sums_kernel(
    chunk_sum,  # of the cut law: those of the slots, and nothing elsewhere
    slots,
    reach_in,
    flag,
    logits,
    stride,
    temperature,
    pivot,
    last_tie,
    chunk_peak,
    vocab_size,
    num_chunks,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = place // PARTS
    reach = tl.load(reach_in + row)
    if (reach < float("inf")) & (tl.load(flag + row) == 0):
        i = place % PARTS * SHARE + tl.arange(0, SHARE)
        at = row * num_chunks
        peaks = tl.load(chunk_peak + at + i, mask=i < num_chunks, other=float("inf"))
        tl.store(chunk_sum + at + i, 0.0, mask=peaks < reach)
        chunk = tl.load(slots + place * WIDTH + tl.arange(0, WIDTH))
        columns = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        x = load_logits(logits + row * stride + columns, columns < vocab_size)
        inside = in_support(x, columns, tl.load(pivot + row), tl.load(last_tie + row))
        peak = tl.max(x, 1)
        weight = tl.exp2((x - peak[:, None]) * exp2_scale(temperature, row))
        total = tl.sum(tl.where(inside, weight, 0.0), 1)
        tl.store(chunk_sum + at + chunk, total, mask=chunk < num_chunks)


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
    num_slots = min(SLOTS, block)
    width = min(WIDTH, num_slots)
    parts = num_slots // width
    slots = torch.empty(num_rows, num_slots, dtype=torch.int32, device=logits.device)
    values = torch.empty(num_rows, parts, ROOM, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_rows, parts, ROOM, dtype=torch.int32, device=logits.device)
    count = torch.empty(num_rows, parts, dtype=torch.int32, device=logits.device)
    reach, mass = torch.empty_like(pivot), torch.empty_like(pivot)
    cuts = tuple(None if cut is None else cut.contiguous() for cut in (top_k, top_p, min_p))
    shift, vocab_size = _SHIFT[logits.dtype], law.vocab_size
    rows = logits, logits.stride(0)
    chunks = law.chunk_peak, law.chunk_sum
    launch(
        _select_kernel,
        (num_rows,),
        *(slots, reach, mass, flag, pivot, last_tie),
        *(law.temperature, *chunks, *cuts, vocab_size, num_chunks),
        SHIFT=shift,
        REACH=REACH,
        SLOTS=num_slots,
        BLOCK=block,
        num_warps=warps_for(block, 4 if block <= 1024 else 8),
    )
    launch(
        _gather_kernel,
        (parts * num_rows,),
        *(values, ids, count, slots, reach, *rows, vocab_size),
        PARTS=parts,
        ROOM=ROOM,
        WIDTH=width,
        CHUNK=CHUNK,
    )
    launch(
        _cut_kernel,
        (num_rows,),
        *(values, ids, count, reach, mass, flag, pivot, last_tie),
        *(law.temperature, *cuts, vocab_size),
        SHIFT=shift,
        PARTS=parts,
        ROOM=ROOM,
    )
    launch(
        _sums_kernel,
        (parts * num_rows,),
        *(law.chunk_sum, slots, reach, flag, *rows),
        *(law.temperature, pivot, last_tie, law.chunk_peak, vocab_size, num_chunks),
        PARTS=parts,
        WIDTH=width,
        SHARE=triton.next_power_of_2(triton.cdiv(num_chunks, parts)),
        CHUNK=CHUNK,
    )
    search_whole_rows(
        (pivot, last_tie, flag, *rows, law.temperature, *chunks, *cuts, vocab_size, num_chunks),
        shift,
        num_chunks,
    )
    return replace(law, pivot=pivot, last_tie=last_tie)
