"""Gumbel-max over a row: noise for the few tokens that can win."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spectrue.kernels.philox import STREAM_GUMBEL, STREAM_GUMBEL_REST
from spectrue.kernels.row_law import CHUNK, RowLaw
from spectrue.kernels.triton_common import (
    exp2_scale,
    in_support,
    load_logits,
    load_support,
    not_above,
    pack,
    unpack,
)
from spectrue.kernels.triton_launch import launch
from spectrue.kernels.triton_philox import chunk_noise, gumbel_noise, two_least
from spectrue.kernels.triton_rows import check_logits, with_chunks

_SLACK = tl.constexpr(1e-3)  # of the noise's upper bound, covers the rounding of logit + noise


@triton.jit
def _best_of_chunks(
    logits,
    chunk,  # [N]
    peak,
    inv_temperature,
    seed,
    choice,
    position,
    cut,
    tie,
    vocab_size,
    N: tl.constexpr,
    GUMBEL: tl.constexpr,
    REST: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The best token of some chunks, a `pack` of score and token."""
    column = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    x = load_logits(logits + column, column < vocab_size)
    score = (x - peak) * inv_temperature
    score += chunk_noise(seed, choice, position, chunk, N, GUMBEL, REST, CHUNK)
    score = tl.where(in_support(x, column, cut, tie), score, float("-inf"))
    return tl.max(tl.max(pack(score, column), 1), 0)


@triton.jit
def gumbel_max(
    logits,
    peaks,
    peak,
    scale,
    seed,
    choice,
    position,
    cut,
    tie,
    vocab_size,
    GUMBEL: tl.constexpr,
    REST: tl.constexpr,
    CHUNK: tl.constexpr,
    BATCH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The tokens with the largest noise of their chunk, then chunks whose others can still win."""
    i = tl.arange(0, BLOCK)
    least, place, second, _ = two_least(seed, choice, position, i, GUMBEL, CHUNK)
    inv_temperature = scale * 0.6931471805599453
    possible = (peaks >= cut) & (peaks > float("-inf"))
    column = i * CHUNK + place
    x = load_logits(logits + column, possible & (column < vocab_size))
    score = (x - peak) * inv_temperature - tl.log(least)
    score = tl.where(in_support(x, column, cut, tie), score, float("-inf"))
    best = tl.max(pack(score, column), 0)
    # The others of the likeliest token's chunk can nearly always win: score them at once.
    first = tl.min(tl.where(peaks == peak, i, BLOCK - 1), 0)
    likeliest = _best_of_chunks(
        logits,
        tl.zeros([1], tl.int32) + first,
        peak,
        inv_temperature,
        seed,
        choice,
        position,
        cut,
        tie,
        vocab_size,
        1,
        GUMBEL,
        REST,
        CHUNK,
    )
    best = tl.maximum(best, likeliest)
    to_beat = unpack(best)[0]
    bound = (peaks - peak) * inv_temperature - tl.log(second) + _SLACK
    bound = tl.where(possible & (i != first), bound, float("-inf"))
    left = tl.sum((bound >= to_beat).to(tl.int32), 0)
    while left > 0:
        # As many chunks lie before a place of the batch as have a rank not above it.
        rank = tl.cumsum((bound >= to_beat).to(tl.int32), 0)
        slot = tl.arange(0, BATCH)
        found = _best_of_chunks(
            logits,
            tl.sum(not_above(rank[None, :], slot[:, None]), 1),
            peak,
            inv_temperature,
            seed,
            choice,
            position,
            cut,
            tie,
            vocab_size,
            BATCH,
            GUMBEL,
            REST,
            CHUNK,
        )
        bound = tl.where((bound >= to_beat) & (rank <= BATCH), float("-inf"), bound)
        best = tl.maximum(best, found)
        to_beat = unpack(best)[0]
        left = tl.sum((bound >= to_beat).to(tl.int32), 0)
    return tl.minimum(unpack(best)[1], vocab_size - 1)


@triton.jit
def _gumbel_by_id_kernel(
    out,
    logits,
    stride,
    temperature,
    pivot,
    last_tie,
    chunk_peak,
    index,
    seed,
    choice,
    position,
    token_ids,  # [V] target token id of each column
    vocab_size,
    num_chunks,
    GUMBEL: tl.constexpr,
    REST: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A reduced vocabulary: its columns are all over the target's, so every one is scored."""
    place = tl.program_id(0)
    row = place.to(tl.int64)
    if index is not None:
        row = tl.load(index + place)
    i = tl.arange(0, CHUNKS)
    peaks = tl.load(chunk_peak + row * num_chunks + i, mask=i < num_chunks, other=float("-inf"))
    peak = tl.max(peaks, 0)
    inv_temperature = exp2_scale(temperature, row) * 0.6931471805599453
    cut, tie = load_support(pivot, last_tie, row, vocab_size)
    best = float("-inf")
    token = vocab_size - 1
    if (peak > float("-inf")) & (peak < float("inf")):
        for start in range(0, vocab_size, BLOCK):
            column = start + tl.arange(0, BLOCK)
            mask = column < vocab_size
            x = load_logits(logits + row * stride + column, mask)
            x = tl.where(in_support(x, column, cut, tie), x, float("-inf"))
            target = tl.load(token_ids + column, mask=mask, other=0).to(tl.int32)
            score = (x - peak) * inv_temperature
            score += gumbel_noise(
                tl.load(seed + place),
                tl.load(choice + place),
                tl.load(position + place),
                target,
                GUMBEL,
                REST,
                CHUNK,
            )
            top = tl.max(score, 0)
            lowest = tl.min(tl.where(score == top, column, vocab_size - 1), 0)
            token = tl.where(top > best, lowest, token)
            best = tl.maximum(best, top)
    tl.store(out + place, token.to(tl.int64))


def gumbel_by_id(
    law: RowLaw,
    keys: tuple[Tensor, Tensor, Tensor],  # seed, choice, position, [R] each
    token_ids: Tensor,  # [V]
) -> Tensor:  # [R] int64
    """draw_gumbel where columns are not the target's token ids."""
    law = with_chunks(law, sums=False)
    assert law.chunk_peak is not None
    num_chunks = law.chunk_peak.shape[1]
    out = torch.empty(law.num_rows, dtype=torch.int64, device=law.logits.device)
    launch(
        _gumbel_by_id_kernel,
        (law.num_rows,),
        out,
        check_logits(law.logits),
        law.logits.stride(0),
        law.temperature,
        law.pivot,
        law.last_tie,
        law.chunk_peak,
        law.index,
        *keys,
        token_ids.contiguous(),
        law.vocab_size,
        num_chunks,
        GUMBEL=STREAM_GUMBEL,
        REST=STREAM_GUMBEL_REST,
        CHUNK=CHUNK,
        CHUNKS=triton.next_power_of_2(num_chunks),
        BLOCK=1024,
        num_warps=8,
    )
    return out
