"""One token a row from the logits: argmax, hierarchical inverse CDF, or Gumbel-max.

A program a row reads the maxima and sums of its chunks, picks the chunk, and reads that alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spectrue.kernels.philox import STREAM_GUMBEL, STREAM_GUMBEL_REST
from spectrue.kernels.reference_draw import DRAW_ARGMAX, DRAW_GUMBEL, DRAW_UNIFORM
from spectrue.kernels.row_law import CHUNK, RowLaw
from spectrue.kernels.triton_common import (
    exp2_scale,
    in_support,
    load_logits,
    load_support,
)
from spectrue.kernels.triton_gumbel import gumbel_by_id, gumbel_max
from spectrue.kernels.triton_launch import launch, warps_for
from spectrue.kernels.triton_rows import with_chunks

_DRAW_BY_ROW = 3


@triton.jit
def first_above(weights, aim, SIZE: tl.constexpr):
    """(place, mass before it): where the running sum of `weights` passes `aim`.

    Only places that weigh something, and the last such where rounding runs off the end: a parallel
    sum may step by a rounding error where nothing was added.
    """
    i = tl.arange(0, SIZE)
    # One reduction for both: the first place above, else the last one (counted from the end).
    at = tl.where(tl.cumsum(weights, 0) > aim, i, 2 * SIZE - i)
    found = tl.min(tl.where(weights > 0, at, 2 * SIZE), 0)
    place = tl.where(found < SIZE, found, 2 * SIZE - found)
    return place, tl.sum(tl.where(i < place, weights, 0.0), 0)


@triton.jit
def _argmax(logits, peaks, peak, vocab_size, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    chunk = tl.min(tl.where(peaks == peak, i, BLOCK - 1), 0)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    x = load_logits(logits + column, column < vocab_size)
    return tl.min(tl.where(x == peak, column, vocab_size - 1), 0)


@triton.jit
def _inverse_cdf(
    logits,
    peaks,
    peak,
    sums,
    scale,
    uniform,
    cut,
    tie,
    vocab_size,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # A chunk without weight has no sum, or one that a peak of -inf makes NaN.
    mass = tl.where(sums > 0, sums * tl.exp2((peaks - peak) * scale), 0.0)
    chunk, before = first_above(mass, uniform * tl.sum(mass, 0), BLOCK)
    chunk_peak = tl.sum(tl.where(tl.arange(0, BLOCK) == chunk, peaks, 0.0), 0)
    # In the chunk's own measure.
    aim = (uniform * tl.sum(mass, 0) - before) * tl.exp2((peak - chunk_peak) * scale)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    x = load_logits(logits + column, column < vocab_size)
    weight = tl.exp2((x - chunk_peak) * scale)
    weight = tl.where(in_support(x, column, cut, tie), weight, 0.0)
    place, _ = first_above(weight, aim, CHUNK)
    return tl.minimum(chunk * CHUNK + place, vocab_size - 1)


@triton.jit
def _draw_kernel(
    out,  # [R] int64
    valid_out,  # [R] bool or None
    logits,
    stride,
    temperature,
    pivot,
    last_tie,
    chunk_peak,
    chunk_sum,
    index,
    kind,  # [R] where MODE is BY_ROW
    uniform,  # [R]
    seed,  # [R]
    choice,
    position,
    vocab_size,
    num_chunks,
    MODE: tl.constexpr,
    ARGMAX: tl.constexpr,
    UNIFORM: tl.constexpr,
    NOISE: tl.constexpr,
    BY_ROW: tl.constexpr,
    GUMBEL: tl.constexpr,
    REST: tl.constexpr,
    CHUNK: tl.constexpr,
    BATCH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0)
    row = place.to(tl.int64)
    if index is not None:
        row = tl.load(index + place)
    logits += row * stride
    i = tl.arange(0, BLOCK)
    mask = i < num_chunks
    peaks = tl.load(chunk_peak + row * num_chunks + i, mask=mask, other=float("-inf"))
    peak = tl.max(peaks, 0)
    valid = (peak > float("-inf")) & (peak < float("inf"))
    if valid_out is not None:
        tl.store(valid_out + place, valid)
    if MODE == BY_ROW:
        how = tl.load(kind + place)
    else:
        how = MODE
    token = tl.zeros([], tl.int32)
    if valid:
        if MODE == ARGMAX or MODE == BY_ROW:
            if how == ARGMAX:
                token = _argmax(logits, peaks, peak, vocab_size, CHUNK, BLOCK)
        if (MODE == UNIFORM or MODE == BY_ROW) and uniform is not None:
            if how == UNIFORM:
                scale = exp2_scale(temperature, row)
                cut, tie = load_support(pivot, last_tie, row, vocab_size)
                sums = tl.load(chunk_sum + row * num_chunks + i, mask=mask, other=0.0)
                u = tl.load(uniform + place).to(tl.float32)
                token = _inverse_cdf(
                    logits, peaks, peak, sums, scale, u, cut, tie, vocab_size, CHUNK, BLOCK
                )
        if MODE == NOISE or MODE == BY_ROW:
            if how == NOISE:
                token = gumbel_max(
                    logits,
                    peaks,
                    peak,
                    exp2_scale(temperature, row),
                    tl.load(seed + place),
                    tl.load(choice + place),
                    tl.load(position + place),
                    load_support(pivot, last_tie, row, vocab_size)[0],
                    load_support(pivot, last_tie, row, vocab_size)[1],
                    vocab_size,
                    GUMBEL,
                    REST,
                    CHUNK,
                    BATCH,
                    BLOCK,
                )
    tl.store(out + place, token.to(tl.int64))


def _draw(
    law: RowLaw,
    mode: int,
    *,
    kind: Tensor | None = None,
    uniform: Tensor | None = None,
    seed: Tensor | None = None,
    choice: Tensor | None = None,
    position: Tensor | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    law = with_chunks(law, sums=uniform is not None)
    assert law.chunk_peak is not None
    num_chunks = law.chunk_peak.shape[1]
    block = triton.next_power_of_2(num_chunks)
    out = torch.empty(law.num_rows, dtype=torch.int64, device=law.logits.device)
    launch(
        _draw_kernel,
        (law.num_rows,),
        out,
        valid,
        law.logits,
        law.logits.stride(0),
        law.temperature,
        law.pivot,
        law.last_tie,
        law.chunk_peak,
        law.chunk_sum,
        law.index,
        kind,
        uniform,
        seed,
        choice,
        position,
        law.vocab_size,
        num_chunks,
        MODE=mode,
        ARGMAX=DRAW_ARGMAX,
        UNIFORM=DRAW_UNIFORM,
        NOISE=DRAW_GUMBEL,
        BY_ROW=_DRAW_BY_ROW,
        GUMBEL=STREAM_GUMBEL,
        REST=STREAM_GUMBEL_REST,
        CHUNK=CHUNK,
        BATCH=4,  # chunks scored at once by a Gumbel draw: more than it mostly needs
        BLOCK=block,
        num_warps=warps_for(block, 4 if block <= 1024 else 8),
    )
    return out


def argmax_lowest(logits: Tensor) -> Tensor:
    return _draw(RowLaw(logits), DRAW_ARGMAX)


def draw_inverse_cdf(law: RowLaw, uniform: Tensor) -> Tensor:
    return _draw(law, DRAW_UNIFORM, uniform=uniform.contiguous())


def sample_rows(
    law: RowLaw,
    kind: Tensor | None,
    *,
    uniform: Tensor | None,
    seed: Tensor,
    choice: Tensor,
    position: Tensor,
) -> tuple[Tensor, Tensor]:
    valid = torch.empty(law.num_rows, dtype=torch.bool, device=law.logits.device)
    if kind is None:
        return _draw(law, DRAW_ARGMAX, valid=valid), valid
    token_ids = _draw(
        law,
        _DRAW_BY_ROW,
        kind=kind.contiguous(),
        uniform=None if uniform is None else uniform.contiguous(),
        seed=seed.contiguous(),
        choice=choice.contiguous(),
        position=position.contiguous(),
        valid=valid,
    )
    return token_ids, valid


def draw_gumbel(
    law: RowLaw,
    seed: Tensor,
    choice: Tensor,
    position: Tensor,
    token_ids: Tensor | None = None,
) -> Tensor:
    keys = seed.contiguous(), choice.contiguous(), position.contiguous()
    if token_ids is None:
        return _draw(law, DRAW_GUMBEL, seed=keys[0], choice=keys[1], position=keys[2])
    return gumbel_by_id(law, keys, token_ids)
