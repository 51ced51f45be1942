"""From the target's raw logits to committed tokens: parameters per row, then verification."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spectrue.kernels import dispatch
from spectrue.kernels.dispatch import RowLaw
from spectrue.workers.core import TokenLogprobs
from spectrue.workers.drafters.base import DraftLaw, DraftProposal
from spectrue.workers.input_buffers import InputBuffers
from spectrue.workers.rows import Rows, edits_of
from spectrue.workers.verify_inputs import PartShape, VerifyInputs, VerifyShape, from_device


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult:
    """What rank 0 decided, per sampling request, in batch order."""

    token_ids: list[list[int]]  # accepted drafts, then the recovered, drawn or bonus token
    num_accepted: list[int]  # raw accepted drafts
    invalid: list[bool]  # the walk met a row that is not a law: only the drafts before it stand
    logprobs: list[tuple[TokenLogprobs, ...]]
    guards: dict[str, int] = field(default_factory=dict)
    accepted_rows: list[list[int]] | None = None  # of trees: the row of each accepted draft


@dataclass(frozen=True, slots=True)
class Decided:
    """What the device says of one part, as integers on the host."""

    token_ids: list[list[int]]  # per request [width + 1]
    num_accepted: list[int]
    invalid: list[bool]
    guards: NDArray[np.int64] | None = None  # [requests, NUM_GUARDS]
    accepted_rows: list[list[int]] | None = None  # per request [width], of trees


def verify(
    logits: Tensor,  # [rows, vocab] floating, raw
    buffers: InputBuffers,
    slots: list[int],  # of the sampling requests
    drafts: list[list[int]],  # theirs
    proposal: DraftProposal,
) -> VerifyResult:
    """Decide every sampling request: greedy and `match` by one walk, `rejection` by another."""
    first = [buffers.num_tokens[slot] for slot in slots]
    rows = Rows.build(slots, first, drafts, _trees(drafts, proposal))
    simulated = bool(buffers.resolved.simulated_acceptance)
    inputs = VerifyInputs(VerifyShape.of(buffers, rows), logits.device, simulated=simulated)
    inputs.fill(buffers, rows)
    inputs.packed.upload()
    edits = edits_of(buffers, rows, logits.shape[1], logits.device)
    law = process_rows(logits, inputs, edits)
    decided = decide(law, inputs, proposal.law).cpu().numpy()
    result = collect(decided, inputs.shape, buffers, rows, logits.shape[1])
    for b, slot in enumerate(slots):
        params = buffers.request(slot).request.params
        if params.logprobs is not None:
            path = list(range(1, result.num_accepted[b] + 1))
            if result.accepted_rows is not None:
                path = result.accepted_rows[b]
            committed = torch.tensor([0, *path][: len(result.token_ids[b])], dtype=torch.int64)
            committed = (committed + rows.starts[b]).to(logits.device)
            if params.logprobs_mode == "raw":
                of_rows = logits[committed]
            else:
                of_rows = law.select(committed).scaled()
            result.logprobs[b] = _logprobs(of_rows, result.token_ids[b], params.logprobs)
    return result


def _trees(drafts: list[list[int]], proposal: DraftProposal) -> list[list[int]] | None:
    """The parents of these drafts; requests that do not sample have none."""
    if proposal.parents is None:
        return None
    parents = iter(proposal.parents.tolist())
    return [list(islice(parents, len(d))) for d in drafts]


def process_rows(logits: Tensor, inputs: VerifyInputs, edits: Mapping[str, Any]) -> RowLaw:
    """The law of every row, each under its request's parameters. No host synchronisation."""
    if inputs.shape.greedy and not edits:
        return RowLaw(logits)
    temperature = inputs.get("temperature")
    if temperature is None:
        temperature = torch.zeros(len(logits), device=logits.device)
    cuts: dict[str, Any] = {name: inputs.get(name) for name in ("top_k", "top_p", "min_p")}
    return dispatch.process_logits(logits, temperature=temperature, **cuts, **edits)


def decide(law: RowLaw, inputs: VerifyInputs, draft_law: DraftLaw | None) -> Tensor:
    """Every decision of a step in one int64 vector, for `collect`. No host synchronisation, so that
    a graph can capture it."""
    found: list[Tensor] = []
    walk, reject = inputs.shape.walk, inputs.shape.reject
    if walk is not None:
        seed, choice, position = inputs.keys("walk")
        uniform = None
        if walk.uniform:
            uniform = dispatch.uniform(seed, choice, position, dispatch.STREAM_DRAW)
        target_token_ids, row_valid = dispatch.sample_rows(
            _rows(law, inputs.get("walk.index")),
            None if walk.greedy else inputs["walk.kind"],
            uniform=uniform,
            seed=seed,
            choice=choice,
            position=position,
        )
        drafts, accepts = inputs.drafts("walk"), inputs.get("walk.accepts")
        if accepts is not None and walk.num_drafts:  # made up, see workers/simulate.py
            target_token_ids = from_device(target_token_ids, accepts, drafts)
            drafts = torch.where(inputs["walk.kept"] > 0, drafts, -1)
        output, accepted, invalid, accepted_rows = dispatch.verify_match(
            target_token_ids,
            drafts,
            inputs["walk.cu_num_draft_tokens"],
            row_valid,
            parents=inputs.get("walk.parents"),
            max_draft_tokens=walk.width,
        )
        found += [output, accepted, invalid]
        if walk.tree:
            found.append(accepted_rows)
    if reject is not None:
        found += _reject(_rows(law, inputs.get("reject.index")), inputs, reject, draft_law)
    return torch.cat([tensor.flatten().to(torch.int64) for tensor in found])


def num_decided(shape: VerifyShape) -> int:
    """How long the vector of `decide` is, for a rank that has no logits."""
    length = 0
    if shape.walk is not None:
        length += shape.walk.num_requests * (shape.walk.width + 3)
        length += shape.walk.num_requests * shape.walk.width * shape.walk.tree
    if shape.reject is not None:
        length += shape.reject.num_requests * (shape.reject.width + 3 + dispatch.NUM_GUARDS)
    return length


def _rows(law: RowLaw, index: Tensor | None) -> RowLaw:
    """Not `select`: as many rows as there are may still be others."""
    if index is None:
        return law
    if law.temperature is None:
        return RowLaw(law.logits.index_select(0, index))
    return replace(law, index=index)


def _reject(
    law: RowLaw, inputs: VerifyInputs, part: PartShape, draft_law: DraftLaw | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Chain rejection; the draft law's rows are the drafts of these requests, in the same order."""
    if draft_law is None:
        assert part.num_drafts == 0
        empty = torch.empty(0, device=law.logits.device)
        draft_law = DraftLaw(
            logits=empty.new_empty(0, law.vocab_size),
            inv_temperature=empty,
            log_normalizer=empty,
            token_probs=empty,
        )
    assert len(draft_law.logits) == part.num_drafts
    return dispatch.verify_rejection(
        law,
        inputs.drafts("reject"),
        inputs["reject.cu_num_draft_tokens"],
        draft_logits=draft_law.logits,
        draft_inv_temperature=draft_law.inv_temperature,
        draft_log_normalizer=draft_law.log_normalizer,
        draft_token_probs=draft_law.token_probs,
        draft_index=draft_law.draft_index,
        coins=dispatch.uniform(*inputs.keys("coin"), dispatch.STREAM_COIN),
        uniforms=dispatch.uniform(*inputs.keys("reject"), dispatch.STREAM_DRAW),
        max_draft_tokens=part.width,
    )


def collect(
    decided: NDArray[np.int64],  # what `decide` found
    shape: VerifyShape,
    buffers: InputBuffers,
    rows: Rows,
    vocab_size: int,
) -> VerifyResult:
    """Of a vector of integers the result, in batch order. A padded part's last requests are no
    requests."""
    result = VerifyResult(
        token_ids=[[] for _ in rows.slots],
        num_accepted=[0] * len(rows.slots),
        invalid=[False] * len(rows.slots),
        logprobs=[() for _ in rows.slots],
        accepted_rows=None if rows.parents is None else [[] for _ in rows.slots],
    )
    rejects = [buffers.methods[slot] == "rejection" for slot in rows.slots]
    at = 0
    if shape.walk is not None:
        batch = [b for b, reject in enumerate(rejects) if not reject]
        part, at = _part(decided, at, shape.walk)
        _put(result, batch, part)
        # Of drafts that stay on the device nobody tells; they are some of a vocabulary's own ids.
        bad = sum(_met_bad_id(rows, result, b, vocab_size) for b in batch)
        if bad and not shape.on_device:
            result.guards[dispatch.GUARD_NAMES[dispatch.GUARD_DRAFT_ID_OUT_OF_RANGE]] = bad
    if shape.reject is not None:
        batch = [b for b, reject in enumerate(rejects) if reject]
        part, at = _part(decided, at, shape.reject, dispatch.NUM_GUARDS)
        _put(result, batch, part)
        assert part.guards is not None
        fired = part.guards[: len(batch)].sum(0).tolist()
        for name, count in zip(dispatch.GUARD_NAMES, fired, strict=True):
            if count:
                result.guards[name] = result.guards.get(name, 0) + count
    if any(result.invalid):
        result.guards["row_invalid"] = sum(result.invalid)
    return result


def decided_at(shape: VerifyShape, rejects: Sequence[bool]) -> tuple[list[int], list[int]]:
    """For each request where in the vector of `decide` its tokens begin, and where the number of
    its accepted drafts is."""
    tokens: dict[int, int] = {}
    accepted: dict[int, int] = {}
    at = 0
    for part, of_reject in ((shape.walk, False), (shape.reject, True)):
        if part is None:
            continue
        n, width = part.num_requests, part.width + 1
        batch = [b for b, reject in enumerate(rejects) if reject == of_reject]
        tokens |= {b: at + i * width for i, b in enumerate(batch)}
        accepted |= {b: at + n * width + i for i, b in enumerate(batch)}
        at += num_decided(VerifyShape(0, False, None if of_reject else part, None))
    return [tokens[b] for b in range(len(rejects))], [accepted[b] for b in range(len(rejects))]


def _part(
    decided: NDArray[np.int64],
    at: int,
    shape: PartShape,
    num_guards: int = 0,
) -> tuple[Decided, int]:
    """One part of the vector from `at`, and where the next begins."""
    n, width = shape.num_requests, shape.width + 1

    def take(size: int) -> NDArray[np.int64]:
        nonlocal at
        at += size
        return decided[at - size : at]

    token_ids = take(n * width).reshape(n, width).tolist()
    accepted, invalid = take(n).tolist(), (take(n) != 0).tolist()
    accepted_rows = None
    if shape.tree:
        accepted_rows = take(n * shape.width).reshape(n, shape.width).tolist()
    guards = take(n * num_guards).reshape(n, num_guards) if num_guards else None
    return Decided(token_ids, accepted, invalid, guards, accepted_rows), at


def _put(result: VerifyResult, batch: list[int], part: Decided) -> None:
    for i, b in enumerate(batch):
        kept = part.num_accepted[i] + (not part.invalid[i])
        result.token_ids[b] = part.token_ids[i][:kept]
        result.num_accepted[b] = part.num_accepted[i]
        result.invalid[b] = part.invalid[i]
        if part.accepted_rows is not None and result.accepted_rows is not None:
            result.accepted_rows[b] = part.accepted_rows[i][: part.num_accepted[i]]


def _met_bad_id(rows: Rows, result: VerifyResult, b: int, vocab_size: int) -> bool:
    """Whether a draft that the walk stopped at is no token at all."""
    drafts, num_accepted = rows.drafts[b], result.num_accepted[b]
    if rows.parents is None or result.accepted_rows is None:
        return num_accepted < len(drafts) and not 0 <= drafts[num_accepted] < vocab_size
    last = [0, *result.accepted_rows[b]][-1]
    after = zip(drafts, rows.parents[b], strict=True)
    return any(parent == last and not 0 <= token < vocab_size for token, parent in after)


def _logprobs(law: Tensor, token_ids: list[int], num_top: int) -> tuple[TokenLogprobs, ...]:
    """Of one law a token, [len(token_ids), vocab]: raw logits or processed ones."""
    logprobs = law.float().log_softmax(-1)
    chosen = logprobs.gather(
        1, torch.tensor(token_ids, dtype=torch.int64, device=law.device)[:, None]
    ).squeeze(1)
    values, ids = logprobs.topk(min(num_top, law.shape[1]), -1)
    return tuple(
        TokenLogprobs(token_id=token, logprob=p, top=tuple(zip(i, v, strict=True)))
        for token, p, i, v in zip(
            token_ids, chosen.tolist(), ids.tolist(), values.tolist(), strict=True
        )
    )
