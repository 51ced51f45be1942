"""How many drafts the decoding requests get in a step: the contract, a fixed k, a schedule.

Rank 0's scheduler asks, before anything is drafted; the plan carries the answer to every rank. What
a depth depends on lies in the past of the step, so it is allowed under every verify method.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Protocol

from spectrue.workers.adaptive_depth import AdaptiveDepth
from spectrue.workers.core import SchedulerOutput, StepOutput
from spectrue.workers.policy import ResolvedSpeculative


class DepthPolicy(Protocol):
    """A request's own limit, its length limit and the memory may still lower what is chosen."""

    def choose(self, num_requests: int) -> int:
        """The most drafts that each of `num_requests` decoding requests gets in the next step."""
        ...

    def observe(self, plan: SchedulerOutput, step: StepOutput, seconds: float) -> None:
        """Learn from a step that took `seconds`, the engine's own work included."""
        ...


class FixedDepth:
    """Always k."""

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def choose(self, num_requests: int) -> int:
        return self.depth

    def observe(self, plan: SchedulerOutput, step: StepOutput, seconds: float) -> None:
        pass


class DepthSchedule:
    """k by batch size, as the operator wrote it: the form of vLLM's dynamic speculative decoding.

    `schedule` has entries (from, to, k) without gap or overlap, from 1 on; sizes beyond the last
    one, which no configuration allows, get its k.
    """

    def __init__(self, schedule: tuple[tuple[int, int, int], ...]) -> None:
        self.ends = [high for _, high, _ in schedule]
        self.depths = [depth for _, _, depth in schedule]

    def choose(self, num_requests: int) -> int:
        return self.depths[min(bisect_left(self.ends, num_requests), len(self.depths) - 1)]

    def observe(self, plan: SchedulerOutput, step: StepOutput, seconds: float) -> None:
        pass


def depth_policy(resolved: ResolvedSpeculative) -> DepthPolicy:
    k = resolved.num_speculative_tokens
    if resolved.depth_schedule and k:
        return DepthSchedule(resolved.depth_schedule)
    if resolved.depth == "adaptive" and k:
        return AdaptiveDepth(k)
    return FixedDepth(k)
