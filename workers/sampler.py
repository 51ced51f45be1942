"""From the target's raw logits to committed tokens: parameters per row, then verification."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from spectrue.kernels import dispatch
from spectrue.kernels.dispatch import RowLaw
from spectrue.workers.core import TokenLogprobs
from spectrue.workers.drafters.base import DraftProposal
from spectrue.workers.input_buffers import InputBuffers
from spectrue.workers.rows import Rows, process_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult:
    """What rank 0 decided, per sampling request, in batch order."""

    token_ids: list[list[int]]  # accepted drafts, then the recovered, drawn or bonus token
    num_accepted: list[int]  # raw accepted drafts
    invalid: list[bool]  # the walk met a row that is not a law: only the drafts before it stand
    logprobs: list[tuple[TokenLogprobs, ...]]
    guards: dict[str, int] = field(default_factory=dict)


def verify(
    logits: Tensor,  # [rows, vocab] float32, raw
    buffers: InputBuffers,
    slots: list[int],  # of the sampling requests
    drafts: list[list[int]],  # theirs
    proposal: DraftProposal,
) -> VerifyResult:
    """Decide every sampling request: greedy and `match` by one walk, `rejection` by another."""
    rows = Rows.build(buffers, slots, drafts)
    law = process_rows(logits, buffers, rows)
    result = VerifyResult(
        token_ids=[[] for _ in slots],
        num_accepted=[0] * len(slots),
        invalid=[False] * len(slots),
        logprobs=[() for _ in slots],
    )
    walk = [b for b, slot in enumerate(slots) if buffers.methods[slot] != "rejection"]
    reject = [b for b, slot in enumerate(slots) if buffers.methods[slot] == "rejection"]
    if walk:
        index = rows.of(walk)
        target_token_ids, row_valid = _target_tokens(law.select(index), buffers, rows, index)
        output, accepted, invalid, _ = dispatch.verify_match(
            target_token_ids,
            torch.tensor([t for b in walk for t in drafts[b]], dtype=torch.int64),
            _cumulative(rows, walk),
            row_valid,
        )
        _collect(result, walk, output, accepted, invalid)
        bad_ids = sum(_met_bad_id(drafts[b], result.num_accepted[b], logits.shape[1]) for b in walk)
        if bad_ids:
            result.guards[dispatch.GUARD_NAMES[dispatch.GUARD_DRAFT_ID_OUT_OF_RANGE]] = bad_ids
    if reject:
        index = rows.of(reject)
        output, accepted, invalid, guards = _reject(
            law.select(index), buffers, rows, reject, index, proposal
        )
        _collect(result, reject, output, accepted, invalid)
        for name, count in zip(dispatch.GUARD_NAMES, guards.sum(0).tolist(), strict=True):
            if count:
                result.guards[name] = result.guards.get(name, 0) + count
    if any(result.invalid):
        result.guards["row_invalid"] = sum(result.invalid)
    for b, slot in enumerate(slots):
        params = buffers.request(slot).request.params
        if params.logprobs is not None:
            first = rows.starts[b]
            committed = torch.arange(first, first + len(result.token_ids[b]))
            if params.logprobs_mode == "raw":
                of_rows = logits[committed]
            else:
                of_rows = law.select(committed).scaled()
            result.logprobs[b] = _logprobs(of_rows, result.token_ids[b], params.logprobs)
    return result


def _met_bad_id(drafts: list[int], num_accepted: int, vocab_size: int) -> bool:
    """Whether the draft that the walk stopped at is no token at all."""
    return num_accepted < len(drafts) and not 0 <= drafts[num_accepted] < vocab_size


def _target_tokens(
    law: RowLaw, buffers: InputBuffers, rows: Rows, index: Tensor
) -> tuple[Tensor, Tensor]:
    """The target's own token at each row of `index`, and which of them are laws."""
    slot = rows.slot[index]
    kind = buffers.draw_kind[slot]
    key = buffers.seed[slot], buffers.choice[slot], rows.position[index]
    uniform = None
    if bool((kind == dispatch.DRAW_UNIFORM).any()):
        uniform = dispatch.uniform(*key, dispatch.STREAM_DRAW)
    seed, choice, position = key
    return dispatch.sample_rows(
        law,
        kind if bool((kind != dispatch.DRAW_ARGMAX).any()) else None,  # None: a greedy batch
        uniform=uniform,
        seed=seed,
        choice=choice,
        position=position,
    )


def _reject(
    target_law: RowLaw,
    buffers: InputBuffers,
    rows: Rows,
    batch: list[int],
    index: Tensor,
    proposal: DraftProposal,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Chain rejection of the requests of `batch`; the law's rows are theirs, in the same order."""
    draft_token_ids = torch.tensor([t for b in batch for t in rows.drafts[b]], dtype=torch.int64)
    num_drafts = len(draft_token_ids)
    law = proposal.law
    assert (num_drafts == 0) or (law is not None and len(law.logits) == num_drafts)
    empty = torch.empty(0)
    is_draft = torch.cat([torch.arange(rows.num_drafts[b] + 1) < rows.num_drafts[b] for b in batch])
    slot = rows.slot[index]
    seed, choice, position = buffers.seed[slot], buffers.choice[slot], rows.position[index]
    coins = dispatch.uniform(
        seed[is_draft], choice[is_draft], position[is_draft], dispatch.STREAM_COIN
    )
    return dispatch.verify_rejection(
        target_law,
        draft_token_ids,
        _cumulative(rows, batch),
        draft_logits=law.logits if law is not None else empty.new_empty(0, target_law.vocab_size),
        draft_inv_temperature=law.inv_temperature if law is not None else empty,
        draft_log_normalizer=law.log_normalizer if law is not None else empty,
        draft_token_probs=law.token_probs if law is not None else empty,
        draft_index=law.draft_index if law is not None else None,
        coins=coins,
        uniforms=dispatch.uniform(seed, choice, position, dispatch.STREAM_DRAW),
    )


def _cumulative(rows: Rows, batch: list[int]) -> Tensor:
    return torch.tensor(list(accumulate(rows.num_drafts[b] for b in batch)), dtype=torch.int64)


def _collect(
    result: VerifyResult, batch: list[int], output: Tensor, accepted: Tensor, invalid: Tensor
) -> None:
    columns = zip(batch, output.tolist(), accepted.tolist(), invalid.tolist(), strict=True)
    for b, token_ids, num_accepted, is_invalid in columns:
        kept = num_accepted if is_invalid else num_accepted + 1
        result.token_ids[b] = token_ids[:kept]
        result.num_accepted[b] = num_accepted
        result.invalid[b] = is_invalid


def _logprobs(law: Tensor, token_ids: list[int], num_top: int) -> tuple[TokenLogprobs, ...]:
    """Of one law a token, [len(token_ids), vocab]: raw logits or processed ones."""
    logprobs = law.float().log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, dtype=torch.int64)[:, None]).squeeze(1)
    values, ids = logprobs.topk(min(num_top, law.shape[1]), -1)
    return tuple(
        TokenLogprobs(token_id=token, logprob=p, top=tuple(zip(i, v, strict=True)))
        for token, p, i, v in zip(
            token_ids, chosen.tolist(), ids.tolist(), values.tolist(), strict=True
        )
    )
