"""Recording the law that a draft was drawn from, in Triton: one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from spectrue.kernels.reference_draw import check_record
from spectrue.kernels.row_law import RowLaw
from spectrue.kernels.triton_common import in_support, load_logits, load_support
from spectrue.kernels.triton_launch import launch
from spectrue.kernels.triton_rows import check_logits

BLOCK = 4096


def record_law(
    law: RowLaw,
    token_ids: Tensor,
    rows: Tensor,
    *,
    logits: Tensor,
    log_normalizer: Tensor,
    token_probs: Tensor,
) -> None:
    check_record(law, token_ids, rows, logits, log_normalizer, token_probs)
    source = check_logits(law.logits)
    block = min(BLOCK, triton.next_power_of_2(law.vocab_size))
    launch(
        _record_kernel,
        (law.num_rows,),
        source,
        law.temperature,
        law.pivot,
        law.last_tie,
        law.index,
        token_ids,
        rows,
        logits,
        log_normalizer,
        token_probs,
        source.stride(0),
        law.vocab_size,
        num_warps=max(1, min(8, block // 256)),
        BLOCK=block,
    )


@triton.jit
def _record_kernel(
    source,  # [M, V]
    temperature,  # [M] or None
    pivot,  # [M] or None
    last_tie,
    index,  # [R] or None
    token_ids,  # [R]
    rows,  # [R]
    logits,  # [N, V] float32, output
    log_normalizer,  # [N] output
    token_probs,  # [N] output
    stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(0)
    row = number.to(tl.int64)
    if index is not None:
        row = tl.load(index + number)
    to = tl.load(rows + number)
    x_row = source + row * stride
    out = logits + to * vocab_size
    cut, tie = load_support(pivot, last_tie, row, vocab_size)
    peak = float("-inf")
    for start in range(0, vocab_size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        peak = tl.maximum(peak, tl.max(load_logits(x_row + column, column < vocab_size), 0))
    # As `RowLaw.scaled` does: a row that takes its argmax keeps its logits.
    divisor, shift = 1.0, 0.0
    if temperature is not None:
        t = tl.load(temperature + row).to(tl.float32)
        divisor, shift = tl.where(t > 0, t, 1.0), tl.where(t > 0, peak, 0.0)
    top = (peak - shift) / divisor
    total = 0.0
    for start in range(0, vocab_size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < vocab_size
        x = load_logits(x_row + column, mask)
        inside = in_support(x, column, cut, tie) & mask
        value = tl.where(inside, (x - shift) / divisor, float("-inf"))
        total += tl.sum(tl.exp(value - top), 0)
        tl.store(out + column, value, mask=mask)
    normalizer = tl.log(total) + top
    token = tl.load(token_ids + number)
    x = load_logits(x_row + token, True)
    inside = in_support(x, token, cut, tie)
    prob = tl.exp(tl.where(inside, (x - shift) / divisor, float("-inf")) - normalizer)
    tl.store(log_normalizer + to, normalizer)
    # Not `minimum`: it loses a NaN, which verification must see.
    tl.store(token_probs + to, tl.where(prob > 1.0, 1.0, prob))
