"""With a draft head the joint law is the target's, and the draft law is what it should be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from spectrue.workers import proposal
from spectrue.workers.config import SpeculativeConfig
from spectrue.workers.core import (
    NewRequest,
    Request,
    SamplingParams,
    ScheduledRequest,
    SchedulerOutput,
)
from spectrue.workers.drafters.base import Drafter, DraftLaw, DraftProposal
from spectrue.workers.drafters.chain import DraftCuts
from spectrue.workers.forward_batch import ForwardBatch, ForwardOutput
from spectrue.workers.input_buffers import InputBuffers
from spectrue.workers.parallel import TPGroup
from spectrue.workers.speculative import speculative_step

from .test_exactness import FAULT, PARAMS, TOLERANCE
from .toy import BLOCK_SIZE, EOS, joint_law, output_law, total_variation
from .toy_head import HeadSetup

DRAFTER: dict[str, Any] = {"drafter": "eagle3", "draft_model": "-"}
CONFIGS = {
    "match-greedy": SpeculativeConfig(**DRAFTER, verify_method="match", draft_sampling="greedy"),
    "match-sampled": SpeculativeConfig(**DRAFTER, verify_method="match", draft_sampling="sampled"),
    "rejection": SpeculativeConfig(**DRAFTER),
}
REDUCED = (0, 2, 3)  # token 1 is never drafted


def make(config: str, params: dict[str, Any], **changes: Any) -> HeadSetup:
    options: dict[str, Any] = {"prompt": (1, 2, 3), "draft_ids": REDUCED, **changes}
    return HeadSetup(
        config=CONFIGS[config], params=SamplingParams(max_tokens=8, **params), **options
    )


@pytest.mark.parametrize("params", ["plain", "cold", "top_k", "cuts", "all"])
@pytest.mark.parametrize("config", CONFIGS)
def test_output_law_is_the_targets(config: str, params: str) -> None:
    """sglang#37134: with EAGLE3's reduced vocabulary too; what it lacks comes by the residual."""
    setup = make(config, PARAMS[params])
    law = joint_law(setup)
    assert params in ("top_k", "cuts") or sum(p for t, p in law.items() if 1 in t) > 0.1
    assert total_variation(output_law(setup), law) < TOLERANCE


@pytest.mark.parametrize("config", CONFIGS)
def test_the_whole_vocabulary(config: str) -> None:
    setup = make(config, {"top_p": 0.8}, draft_ids=None)
    assert total_variation(output_law(setup), joint_law(setup)) < TOLERANCE


@pytest.mark.parametrize("config", CONFIGS)
def test_greedy(config: str) -> None:
    setup = make(config, {"temperature": 0.0, "repetition_penalty": 1.7})
    assert total_variation(output_law(setup), joint_law(setup)) < TOLERANCE


@pytest.mark.parametrize(
    ("top_k", "cuts"),
    [
        (3, DraftCuts(top_k=1)),
        (3, DraftCuts(top_k=2)),
        (0, DraftCuts(top_k=2)),
        (2, DraftCuts(top_k=3)),  # the request's own is the smaller one
        (3, DraftCuts(top_p=0.5)),
    ],
)
@pytest.mark.parametrize("config", ["match-sampled", "rejection"])
def test_cuts_of_the_draft_law_keep_it_exact(config: str, top_k: int, cuts: DraftCuts) -> None:
    setup = make(config, {"top_k": top_k}, cuts=cuts)
    assert total_variation(output_law(setup), joint_law(setup)) < TOLERANCE


def test_fault_cuts_that_are_not_in_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn with the cut, recorded without: rejected as a law that has changed, or biased."""
    draw = proposal.sample_draft_proposal

    def uncut(
        logits: Tensor, rows: proposal.DraftRows, target_ids: Tensor | None = None
    ) -> proposal.Draw:
        drawn = draw(logits, rows, target_ids)
        whole = logits.log_softmax(1)
        ids = drawn.token_ids
        column = ids if target_ids is None else torch.searchsorted(target_ids, ids)
        return proposal.Draw(
            token_ids=ids,
            logits=whole,
            log_normalizer=torch.zeros(len(ids)),
            token_probs=whole.gather(1, column[:, None]).squeeze(1).exp(),
        )

    monkeypatch.setattr("spectrue.workers.drafters.chain.sample_draft_proposal", uncut)
    setup = make("rejection", {}, cuts=DraftCuts(top_k=1))
    assert total_variation(output_law(setup), joint_law(setup)) > FAULT


# -- the law step after step: accepted hidden states, rejected drafts, chunks, joins ------------


class Spy:
    """Compares the law of every draft with what it must be for the committed text."""

    needs_hidden_states = True
    law: DraftLaw | None = None

    def __init__(self, drafter: Drafter, setup: HeadSetup) -> None:
        self.drafter = drafter
        self.setup = setup
        self.num_checked = 0

    def propose(self, plan: SchedulerOutput, buffers: InputBuffers) -> DraftProposal:
        proposal = self.drafter.propose(plan, buffers)
        law, row = proposal.law, 0
        tokens = proposal.token_ids.tolist()
        for s, k in zip(plan.scheduled, proposal.num_draft_tokens, strict=True):
            assert k == s.num_draft_tokens
            prefix = tuple(buffers.token_ids[s.slot, : buffers.num_tokens[s.slot]].tolist())
            for j in range(row, row + k):
                assert law is not None
                want = self.setup.draft_law(prefix, tuple(tokens[row:j]))
                got = (law.logits[j] - law.log_normalizer[j]).exp().numpy()
                ids = list(self.setup.draft.draft_ids)
                np.testing.assert_allclose(got, want[ids], atol=1e-5)
                np.testing.assert_allclose(law.token_probs[j], want[tokens[j]], atol=1e-5)
                self.num_checked += 1
            row += k
        return proposal

    def extend(
        self,
        plan: SchedulerOutput,
        buffers: InputBuffers,
        batch: ForwardBatch,
        output: ForwardOutput,
    ) -> None:
        self.drafter.extend(plan, buffers, batch, output)


def plans(buffers: InputBuffers, prompts: list[tuple[int, ...]]) -> Iterator[SchedulerOutput]:
    """Prompts in chunks of 3, late joins, steps left out, any order, depths from 0 to 3."""
    rng = np.random.default_rng(0)
    per_row = buffers.block_tables.shape[1]
    done = [0] * len(prompts)
    for step in range(24):
        new, scheduled = [], []
        for slot in rng.permutation(len(prompts)).tolist():
            prompt = prompts[slot]
            if step < 2 * slot or (step > 2 * slot and rng.random() < 0.2):
                continue
            if step == 2 * slot:
                params = SamplingParams(max_tokens=64, ignore_eos=True)
                request = Request(request_id=str(slot), prompt_token_ids=prompt, params=params)
                new.append(NewRequest(slot=slot, request=request, seed=100 + slot))
            total = len(prompt) if step == 2 * slot else buffers.num_tokens[slot]
            chunk = min(3, total - done[slot])
            decoding = chunk == 1 and done[slot] >= len(prompt)
            blocks = range(slot * per_row, (slot + 1) * per_row) if step == 2 * slot else ()
            scheduled.append(
                ScheduledRequest(
                    slot=slot,
                    num_computed_tokens=done[slot],
                    num_scheduled_tokens=chunk,
                    num_draft_tokens=int(rng.integers(0, 4)) if decoding else 0,
                    samples=done[slot] + chunk == total,
                    new_block_ids=tuple(blocks),
                )
            )
            done[slot] += chunk
        if scheduled:
            yield SchedulerOutput(scheduled=tuple(scheduled), new_requests=tuple(new))
        for s in scheduled:
            if s.samples:
                done[s.slot] = buffers.num_tokens[s.slot] - 1


def watch(change: Callable[[Any], None] = lambda drafter: None) -> int:
    """Run some steps under the spy; the number of laws that it compared."""
    setup = make("rejection", {}, k=3, vocab_size=5)
    buffers = InputBuffers(
        max_num_seqs=3,
        max_model_len=128,
        block_size=BLOCK_SIZE,
        resolved=setup.resolved,
        eos_token_ids=(EOS,),
    )
    drafter = setup.drafter(3)
    change(drafter)
    spy, target = Spy(drafter, setup), setup.target
    for plan in plans(buffers, [(1, 2, 3, 4, 1, 2, 0), (3,), (4, 4, 2, 1)]):
        speculative_step(plan, buffers, target, spy, TPGroup())  # type: ignore[arg-type]
    return spy.num_checked


def test_the_draft_law_follows_the_committed_text() -> None:
    assert watch() > 40


def keep_drafted_kv(drafter: Any, which: Callable[[ForwardBatch], Tensor]) -> None:
    """What `extend` writes is lost at some of its slots where the drafts had written before."""
    extend, forward = drafter.extend, drafter.runner.forward

    def stale(batch: ForwardBatch, hidden: Tensor) -> Tensor:
        before = drafter.runner.kv.clone()
        out: Tensor = forward(batch, hidden)
        slots = batch.slot_mapping[which(batch)]
        slots = slots[before[slots] >= 0]
        drafter.runner.kv[slots] = before[slots]
        return out

    def extending(*arguments: Any) -> None:
        drafter.runner.forward = stale
        extend(*arguments)
        drafter.runner.forward = forward

    drafter.extend = extending


def not_refreshed(drafter: Any) -> None:
    """Accepted tokens keep the KV of recycled hidden states; the last token alone is fed anew."""

    def accepted(batch: ForwardBatch) -> Tensor:
        last = torch.tensor(batch.query_lens).cumsum(0) - 1
        rows = torch.ones(len(batch.input_ids), dtype=torch.bool)
        rows[last] = False
        return rows

    keep_drafted_kv(drafter, accepted)


def not_rolled_back(drafter: Any) -> None:
    """The KV of a rejected draft stays where the committed token's belongs."""

    def corrected(batch: ForwardBatch) -> Tensor:
        return torch.tensor(batch.query_lens).cumsum(0) - 1

    keep_drafted_kv(drafter, corrected)


def wrong_rows(drafter: Any) -> None:
    """Hidden states of one row too early."""
    combine = drafter.runner.combine
    drafter.runner.combine = lambda output: combine(output).roll(1, 0)


def shared_slot(drafter: Any) -> None:
    """What waits for the next step is one row for all requests."""
    extend = drafter.extend

    def mixing(*arguments: Any) -> None:
        extend(*arguments)
        drafter.hidden[:] = drafter.hidden[0].clone()

    drafter.extend = mixing


def no_table(drafter: Any) -> None:
    """d2t is dropped: draft ids are taken for target ids."""
    drafter.draws.vocab = None


@pytest.mark.parametrize(
    "fault", [not_refreshed, not_rolled_back, wrong_rows, shared_slot, no_table]
)
def test_faults_of_the_drafter_are_seen(fault: Callable[[Any], None]) -> None:
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        watch(fault)
