"""Which drafts stay: the match and the rejection rule.

Words: *draft* tokens are proposed, *accepted* ones kept; then comes one token of the target's own,
*recovered* (drawn after a rejection, or the target's token at a mismatch) or *bonus* (all drafts
accepted). Rows are flattened: request b has k_b >= 0 drafts and k_b + 1 rows of logits; its draft i
is judged by its row i, its last row is the bonus row. R = D + B.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrue.kernels.reference_draw import draw_weights
from spectrue.kernels.reference_rows import row_sums, valid_rows
from spectrue.kernels.row_law import RowLaw

PLACEHOLDER_TOKEN_ID = -1  # pads output rows after the last token

# Columns of the guards that verify_rejection returns, 1 where a guard fired in this step.
GUARD_DRAFT_PROB_INVALID = 0
GUARD_DRAFT_LAW_CHANGED = 1
GUARD_RESIDUAL_EMPTY = 2
GUARD_DRAFT_ID_OUT_OF_RANGE = 3
GUARD_ROW_INVALID = 4
GUARD_NAMES = (
    "draft_prob_invalid",
    "draft_law_changed",
    "residual_empty",
    "draft_id_out_of_range",
    "row_invalid",
)
NUM_GUARDS = len(GUARD_NAMES)

_MAX_PROB = 1 + 1e-5  # rounding of exp(logit / T - log normaliser)
_LAW_TOLERANCE = 1e-3


class MatchResult(NamedTuple):
    """What verify_match decides."""

    output_token_ids: Tensor  # [B, K + 1] int64, PLACEHOLDER_TOKEN_ID after the last token
    num_accepted: Tensor  # [B] int64
    invalid: Tensor  # [B] bool, the walk reached a row that is no law
    accepted_rows: Tensor  # [B, K] int64, row in its request (1 to k) of each accepted draft; -1


class _Layout(NamedTuple):
    num_draft_tokens: Tensor  # [B]
    first_draft: Tensor  # [B]
    first_row: Tensor  # [B]
    row_of_draft: Tensor  # [D]


def _layout(cu_num_draft_tokens: Tensor, num_drafts: int) -> _Layout:
    cu = cu_num_draft_tokens.to(torch.int64)
    requests = torch.arange(cu.shape[0], device=cu.device)
    k = torch.diff(cu, prepend=cu.new_zeros(1))
    first_draft = cu - k
    drafts = torch.arange(num_drafts, device=cu.device)
    return _Layout(
        num_draft_tokens=k,
        first_draft=first_draft,
        first_row=first_draft + requests,
        row_of_draft=drafts + torch.searchsorted(cu, drafts, right=True),
    )


def _walk(
    accepted: Tensor,  # [D] bool
    draft_token_ids: Tensor,  # [D] int64
    layout: _Layout,
    max_draft_tokens: int | None,
) -> tuple[Tensor, Tensor]:
    """Accepted drafts up to the first rejection: ids [B, K + 1] with placeholders, number [B]."""
    k = layout.num_draft_tokens
    if max_draft_tokens is None:
        max_draft_tokens = int(k.max()) if k.numel() else 0
    output = torch.full(
        (k.shape[0], max_draft_tokens + 1),
        PLACEHOLDER_TOKEN_ID,
        dtype=torch.int64,
        device=accepted.device,
    )
    if not draft_token_ids.numel():
        return output, torch.zeros_like(k)
    depth = torch.arange(max_draft_tokens, device=accepted.device)
    draft = (layout.first_draft[:, None] + depth).clamp(max=draft_token_ids.shape[0] - 1)
    stays = (accepted[draft] & (depth < k[:, None])).to(torch.int64).cumprod(1)
    output[:, :-1] = torch.where(stays > 0, draft_token_ids[draft], PLACEHOLDER_TOKEN_ID)
    return output, stays.sum(1)


def verify_match(
    target_token_ids: Tensor,  # [R] integer, the target's own token at each row
    draft_token_ids: Tensor,  # [D] integer
    cu_num_draft_tokens: Tensor,  # [B] integer, inclusive cumulative
    row_valid: Tensor,  # [R] bool
    *,
    parents: Tensor | None = None,  # [D] integer, row in its request of each draft's parent
    max_draft_tokens: int | None = None,  # K; None takes the largest k of the batch
) -> MatchResult:
    """Walk while a draft is the target's token; commit the target's token where none is.

    With tokens drawn from the target law this is exact for any drafter; with argmax tokens it is
    greedy verification. A request's row 0 is its root and row i + 1 belongs to its draft i. In a
    tree `parents` says after which row each draft comes (a smaller one than its own), None is a
    chain. Of equal siblings the first is taken. The law is that of sampling from the target alone,
    since the target's token is drawn before it is compared.

    A request whose walk reaches a row that is not valid gets no token from that row (a placeholder)
    and must end; rows after the stop are not judged.
    """
    draft = draft_token_ids.to(torch.int64)
    target = target_token_ids.to(torch.int64)
    layout = _layout(cu_num_draft_tokens, draft.shape[0])
    if parents is None:
        accepted = (draft == target[layout.row_of_draft]) & row_valid[layout.row_of_draft]
        output, num_accepted = _walk(accepted, draft, layout, max_draft_tokens)
        rows = torch.arange(1, output.shape[1], device=draft.device)
        accepted_rows = torch.where(rows <= num_accepted[:, None], rows, -1)
        last = num_accepted
    else:
        output, num_accepted, accepted_rows, last = _walk_tree(
            target, draft, parents, row_valid, layout, max_draft_tokens
        )
    stop_row = layout.first_row + last
    invalid = ~row_valid[stop_row]
    token = torch.where(invalid, PLACEHOLDER_TOKEN_ID, target[stop_row])
    output.scatter_(1, num_accepted[:, None], token[:, None])
    return MatchResult(output, num_accepted, invalid, accepted_rows)


def _walk_tree(
    target: Tensor,
    draft: Tensor,
    parents: Tensor,
    row_valid: Tensor,
    layout: _Layout,
    max_draft_tokens: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Accepted ids [B, K + 1] and rows [B, K], their number [B], the row of the last [B]."""
    nobody = torch.zeros(draft.shape[0], dtype=torch.bool, device=draft.device)
    output, num_accepted = _walk(nobody, draft, layout, max_draft_tokens)  # nothing accepted yet
    width = output.shape[1] - 1
    accepted_rows = torch.full_like(output[:, :width], -1)
    last = torch.zeros_like(num_accepted)
    if not draft.numel():
        return output, num_accepted, accepted_rows, last
    node = torch.arange(width, device=draft.device)
    place = (layout.first_draft[:, None] + node).clamp(max=draft.shape[0] - 1)
    ours = node < layout.num_draft_tokens[:, None]
    for depth in range(width):
        row = layout.first_row + last
        hit = ours & (parents[place] == last[:, None]) & (draft[place] == target[row, None])
        hit &= row_valid[row, None]
        found = hit.any(1)
        if not found.any():
            break  # all have stopped
        child = hit.to(torch.int64).argmax(1)  # the first
        token = draft[place.gather(1, child[:, None]).squeeze(1)]
        output[:, depth] = torch.where(found, token, output[:, depth])
        last = torch.where(found, child + 1, last)
        accepted_rows[:, depth] = torch.where(found, last, -1)
        # A walk that has stopped finds nothing: its row is as before, and so is its token.
        num_accepted += found
        ours &= found[:, None]
    return output, num_accepted, accepted_rows, last


def verify_rejection(
    law: RowLaw,  # [R, V], no row of temperature 0
    draft_token_ids: Tensor,  # [D] integer, target token ids
    cu_num_draft_tokens: Tensor,  # [B] integer, inclusive cumulative
    *,
    draft_logits: Tensor,  # [D, Vd] floating
    draft_inv_temperature: Tensor,  # [D]
    draft_log_normalizer: Tensor,  # [D], logsumexp_rows(draft_logits, draft_inv_temperature)
    draft_token_probs: Tensor,  # [D], of the drawn token, recorded when it was drawn
    draft_index: Tensor | None,  # [V] int32: target id -> draft id, -1 absent; None: equal ids
    coins: Tensor,  # [D] in [0, 1)
    uniforms: Tensor,  # [R] in [0, 1)
    max_draft_tokens: int | None = None,  # K; None takes the largest k of the batch
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Speculative sampling (Leviathan et al., arXiv 2211.17192), exact for the draft law given.

    A draft is accepted iff `0 < draft_prob <= 1 and coin * draft_prob < target_prob`. At the first
    rejection a token is drawn from max(target - draft, 0), with all accepted from the target law of
    the bonus row, by inverse CDF at the uniform of that row. The draft law is
    exp(draft_logits * inv_temperature - log_normalizer). Where logits / temperature exceeds some
    thousand, hand over logits whose row maximum is 0: float32 loses the law's sum otherwise.

    Returns output_token_ids [B, K + 1] int64, num_accepted [B] int64, invalid [B] bool (as
    verify_match) and guards [B, NUM_GUARDS] int32, for rows that the walk reached:
    draft_prob_invalid: a law entry is not a probability (NaN, inf, > 1); it counts as 0.
    draft_law_changed: the law is not what the token was drawn from; it counts as 0 altogether.
    residual_empty: nothing to draw from after a rejection; drawn from the target law instead.
    draft_id_out_of_range: the draft has no place in the law or the vocabulary; rejected, the law
    counts as 0. row_invalid: as `invalid`.

    Raises ValueError for a draft vocabulary beyond the target's without a draft_index.
    """
    scaled = law.scaled()
    row_valid = valid_rows(scaled)
    vocab_size, draft_vocab_size = scaled.shape[1], draft_logits.shape[1]
    if draft_index is None and draft_vocab_size > vocab_size:
        raise ValueError(
            f"a draft law over {draft_vocab_size} tokens needs a draft_index into {vocab_size}"
        )
    draft = draft_token_ids.to(torch.int64)
    layout = _layout(cu_num_draft_tokens, draft.shape[0])
    weights = scaled.exp()
    normalizer = row_sums(weights)

    # The drawn tokens: one entry of each law.
    known = (draft >= 0) & (draft < vocab_size)
    token = torch.where(known, draft, 0)
    column = token if draft_index is None else draft_index[token].to(torch.int64)
    known &= (column >= 0) & (column < draft_vocab_size)
    column = torch.where(known, column, 0)
    logit = draft_logits.gather(1, column[:, None])
    draft_prob, sound = _law(logit, draft_inv_temperature, draft_log_normalizer)
    draft_prob, sound = draft_prob.squeeze(1), sound.squeeze(1)
    recorded = draft_token_probs.to(draft_prob.dtype)
    same = (draft_prob - recorded).abs() <= _LAW_TOLERANCE * recorded  # false for NaN
    row = layout.row_of_draft
    target_prob = weights[row, token] / normalizer[row]
    accepted = known & sound & same & row_valid[row]
    accepted &= (draft_prob > 0) & (coins * draft_prob < target_prob)
    output, num_accepted = _walk(accepted, draft, layout, max_draft_tokens)

    # The row where each request stops.
    stop_row = layout.first_row + num_accepted
    invalid = ~row_valid[stop_row]
    guards = torch.zeros(invalid.shape[0], NUM_GUARDS, dtype=torch.int32, device=scaled.device)
    guards[:, GUARD_ROW_INVALID] = invalid
    final = weights[stop_row]
    rejecting = ((num_accepted < layout.num_draft_tokens) & ~invalid).nonzero().squeeze(1)
    if rejecting.numel():
        stop = (layout.first_draft + num_accepted)[rejecting]
        guards[rejecting, GUARD_DRAFT_ID_OUT_OF_RANGE] = (~known[stop]).to(torch.int32)
        changed = known & sound & ~same
        guards[rejecting, GUARD_DRAFT_LAW_CHANGED] = changed[stop].to(torch.int32)
        reads_law = (known & ~changed)[stop]
        rejecting, stop = rejecting[reads_law], stop[reads_law]
    if rejecting.numel():
        draft_law, sound = _law(
            draft_logits[stop], draft_inv_temperature[stop], draft_log_normalizer[stop]
        )
        bad = ~sound.all(1)
        # With invalid entries the sum is not judged: the law with zeros in their place lies below
        # the one drawn from, those tokens are never accepted, and so max(target - law, 0) is what
        # is still missing, exactly. The target law in its place would be biased.
        changed = ~bad & ~((row_sums(draft_law) - 1).abs() <= _LAW_TOLERANCE)
        draft_law[changed] = 0
        target = final[rejecting] / normalizer[stop_row[rejecting], None]
        residual = _residual(target, draft_law, draft_index)
        mass = row_sums(residual)
        empty = ~(mass.isfinite() & (mass > 0))
        final[rejecting] = torch.where(empty[:, None], target, residual).to(final.dtype)
        guards[rejecting, GUARD_DRAFT_PROB_INVALID] = bad.to(torch.int32)
        guards[rejecting, GUARD_DRAFT_LAW_CHANGED] = changed.to(torch.int32)
        guards[rejecting, GUARD_RESIDUAL_EMPTY] = empty.to(torch.int32)
    drawn = draw_weights(final, uniforms[stop_row])
    drawn = torch.where(invalid, PLACEHOLDER_TOKEN_ID, drawn)
    output.scatter_(1, num_accepted[:, None], drawn[:, None])
    return output, num_accepted, invalid, guards


def _law(
    logits: Tensor,  # [n, M]
    inv_temperature: Tensor,  # [n]
    log_normalizer: Tensor,  # [n]
) -> tuple[Tensor, Tensor]:  # [n, M], [n, M] bool
    """Draft probabilities, 0 for those that are none, and which are probabilities."""
    law = (logits * inv_temperature[:, None]).sub_(log_normalizer[:, None]).exp_()
    sound = law <= _MAX_PROB  # false for NaN
    return torch.where(sound, law.clamp(max=1), 0), sound


def _residual(
    target: Tensor,  # [n, V]
    law: Tensor,  # [n, Vd]
    draft_index: Tensor | None,  # [V]
) -> Tensor:  # [n, V]
    """max(target - law, 0), the law read as one over the target's vocabulary."""
    if draft_index is not None:
        law = F.pad(law, (0, 1))  # a zero for the tokens that are absent
        law = law.index_select(1, torch.where(draft_index < 0, law.shape[1] - 1, draft_index))
    elif law.shape[1] < target.shape[1]:
        law = F.pad(law, (0, target.shape[1] - law.shape[1]))
    return (target - law).clamp_(min=0)
