"""Adaptive depth against made-up hardware and drafters: what it settles on, and what it costs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrue.workers.adaptive_depth import FIRST_RATE, AdaptiveDepth, _interpolate
from spectrue.workers.core import ScheduledRequest, SchedulerOutput, SlotOutput, StepOutput

from .harness import complete, make_engine, make_request

Times = Callable[[int, int], float]  # seconds of a step by (requests, k)


def plan_of(num_requests: int, k: int, chunk: int = 0) -> SchedulerOutput:
    scheduled = [
        ScheduledRequest(
            slot=i,
            num_computed_tokens=9,
            num_scheduled_tokens=1,
            num_draft_tokens=k,
            samples=True,
        )
        for i in range(num_requests)
    ]
    if chunk:
        scheduled.append(
            ScheduledRequest(
                slot=num_requests,
                num_computed_tokens=0,
                num_scheduled_tokens=chunk,
                num_draft_tokens=0,
                samples=False,
            )
        )
    return SchedulerOutput(scheduled=tuple(scheduled))


def outputs(plan: SchedulerOutput, accepted: Sequence[int]) -> StepOutput:
    return StepOutput(
        outputs=tuple(
            SlotOutput(slot=s.slot, num_draft_tokens=s.num_draft_tokens, num_accepted_tokens=a)
            for s, a in zip(plan.scheduled, accepted, strict=True)
        )
    )


class World:
    """Serves `n` requests for ever; rates are those of a draft given the ones before it."""

    def __init__(self, policy: AdaptiveDepth, seed: int = 0, noise: float = 0.03) -> None:
        self.policy = policy
        self.rng = random.Random(seed)
        self.noise = noise
        self.seconds = 0.0
        self.tokens = 0
        self.depths: list[int] = []

    def run(self, steps: int, n: int, rates: Sequence[float], times: Times) -> list[int]:
        """Depths of these steps."""
        for _ in range(steps):
            k = self.policy.choose(n)
            plan = plan_of(n, k)
            accepted = [self._accept(rates, k) for _ in range(n)]
            seconds = times(n, k) * self.rng.gauss(1, self.noise)
            self.policy.observe(plan, outputs(plan, accepted), seconds)
            self.seconds += seconds
            self.tokens += n + sum(accepted)
            self.depths.append(k)
        return self.depths[-steps:]

    def _accept(self, rates: Sequence[float], k: int) -> int:
        for i in range(k):
            if self.rng.random() >= rates[i]:
                return i
        return k


def memory_bound(n: int, k: int) -> float:
    """Rows are free until there are 32 of them; a draft forward costs a fifth of the target's."""
    return 5e-3 + 1e-3 * k + 1e-4 * max(0, n * (k + 1) - 32)


def slowed(factor: float) -> Times:
    return lambda n, k: factor * memory_bound(n, k)


def goodput(rates: Sequence[float], times: Times, n: int, k: int) -> float:
    length, reach = 1.0, 1.0
    for rate in rates[:k]:
        reach *= rate
        length += reach
    return n * length / times(n, k)


@pytest.mark.parametrize("n", [1, 8, 64])
@pytest.mark.parametrize(
    "rates", [[0.9] * 5, [0.8, 0.6, 0.4, 0.2, 0.1], [0.3] * 5, [0.0] * 5, [1.0] * 5]
)
def test_settles_on_the_best_depth(rates: list[float], n: int) -> None:
    """Tokens per second, exploring and probing included, near those of the best fixed depth."""
    world = World(AdaptiveDepth(5))
    world.run(1000, n, rates, memory_bound)
    world.seconds, world.tokens = 0.0, 0
    depths = world.run(3000, n, rates, memory_bound)
    best = max(goodput(rates, memory_bound, n, k) for k in range(6))
    usual = Counter(depths).most_common(1)[0][0]
    assert goodput(rates, memory_bound, n, usual) >= 0.96 * best
    assert world.tokens / world.seconds >= 0.94 * best
    assert world.tokens / world.seconds >= 0.97 * goodput(rates, memory_bound, n, 0)


def test_a_drafter_that_is_never_right_is_left_alone() -> None:
    world = World(AdaptiveDepth(3))
    world.run(200, 1, [0.0] * 3, memory_bound)
    depths = world.run(5000, 1, [0.0] * 3, memory_bound)
    assert depths.count(0) >= 0.985 * len(depths)
    assert 3 in depths  # still probed


def test_drafts_that_cost_nothing_and_gain_nothing_end_too() -> None:
    """N-gram lookup that finds nothing: the step is as long as without it."""
    world = World(AdaptiveDepth(3))
    world.run(300, 4, [0.0] * 3, lambda n, k: 5e-3)
    assert world.run(2000, 4, [0.0] * 3, lambda n, k: 5e-3).count(0) >= 1900


@pytest.mark.parametrize("n", [1, 8])
def test_comes_back_when_drafts_begin_to_be_right(n: int) -> None:
    world = World(AdaptiveDepth(3))
    assert world.run(2000, n, [0.02, 0.0, 0.0], memory_bound)[-600:].count(0) > 550
    depths = world.run(2500, n, [0.95] * 3, memory_bound)
    assert depths[-1000:].count(3) > 950  # at the third probe at the latest
    depths = world.run(600, n, [0.02, 0.0, 0.0], memory_bound)
    assert depths[-300:].count(0) > 250


def test_batch_sizes_have_depths_of_their_own() -> None:
    """vllm#49548: 8 requests under a rule made for 4."""
    world = World(AdaptiveDepth(3))
    rates = [0.75, 0.7, 0.5]
    for _ in range(40):
        world.run(50, 2, rates, memory_bound)
        world.run(50, 64, rates, memory_bound)
    small = Counter(world.run(50, 2, rates, memory_bound)).most_common(1)[0][0]
    large = Counter(world.run(50, 64, rates, memory_bound)).most_common(1)[0][0]
    assert small >= 2
    assert large == 0


def test_near_ties_do_not_make_it_swing() -> None:
    """Depths 1 and 2 are worth the same within a percent, times are off by 10 %."""
    times = {0: 1.0, 1: 1.2, 2: 1.33, 3: 2.0}
    rates = [0.5, 0.33, 0.2]
    assert goodput(rates, lambda n, k: times[k], 1, 1) == pytest.approx(
        goodput(rates, lambda n, k: times[k], 1, 2), rel=0.01
    )
    changes = 0
    for seed in range(5):
        policy = AdaptiveDepth(3)
        world = World(policy, seed, noise=0.1)
        world.run(500, 32, rates, lambda n, k: times[k])
        before = policy.batches[5].depth
        for _ in range(2000):
            world.run(1, 32, rates, lambda n, k: times[k])
            changes += policy.batches[5].depth != before
            before = policy.batches[5].depth
    assert changes <= 5 * 8


@pytest.mark.parametrize("rate", [0.9, 0.1])
def test_growing_contexts_are_not_mistaken_for_costly_drafts(rate: float) -> None:
    """Steps get 20 times longer at every depth alike; the depth that is best stays so."""
    world = World(AdaptiveDepth(3))
    world.run(300, 8, [rate] * 3, memory_bound)
    depths: list[int] = []
    for i in range(3000):
        grown = 1 + 19 * i / 3000
        depths += world.run(1, 8, [rate] * 3, slowed(grown))
    assert depths.count(3 if rate > 0.5 else 0) > 2500


@pytest.mark.parametrize("rate", [0.9, 0.1])
def test_shrinking_contexts_change_nothing_either(rate: float) -> None:
    """Long requests end, short ones follow, again and again: from one step to the next."""
    world = World(AdaptiveDepth(3))
    world.run(300, 8, [rate] * 3, memory_bound)
    depths: list[int] = []
    for i in range(3000):
        grown = 10 if i // 100 % 2 else 1
        depths += world.run(1, 8, [rate] * 3, slowed(grown))
    assert depths.count(3 if rate > 0.5 else 0) > 2400


def test_where_probes_are_dear_decisions_are_still_made() -> None:
    """Drafts make a step eight times as long: none is probed for long, and acceptance that falls
    is acted on at once."""

    def dear(n: int, k: int) -> float:
        return 5e-3 * (1 + 7 * k / 3)

    world = World(AdaptiveDepth(3))
    world.run(300, 64, [0.1] * 3, dear)
    depths = world.run(4000, 64, [0.1] * 3, dear)
    assert len(depths) - depths.count(0) <= 4 * 3
    policy = AdaptiveDepth(3)
    world = World(policy)
    world.run(2000, 8, [0.9] * 3, lambda n, k: 1e-3 * (1 + 0.1 * k))
    assert policy.batches[3].depth == 3
    policy.batches[3].steps = 10_000  # a probe is overdue, and thought too dear
    assert policy.batches[3].times[0] is not None
    world.run(160, 8, [0.0] * 3, lambda n, k: 1e-3 * (1 + 0.1 * k))
    assert policy.batches[3].depth == 0


def test_single_slow_steps_change_nothing() -> None:
    """A pause of a hundred steps, now and then, and at the very first steps."""
    world = World(AdaptiveDepth(3))
    slow = random.Random(1)

    def times(n: int, k: int) -> float:
        first = len(world.depths) < 3 or 8 <= len(world.depths) < 11
        return memory_bound(n, k) * (100 if first or slow.random() < 0.01 else 1)

    world.run(600, 1, [0.9] * 3, times)
    assert world.run(1500, 1, [0.9] * 3, times).count(3) > 1300


def test_steps_with_prompts_are_not_timed() -> None:
    policy = AdaptiveDepth(3)
    for _ in range(5):
        plan = plan_of(2, 3, chunk=64)
        policy.observe(plan, outputs(plan, [3, 3, 0]), 1.0)
    assert policy.batches[1].times == [None] * 4
    assert policy.accept_lengths()[3] == pytest.approx(4)  # what was accepted counts all the same


def test_the_first_step_at_a_depth_is_not_timed() -> None:
    policy = AdaptiveDepth(2)
    for k, seconds in ((2, 9.0), (2, 1.0), (0, 9.0), (0, 0.5), (2, 9.0)):
        plan = plan_of(1, k)
        policy.observe(plan, outputs(plan, [0]), seconds)
    assert policy.batches[0].times == [0.5, None, 1.0]


def test_expected_tokens() -> None:
    policy = AdaptiveDepth(3)
    r = FIRST_RATE
    assert policy.accept_lengths() == pytest.approx([1, 1 + r, 1 + r + r**2, 1 + r + r**2 + r**3])
    plan = plan_of(8, 2)
    policy.observe(plan, outputs(plan, [0, 0, 1, 1, 1, 1, 2, 2]), 1.0)
    # 6 of 8, then 2 of 6; nobody tried the third: like the second.
    assert policy.accept_lengths() == pytest.approx([1, 1.75, 2.0, 2.0 + 0.25 / 3])


def test_times_between_known_depths_lie_on_a_line() -> None:
    assert _interpolate([1.0, None, None, 4.0]) == pytest.approx([1, 2, 3, 4])
    assert _interpolate([1.0, 1.5, None, 2.5, None]) == pytest.approx([1, 1.5, 2, 2.5, 3])
    assert _interpolate([2.0, 1.0, None]) == pytest.approx([2, 1, 1])
    assert _interpolate([1.0, None]) is None
    assert _interpolate([None, 1.0]) is None


@settings(max_examples=60, deadline=None)
@given(
    max_depth=st.integers(1, 16),
    steps=st.lists(
        st.tuples(
            st.integers(1, 300),  # requests
            st.integers(0, 16),  # k that came out, after limits
            st.integers(0, 20),  # accepted by each
            st.floats(1e-9, 1e6),
            st.booleans(),
        ),
        max_size=60,
    ),
)
def test_whatever_is_observed_a_depth_is_chosen(
    max_depth: int, steps: list[tuple[int, int, int, float, bool]]
) -> None:
    policy, twin = AdaptiveDepth(max_depth), AdaptiveDepth(max_depth)
    for n, k, a, seconds, chunk in steps:
        assert 0 <= policy.choose(n) == twin.choose(n) <= max_depth
        k = min(k, policy.choose(n))
        plan = plan_of(n, k, chunk=9 * chunk)
        step = outputs(plan, [min(a, k)] * n + [0] * chunk)
        policy.observe(plan, step, seconds)
        twin.observe(plan, step, seconds)
        lengths = policy.accept_lengths()
        assert all(0 <= b - a <= 1 + 1e-9 for a, b in pairwise(lengths))
        assert all(t is None or t > 0 for b in policy.batches.values() for t in b.times)


def test_more_drafts_are_never_taken_for_faster() -> None:
    """Times say so by noise, and nothing is accepted: no drafts, whatever the times."""
    policy = AdaptiveDepth(3)
    plan = plan_of(1, 3)
    for _ in range(6):
        policy.observe(plan, outputs(plan, [0]), 0.9)
    batch = policy.batches[0]
    batch.times = [1.0, None, None, 0.9]
    assert policy._decide(batch, 1)
    assert batch.depth == 0


def test_the_engine_feeds_it(tiny_llama: Path) -> None:
    """On a real engine whose drafts are never right it goes to 0, and text stays as it was."""
    prompt = list(range(20, 45))
    request = make_request("r", prompt, max_tokens=200, ignore_eos=True, seed=5, temperature=1.5)
    (want,) = complete(make_engine(tiny_llama), request)
    engine = make_engine(tiny_llama, "ngram", 3, ngram_min=4, depth="adaptive")
    (got,) = complete(engine, request)
    assert got.token_ids == want.token_ids
    policy = engine.depth
    assert isinstance(policy, AdaptiveDepth)
    assert policy.batches[0].depth == 0
    assert engine.scheduler.depths[0] > 100
    assert policy.accept_lengths()[1] < 1.2
