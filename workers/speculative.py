"""The speculative step: propose, one target forward, verify, commit, refresh the drafter.

Runs on every rank with the same plan. Rank 0 alone decides; what it decides is broadcast, so
ranks cannot diverge (sglang#28815).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from spectrue.workers.compaction import compact
from spectrue.workers.core import SchedulerOutput, SlotOutput, StepOutput
from spectrue.workers.drafters.base import Drafter
from spectrue.workers.forward_batch import ForwardBatch
from spectrue.workers.graphs import StepGraphs
from spectrue.workers.input_buffers import InputBuffers
from spectrue.workers.model_runner import ModelRunner
from spectrue.workers.parallel import TPGroup
from spectrue.workers.sampler import VerifyResult, verify


def speculative_step(
    plan: SchedulerOutput,
    buffers: InputBuffers,
    target: ModelRunner,
    drafter: Drafter,
    group: TPGroup,
    graphs: StepGraphs | None = None,
) -> StepOutput:
    """Run one planned step."""
    return start_step(plan, buffers, target, drafter, group, graphs)()


def start_step(
    plan: SchedulerOutput,
    buffers: InputBuffers,
    target: ModelRunner,
    drafter: Drafter,
    group: TPGroup,
    graphs: StepGraphs | None = None,
) -> Callable[[], StepOutput]:
    """Start one planned step; what is returned waits for its end and commits.

    The tokens that it commits are the target's law, whatever is drafted. A prefilling request takes
    part with no drafts, and decides a token only with its last chunk. Without a graph all the work
    is done here, and the next step may only be started when this one was ended.
    """
    t0 = time.perf_counter()
    buffers.apply(plan)

    # Propose k tokens each, x_1 .. x_k, or a tree of so many.
    proposal = drafter.propose(plan, buffers)
    drafts = proposal.drafts()
    t1 = time.perf_counter()

    # One target forward: the tokens that have no KV yet, then the drafts. Then, on rank 0, accept a
    # prefix of the drafts and draw one token more. A graph does both, where it can.
    sampling = [i for i, s in enumerate(plan.scheduled) if s.samples]
    slots = [plan.scheduled[i].slot for i in sampling]
    in_flight = None if graphs is None else graphs.launch(plan, drafts, proposal)
    result: VerifyResult | None = None
    t2 = time.perf_counter()
    if in_flight is None:
        proposal.fetch_into(drafts)
        parents = None if proposal.parents is None else proposal.of_requests(proposal.parents)
        batch, rows = _target_batch(plan, buffers, drafts, target, parents)
        output = target.forward(batch)
        logits = target.logits(output.hidden_states[rows])
        t2 = time.perf_counter()
        if logits is not None and sampling:
            result = verify(logits, buffers, slots, [drafts[i] for i in sampling], proposal)
        result = group.broadcast_object(result)  # a graph has broadcast it by itself
    t3 = time.perf_counter()

    def finish() -> StepOutput:
        nonlocal result, batch, output
        t4 = time.perf_counter()  # what came since t3 is the engine's, or another step's
        if in_flight is not None:
            assert graphs is not None
            result, batch, output = graphs.finish(in_flight)
        t5 = time.perf_counter()

        # What was committed before this step is known now, if it was not at the start.
        settled = buffers.settle(plan)

        # Commit. KV of rejected drafts is dropped by not counting it; in a tree there is some
        # between that of accepted ones, so these move together first.
        if result is not None:
            for slot, token_ids in zip(slots, result.token_ids, strict=True):
                buffers.commit(slot, token_ids)
            if result.accepted_rows is not None:
                output = compact(settled, target, batch, output, result.accepted_rows)
        drafter.extend(settled, buffers, batch, output)
        t6 = time.perf_counter()
        return StepOutput(
            outputs=_outputs(plan, buffers, result, drafts),
            guards=result.guards if result is not None else {},
            draft_time=t1 - t0 + t6 - t5,
            model_time=t2 - t1 + t5 - t4,
            verify_time=t3 - t2,
        )

    return finish


def _target_batch(
    plan: SchedulerOutput,
    buffers: InputBuffers,
    drafts: list[list[int]],
    target: ModelRunner,
    parents: list[list[int]] | None = None,
) -> tuple[ForwardBatch, Tensor]:
    """The forward's tensors, and its rows whose logits are needed, [rows] int64.

    A draft id outside the vocabulary has no embedding: another is fed in its place, and
    verification, which sees the id itself, rejects it.
    """
    token_ids, rows, end = [], [], 0
    for s, draft in zip(plan.scheduled, drafts, strict=True):
        first = s.num_computed_tokens
        tokens = buffers.token_ids[s.slot, first : first + s.num_scheduled_tokens]
        if draft:
            fed = [t if 0 <= t < target.vocab_size else 0 for t in draft]
            tokens = torch.cat([tokens, torch.tensor(fed)])
        token_ids.append(tokens)
        end += len(tokens)
        if s.samples:
            rows.append(torch.arange(end - len(draft) - 1, end))
    batch = ForwardBatch.build(
        token_ids=token_ids,
        starts=[s.num_computed_tokens for s in plan.scheduled],
        block_tables=buffers.block_tables[[s.slot for s in plan.scheduled]],
        block_size=buffers.block_size,
        device=target.device,
        parents=None if parents is None else _parents_fed(plan, parents),
    )
    index = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)
    return batch, index.to(target.device)


def _parents_fed(plan: SchedulerOutput, parents: list[list[int]]) -> list[list[int]]:
    """Of every token fed: scheduled ones are a chain, drafts come after its last."""
    return [
        [*range(-1, s.num_scheduled_tokens - 1), *(s.num_scheduled_tokens - 1 + p for p in tree)]
        for s, tree in zip(plan.scheduled, parents, strict=True)
    ]


def _outputs(
    plan: SchedulerOutput,
    buffers: InputBuffers,
    result: VerifyResult | None,
    drafts: list[list[int]],
) -> tuple[SlotOutput, ...]:
    outputs, b = [], 0
    for s, draft in zip(plan.scheduled, drafts, strict=True):
        num_draft_computed = buffers.num_draft_computed[s.slot]
        if result is None or not s.samples:
            outputs.append(SlotOutput(slot=s.slot, num_draft_computed_tokens=num_draft_computed))
            continue
        error = "the model's logits are not a distribution (NaN, +inf or all masked)"
        outputs.append(
            SlotOutput(
                slot=s.slot,
                token_ids=tuple(result.token_ids[b]),
                num_accepted_tokens=result.num_accepted[b],
                num_draft_tokens=len(draft),
                num_draft_computed_tokens=num_draft_computed,
                logprobs=result.logprobs[b],
                verify_method=buffers.methods[s.slot],
                error=error if result.invalid[b] else None,
            )
        )
        b += 1
    return tuple(outputs)
