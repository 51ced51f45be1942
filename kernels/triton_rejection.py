"""Chain rejection straight from the logits.

Three kernels after the chunk pass of the target rows: accept (a program a request judges all its
drafts at once), residual (chunk sums of max(target - draft, 0), at the row where the request stops
and nowhere else), draw.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spectrue.kernels.reference_verify import (
    GUARD_DRAFT_ID_OUT_OF_RANGE,
    GUARD_DRAFT_LAW_CHANGED,
    GUARD_DRAFT_PROB_INVALID,
    GUARD_RESIDUAL_EMPTY,
    GUARD_ROW_INVALID,
    NUM_GUARDS,
    PLACEHOLDER_TOKEN_ID,
)
from spectrue.kernels.row_law import CHUNK, RowLaw
from spectrue.kernels.triton_common import (
    LOG2E,
    exp2_scale,
    in_support,
    load_logits,
    load_support,
)
from spectrue.kernels.triton_draw import first_above
from spectrue.kernels.triton_launch import launch, warps_for
from spectrue.kernels.triton_rows import row_totals, with_chunks
from spectrue.kernels.triton_verify import span, widest

CHUNKS = 16  # of a residual program
_MAX_PROB = tl.constexpr(1 + 1e-5)  # rounding of exp(logit / T - log normaliser)
_TOLERANCE = tl.constexpr(1e-3)
# What the accept kernel found at the row where a request stops.
_STOP_INVALID = tl.constexpr(-2)  # no law: no token
_STOP_TARGET = tl.constexpr(-1)  # draw from the target: all accepted, or no draft law to subtract


@triton.jit
def _draft_prob(logit, inv_temperature, log_normalizer):
    """(probability, whether it is one); what is none counts as 0."""
    prob = tl.exp2((logit.to(tl.float32) * inv_temperature - log_normalizer) * LOG2E)
    sound = prob <= _MAX_PROB  # false for NaN
    return tl.where(sound, tl.minimum(prob, 1.0), 0.0), sound


@triton.jit
def _accept_kernel(
    output,  # [B, width + 1]
    num_accepted,  # [B]
    invalid_out,  # [B]
    guards,  # [B, NUM_GUARDS]
    stop_out,  # [B] draft whose law the residual takes away, or _STOP_*
    stop_row,  # [B] row of the logits where the request stops
    facts,  # [B, 4] of that row: peak, total, and the draft's 1 / temperature and normaliser
    logits,
    stride,
    temperature,
    pivot,
    last_tie,
    index,
    row_peak,  # [R]
    row_total,  # [R]
    draft,  # [D]
    cu_num_draft_tokens,
    draft_logits,  # [D, Vd]
    draft_stride,
    draft_inv_temperature,
    draft_log_normalizer,
    draft_token_probs,
    draft_index,  # [V] or None
    coins,  # [D]
    vocab_size,
    draft_vocab_size,
    width,
    LAW_CHANGED: tl.constexpr,
    OUT_OF_RANGE: tl.constexpr,
    ROW_INVALID: tl.constexpr,
    NUM_GUARDS: tl.constexpr,
    PLACEHOLDER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    first, k = span(cu_num_draft_tokens, request)
    i = tl.arange(0, BLOCK)
    mine = i < k
    law_row = first + request + i  # of the draft's row, and of the bonus row at i = k
    peak = tl.load(row_peak + law_row, mask=i <= k, other=0.0)
    valid = (peak > float("-inf")) & (peak < float("inf"))
    at = tl.load(draft + first + i, mask=mine, other=-1).to(tl.int64)
    known = mine & (at >= 0) & (at < vocab_size)
    token = tl.where(known, at, 0)
    column = token
    if draft_index is not None:
        column = tl.load(draft_index + token, mask=known, other=-1).to(tl.int64)
    known = known & (column >= 0) & (column < draft_vocab_size)
    column = tl.where(known, column, 0)
    place = (first + i).to(tl.int64)
    logit = tl.load(draft_logits + place * draft_stride + column, mask=known, other=0.0)
    inv_t = tl.load(draft_inv_temperature + place, mask=mine, other=1.0).to(tl.float32)
    log_normalizer = tl.load(draft_log_normalizer + place, mask=mine, other=0.0).to(tl.float32)
    prob, sound = _draft_prob(logit, inv_t, log_normalizer)
    recorded = tl.load(draft_token_probs + place, mask=mine, other=0.0).to(tl.float32)
    same = tl.abs(prob - recorded) <= _TOLERANCE * recorded  # false for NaN
    row = law_row.to(tl.int64)
    if index is not None:
        row = tl.load(index + law_row, mask=i <= k, other=0)
    scale = LOG2E
    if temperature is not None:
        t = tl.load(temperature + row, mask=mine, other=1.0)
        scale = LOG2E / tl.where(t > 0, t, 1.0)
    cut = float("-inf")
    tie = vocab_size
    if pivot is not None:
        cut = tl.load(pivot + row, mask=mine, other=0.0)
        tie = tl.load(last_tie + row, mask=mine, other=0)
    x = load_logits(logits + row * stride + token, known & valid)
    inside = known & valid & in_support(x, token, cut, tie)
    total = tl.load(row_total + law_row, mask=i <= k, other=1.0)
    target = tl.where(inside, tl.exp2((x - peak) * scale), 0.0) / total
    coin = tl.load(coins + place, mask=mine, other=1.0).to(tl.float32)
    accepted = known & sound & same & valid & (prob > 0) & (coin * prob < target)
    length = tl.min(tl.where(mine & accepted, k, i), 0)
    length = tl.minimum(length, k)

    here = i == length
    bad_row = tl.sum(tl.where(here & (valid == 0), 1, 0), 0)
    rejecting = (length < k) & (bad_row == 0)
    unknown = tl.sum(tl.where(here & (known == 0), 1, 0), 0)
    changed = tl.sum(tl.where(here & known & sound & (same == 0), 1, 0), 0)
    stop = tl.where(rejecting & (unknown + changed == 0), first + length, _STOP_TARGET)
    tl.store(stop_out + request, tl.where(bad_row > 0, _STOP_INVALID, stop))
    out = request.to(tl.int64)
    # One load of what the next kernels would else look up in turn. NaN times 0 is no 0: selected.
    tl.store(stop_row + out, tl.sum(tl.where(here, row, 0), 0))
    tl.store(facts + out * 4, tl.sum(tl.where(here, peak, 0.0), 0))
    tl.store(facts + out * 4 + 1, tl.sum(tl.where(here, total, 0.0), 0))
    tl.store(facts + out * 4 + 2, tl.sum(tl.where(here, inv_t, 0.0), 0))
    tl.store(facts + out * 4 + 3, tl.sum(tl.where(here, log_normalizer, 0.0), 0))
    guards += out * NUM_GUARDS
    tl.store(guards + ROW_INVALID, bad_row)
    tl.store(guards + OUT_OF_RANGE, tl.where(rejecting, unknown, 0))
    tl.store(guards + LAW_CHANGED, tl.where(rejecting, changed, 0))
    tl.store(invalid_out + out, bad_row > 0)
    tl.store(num_accepted + out, length.to(tl.int64))
    kept = tl.where(i < length, at, PLACEHOLDER)
    tl.store(output + out * (width + 1) + i, kept, mask=i <= width)


@triton.jit
def _weights(
    logits,  # of the row
    peak,
    total,
    scale,
    cut,
    tie,
    draft_logits,  # of the draft
    inv_temperature,
    log_normalizer,
    draft_index,
    column,
    vocab_size,
    draft_size,  # 0 subtracts nothing
):
    """(max(target - draft, 0), draft, whether the draft is a probability) at `column`."""
    mask = column < vocab_size
    x = load_logits(logits + column, mask)
    inside = in_support(x, column, cut, tie)
    target = tl.where(inside, tl.exp2((x - peak) * scale), 0.0) / total
    if draft_index is None:
        place = column
    else:
        place = tl.load(draft_index + column, mask=mask, other=-1)
    has = mask & (place >= 0) & (place < draft_size)
    logit = tl.load(draft_logits + place, mask=has, other=0.0)
    prob, sound = _draft_prob(logit, inv_temperature, log_normalizer)
    prob = tl.where(has, prob, 0.0)
    return tl.maximum(target - prob, 0.0), prob, sound | (has == 0)


@triton.jit
def _residual_kernel(
    chunk_sum,  # [B, num_chunks]
    part_law,  # [B, parts] sum of the draft law
    part_bad,  # [B, parts] entries that are no probability
    stop,  # [B]
    stop_row,  # [B]
    facts,  # [B, 4]
    logits,
    stride,
    temperature,
    pivot,
    last_tie,
    draft_logits,
    draft_stride,
    draft_index,
    vocab_size,
    draft_vocab_size,
    num_chunks,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    parts = tl.cdiv(num_chunks, CHUNKS)
    request = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    out = request.to(tl.int64)
    at = tl.load(stop + request)
    row = tl.load(stop_row + request)
    facts += out * 4
    if at >= 0:
        cut, tie = load_support(pivot, last_tie, row, vocab_size)
        chunk = part * CHUNKS + tl.arange(0, CHUNKS)
        column = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        weight, prob, sound = _weights(
            logits + row * stride,
            tl.load(facts),
            tl.load(facts + 1),
            exp2_scale(temperature, row),
            cut,
            tie,
            draft_logits + at.to(tl.int64) * draft_stride,
            tl.load(facts + 2),
            tl.load(facts + 3),
            draft_index,
            column,
            vocab_size,
            draft_vocab_size,
        )
        tl.store(chunk_sum + out * num_chunks + chunk, tl.sum(weight, 1), mask=chunk < num_chunks)
        tl.store(part_law + out * parts + part, tl.sum(tl.sum(prob, 1), 0))
        bad = tl.sum(tl.sum((sound == 0).to(tl.int32), 1), 0)
        tl.store(part_bad + out * parts + part, bad)


@triton.jit
def _final_kernel(
    output,
    guards,
    stop,
    stop_row,
    facts,
    num_accepted,
    uniforms,  # [R]
    residual_sum,  # [B, num_chunks]
    part_law,
    part_bad,
    cu_num_draft_tokens,
    logits,
    stride,
    temperature,
    pivot,
    last_tie,
    chunk_peak,
    chunk_sum,
    draft_logits,
    draft_stride,
    draft_index,
    vocab_size,
    draft_vocab_size,
    num_chunks,
    width,
    parts,
    PROB_INVALID: tl.constexpr,
    LAW_CHANGED: tl.constexpr,
    EMPTY: tl.constexpr,
    NUM_GUARDS: tl.constexpr,
    PLACEHOLDER: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    out = request.to(tl.int64)
    first = span(cu_num_draft_tokens, request)[0]
    length = tl.load(num_accepted + request)
    row = tl.load(stop_row + request)
    facts += out * 4
    guards += out * NUM_GUARDS
    at = tl.load(stop + request)
    token = tl.full([], PLACEHOLDER, tl.int64)
    bad = tl.zeros([], tl.int32)
    changed = tl.zeros([], tl.int32)
    empty = tl.zeros([], tl.int32)
    if at >= _STOP_TARGET:
        i = tl.arange(0, BLOCK)
        mask = i < num_chunks
        scale = exp2_scale(temperature, row)
        peak = tl.load(facts)
        total = tl.load(facts + 1)
        # The law of the target by chunks, as probabilities.
        peaks = tl.load(chunk_peak + row * num_chunks + i, mask=mask, other=float("-inf"))
        sums = tl.load(chunk_sum + row * num_chunks + i, mask=mask, other=0.0)
        mass = tl.where(sums > 0, sums * tl.exp2((peaks - peak) * scale), 0.0) / total
        draft_size = 0
        if at >= 0:
            j = tl.arange(0, PARTS)
            here = j < parts
            law = tl.sum(tl.load(part_law + out * parts + j, mask=here, other=0.0), 0)
            invalid = tl.sum(tl.load(part_bad + out * parts + j, mask=here, other=0), 0)
            bad = (invalid > 0).to(tl.int32)
            # With invalid entries the sum is not judged: see the reference.
            wrong = (tl.abs(law - 1) <= _TOLERANCE) == 0
            changed = (wrong & (invalid == 0)).to(tl.int32)
            residual = tl.load(residual_sum + out * num_chunks + i, mask=mask, other=0.0)
            left = tl.sum(residual, 0)
            usable = (left > 0) & (left < float("inf"))
            empty = ((usable == 0) & (changed == 0)).to(tl.int32)
            if empty + changed == 0:
                draft_size = draft_vocab_size
                mass = residual
        # A chunk whose tokens' own weights may be flushed to zero is none to look into.
        mass = tl.where(mass > 1e-30, mass, 0.0)
        u = tl.load(uniforms + first + request + length).to(tl.float32)
        aim = u * tl.sum(mass, 0)
        chunk, before = first_above(mass, aim, BLOCK)
        column = chunk * CHUNK + tl.arange(0, CHUNK)
        cut, tie = load_support(pivot, last_tie, row, vocab_size)
        law_at = tl.maximum(at, 0)
        weight = _weights(
            logits + row * stride,
            peak,
            total,
            scale,
            cut,
            tie,
            draft_logits + law_at.to(tl.int64) * draft_stride,
            tl.load(facts + 2),
            tl.load(facts + 3),
            draft_index,
            column,
            vocab_size,
            draft_size,
        )[0]
        place = first_above(weight, aim - before, CHUNK)[0]
        token = tl.minimum(chunk * CHUNK + place, vocab_size - 1).to(tl.int64)
    if at >= 0:
        tl.store(guards + LAW_CHANGED, changed)
    tl.store(guards + PROB_INVALID, bad)
    tl.store(guards + EMPTY, empty)
    tl.store(output + out * (width + 1) + length, token)


def verify_rejection(
    law: RowLaw,
    draft_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    *,
    draft_logits: Tensor,
    draft_inv_temperature: Tensor,
    draft_log_normalizer: Tensor,
    draft_token_probs: Tensor,
    draft_index: Tensor | None,
    coins: Tensor,
    uniforms: Tensor,
    max_draft_tokens: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    vocab_size, draft_vocab_size = law.vocab_size, draft_logits.shape[1]
    if draft_index is None and draft_vocab_size > vocab_size:
        raise ValueError(
            f"a draft law over {draft_vocab_size} tokens needs a draft_index into {vocab_size}"
        )
    law = with_chunks(law)
    assert law.chunk_peak is not None
    peak, total = row_totals(law)
    num_chunks = law.chunk_peak.shape[1]
    num_requests, device = len(cu_num_draft_tokens), law.logits.device
    width = widest(cu_num_draft_tokens, max_draft_tokens)
    block = triton.next_power_of_2(num_chunks)
    chunks = min(CHUNKS, block)
    parts = triton.cdiv(num_chunks, chunks)

    output = torch.empty(num_requests, width + 1, dtype=torch.int64, device=device)
    num_accepted = torch.empty(num_requests, dtype=torch.int64, device=device)
    invalid = torch.empty(num_requests, dtype=torch.bool, device=device)
    guards = torch.empty(num_requests, NUM_GUARDS, dtype=torch.int32, device=device)
    stop = torch.empty(num_requests, dtype=torch.int32, device=device)
    stop_row = torch.empty(num_requests, dtype=torch.int64, device=device)
    facts = torch.empty(num_requests, 4, dtype=torch.float32, device=device)
    residual = torch.empty(num_requests, num_chunks, dtype=torch.float32, device=device)
    part_law = torch.empty(num_requests, parts, dtype=torch.float32, device=device)
    part_bad = torch.empty(num_requests, parts, dtype=torch.int32, device=device)

    cu_num_draft_tokens = cu_num_draft_tokens.contiguous()
    draft_index = None if draft_index is None else draft_index.contiguous()
    if draft_logits.stride(1) != 1:
        draft_logits = draft_logits.contiguous()
    rows = law.logits, law.logits.stride(0), law.temperature, law.pivot, law.last_tie
    drafts = draft_logits, draft_logits.stride(0)
    launch(
        _accept_kernel,
        (num_requests,),
        output,
        num_accepted,
        invalid,
        guards,
        stop,
        stop_row,
        facts,
        *rows,
        law.index,
        peak,
        total,
        draft_token_ids.contiguous(),
        cu_num_draft_tokens,
        *drafts,
        draft_inv_temperature.contiguous(),
        draft_log_normalizer.contiguous(),
        draft_token_probs.contiguous(),
        draft_index,
        coins.contiguous(),
        vocab_size,
        draft_vocab_size,
        width,
        LAW_CHANGED=GUARD_DRAFT_LAW_CHANGED,
        OUT_OF_RANGE=GUARD_DRAFT_ID_OUT_OF_RANGE,
        ROW_INVALID=GUARD_ROW_INVALID,
        NUM_GUARDS=NUM_GUARDS,
        PLACEHOLDER=PLACEHOLDER_TOKEN_ID,
        BLOCK=triton.next_power_of_2(width + 1),
        num_warps=1,
    )
    launch(
        _residual_kernel,
        (parts * num_requests,),
        residual,
        part_law,
        part_bad,
        stop,
        stop_row,
        facts,
        *rows,
        *drafts,
        draft_index,
        vocab_size,
        draft_vocab_size,
        num_chunks,
        CHUNKS=chunks,
        CHUNK=CHUNK,
        num_warps=warps_for(chunks * CHUNK // 4),
    )
    launch(
        _final_kernel,
        (num_requests,),
        output,
        guards,
        stop,
        stop_row,
        facts,
        num_accepted,
        uniforms.contiguous(),
        residual,
        part_law,
        part_bad,
        cu_num_draft_tokens,
        *rows,
        law.chunk_peak,
        law.chunk_sum,
        *drafts,
        draft_index,
        vocab_size,
        draft_vocab_size,
        num_chunks,
        width,
        parts,
        PROB_INVALID=GUARD_DRAFT_PROB_INVALID,
        LAW_CHANGED=GUARD_DRAFT_LAW_CHANGED,
        EMPTY=GUARD_RESIDUAL_EMPTY,
        NUM_GUARDS=NUM_GUARDS,
        PLACEHOLDER=PLACEHOLDER_TOKEN_ID,
        PARTS=triton.next_power_of_2(parts),
        CHUNK=CHUNK,
        BLOCK=block,
        num_warps=warps_for(block),
    )
    return output, num_accepted, invalid, guards
