"""Steps whose requests' lengths are known on the device alone: where their tokens are, and what
they leave for the step after them. A slot is a request's row in the engine's buffers.
"""

from __future__ import annotations

import torch
from torch import Tensor


def place_tokens(
    offset: Tensor,  # [N] int64, added to the length
    base: Tensor,  # [N] int64, whose length: a row of `lengths`
    lengths: Tensor,  # [S] int64
    request: Tensor,  # [N] int64, row of block_tables; < 0: its KV goes nowhere
    block_tables: Tensor,  # [B, W] int32, physical block of each logical one
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor]:  # [N] int64 positions; [N] int64 KV slots or -1; [N] int32
    """Positions `lengths[base] + offset`, the slots of their KV, and the positions as int32.

    A position before the first token is 0, one beyond the table's end is the last and has no slot.
    Raises ValueError naming the argument.
    """
    check_place(offset, base, request, block_tables)
    size = block_tables.shape[1] * block_size
    wanted = (lengths[base] + offset).clamp(min=0)
    positions = wanted.clamp(max=size - 1)
    found = block_tables[request.clamp(min=0), positions // block_size].to(torch.int64)
    slots = found * block_size + positions % block_size
    slots = torch.where((request >= 0) & (wanted < size), slots, -1)
    return positions, slots, positions.to(torch.int32)


def advance_slots(
    decided: Tensor,  # [L] int64, what verification found
    tokens_at: Tensor,  # [B] int64, where in it a request's tokens begin
    accepted_at: Tensor,  # [B] int64, where in it the number of its accepted drafts is
    before: Tensor,  # [B] int64, its committed tokens before the step
    slots: Tensor,  # [B] int64, no two the same among those that are read
    cu_query_lens: Tensor,  # [B + 1] int32, rows of the step before each request
    num_rows: int,  # T, of the step, padding included
    tokens: Tensor,  # [S, K] int64: column 0 becomes the slot's last token
    lengths: Tensor,  # [S] int64: becomes the slot's number of committed tokens
) -> tuple[Tensor, Tensor]:  # [T] int64, [B] int64
    """Commit a step on the device: the token after each row, and the last row that is committed.

    Rows after a request's last committed one are followed by what verification left there, or 0.
    """
    check_advance(tokens_at, accepted_at, before, slots, cu_query_lens)
    count = cu_query_lens.diff().to(torch.int64)
    accepted = torch.minimum(decided[accepted_at], count - 1).clamp(min=0)
    tokens[slots, 0] = decided[tokens_at + accepted].clamp(min=0)
    lengths[slots] = before + accepted + 1
    row = torch.arange(num_rows, dtype=torch.int32, device=decided.device)
    owner = torch.searchsorted(cu_query_lens[1:].contiguous(), row, right=True)
    real = owner < len(slots)
    owner = torch.where(real, owner, 0)
    at = torch.where(real, tokens_at[owner] + row - cu_query_lens[owner], 0)
    following = torch.where(real, decided[at].clamp(min=0), 0)
    return following, (cu_query_lens[:-1] + accepted).clamp(max=num_rows - 1)


def check_place(offset: Tensor, base: Tensor, request: Tensor, block_tables: Tensor) -> None:
    if offset.shape != base.shape or offset.shape != request.shape:
        raise ValueError(
            f"offset, base and request must be of one length, not {len(offset)}, {len(base)} "
            f"and {len(request)}"
        )
    if block_tables.dim() != 2 or not block_tables.is_contiguous():
        raise ValueError("block_tables must be contiguous [B, W]")


def check_advance(
    tokens_at: Tensor, accepted_at: Tensor, before: Tensor, slots: Tensor, cu_query_lens: Tensor
) -> None:
    n = len(cu_query_lens) - 1
    named = {"tokens_at": tokens_at, "accepted_at": accepted_at, "before": before, "slots": slots}
    for name, tensor in named.items():
        if tensor.shape != (n,):
            raise ValueError(f"{name} must be [{n}], not {list(tensor.shape)}")
