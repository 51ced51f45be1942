"""One pass over the logits: the largest of every chunk of 128 tokens, and the chunk's weight.

Everything else starts from these: 1/64 of a bfloat16 row's bytes, each. A chunk is reduced within
a few lanes of one warp, so the pass has no barrier, and every value takes one exponential.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from spectrue.kernels.reference_rows import RowStatistics
from spectrue.kernels.row_law import CHUNK, RowLaw
from spectrue.kernels.triton_common import (
    exp2_scale,
    in_support,
    load_logits,
    load_support,
)
from spectrue.kernels.triton_launch import launch, warps_for

CHUNKS = 64  # of a program that sums
CHUNKS_OF_MAXIMA = 16  # of one that does not: measured, docs/performance.md
_LN2 = tl.constexpr(0.6931471805599453)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _chunk_kernel(
    logits,
    stride,
    temperature,  # [M] or None
    chunk_peak,  # [M, num_chunks]
    chunk_sum,  # [M, num_chunks] or None: maxima only
    vocab_size,
    num_chunks,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    parts = tl.cdiv(num_chunks, CHUNKS)
    row = (tl.program_id(0) // parts).to(tl.int64)
    chunk = tl.program_id(0) % parts * CHUNKS + tl.arange(0, CHUNKS)
    column = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    mask = column < vocab_size
    out = row * num_chunks + chunk
    if chunk_sum is None:
        peak = tl.max(load_logits(logits + row * stride + column, mask), 1)
    else:
        # NaN is looked for in the sums, not in every value: the pass is bound by instructions.
        x = tl.load(logits + row * stride + column, mask=mask, other=float("-inf")).to(tl.float32)
        peak = tl.max(x, 1)
        shift = tl.where(peak == float("-inf"), 0.0, peak)
        weight = tl.exp2((x - shift[:, None]) * exp2_scale(temperature, row))
        total = tl.sum(weight, 1)
        peak = tl.where(total == total, peak, float("inf"))
        tl.store(chunk_sum + out, total, mask=chunk < num_chunks)
    tl.store(chunk_peak + out, peak, mask=chunk < num_chunks)


def check_logits(logits: Tensor) -> Tensor:
    """Rows of contiguous half or single floats. Raises ValueError for another dtype."""
    if logits.dtype not in _DTYPES:
        raise ValueError(f"logits are {logits.dtype}, the kernels take {_DTYPES}")
    return logits if logits.stride(1) == 1 else logits.contiguous()


def with_chunks(law: RowLaw, sums: bool = True) -> RowLaw:
    """The law with its chunk_peak and, if asked for, chunk_sum."""
    if law.chunk_peak is not None and (law.chunk_sum is not None or not sums):
        return law
    logits = check_logits(law.logits)
    num_rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    chunks = min(CHUNKS if sums else CHUNKS_OF_MAXIMA, triton.next_power_of_2(num_chunks))
    shape = num_rows, num_chunks
    peak = torch.empty(shape, dtype=torch.float32, device=logits.device)
    weight = torch.empty_like(peak) if sums else None
    launch(
        _chunk_kernel,
        (triton.cdiv(num_chunks, chunks) * num_rows,),
        logits,
        logits.stride(0),
        law.temperature,
        peak,
        weight,
        vocab_size,
        num_chunks,
        CHUNKS=chunks,
        CHUNK=CHUNK,
        num_warps=warps_for(chunks * CHUNK // (8 if sums else 4), 8),
    )
    return replace(law, logits=logits, chunk_peak=peak, chunk_sum=weight)


@triton.jit
def sum_chunks(chunk_peak, chunk_sum, row, scale, num_chunks, BLOCK: tl.constexpr):
    """(largest logit, sum of the weights relative to it) of a row; the peak shows a bad row."""
    i = tl.arange(0, BLOCK)
    mask = i < num_chunks
    peaks = tl.load(chunk_peak + row * num_chunks + i, mask=mask, other=float("-inf"))
    sums = tl.load(chunk_sum + row * num_chunks + i, mask=mask, other=0.0)
    peak = tl.max(peaks, 0)
    shift = tl.where((peak > float("-inf")) & (peak < float("inf")), peak, 0.0)
    return peak, tl.sum(tl.where(sums > 0, sums * tl.exp2((peaks - shift) * scale), 0.0), 0)


@triton.jit
def _total_kernel(
    chunk_peak,
    chunk_sum,
    temperature,  # [M] or None
    index,  # [R] or None
    row_peak,  # [R]
    row_total,  # [R] weights relative to row_peak, or None
    row_valid,  # [R] or None
    row_logsumexp,  # [R] or None
    num_chunks,
    BLOCK: tl.constexpr,
):
    out = tl.program_id(0)
    row = out.to(tl.int64)
    if index is not None:
        row = tl.load(index + out)
    if chunk_sum is None:
        i = tl.arange(0, BLOCK)
        peaks = chunk_peak + row * num_chunks + i
        peak = tl.max(tl.load(peaks, mask=i < num_chunks, other=float("-inf")), 0)
    else:
        scale = exp2_scale(temperature, row)
        peak, total = sum_chunks(chunk_peak, chunk_sum, row, scale, num_chunks, BLOCK)
        if row_total is not None:
            tl.store(row_total + out, total)
        if row_logsumexp is not None:
            valid = (peak > float("-inf")) & (peak < float("inf"))
            found = tl.where(valid, tl.log(total) + peak * scale * _LN2, peak)
            tl.store(row_logsumexp + out, found)
    if row_peak is not None:
        tl.store(row_peak + out, peak)
    if row_valid is not None:
        tl.store(row_valid + out, (peak > float("-inf")) & (peak < float("inf")))


def row_totals(law: RowLaw) -> tuple[Tensor, Tensor]:
    """Of every row: the largest logit, and the weights' sum relative to it. [R] float32 each."""
    law = with_chunks(law)
    assert law.chunk_peak is not None
    peak = torch.empty(law.num_rows, dtype=torch.float32, device=law.logits.device)
    total = torch.empty_like(peak)
    _launch_totals(law, peak=peak, total=total)
    return peak, total


def _launch_totals(
    law: RowLaw,
    *,
    peak: Tensor | None = None,
    total: Tensor | None = None,
    valid: Tensor | None = None,
    logsumexp: Tensor | None = None,
) -> None:
    assert law.chunk_peak is not None
    num_chunks = law.chunk_peak.shape[1]
    block = triton.next_power_of_2(num_chunks)
    launch(
        _total_kernel,
        (law.num_rows,),
        law.chunk_peak,
        law.chunk_sum,
        law.temperature,
        law.index,
        peak,
        total,
        valid,
        logsumexp,
        num_chunks,
        BLOCK=block,
        num_warps=warps_for(block),
    )


def valid_rows(logits: Tensor) -> Tensor:
    law = with_chunks(RowLaw(logits), sums=False)
    valid = torch.empty(law.num_rows, dtype=torch.bool, device=logits.device)
    _launch_totals(law, valid=valid)
    return valid


def logsumexp_rows(logits: Tensor, inv_temperature: Tensor | None = None) -> Tensor:
    temperature = None if inv_temperature is None else 1 / inv_temperature
    law = with_chunks(RowLaw(logits, temperature))
    out = torch.empty(law.num_rows, dtype=torch.float32, device=logits.device)
    _launch_totals(law, logsumexp=out)
    return out


@triton.jit
def _statistics_kernel(
    logits,
    stride,
    temperature,
    pivot,
    last_tie,
    index,
    row_peak,  # [R]
    row_total,  # [R]
    token_ids,  # [R]
    logsumexp,  # [R] outputs
    argmax,
    entropy,
    surprisal,
    variance,
    vocab_size,
    BLOCK: tl.constexpr,
):
    out = tl.program_id(0)
    row = out.to(tl.int64)
    if index is not None:
        row = tl.load(index + out)
    scale = exp2_scale(temperature, row)
    cut, tie = load_support(pivot, last_tie, row, vocab_size)
    peak = tl.load(row_peak + out)
    total = tl.load(row_total + out)
    log_total = tl.log(total)
    mean = 0.0
    square = 0.0
    best = vocab_size
    for start in range(0, vocab_size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = load_logits(logits + row * stride + column, column < vocab_size)
        inside = in_support(x, column, cut, tie) & (x > float("-inf"))
        surprise = tl.where(inside, log_total - (x - peak) * scale * _LN2, 0.0)
        prob = tl.where(inside, tl.exp2((x - peak) * scale), 0.0) / total
        mean += tl.sum(prob * surprise, 0)
        square += tl.sum(prob * surprise * surprise, 0)
        best = tl.minimum(best, tl.min(tl.where(x == peak, column, vocab_size), 0))
    token = tl.load(token_ids + out)
    x = load_logits(logits + row * stride + token, True)
    inside = in_support(x, token, cut, tie) & (x > float("-inf"))
    surprise = log_total - (x - peak) * scale * _LN2
    tl.store(logsumexp + out, log_total)
    tl.store(argmax + out, best.to(tl.int64))
    tl.store(entropy + out, mean)
    tl.store(surprisal + out, tl.where(inside, surprise, float("inf")))
    tl.store(variance + out, tl.maximum(square - mean * mean, 0.0))


def row_statistics(law: RowLaw, token_ids: Tensor) -> RowStatistics:
    law = with_chunks(law)
    peak, total = row_totals(law)
    argmax = torch.empty(law.num_rows, dtype=torch.int64, device=peak.device)
    logsumexp, entropy, surprisal, variance = (torch.empty_like(peak) for _ in range(4))
    launch(
        _statistics_kernel,
        (law.num_rows,),
        law.logits,
        law.logits.stride(0),
        law.temperature,
        law.pivot,
        law.last_tie,
        law.index,
        peak,
        total,
        token_ids,
        logsumexp,
        argmax,
        entropy,
        surprisal,
        variance,
        law.vocab_size,
        BLOCK=2048,
        num_warps=8,
    )
    return RowStatistics(peak, logsumexp, argmax, entropy, surprisal, variance)
