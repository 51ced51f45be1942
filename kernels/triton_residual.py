"""After a rejection: chunk sums of max(target - draft, 0), and the token drawn from them.

Only the row where a request stops is read, and only if there is a law to take away. A program finds
that row by itself from the verdicts on the request's rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spectrue.kernels.triton_common import LOG2E, exp2_scale, in_support
from spectrue.kernels.triton_draw import first_above
from spectrue.kernels.triton_verify import span

MAX_PROB = tl.constexpr(1 + 1e-5)  # rounding of exp(logit / T - log normaliser)
TOLERANCE = tl.constexpr(1e-3)
# Verdicts on a row. The first that is not ACCEPTED ends its request's walk.
ACCEPTED = tl.constexpr(0)
REJECTED = tl.constexpr(1)  # draw from max(target - draft, 0)
BONUS = tl.constexpr(2)  # behind the last draft: draw from the target
OUT_OF_RANGE = tl.constexpr(3)  # the draft has no place in its law: draw from the target
CHANGED = tl.constexpr(4)  # its law is not the one drawn from: draw from the target
INVALID = tl.constexpr(5)  # the row is no law: no token


@triton.jit
def _find_stop(verdicts, request, width, WIDTH: tl.constexpr):
    """(accepted drafts, verdict on the row behind them)."""
    i = tl.arange(0, WIDTH)
    verdict = tl.load(verdicts + request * (width + 1) + i, mask=i <= width, other=BONUS)
    length = tl.min(tl.where(verdict != ACCEPTED, i, width), 0)
    return length, tl.sum(tl.where(i == length, verdict, 0), 0)


@triton.jit
def _weights(
    logits,  # of the row, which is a law: neither NaN nor inf
    peak,
    scale,
    log2_total,
    pivot,
    last_tie,
    row,
    draft_logits,  # of the draft
    inv_temperature,
    log_normalizer,
    draft_index,
    column,
    vocab_size,
    draft_size,  # 0 takes nothing away
):
    """(max(target - draft, 0), draft, draft as found: more than 1 or NaN is none) at `column`."""
    x = tl.load(logits + column, mask=column < vocab_size, other=float("-inf")).to(tl.float32)
    target = tl.exp2((x - peak) * scale - log2_total)
    if pivot is not None:
        cut = tl.load(pivot + row)
        target = tl.where(in_support(x, column, cut, tl.load(last_tie + row)), target, 0.0)
    if draft_index is None:
        place = column
        has = column < draft_size
    else:
        place = tl.load(draft_index + column, mask=column < vocab_size, other=-1)
        has = (place >= 0) & (place < draft_size)
    logit = tl.load(draft_logits + place, mask=has, other=float("-inf")).to(tl.float32)
    found = tl.exp2((logit * inv_temperature - log_normalizer) * LOG2E)
    prob = tl.where(found <= MAX_PROB, found, 0.0)
    return tl.maximum(target - prob, 0.0), prob, found


@triton.jit
def residual_kernel(
    chunk_sum,  # [B, num_chunks]
    part_law,  # [B, parts] sum of the draft law
    part_found,  # [B, parts] the same, entries that are no probability included
    verdicts,  # [B, width + 1]
    row_peak,  # [B, width + 1]
    row_total,  # [B, width + 1]
    cu_num_draft_tokens,
    logits,
    stride,
    temperature,
    pivot,
    last_tie,
    index,
    draft_logits,
    draft_stride,
    draft_inv_temperature,
    draft_log_normalizer,
    draft_index,
    vocab_size,
    draft_vocab_size,
    num_chunks,
    width,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    parts = tl.cdiv(num_chunks, CHUNKS)
    # The last request first: its rows were read last, and a cache may still have them.
    request = (tl.num_programs(0) - 1 - tl.program_id(0)) // parts
    part = (tl.num_programs(0) - 1 - tl.program_id(0)) % parts
    first = span(cu_num_draft_tokens, request)[0]
    length, verdict = _find_stop(verdicts, request, width, WIDTH)
    if verdict == REJECTED:
        stop = request * (width + 1) + length
        draft = (first + length).to(tl.int64)
        row = draft + request
        if index is not None:
            row = tl.load(index + row)
        chunk = part * CHUNKS + tl.arange(0, CHUNKS)
        column = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        weight, prob, found = _weights(
            logits + row * stride,
            tl.load(row_peak + stop),
            exp2_scale(temperature, row),
            tl.log2(tl.load(row_total + stop)),
            pivot,
            last_tie,
            row,
            draft_logits + draft * draft_stride,
            tl.load(draft_inv_temperature + draft).to(tl.float32),
            tl.load(draft_log_normalizer + draft).to(tl.float32),
            draft_index,
            column,
            vocab_size,
            draft_vocab_size,
        )
        out = request.to(tl.int64)
        tl.store(chunk_sum + out * num_chunks + chunk, tl.sum(weight, 1), mask=chunk < num_chunks)
        tl.store(part_law + out * parts + part, tl.sum(prob))
        tl.store(part_found + out * parts + part, tl.sum(found))


@triton.jit
def final_kernel(
    output,  # [B, width + 1]
    num_accepted,  # [B]
    invalid_out,  # [B]
    guards,  # [B, NUM_GUARDS]
    verdicts,  # [B, width + 1]
    row_peak,
    row_total,
    draft,  # [D]
    uniforms,  # [R]
    residual_sum,  # [B, num_chunks]
    part_law,
    part_found,
    cu_num_draft_tokens,
    logits,
    stride,
    temperature,
    pivot,
    last_tie,
    index,
    chunk_peak,
    chunk_sum,
    draft_logits,
    draft_stride,
    draft_inv_temperature,
    draft_log_normalizer,
    draft_index,
    vocab_size,
    draft_vocab_size,
    num_chunks,
    width,
    parts,
    GUARD_PROB_INVALID: tl.constexpr,
    GUARD_LAW_CHANGED: tl.constexpr,
    GUARD_EMPTY: tl.constexpr,
    GUARD_OUT_OF_RANGE: tl.constexpr,
    GUARD_ROW_INVALID: tl.constexpr,
    NUM_GUARDS: tl.constexpr,
    PLACEHOLDER: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    out = request.to(tl.int64)
    first = span(cu_num_draft_tokens, request)[0]
    length, verdict = _find_stop(verdicts, request, width, WIDTH)
    rejected = verdict == REJECTED
    token = tl.full([], PLACEHOLDER, tl.int64)
    bad = tl.zeros([], tl.int32)
    changed = (verdict == CHANGED).to(tl.int32)
    empty = tl.zeros([], tl.int32)
    if verdict != INVALID:
        stop = request * (width + 1) + length
        at = (first + length).to(tl.int64)
        row = at + request
        u = tl.load(uniforms + row).to(tl.float32)
        if index is not None:
            row = tl.load(index + row)
        i = tl.arange(0, BLOCK)
        mask = i < num_chunks
        scale = exp2_scale(temperature, row)
        peak = tl.load(row_peak + stop)
        log2_total = tl.log2(tl.load(row_total + stop))
        # The law of the target by chunks, as probabilities.
        peaks = tl.load(chunk_peak + row * num_chunks + i, mask=mask, other=float("-inf"))
        sums = tl.load(chunk_sum + row * num_chunks + i, mask=mask, other=0.0)
        mass = tl.where(sums > 0, sums * tl.exp2((peaks - peak) * scale - log2_total), 0.0)
        draft_size = 0
        inv_temperature = 1.0
        log_normalizer = 0.0
        if rejected:
            j = tl.arange(0, PARTS)
            here = j < parts
            law = tl.sum(tl.load(part_law + out * parts + j, mask=here, other=0.0), 0)
            found = tl.sum(tl.load(part_found + out * parts + j, mask=here, other=0.0), 0)
            # An entry that is none adds more than 1, or makes this NaN.
            bad = ((found - law < 0.5) == 0).to(tl.int32)
            # With such entries the sum is not judged: see the reference.
            wrong = (tl.abs(law - 1) <= TOLERANCE) == 0
            changed = (wrong & (bad == 0)).to(tl.int32)
            residual = tl.load(residual_sum + out * num_chunks + i, mask=mask, other=0.0)
            left = tl.sum(residual, 0)
            usable = (left > 0) & (left < float("inf"))
            empty = ((usable == 0) & (changed == 0)).to(tl.int32)
            inv_temperature = tl.load(draft_inv_temperature + at).to(tl.float32)
            log_normalizer = tl.load(draft_log_normalizer + at).to(tl.float32)
            if empty + changed == 0:
                draft_size = draft_vocab_size
                mass = residual
        # A chunk whose tokens' own weights may be flushed to zero is none to look into.
        mass = tl.where(mass > 1e-30, mass, 0.0)
        aim = u * tl.sum(mass, 0)
        chunk, before = first_above(mass, aim, BLOCK)
        column = chunk * CHUNK + tl.arange(0, CHUNK)
        weight = _weights(
            logits + row * stride,
            peak,
            scale,
            log2_total,
            pivot,
            last_tie,
            row,
            draft_logits + at * draft_stride,
            inv_temperature,
            log_normalizer,
            draft_index,
            column,
            vocab_size,
            draft_size,
        )[0]
        place = first_above(weight, aim - before, CHUNK)[0]
        token = tl.minimum(chunk * CHUNK + place, vocab_size - 1).to(tl.int64)
    guards += out * NUM_GUARDS
    tl.store(guards + GUARD_PROB_INVALID, bad)
    tl.store(guards + GUARD_LAW_CHANGED, changed)
    tl.store(guards + GUARD_EMPTY, empty)
    tl.store(guards + GUARD_OUT_OF_RANGE, (verdict == OUT_OF_RANGE).to(tl.int32))
    tl.store(guards + GUARD_ROW_INVALID, (verdict == INVALID).to(tl.int32))
    tl.store(invalid_out + out, verdict == INVALID)
    tl.store(num_accepted + out, length.to(tl.int64))
    j = tl.arange(0, WIDTH)
    kept = tl.load(draft + first + j, mask=j < length, other=PLACEHOLDER).to(tl.int64)
    tl.store(output + out * (width + 1) + j, tl.where(j == length, token, kept), mask=j <= width)
