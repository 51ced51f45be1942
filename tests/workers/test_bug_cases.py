"""Bugs that other engines had: each test is about the whole kind, its first report is named."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from spectrue.kernels import dispatch
from spectrue.workers.config import SpeculativeConfig
from spectrue.workers.core import SamplingParams, SchedulerOutput
from spectrue.workers.drafters.base import Drafter, DraftLaw, DraftProposal
from spectrue.workers.drafters.ngram import lookup
from spectrue.workers.engine import Engine
from spectrue.workers.executor import GroupExecutor
from spectrue.workers.forward_batch import ForwardBatch, ForwardOutput
from spectrue.workers.input_buffers import InputBuffers
from spectrue.workers.worker import Worker

from ..conftest import make_tiny_model
from . import toy
from .harness import assert_same_tokens, complete, make_engine, make_request

LOOP = [5, 9, 12, 7] * 4
PROMPTS = [LOOP, [3, 4, 5], [88, 17, 23, 56, 91, 33, 2, 17, 23], [40] * 9, list(range(20, 45))]


@pytest.fixture(scope="module")
def other_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("other"), seed=7, layers=1)


def worker_of(engine: Engine) -> Worker:
    assert isinstance(engine.executor, GroupExecutor)
    return engine.executor.worker


# -- sampling is sampling (sglang#31214: HIP committed the argmax at every temperature) ---------


@pytest.mark.parametrize(
    ("config", "seeded"),
    [
        (SpeculativeConfig(drafter="none"), False),
        (SpeculativeConfig(drafter="ngram", ngram_min=1), False),
        (SpeculativeConfig(drafter="draft_model", draft_model="-"), False),
        (SpeculativeConfig(drafter="draft_model", draft_model="-"), True),
        (SpeculativeConfig(drafter="draft_model", draft_model="-", reproducible=True), False),
        (SpeculativeConfig(drafter="ngram", ngram_min=1), True),
    ],
)
def test_histogram_of_the_first_tokens_is_the_law(config: SpeculativeConfig, seeded: bool) -> None:
    """With the real noise: the step's first two tokens over 5,000 seeds, by chi-square."""
    setup = toy.Setup(
        config=config,
        params=SamplingParams(top_p=0.95, seed=1 if seeded else None),
        prompt=(1, 2, 3, 1, 2),
    )
    n = 5_000
    outputs = toy.run_step(setup, setup.prompt, [{}] * n, scripted=False)
    first = Counter(tokens[0] for tokens in outputs)
    law = setup.target_law(setup.prompt)
    assert chi_square(first, dict(enumerate(law)), n) > 1e-4
    # The second, of those steps that had one: the law after the first, not another.
    for token in first:
        second = Counter(t[1] for t in outputs if t[0] == token and len(t) > 1)
        if sum(second.values()) > 200:
            law = setup.target_law((*setup.prompt, token))
            p = chi_square(second, dict(enumerate(law)), sum(second.values()))
            assert p > 1e-4


def chi_square(counts: Counter[int], law: dict[int, float], n: int) -> float:
    assert all(law[token] > 0 for token in counts), "a token outside the support"
    support = [t for t, p in law.items() if p > 0]
    if len(support) == 1:
        return 1.0
    return float(chisquare([counts[t] for t in support], [law[t] * n for t in support]).pvalue)


def test_the_histogram_test_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def argmax(law: dispatch.RowLaw, kind: Tensor, **keys: Tensor | None) -> tuple[Tensor, Tensor]:
        scaled = law.scaled()
        return dispatch.argmax_lowest(scaled), dispatch.valid_rows(scaled)

    monkeypatch.setattr(dispatch, "sample_rows", argmax)
    setup = toy.Setup(
        config=SpeculativeConfig(drafter="none"), params=SamplingParams(), prompt=(1, 2)
    )
    outputs = toy.run_step(setup, setup.prompt, [{}] * 1000, scripted=False)
    law = dict(enumerate(setup.target_law(setup.prompt)))
    assert chi_square(Counter(t[0] for t in outputs), law, 1000) < 1e-4


# -- the drafter cannot change the text -------------------------------------------------------


class Garbage:
    """Replaces a drafter's tokens by ids that no vocabulary has, or by noise."""

    needs_hidden_states = False
    law: DraftLaw | None = None

    def __init__(self, drafter: Drafter, ids: list[int]) -> None:
        self.drafter = drafter
        self.ids = ids

    def propose(self, plan: SchedulerOutput, buffers: InputBuffers) -> DraftProposal:
        ks = tuple(s.num_draft_tokens for s in plan.scheduled)
        law = self.drafter.propose(plan, buffers).law
        ids = [self.ids[i % len(self.ids)] for i in range(sum(ks))]
        return DraftProposal(num_draft_tokens=ks, token_ids=torch.tensor(ids), law=law)

    def extend(
        self,
        plan: SchedulerOutput,
        buffers: InputBuffers,
        batch: ForwardBatch,
        output: ForwardOutput,
    ) -> None:
        self.drafter.extend(plan, buffers, batch, output)


@pytest.mark.parametrize("ids", [[-1], [128], [10**6, -5], [2**40], [3, 77, -1, 0]])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"seed": 4}])
def test_garbage_drafts_change_nothing(
    tiny_llama: Path, ids: list[int], params: dict[str, Any]
) -> None:
    """sglang#35872: a drafter's out-of-vocabulary id must neither be committed nor crash."""
    requests = [make_request(f"r{i}", p, **params) for i, p in enumerate(PROMPTS)]
    want = complete(make_engine(tiny_llama), *requests)
    engine = make_engine(tiny_llama, "ngram")
    worker = worker_of(engine)
    worker.drafter = Garbage(worker.drafter, ids)
    got = complete(engine, *requests)
    assert [c.token_ids for c in got] == [c.token_ids for c in want]
    assert engine.stats.num_draft_tokens > 0


def test_garbage_ids_under_rejection_are_rejected(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, "draft_model", 2, tiny_llama)
    worker = worker_of(engine)
    worker.drafter = Garbage(worker.drafter, [-1, 128, 10**9])
    done = complete(engine, *[make_request(f"r{i}", p) for i, p in enumerate(PROMPTS)])
    assert all(0 <= t < 128 for c in done for t in c.token_ids)
    assert engine.stats.num_accepted_tokens == 0
    assert engine.guards["draft_id_out_of_range"] > 0


@pytest.mark.parametrize("poison", [0.0, math.nan, math.inf, "another row"])
def test_the_law_outlives_the_memory_it_was_drawn_from(
    tiny_llama: Path, other_llama: Path, poison: float | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sglang#37134: draft probabilities read after their graph pool was recycled."""
    monkeypatch.setattr("secrets.randbits", lambda bits: 12345)
    requests = [make_request(f"r{i}", p, ignore_eos=True) for i, p in enumerate(PROMPTS)]
    want = complete(make_engine(tiny_llama, "draft_model", 3, other_llama), *requests)

    engine = make_engine(tiny_llama, "draft_model", 3, other_llama)
    worker = worker_of(engine)
    seen: list[Tensor] = []
    runner: Any = worker.drafter.runner  # type: ignore[attr-defined]
    logits, forward = runner.logits, worker.target.forward

    def remember(hidden: Tensor) -> Tensor:
        seen.append(logits(hidden))
        return seen[-1]

    def recycle(batch: Any) -> ForwardOutput:
        for tensor in seen:
            tensor.copy_(tensor.roll(1, 1) if isinstance(poison, str) else torch.tensor(poison))
        seen.clear()
        return forward(batch)

    monkeypatch.setattr(runner, "logits", remember)
    monkeypatch.setattr(worker.target, "forward", recycle)
    got = complete(engine, *requests)
    assert [c.token_ids for c in got] == [c.token_ids for c in want]
    assert engine.stats.num_accepted_tokens > 0
    assert not engine.guards


@pytest.mark.parametrize("poison", ["zero", "another row", "nan"])
def test_a_changed_law_is_noticed(tiny_llama: Path, poison: str) -> None:
    """Zeroed logits still look like probabilities: the recorded one tells (DESIGN 4)."""
    engine = make_engine(tiny_llama, "draft_model", 3, tiny_llama)
    worker = worker_of(engine)
    propose = worker.drafter.propose

    def poisoned(plan: SchedulerOutput, buffers: InputBuffers) -> DraftProposal:
        proposal = propose(plan, buffers)
        if proposal.law is not None and len(proposal.law.logits):
            law = proposal.law.logits
            if poison == "another row":
                law.copy_(law.roll(17, 1))
            else:
                law.fill_(0.0 if poison == "zero" else math.nan)
        return proposal

    worker.drafter.propose = poisoned  # type: ignore[method-assign]
    complete(engine, *[make_request(f"r{i}", p, ignore_eos=True) for i, p in enumerate(PROMPTS)])
    fired = engine.guards["draft_law_changed"] + engine.guards["draft_prob_invalid"]
    assert fired > 0.9 * engine.stats.num_drafts
    assert engine.stats.num_accepted_tokens < 0.1 * engine.stats.num_draft_tokens


# -- rows that are not numbers ----------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, "one nan", "all masked"])
@pytest.mark.parametrize("drafter", ["none", "ngram", "draft_model"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bad_row_ends_its_request_alone(
    tiny_llama: Path, drafter: str, bad: float | str, temperature: float
) -> None:
    """vllm#45060, vllm#21876: NaN logits became token 8191 or an id out of the vocabulary."""
    requests = [
        make_request(f"r{i}", p, temperature=temperature, seed=i) for i, p in enumerate(PROMPTS)
    ]
    want = complete(make_engine(tiny_llama), *requests)
    engine = make_engine(tiny_llama, drafter, enable_graphs=False)  # they would not see the patch
    worker = worker_of(engine)
    logits = worker.target.logits
    steps = 0

    def spoil(hidden: Tensor) -> Tensor | None:
        nonlocal steps
        steps += 1
        rows = logits(hidden)
        if steps == 4:  # the first rows are those of the first request
            assert rows is not None
            if isinstance(bad, float):
                rows[0] = bad
            elif bad == "all masked":
                rows[0] = -math.inf
            else:
                rows[0, 50] = math.nan
        return rows

    worker.target.logits = spoil  # type: ignore[method-assign, assignment]
    got = complete(engine, *requests)
    assert got[0].finish_reason == "error"
    assert got[0].last is not None
    assert "not a distribution" in (got[0].last.error or "")
    assert got[0].token_ids == want[0].token_ids[: len(got[0].token_ids)]
    assert [c.token_ids for c in got[1:]] == [c.token_ids for c in want[1:]]
    assert engine.guards["row_invalid"] == 1


# -- parameters hold at every draft position ----------------------------------------------------


@pytest.mark.parametrize("drafter", ["ngram", "draft_model"])
@pytest.mark.parametrize(
    "params",
    [
        {"frequency_penalty": 2.0},
        {"frequency_penalty": -2.0},
        {"presence_penalty": 2.0},
        {"repetition_penalty": 1.5},
        {"logit_bias": ((7, 30.0), (9, -100.0))},
        {"bad_words": ((7,), (9, 12))},
        {"min_tokens": 20, "stop_token_ids": (7, 9)},
    ],
)
def test_parameters_count_drafts_as_text(
    tiny_llama: Path, drafter: str, params: dict[str, Any]
) -> None:
    """vllm#18902, sglang#22049, sglang#10617: the text is that of plain decoding with them."""
    plain = make_engine(tiny_llama)
    requests = [
        make_request(f"r{i}", p, temperature=0.0, logprobs=2, **params)
        for i, p in enumerate(PROMPTS)
    ]
    want = complete(plain, *requests)
    without = complete(
        plain, *[make_request(f"r{i}", p, temperature=0.0) for i, p in enumerate(PROMPTS)]
    )
    assert [c.token_ids for c in want] != [c.token_ids for c in without]
    got = complete(make_engine(tiny_llama, drafter, 4, tiny_llama), *requests)
    # Raw logprobs say nothing of a tie after penalties: these prompts have none.
    assert [c.token_ids for c in got] == [c.token_ids for c in want]


def test_a_banned_token_is_never_committed(tiny_llama: Path) -> None:
    for drafter in ("none", "ngram", "draft_model"):
        engine = make_engine(tiny_llama, drafter)
        free = complete(engine, *[make_request(f"r{i}", p, seed=1) for i, p in enumerate(PROMPTS)])
        (common, _), *_ = Counter(t for c in free for t in c.token_ids).most_common(1)
        for params in ({"logit_bias": ((common, -100.0),)}, {"bad_words": ((common,),)}):
            done = complete(
                engine, *[make_request(f"r{i}", p, **params) for i, p in enumerate(PROMPTS)]
            )
            assert all(common not in c.token_ids for c in done)


def test_min_p_keeps_what_is_near_the_maximum(tiny_llama: Path) -> None:
    """sglang#10617: min_p was dropped in silence under speculation."""
    for drafter in ("none", "ngram", "draft_model"):
        engine = make_engine(tiny_llama, drafter)
        for completion in complete(
            engine,
            *[make_request(f"r{i}", p, min_p=0.5, logprobs=1) for i, p in enumerate(PROMPTS)],
        ):
            for logprob in completion.logprobs:
                assert logprob.logprob >= logprob.top[0][1] + math.log(0.5) - 1e-4


# -- log-probabilities --------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.5])
def test_logprobs_are_those_of_plain_decoding(
    tiny_llama: Path, temperature: float, mode: str
) -> None:
    """sglang#14046, llama.cpp#27972: one for each token, of the real law."""
    params: dict[str, Any] = {
        "seed": 2,
        "temperature": temperature,
        "logprobs": 3,
        "logprobs_mode": mode,
    }
    requests = [make_request(f"r{i}", p, **params) for i, p in enumerate(PROMPTS)]
    want = complete(make_engine(tiny_llama), *requests)
    for drafter in ("ngram", "draft_model"):
        got = complete(make_engine(tiny_llama, drafter, 3, tiny_llama), *requests)
        for a, b in zip(got, want, strict=True):
            assert a.token_ids == b.token_ids == [p.token_id for p in a.logprobs]
            np.testing.assert_allclose(
                [p.logprob for p in a.logprobs], [p.logprob for p in b.logprobs], atol=1e-4
            )
            assert [len(p.top) for p in a.logprobs] == [3] * len(a.logprobs)
    values = [p.logprob for c in want for p in c.logprobs]
    assert min(values) < -0.5 or (temperature == 0 and mode == "processed")
    if mode == "raw":
        assert all(v < 0 for v in values)


def test_logprobs_are_normalised(tiny_llama: Path) -> None:
    (done,) = complete(make_engine(tiny_llama), make_request("r", LOOP, logprobs=20, max_tokens=1))
    (entry,) = done.logprobs
    assert sum(math.exp(v) for _, v in entry.top) <= 1 + 1e-5
    assert list(entry.top) == sorted(entry.top, key=lambda t: -t[1])


# -- stops --------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["none", "ngram", "draft_model"])
def test_a_stop_inside_an_accepted_block_stops_there(tiny_llama: Path, drafter: str) -> None:
    """transformers#47912: any greedily produced token, declared a stop, ends the text at itself."""
    engine = make_engine(tiny_llama, drafter, 4, tiny_llama)
    (free,) = complete(
        make_engine(tiny_llama), make_request("r", LOOP, temperature=0.0, ignore_eos=True)
    )
    for i, token in enumerate(free.token_ids):
        if token in free.token_ids[:i]:
            continue
        request = make_request("r", LOOP, temperature=0.0, ignore_eos=True, stop_token_ids=(token,))
        (done,) = complete(engine, request)
        assert done.token_ids == free.token_ids[: i + 1]
        assert done.last is not None
        assert (done.finish_reason, done.last.stop_reason) == ("stop", token)


def test_eos_is_not_sampled_before_min_tokens(tiny_llama: Path) -> None:
    for drafter in ("none", "ngram", "draft_model"):
        engine = make_engine(tiny_llama, drafter)
        for completion in complete(
            engine,
            *[
                make_request(f"r{i}", LOOP, min_tokens=10, logit_bias=((0, 50.0),))
                for i in range(4)
            ],
        ):
            assert 0 not in completion.token_ids[:10]
            assert completion.token_ids[10:] == [0]


# -- the n-gram drafter -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "k", "drafts"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 2, [9, 1]),
        ([1, 2, 3, 9, 1, 2, 3], 6, [9, 1, 2, 3, 9, 1]),  # goes on into its own drafts
        ([5, 5, 5], 4, [5, 5, 5, 5]),
        ([1, 2, 7, 1, 2, 8, 1, 2], 1, [8]),  # the latest occurrence
        ([4, 1, 2, 7, 3, 1, 2, 8, 4, 1, 2], 1, [7]),  # of the longest suffix
        ([1, 2, 3, 4], 3, []),
        ([1], 3, []),
        ([1, 2], 3, []),
    ],
)
def test_lookup(text: list[int], k: int, drafts: list[int]) -> None:
    assert lookup(np.array(text), k, ngram_min=1 if text == [5, 5, 5] else 2, ngram_max=3) == drafts


def test_a_greedy_neighbour_stays_greedy_under_ties(tiny_llama: Path) -> None:
    """sglang: a temperature-0 row in a sampled batch kept all tied maxima and drew among them."""
    engine = make_engine(tiny_llama, "draft_model", 3, tiny_llama, enable_graphs=False)
    worker = worker_of(engine)
    logits = worker.target.logits

    def tied(hidden: Tensor) -> Tensor | None:
        rows = logits(hidden)
        assert rows is not None
        rows[:, [21, 63, 100]] = rows.amax(1, keepdim=True) + 1
        return rows

    worker.target.logits = tied  # type: ignore[method-assign, assignment]
    greedy = [make_request(f"g{i}", p, temperature=0.0) for i, p in enumerate(PROMPTS[:3])]
    sampled = [make_request(f"s{i}", p, ignore_eos=True) for i, p in enumerate(PROMPTS[:3])]
    done = complete(engine, *greedy, *sampled)
    assert all(set(c.token_ids) == {21} for c in done[:3])
    assert all(len(set(c.token_ids)) > 1 for c in done[3:])


def test_two_engines_in_one_process_do_not_meet(tiny_llama: Path, other_llama: Path) -> None:
    a, b = make_engine(tiny_llama, "ngram"), make_engine(other_llama, "ngram")
    request = make_request("r", LOOP, temperature=0.0, logprobs=2)
    (first,) = complete(a, request)
    (other,) = complete(b, request)
    (again,) = complete(a, request)
    assert other.token_ids != first.token_ids
    assert_same_tokens(again, first)
