"""The joint law of the output equals the target's: every method, drafter and parameter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from spectrue.kernels import dispatch
from spectrue.workers import proposal
from spectrue.workers.config import SpeculativeConfig
from spectrue.workers.core import SamplingParams, SchedulerOutput
from spectrue.workers.drafters.base import Drafter, DraftLaw, DraftProposal
from spectrue.workers.forward_batch import ForwardBatch, ForwardOutput
from spectrue.workers.input_buffers import InputBuffers

from .toy import Setup, joint_law, output_law, total_variation

TOLERANCE = 1e-5  # float32 against float64; a biased step is off by 1e-2
FAULT = 1e-2

CONFIGS = {
    "none": SpeculativeConfig(drafter="none"),
    "ngram": SpeculativeConfig(drafter="ngram", ngram_min=1),
    "match-greedy": SpeculativeConfig(
        drafter="draft_model", draft_model="-", verify_method="match", draft_sampling="greedy"
    ),
    "match-sampled": SpeculativeConfig(
        drafter="draft_model", draft_model="-", verify_method="match", draft_sampling="sampled"
    ),
    "rejection": SpeculativeConfig(drafter="draft_model", draft_model="-"),
}
PARAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.4},
    "hot": {"temperature": 2.5},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.3},
    "cuts": {"temperature": 1.3, "top_k": 3, "top_p": 0.7, "min_p": 0.2},
    "repetition": {"repetition_penalty": 1.7},
    "presence-frequency": {"presence_penalty": 0.9, "frequency_penalty": -0.7},
    "bias": {"logit_bias": ((1, 2.0), (3, -100.0))},
    "bad_words": {"bad_words": ((2,), (1, 0), (3, 3))},
    "min_tokens": {"min_tokens": 2, "stop_token_ids": (3,)},
    "all": {
        "temperature": 0.8,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
        "logit_bias": ((0, 0.7),),
        "bad_words": ((2, 2),),
        "min_tokens": 1,
    },
}
PROMPT = (1, 2, 3, 1, 2)  # the n-gram drafter finds "1 2 3"


def make(config: str, params: dict[str, Any], **changes: Any) -> Setup:
    return Setup(
        config=CONFIGS[config],
        params=SamplingParams(max_tokens=8, **params),
        prompt=PROMPT,
        **changes,
    )


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("config", CONFIGS)
def test_output_law_is_the_targets(config: str, params: str) -> None:
    setup = make(config, PARAMS[params])
    assert total_variation(output_law(setup), joint_law(setup)) < TOLERANCE


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("params", [{}, {"repetition_penalty": 1.7}, {"bad_words": ((2,), (1, 0))}])
def test_greedy_output_is_the_argmax_chain(config: str, params: dict[str, Any]) -> None:
    setup = make(config, {"temperature": 0.0, **params})
    assert total_variation(output_law(setup), joint_law(setup)) < TOLERANCE


@pytest.mark.parametrize("k", [0, 1, 3])
def test_any_k(k: int) -> None:
    setup = make("rejection", {"top_p": 0.7}, vocab_size=3, k=k)
    setup.prompt = (1, 2, 1)
    assert total_variation(output_law(setup), joint_law(setup)) < TOLERANCE


# -- planted faults: each must be seen --------------------------------------------------------


class Faulty:
    """Drops drafts from a real drafter's proposal, from the first one that `drop` names on."""

    needs_hidden_states = False
    law: DraftLaw | None = None

    def __init__(self, drafter: Drafter, drop: Any) -> None:
        self.drafter = drafter
        self.drop = drop

    def propose(self, plan: SchedulerOutput, buffers: InputBuffers) -> DraftProposal:
        proposal = self.drafter.propose(plan, buffers)
        law = proposal.law
        if law is None:
            return proposal
        ks, kept, row = [], [], 0
        for s, k in zip(plan.scheduled, proposal.num_draft_tokens, strict=True):
            rows = list(range(row, row + k))
            row += k
            stop = next(
                (i for i, r in enumerate(rows) if self.drop(proposal, r, s.slot)), len(rows)
            )
            ks.append(stop)
            kept += rows[:stop]
        return DraftProposal(
            num_draft_tokens=tuple(ks),
            token_ids=proposal.token_ids[kept],
            law=DraftLaw(
                logits=law.logits[kept],
                inv_temperature=law.inv_temperature[kept],
                log_normalizer=law.log_normalizer[kept],
                token_probs=law.token_probs[kept],
            ),
        )

    def extend(
        self,
        plan: SchedulerOutput,
        buffers: InputBuffers,
        batch: ForwardBatch,
        output: ForwardOutput,
    ) -> None:
        self.drafter.extend(plan, buffers, batch, output)


def test_fault_argmax_draft_with_a_softmax_law(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = make("rejection", {})
    draw = proposal.sample_draft_proposal

    def argmax_draw(
        logits: Tensor, rows: proposal.DraftRows, target_ids: Tensor | None = None
    ) -> proposal.Draw:
        drawn = draw(logits, rows)
        token_ids = dispatch.argmax_lowest(logits)
        prob = drawn.logits.gather(1, token_ids[:, None]).squeeze(1) - drawn.log_normalizer
        return replace(drawn, token_ids=token_ids, token_probs=prob.exp())

    monkeypatch.setattr("spectrue.workers.drafters.chain.sample_draft_proposal", argmax_draw)
    assert total_variation(output_law(setup), joint_law(setup)) > FAULT


def test_fault_illegal_draft_dropped_under_rejection() -> None:
    def illegal(proposal: DraftProposal, row: int, slot: int) -> bool:
        return int(proposal.token_ids[row]) == 2

    setup = make("rejection", {"bad_words": ((2,),)}, wrap=lambda drafter: Faulty(drafter, illegal))
    assert total_variation(output_law(setup), joint_law(setup)) > FAULT


def test_fault_k_stopped_on_a_drawn_tokens_probability() -> None:
    def unlikely(proposal: DraftProposal, row: int, slot: int) -> bool:
        assert proposal.law is not None
        return float(proposal.law.token_probs[row]) < 0.3

    setup = make("rejection", {}, wrap=lambda drafter: Faulty(drafter, unlikely))
    assert total_variation(output_law(setup), joint_law(setup)) > FAULT


def test_dropping_after_the_draw_is_allowed_under_match() -> None:
    """The same drops that bias `rejection` leave `match` exact."""

    class MatchFaulty(Faulty):
        def propose(self, plan: SchedulerOutput, buffers: InputBuffers) -> DraftProposal:
            proposal = self.drafter.propose(plan, buffers)
            ends = torch.tensor(proposal.num_draft_tokens).cumsum(0).tolist()
            ks, kept = [], []
            for end, k in zip(ends, proposal.num_draft_tokens, strict=True):
                rows = list(range(end - k, end))
                tokens = proposal.token_ids.tolist()
                stop = next((i for i, r in enumerate(rows) if tokens[r] == 2), k)
                ks.append(stop)
                kept += rows[:stop]
            return DraftProposal(
                num_draft_tokens=tuple(ks), token_ids=proposal.token_ids[kept], law=None
            )

    setup = make("match-sampled", {}, wrap=lambda drafter: MatchFaulty(drafter, None))
    assert total_variation(output_law(setup), joint_law(setup)) < TOLERANCE


def test_fault_penalties_that_ignore_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """sglang's relaxed penalties (sglang#22049): one vector for all rows of a step."""
    from spectrue.workers import rows

    penalise = rows._penalise

    def relaxed(
        edits: Any, buffers: InputBuffers, slot: int, first: int, rows: list[Any], vocab: int
    ) -> None:
        penalise(edits, buffers, slot, first, [[] for _ in rows], vocab)

    monkeypatch.setattr(rows, "_penalise", relaxed)
    setup = make("match-sampled", {"frequency_penalty": 2.0})
    assert total_variation(output_law(setup), joint_law(setup)) > FAULT
