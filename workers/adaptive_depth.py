"""The depth that commits the most tokens per second, by what is measured while serving."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import accumulate, pairwise

from spectrue.workers.core import SchedulerOutput, StepOutput

logger = logging.getLogger(__name__)

MEMORY = 0.98  # what a step leaves of earlier acceptance: an average over some 50 steps
FIRST_RATE = 0.7  # of a position of which nothing is known
ENOUGH = 4  # requests that reached a position, before its rate stands on its own
TIME_WEIGHT = 0.1  # of a new step in the average of a depth's times
OUTLIER = 2.0  # a time that is further off counts as this many times the average
GAIN = 1.03  # a deeper depth must promise this much
SLACK = 1.01  # a shallower one may promise this much less
DECIDE_STEPS = 8  # steps between two looks at the estimates
PROBE_REQUESTS = 8  # a probe is over when it has seen as many, in no less than
PROBE_STEPS = 3  # steps; the first of them is not timed
PROBE_COST = 0.01  # of all tokens, the most that probes may lose
FIRST_INTERVAL = 4 * DECIDE_STEPS  # steps before a probe; doubled whenever one changes nothing
LAST_INTERVAL = 1024


@dataclass(slots=True)
class BatchSize:
    """What is known, and chosen, for batches of about one size."""

    depth: int
    times: list[float | None]  # seconds of a step, by depth
    counts: list[int]  # steps that were timed, by depth
    interval: int = DECIDE_STEPS  # the first probe comes at once: two depths make a line
    steps: int = 0  # since the last probe
    probe: int | None = None  # the depth on probation, for `probe_steps` more steps
    probe_steps: int = 0
    num_probes: int = 0


class AdaptiveDepth:
    """Chooses k in [0, max_depth] for each step; 0 is plain decoding.

    With n decoding requests, depth k is expected to commit `n * L(k) / T(n, k)` tokens a second:

        L(k)    = 1 + sum over i <= k of r_1 * .. * r_i
        T(n, k) = time of a whole step

    `r_i` is the rate at which position i is accepted by those whose positions before it were, of
    all requests that the plan gave i drafts or not: an exponential average over steps. A drafter
    that finds nothing to propose counts as not accepted, and its steps as short as they are, so
    the quotient is right for every drafter. A position of which little is known is taken to be
    accepted like the one before it.

    `T` is an average for each power of two of n and each depth, with straight lines between
    depths that were tried. Contexts grow and steps with them: the change seen at the depth in use
    is applied to the times of all, so an old time is not mistaken for a fast one.

    A deeper depth must promise 3 % more, a shallower one wins ties (hysteresis, and no drafts
    where they gain nothing); more drafts never count as faster. Other depths are probed for some
    steps: none, one fewer and one more by turns; from 0 all, which shows best that drafts begin to
    be right, and one. A probe that changes nothing doubles the time to the next one, and all
    of them may cost 1 % of the tokens.

    Depends on steps that are over, never on a draft of the step it is for (DESIGN 4). Only rank 0
    has one. Sources: goodput of Liu et al., arXiv 2406.14066 (SmartSpec, TurboSpec), measured
    here instead of fitted beforehand; SGLang's adaptive steps (averages by batch size, hysteresis,
    0 as off); vLLM's dynamic speculative decoding, and vllm#49548 for what happens without a cost
    model.
    """

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self.batches: dict[int, BatchSize] = {}  # by the power of two that holds the batch
        self._reached = [0.0] * max_depth  # decayed counts, by position
        self._accepted = [0.0] * max_depth
        self._last_depth = -1

    def choose(self, num_requests: int) -> int:
        batch = self._batch(num_requests)
        return batch.depth if batch.probe is None else batch.probe

    def observe(self, plan: SchedulerOutput, step: StepOutput, seconds: float) -> None:
        num_chunks, depth = 0, 0
        accepted = [0] * (self.max_depth + 1)  # requests, by how many drafts they accepted
        for s, output in zip(plan.scheduled, step.outputs, strict=True):
            if s.num_scheduled_tokens > 1 or not s.samples:
                num_chunks += 1
                continue
            if s.depth > depth:
                depth = s.depth
            accepted[output.num_accepted_tokens] += 1
        num_requests = len(plan.scheduled) - num_chunks
        if not num_requests:
            return
        batch = self._batch(num_requests)
        self._learn_rates(num_requests, depth, accepted)
        # A prompt's chunk takes longer than decoding. The first step at a new depth pays for the
        # change: a drafter catches up, graphs are cold.
        if not num_chunks and depth == self._last_depth:
            self._learn_time(batch, depth, seconds)
        self._last_depth = depth
        self._advance(batch, num_requests)

    def accept_lengths(self) -> list[float]:
        """L(k), expected tokens of a request in a step, for k = 0 .. max_depth."""
        lengths, rate, reach = [1.0], FIRST_RATE, 1.0
        for accepted, reached in zip(self._accepted, self._reached, strict=True):
            assumed = max(0.0, ENOUGH - reached)
            rate = (accepted + assumed * rate) / (reached + assumed)
            reach *= rate
            lengths.append(lengths[-1] + reach)
        return lengths

    def _batch(self, num_requests: int) -> BatchSize:
        key = (num_requests - 1).bit_length()
        batch = self.batches.get(key)
        if batch is None:
            n = self.max_depth + 1
            batch = BatchSize(self.max_depth, [None] * n, [0] * n)
            self.batches[key] = batch
        return batch

    def _learn_rates(self, num_requests: int, depth: int, accepted: list[int]) -> None:
        reached = num_requests
        for i in range(depth):
            passed = reached - accepted[i]
            self._reached[i] = self._reached[i] * MEMORY + reached
            self._accepted[i] = self._accepted[i] * MEMORY + passed
            reached = passed

    def _learn_time(self, batch: BatchSize, depth: int, seconds: float) -> None:
        old = batch.times[depth]
        batch.counts[depth] += 1
        early = batch.counts[depth] <= PROBE_STEPS
        if old is None or (early and seconds * OUTLIER < old):  # the old one was an outlier
            batch.times[depth] = seconds
            return
        weight = max(TIME_WEIGHT, 1 / batch.counts[depth])
        factor = 1 + weight * (min(max(seconds / old, 1 / OUTLIER), OUTLIER) - 1)
        for i, time in enumerate(batch.times):
            if time is not None and (i == depth or (batch.probe is None and depth == batch.depth)):
                batch.times[i] = time * factor

    def _advance(self, batch: BatchSize, num_requests: int) -> None:
        """Count a step towards the end of a probe, the next decision or the next probe."""
        if batch.probe is not None:
            batch.probe_steps -= 1
            if batch.probe_steps == 0:
                batch.probe = None
                changed = self._decide(batch, num_requests)
                longer = max(FIRST_INTERVAL, min(2 * batch.interval, LAST_INTERVAL))
                batch.interval = FIRST_INTERVAL if changed else longer
            return
        batch.steps += 1
        if batch.steps % DECIDE_STEPS:
            return
        if batch.steps >= batch.interval and self._probe(batch, num_requests):
            return
        if self._decide(batch, num_requests):
            batch.steps, batch.interval = 0, FIRST_INTERVAL

    def _probe(self, batch: BatchSize, num_requests: int) -> bool:
        """Begin a probe, unless it would cost too much so soon after the last one."""
        now = batch.depth
        others = [0, now - 1, now + 1] if now else [self.max_depth, 1]
        others = [k for k in others if 0 <= k <= self.max_depth]
        depth = others[batch.num_probes % len(others)]
        num_steps = max(PROBE_STEPS, 1 + -(-PROBE_REQUESTS // num_requests))
        rates = self._rates(batch)
        if rates is not None:
            lengths = self.accept_lengths()
            slower = lengths[depth] / rates[depth] * rates[now] / lengths[now]
            lost = num_steps * slower * (1 - rates[depth] / rates[now])  # in steps as they are now
            if lost > PROBE_COST * batch.steps:
                return False
        batch.steps = 0
        batch.num_probes += 1
        batch.probe, batch.probe_steps = depth, num_steps
        if now == 0:
            # Acceptance was last seen long ago: it weighs no more than what the probe will see.
            weight = num_steps * num_requests / max(self._reached[0], num_steps * num_requests)
            self._reached = [weight * count for count in self._reached]
            self._accepted = [weight * count for count in self._accepted]
        return True

    def _rates(self, batch: BatchSize) -> list[float] | None:
        """Tokens per second of one request, by depth; None while too few depths were timed."""
        times = _interpolate(batch.times)
        if times is None:
            return None
        # More drafts are not faster: what looks so is noise.
        slowest = accumulate(times, max)
        return [length / t for length, t in zip(self.accept_lengths(), slowest, strict=True)]

    def _decide(self, batch: BatchSize, num_requests: int) -> bool:
        """Take the depth of the most tokens per second; whether that is another one."""
        rates = self._rates(batch)
        if rates is None:
            return False
        now = batch.depth
        bias = [SLACK] * now + [1.0] + [1 / GAIN] * (self.max_depth - now)
        worth = [rate * b for rate, b in zip(rates, bias, strict=True)]
        best = worth.index(max(worth))  # of equal ones the shallowest
        if best == now:
            return False
        logger.log(
            logging.INFO if 0 in (best, now) else logging.DEBUG,
            "speculative depth for batches of about %d: %d -> %d (%.4g -> %.4g tokens/s expected)",
            num_requests,
            now,
            best,
            num_requests * rates[now],
            num_requests * rates[best],
        )
        batch.depth = best
        return True


def _interpolate(times: list[float | None]) -> list[float] | None:
    """Times of all depths by lines between the known ones; None unless 0 and another are known."""
    known = [(k, time) for k, time in enumerate(times) if time is not None]
    if len(known) < 2 or known[0][0] != 0:
        return None
    filled, slope = [known[0][1]], 0.0
    for (k, time), (next_k, next_time) in pairwise(known):
        slope = (next_time - time) / (next_k - k)
        filled += [time + slope * i for i in range(1, next_k - k + 1)]
    # Depths that no request of this batch size may have: never taken for free.
    return filled + [
        filled[-1] + max(slope, 0.0) * i for i in range(1, len(times) - len(filled) + 1)
    ]
