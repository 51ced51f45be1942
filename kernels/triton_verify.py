"""The match walk, over chains and trees: one program a request."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spectrue.kernels.reference_verify import PLACEHOLDER_TOKEN_ID, MatchResult
from spectrue.kernels.triton_launch import launch


def widest(cu_num_draft_tokens: Tensor, max_draft_tokens: int | None) -> int:
    """K. Asking the device for it waits for the device: a graph must be told."""
    if max_draft_tokens is not None:
        return max_draft_tokens
    if not len(cu_num_draft_tokens):
        return 0
    return int(torch.diff(cu_num_draft_tokens, prepend=cu_num_draft_tokens.new_zeros(1)).max())


@triton.jit
def span(cu_num_draft_tokens, request):
    """(first draft, number of drafts) of a request."""
    end = tl.load(cu_num_draft_tokens + request).to(tl.int32)
    first = tl.load(cu_num_draft_tokens + request - 1, mask=request > 0, other=0).to(tl.int32)
    return first, end - first


@triton.jit
def _walk_kernel(
    output,  # [B, width + 1]
    num_accepted,  # [B]
    invalid_out,  # [B]
    accepted_rows,  # [B, width]
    target,  # [R]
    draft,  # [D]
    parents,  # [D] or None: a chain
    cu_num_draft_tokens,
    row_valid,  # [R]
    width,
    PLACEHOLDER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    first, k = span(cu_num_draft_tokens, request)
    first_row = first + request
    i = tl.arange(0, BLOCK)
    mine = i < k
    token = tl.load(draft + first + i, mask=mine, other=PLACEHOLDER).to(tl.int64)
    if parents is None:
        parent = i
    else:
        parent = tl.load(parents + first + i, mask=mine, other=-1).to(tl.int32)
    tokens = tl.full([BLOCK], PLACEHOLDER, tl.int64)
    rows = tl.full([BLOCK], -1, tl.int64)
    last = tl.zeros([], tl.int32)
    length = tl.zeros([], tl.int32)
    wanted = tl.load(target + first_row).to(tl.int64)
    valid = tl.load(row_valid + first_row).to(tl.int1)
    child = tl.min(tl.where(mine & (parent == 0) & (token == wanted) & valid, i, BLOCK), 0)
    while child < BLOCK:
        here = i == length
        tokens = tl.where(here, wanted, tokens)
        last = child + 1
        rows = tl.where(here, last.to(tl.int64), rows)
        length += 1
        wanted = tl.load(target + first_row + last).to(tl.int64)
        valid = tl.load(row_valid + first_row + last).to(tl.int1)
        # A child has a later row than its parent, so that no list of parents makes a walk endless.
        child = tl.min(
            tl.where(mine & (parent == last) & (i >= last) & (token == wanted) & valid, i, BLOCK),
            0,
        )
    ends_with = tl.where(valid, wanted, PLACEHOLDER)
    tokens = tl.where(i == length, ends_with, tokens)
    tl.store(output + request.to(tl.int64) * (width + 1) + i, tokens, mask=i <= width)
    tl.store(accepted_rows + request.to(tl.int64) * width + i, rows, mask=i < width)
    tl.store(num_accepted + request, length.to(tl.int64))
    tl.store(invalid_out + request, valid == 0)


def verify_match(
    target_token_ids: Tensor,
    draft_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    row_valid: Tensor,
    *,
    parents: Tensor | None = None,
    max_draft_tokens: int | None = None,
) -> MatchResult:
    num_requests, device = len(cu_num_draft_tokens), target_token_ids.device
    width = widest(cu_num_draft_tokens, max_draft_tokens)
    output = torch.empty(num_requests, width + 1, dtype=torch.int64, device=device)
    num_accepted = torch.empty(num_requests, dtype=torch.int64, device=device)
    invalid = torch.empty(num_requests, dtype=torch.bool, device=device)
    accepted_rows = torch.empty(num_requests, width, dtype=torch.int64, device=device)
    launch(
        _walk_kernel,
        (num_requests,),
        output,
        num_accepted,
        invalid,
        accepted_rows,
        target_token_ids.contiguous(),
        draft_token_ids.contiguous(),
        None if parents is None else parents.contiguous(),
        cu_num_draft_tokens.contiguous(),
        row_valid.contiguous(),
        width,
        PLACEHOLDER=PLACEHOLDER_TOKEN_ID,
        BLOCK=triton.next_power_of_2(width + 1),
        num_warps=1,
    )
    return MatchResult(output, num_accepted, invalid, accepted_rows)
