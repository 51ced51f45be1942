"""Where the tokens of a step are, and what it leaves for the next one, in Triton: a launch each.

In a step of 5 ms every launch of a tiny kernel counts for 2 us, so each of the two does all it can.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spectrue.kernels.reference_slots import check_advance, check_place
from spectrue.kernels.triton_common import await_previous
from spectrue.kernels.triton_launch import launch

BLOCK = 128


def place_tokens(
    offset: Tensor,
    base: Tensor,
    lengths: Tensor,
    request: Tensor,
    block_tables: Tensor,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    check_place(offset, base, request, block_tables)
    positions, slots = torch.empty_like(offset), torch.empty_like(offset)
    narrow = torch.empty_like(offset, dtype=torch.int32)
    size = len(offset)
    launch(
        _place_kernel,
        (triton.cdiv(size, BLOCK),),
        offset,
        base,
        lengths,
        request,
        block_tables,
        positions,
        slots,
        narrow,
        size,
        block_tables.shape[1],
        block_size,
        num_warps=1,
        BLOCK=BLOCK,
    )
    return positions, slots, narrow


@triton.jit
def _place_kernel(
    offset,  # [N]
    base,  # [N]
    lengths,  # [S]
    request,  # [N]
    block_tables,  # [B, W]
    positions,  # [N] output
    slots,  # [N] output
    narrow,  # [N] output
    size,
    width,
    block_size,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):
    await_previous(PDL)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    length = tl.load(lengths + tl.load(base + i, mask=inside, other=0), mask=inside, other=0)
    position = tl.maximum(length + tl.load(offset + i, mask=inside, other=0), 0)
    owner = tl.load(request + i, mask=inside, other=-1)
    # 32 bits: a division of 64 is a long one, and positions are far below.
    small = position.to(tl.int32)
    block = small // block_size
    has_kv = (owner >= 0) & (block < width)
    found = tl.load(block_tables + owner * width + block, mask=has_kv, other=0).to(tl.int64)
    slot = tl.where(has_kv, found * block_size + small % block_size, -1)
    position = tl.minimum(position, width * block_size - 1)
    tl.store(positions + i, position, mask=inside)
    tl.store(slots + i, slot, mask=inside)
    tl.store(narrow + i, position.to(tl.int32), mask=inside)


def advance_slots(
    decided: Tensor,
    tokens_at: Tensor,
    accepted_at: Tensor,
    before: Tensor,
    slots: Tensor,
    cu_query_lens: Tensor,
    num_rows: int,
    tokens: Tensor,
    lengths: Tensor,
) -> tuple[Tensor, Tensor]:
    check_advance(tokens_at, accepted_at, before, slots, cu_query_lens)
    following, last = decided.new_empty(num_rows), torch.empty_like(slots)
    launch(
        _advance_kernel,
        (len(slots) + 1,),
        decided,
        tokens_at,
        accepted_at,
        before,
        slots,
        cu_query_lens,
        tokens,
        lengths,
        following,
        last,
        num_rows,
        tokens.stride(0),
        num_warps=1,
        BLOCK=16,
    )
    return following, last


@triton.jit
def _advance_kernel(
    decided,  # [L]
    tokens_at,  # [B]
    accepted_at,  # [B]
    before,  # [B]
    slots,  # [B]
    cu_query_lens,  # [B + 1]
    tokens,  # [S, K], changed
    lengths,  # [S], changed
    following,  # [T] output
    last,  # [B] output
    num_rows,
    tokens_stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """A program a request; one more for the rows that are padding."""
    await_previous(PDL)
    request = tl.program_id(0)
    start = tl.load(cu_query_lens + request)
    j = tl.arange(0, BLOCK)
    if request == tl.num_programs(0) - 1:
        for first in range(start, num_rows, BLOCK):
            tl.store(following + first + j, tl.zeros([BLOCK], tl.int64), mask=first + j < num_rows)
    else:
        count = tl.load(cu_query_lens + request + 1) - start
        accepted = tl.load(decided + tl.load(accepted_at + request))
        accepted = tl.maximum(tl.minimum(accepted, count.to(tl.int64) - 1), 0)
        found = decided + tl.load(tokens_at + request)
        slot = tl.load(slots + request)
        tl.store(tokens + slot * tokens_stride, tl.maximum(tl.load(found + accepted), 0))
        tl.store(lengths + slot, tl.load(before + request) + accepted + 1)
        tl.store(last + request, tl.minimum(start.to(tl.int64) + accepted, num_rows - 1))
        for first in range(0, count, BLOCK):
            inside = first + j < count
            token = tl.maximum(tl.load(found + first + j, mask=inside, other=0), 0)
            tl.store(following + start + first + j, token, mask=inside)
