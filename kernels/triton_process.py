"""The law of every row: single logits edited, then cuts found. The logits are not rewritten."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spectrue.kernels.row_law import RowLaw
from spectrue.kernels.triton_launch import launch
from spectrue.kernels.triton_rows import check_logits, with_chunks
from spectrue.kernels.triton_truncate import truncate

_BLOCK = 256


@triton.jit
def _penalty_kernel(
    logits,
    stride,
    rows,  # [N]
    tokens,  # [N]
    counts,  # [N] in the output
    repetition,  # [R]
    presence,
    frequency,
    n,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    row = tl.load(rows + i, mask=mask, other=0).to(tl.int64)
    count = tl.load(counts + i, mask=mask, other=0).to(tl.float32)
    place = logits + row * stride + tl.load(tokens + i, mask=mask, other=0)
    x = tl.load(place, mask=mask, other=0.0)
    strength = tl.load(repetition + row, mask=mask, other=1.0).to(tl.float32)
    x = tl.where(x > 0, x / strength, x * strength)
    additive = tl.load(presence + row, mask=mask, other=0.0).to(tl.float32)
    additive += tl.load(frequency + row, mask=mask, other=0.0).to(tl.float32) * count
    tl.store(place, x - tl.where(count > 0, additive, 0.0), mask=mask)


@triton.jit
def _add_kernel(
    logits,
    stride,
    rows,  # [N]
    tokens,  # [N]
    values,  # [N], or None: -inf
    n,
    BLOCK: tl.constexpr,
):
    """Entries of one token add up, so atomically. A mask is added too: NaN and +inf stay seen."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    row = tl.load(rows + i, mask=mask, other=0).to(tl.int64)
    place = logits + row * stride + tl.load(tokens + i, mask=mask, other=0)
    if values is None:
        x = tl.load(place, mask=mask, other=0.0)
        tl.store(place, x + float("-inf"), mask=mask)
    else:
        tl.atomic_add(place, tl.load(values + i, mask=mask, other=0.0).to(tl.float32), mask=mask)


def _add(logits: Tensor, row: Tensor, token: Tensor, value: Tensor | None) -> None:
    n = len(row)
    launch(
        _add_kernel,
        (triton.cdiv(n, _BLOCK),),
        logits,
        logits.stride(0),
        row.contiguous(),
        token.contiguous(),
        None if value is None else value.contiguous(),
        n,
        BLOCK=_BLOCK,
    )


def process_logits(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    penalties: tuple[Tensor, Tensor, Tensor] | None = None,
    repetition: Tensor | None = None,
    presence: Tensor | None = None,
    frequency: Tensor | None = None,
    bias: tuple[Tensor, Tensor, Tensor] | None = None,
    mask: tuple[Tensor, Tensor] | None = None,
) -> RowLaw:
    logits = check_logits(logits)
    if penalties is not None or bias is not None or mask is not None:
        # A float32 copy: in bfloat16 an edited logit would be rounded, and the law another.
        logits = logits.to(torch.float32, copy=True)
    if penalties is not None:
        if repetition is None or presence is None or frequency is None:
            raise ValueError("penalties need repetition, presence and frequency")
        row, token, count = penalties
        launch(
            _penalty_kernel,
            (triton.cdiv(len(row), _BLOCK),),
            logits,
            logits.stride(0),
            row.contiguous(),
            token.contiguous(),
            count.contiguous(),
            repetition.contiguous(),
            presence.contiguous(),
            frequency.contiguous(),
            len(row),
            BLOCK=_BLOCK,
        )
    if bias is not None:
        _add(logits, *bias)
    if mask is not None:
        _add(logits, *mask, None)
    law = with_chunks(RowLaw(logits, temperature.to(torch.float32)))
    if top_k is None and top_p is None and min_p is None:
        return law
    return truncate(law, top_k, top_p, min_p)
