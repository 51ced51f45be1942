"""Chain rejection straight from the logits.

Three kernels after the chunk pass of the target rows: judge (a program a row: the row's normaliser,
and the verdict on its draft), then the two of triton_residual.py.
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
from spectrue.kernels.triton_common import LOG2E, exp2_scale, in_support, load_logits, load_support
from spectrue.kernels.triton_launch import launch, warps_for
from spectrue.kernels.triton_residual import (
    ACCEPTED,
    BONUS,
    CHANGED,
    INVALID,
    MAX_PROB,
    OUT_OF_RANGE,
    REJECTED,
    TOLERANCE,
    final_kernel,
    residual_kernel,
)
from spectrue.kernels.triton_rows import sum_chunks, with_chunks
from spectrue.kernels.triton_verify import span, widest

CHUNKS = 32  # of a residual program


@triton.jit
def _judge_kernel(
    verdicts,  # [B, width + 1]
    row_peak,  # [B, width + 1]
    row_total,  # [B, width + 1]
    logits,
    stride,
    temperature,
    pivot,
    last_tie,
    index,
    chunk_peak,
    chunk_sum,
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
    num_chunks,
    width,
    BLOCK: tl.constexpr,
):
    out = tl.program_id(0)
    request = out // (width + 1)
    i = out % (width + 1)
    first, k = span(cu_num_draft_tokens, request)
    if i <= k:
        place = (first + i).to(tl.int64)
        row = place + request
        if index is not None:
            row = tl.load(index + row)
        # The draft's own law at the draft.
        mine = i < k
        at = tl.load(draft + place, mask=mine, other=-1).to(tl.int64)
        known = mine & (at >= 0) & (at < vocab_size)
        token = tl.where(known, at, 0)
        column = token
        if draft_index is not None:
            column = tl.load(draft_index + token, mask=known, other=-1).to(tl.int64)
        known = known & (column >= 0) & (column < draft_vocab_size)
        column = tl.where(known, column, 0)
        logit = tl.load(draft_logits + place * draft_stride + column, mask=known, other=0.0)
        inv_t = tl.load(draft_inv_temperature + place, mask=mine, other=1.0).to(tl.float32)
        log_normalizer = tl.load(draft_log_normalizer + place, mask=mine, other=0.0).to(tl.float32)
        prob = tl.exp2((logit.to(tl.float32) * inv_t - log_normalizer) * LOG2E)
        sound = prob <= MAX_PROB  # false for NaN
        prob = tl.minimum(prob, 1.0)
        recorded = tl.load(draft_token_probs + place, mask=mine, other=0.0).to(tl.float32)
        same = tl.abs(prob - recorded) <= TOLERANCE * recorded  # false for NaN
        coin = tl.load(coins + place, mask=mine, other=1.0).to(tl.float32)
        # The target's.
        scale = exp2_scale(temperature, row)
        cut, tie = load_support(pivot, last_tie, row, vocab_size)
        x = load_logits(logits + row * stride + token, known)
        peak, total = sum_chunks(chunk_peak, chunk_sum, row, scale, num_chunks, BLOCK)
        valid = (peak > float("-inf")) & (peak < float("inf"))
        inside = known & valid & in_support(x, token, cut, tie)
        target = tl.where(inside, tl.exp2((x - peak) * scale), 0.0) / total
        accepted = known & sound & same & (prob > 0) & (coin * prob < target)
        verdict = tl.where(accepted, ACCEPTED, REJECTED)
        verdict = tl.where(known & sound & (same == 0), CHANGED, verdict)
        verdict = tl.where(known, verdict, OUT_OF_RANGE)
        verdict = tl.where(mine, verdict, BONUS)
        tl.store(verdicts + out, tl.where(valid, verdict, INVALID))
        tl.store(row_peak + out, peak)
        tl.store(row_total + out, total)


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
    num_chunks = law.chunk_peak.shape[1]
    num_requests, device = len(cu_num_draft_tokens), law.logits.device
    width = widest(cu_num_draft_tokens, max_draft_tokens)
    block = triton.next_power_of_2(num_chunks)
    chunks = min(CHUNKS, block)
    parts = triton.cdiv(num_chunks, chunks)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(num_requests, *shape, dtype=dtype, device=device)

    output = empty(width + 1, dtype=torch.int64)
    num_accepted = empty(dtype=torch.int64)
    invalid = empty(dtype=torch.bool)
    guards = empty(NUM_GUARDS, dtype=torch.int32)
    verdicts = empty(width + 1, dtype=torch.int32)
    found = verdicts, empty(width + 1), empty(width + 1)
    residual, part_law, part_found = empty(num_chunks), empty(parts), empty(parts)

    cu_num_draft_tokens = cu_num_draft_tokens.contiguous()
    draft_token_ids = draft_token_ids.contiguous()
    if draft_logits.stride(1) != 1:
        draft_logits = draft_logits.contiguous()
    rows = law.logits, law.logits.stride(0), law.temperature, law.pivot, law.last_tie, law.index
    target_chunks = law.chunk_peak, law.chunk_sum
    drafts = (
        draft_logits,
        draft_logits.stride(0),
        draft_inv_temperature.contiguous(),
        draft_log_normalizer.contiguous(),
    )
    draft_index = None if draft_index is None else draft_index.contiguous()
    sizes = vocab_size, draft_vocab_size, num_chunks, width
    launch(
        _judge_kernel,
        (num_requests * (width + 1),),
        *found,
        *rows,
        *target_chunks,
        draft_token_ids,
        cu_num_draft_tokens,
        *drafts,
        draft_token_probs.contiguous(),
        draft_index,
        coins.contiguous(),
        *sizes,
        BLOCK=block,
        num_warps=warps_for(block),
    )
    launch(
        residual_kernel,
        (parts * num_requests,),
        residual,
        part_law,
        part_found,
        *found,
        cu_num_draft_tokens,
        *rows,
        *drafts,
        draft_index,
        *sizes,
        WIDTH=triton.next_power_of_2(width + 1),
        CHUNKS=chunks,
        CHUNK=CHUNK,
        num_warps=warps_for(chunks * CHUNK // 8),
    )
    launch(
        final_kernel,
        (num_requests,),
        output,
        num_accepted,
        invalid,
        guards,
        *found,
        draft_token_ids,
        uniforms.contiguous(),
        residual,
        part_law,
        part_found,
        cu_num_draft_tokens,
        *rows,
        *target_chunks,
        *drafts,
        draft_index,
        *sizes,
        parts,
        GUARD_PROB_INVALID=GUARD_DRAFT_PROB_INVALID,
        GUARD_LAW_CHANGED=GUARD_DRAFT_LAW_CHANGED,
        GUARD_EMPTY=GUARD_RESIDUAL_EMPTY,
        GUARD_OUT_OF_RANGE=GUARD_DRAFT_ID_OUT_OF_RANGE,
        GUARD_ROW_INVALID=GUARD_ROW_INVALID,
        NUM_GUARDS=NUM_GUARDS,
        PLACEHOLDER=PLACEHOLDER_TOKEN_ID,
        WIDTH=triton.next_power_of_2(width + 1),
        PARTS=triton.next_power_of_2(parts),
        CHUNK=CHUNK,
        BLOCK=block,
        num_warps=warps_for(block, 8),
    )
    return output, num_accepted, invalid, guards
