"""Depth of a step: fixed, by schedule, or any at all. No depth changes what is said."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spectrue.workers.adaptive_depth import AdaptiveDepth
from spectrue.workers.config import EngineConfig, SpeculativeConfig
from spectrue.workers.core import SamplingParams, SchedulerOutput, StepOutput
from spectrue.workers.depth import DepthSchedule, FixedDepth, depth_policy
from spectrue.workers.engine import Engine
from spectrue.workers.errors import ConfigError
from spectrue.workers.policy import resolve_speculative

from ..conftest import make_tiny_model
from . import toy
from .harness import complete, make_engine, make_request

LOOP = [5, 9, 12, 7] * 4
PROMPTS = [LOOP, [3, 4, 5], [88, 17, 23, 56, 91, 33, 2, 17, 23], [40] * 9, list(range(20, 45))]
SCHEDULE = ((1, 4, 3), (5, 16, 1), (17, 256, 0))


@pytest.fixture(scope="module")
def other_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("other"), seed=7, layers=1)


class AnyDepth:
    """A new depth each step, as no estimate would choose it."""

    def __init__(self, max_depth: int, seed: int) -> None:
        self.max_depth = max_depth
        self.rng = random.Random(seed)
        self.chosen: Counter[int] = Counter()

    def choose(self, num_requests: int) -> int:
        depth = self.rng.randint(0, self.max_depth)
        self.chosen[depth] += 1
        return depth

    def observe(self, plan: SchedulerOutput, step: StepOutput, seconds: float) -> None:
        assert seconds > 0
        assert len(plan.scheduled) == len(step.outputs)


def with_depth(engine: Engine, seed: int) -> AnyDepth:
    depth = AnyDepth(engine.info.resolved.num_speculative_tokens, seed)
    engine.depth = engine.scheduler.depth = depth
    return depth


# -- settings ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "rule"),
    [
        (((1, 4),), r"entries \[from, to, k\]"),
        (((2, 4, 1),), r"without gap or overlap: \[1, to, k\] next, got \[2, 4, 1\]"),
        (((1, 4, 1), (4, 9, 0)), r"\[5, to, k\] next, got \[4, 9, 0\]"),
        (((1, 4, 1), (6, 9, 0)), r"\[5, to, k\] next, got \[6, 9, 0\]"),
        (((1, 4, 1), (5, 4, 0)), r"\[5, to, k\] next, got \[5, 4, 0\]"),
        (((1, 4, 4),), r"k in \[0, num_speculative_tokens = 3\]"),
        (((1, 4, -1),), r"k in \[0, num_speculative_tokens = 3\]"),
    ],
)
def test_bad_schedules_are_refused(schedule: Any, rule: str) -> None:
    with pytest.raises(ConfigError, match=r"^speculative\.depth_schedule must be .*" + rule):
        SpeculativeConfig(depth_schedule=schedule)


def test_a_schedule_reaches_every_batch_size() -> None:
    speculative = SpeculativeConfig(depth_schedule=((1, 31, 1),))
    with pytest.raises(ConfigError, match=r"depth_schedule.*max_num_seqs = 32"):
        EngineConfig(model="m", speculative=speculative)
    EngineConfig(model="m", max_num_seqs=31, speculative=speculative)


def test_a_schedule_and_adaptive_depth_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match=r"depth_schedule and speculative\.depth: adaptive"):
        SpeculativeConfig(depth="adaptive", depth_schedule=SCHEDULE)
    with pytest.raises(ConfigError, match=r"speculative\.depth must be one of fixed, adaptive"):
        SpeculativeConfig(depth="sometimes")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        ({}, FixedDepth),
        ({"depth": "adaptive"}, AdaptiveDepth),
        ({"depth_schedule": SCHEDULE}, DepthSchedule),
        ({"depth": "adaptive", "drafter": "none"}, FixedDepth),
        ({"depth": "adaptive", "num_speculative_tokens": 0}, FixedDepth),
        ({"depth_schedule": SCHEDULE, "drafter": "none"}, FixedDepth),
    ],
)
def test_the_configuration_picks_the_policy(options: dict[str, Any], policy: type) -> None:
    resolved = resolve_speculative(SpeculativeConfig(**options))
    assert type(depth_policy(resolved)) is policy
    if policy is FixedDepth:
        assert depth_policy(resolved).choose(5) == resolved.num_speculative_tokens


def test_the_schedule_is_read_by_batch_size() -> None:
    schedule = DepthSchedule(SCHEDULE)
    sizes = (1, 4, 5, 16, 17, 256, 257)
    assert [schedule.choose(n) for n in sizes] == [3, 3, 1, 1, 0, 0, 0]


# -- in the engine ----------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["ngram", "draft_model"])
def test_the_schedule_counts_decoding_requests(
    tiny_llama: Path, other_llama: Path, drafter: str
) -> None:
    engine = make_engine(
        tiny_llama, drafter, 3, other_llama, depth_schedule=((1, 1, 3), (2, 3, 2), (4, 8, 0))
    )
    seen: set[tuple[int, int]] = set()
    launch = engine.executor.launch

    def spy(plan: SchedulerOutput) -> Callable[[], StepOutput]:
        ks = [s.num_draft_tokens for s in plan.scheduled if s.num_scheduled_tokens == 1]
        if ks and all(s.num_scheduled_tokens == 1 for s in plan.scheduled):
            seen.add((len(ks), max(ks)))
        return launch(plan)

    engine.executor.launch = spy  # type: ignore[method-assign]
    lengths = (6, 12, 20, 32, 50)
    requests = [
        make_request(f"r{i}", p, max_tokens=n, ignore_eos=True, seed=i)
        for i, (p, n) in enumerate(zip(PROMPTS, lengths, strict=True))
    ]
    complete(engine, *requests)
    want = {1: 3, 2: 2, 3: 2, 4: 0, 5: 0}
    assert {n for n, _ in seen} == set(want)
    assert all(k <= want[n] for n, k in seen)  # less at a request's end
    assert {(1, 3), (2, 2)} <= seen
    assert sum(engine.scheduler.depths.values()) <= engine.stats.num_steps
    assert set(engine.scheduler.depths) == {0, 2, 3}


@pytest.mark.parametrize("drafter", ["ngram", "draft_model"])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"repetition_penalty": 1.3}])
def test_text_of_a_seed_does_not_change_with_the_depth(
    tiny_llama: Path, other_llama: Path, drafter: str, params: dict[str, Any]
) -> None:
    """Greedy and `match` rows, drafts on and off from step to step, the drafter falling behind."""
    plain = make_engine(tiny_llama)
    requests = [make_request(f"r{i}", p, seed=11 + i, **params) for i, p in enumerate(PROMPTS)]
    want = [complete(plain, r)[0].token_ids for r in requests]
    engine = make_engine(tiny_llama, drafter, 4, other_llama)
    for seed in range(3):
        depth = with_depth(engine, seed)
        assert [c.token_ids for c in complete(engine, *requests)] == want
        assert len(depth.chosen) == 5
    if not params:
        assert [complete(engine, r)[0].token_ids for r in requests] == want


def test_a_copy_is_accepted_whatever_the_depth(tiny_llama: Path) -> None:
    """The draft model's KV follows through steps without drafts."""
    engine = make_engine(tiny_llama, "draft_model", 4, tiny_llama)
    with_depth(engine, 3)
    for temperature in (0.0, 1.0):
        requests = [
            make_request(f"r{i}", p, temperature=temperature, ignore_eos=True)
            for i, p in enumerate(PROMPTS)
        ]
        complete(engine, *requests)
    stats = engine.stats
    assert 0 < stats.num_drafts < stats.num_verify_steps
    assert stats.num_accepted_tokens >= 0.999 * stats.num_draft_tokens > 50
    assert not engine.guards


@pytest.mark.parametrize("config", ["match", "rejection"])
@pytest.mark.parametrize("rule", [lambda text: len(text) % 3, lambda text: text[-1] % 3])
def test_the_law_is_the_targets_when_the_past_sets_the_depth(config: str, rule: Any) -> None:
    """Exact enumeration: k of each step is a function of the tokens committed before it."""
    setup = toy.Setup(
        config=SpeculativeConfig(
            drafter="draft_model",
            draft_model="-",
            verify_method=config,  # type: ignore[arg-type]
            draft_sampling="sampled",
        ),
        params=SamplingParams(temperature=0.8, top_k=3, max_tokens=8),
        prompt=(1, 2),
        vocab_size=4,
    )
    law: Counter[toy.Tokens] = Counter()
    open_: Counter[toy.Tokens] = Counter({(): 1.0})
    depths = set()
    while open_:
        output, weight = open_.popitem()
        text = setup.prompt + output
        step = replace(setup, k=rule(text))
        depths.add(step.k)
        scripts, weights = zip(*scenarios(step, text), strict=True)
        for tokens, p in zip(toy.run_step(step, text, list(scripts)), weights, strict=True):
            reached = (output + tokens)[:3]
            (law if len(reached) == 3 else open_)[reached] += weight * p
    assert len(depths) > 1
    assert toy.total_variation(dict(law), toy.joint_law(setup)) < 1e-5


def scenarios(setup: toy.Setup, text: toy.Tokens) -> list[Any]:
    return list(setup.scenarios(text))
