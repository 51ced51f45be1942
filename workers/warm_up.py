"""Before an engine serves on a GPU: the usual steps run once, so that no request waits for kernels
to be compiled and graphs to be captured."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

from spectrue.workers.core import Request, SamplingParams
from spectrue.workers.engine import Engine
from spectrue.workers.graphs import batch_buckets

# What most requests ask for; with other parameters a batch's first step captures its graph.
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.9},
)


def warm_up(engine: Engine, seconds: float, report: Callable[[int, int], None]) -> tuple[int, int]:
    """Run batches of every size and kind, small ones first, until the time is over.

    `engine` is used up: it holds what no client asked for. Its executor is as good as new. `report`
    gets (done, total). Returns the same at the end.
    """
    start, number = time.perf_counter(), itertools.count()
    sizes = batch_buckets(engine.config.max_num_seqs)
    total = len(sizes) * len(KINDS)
    longest = min(engine.config.max_num_batched_tokens, engine.info.max_model_len - 1)

    def run(batch: int, prompt_len: int, params: SamplingParams) -> None:
        for _ in range(batch):
            prompt = (0,) * prompt_len
            request = Request(
                request_id=f"warm-up-{next(number)}", prompt_token_ids=prompt, params=params
            )
            engine.enqueue(request)
        while not all(state.decoding for state in _states(engine)):
            engine.step()
        for _ in range(2):  # with all drafts; what is launched ahead of it has fewer
            engine.step()
        for request_id in list(engine.processors):
            engine.abort(request_id)
        engine.drain()

    max_tokens = engine.info.resolved.num_speculative_tokens + 2
    for done, (batch, kind) in enumerate(itertools.product(sizes, KINDS)):
        report(done, total)
        if time.perf_counter() - start > seconds:
            return done, total
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **kind)
        if done == 0:
            run(1, longest, params)
        run(batch, min(2, longest), params)
    report(total, total)
    return total, total


def _states(engine: Engine) -> list[Any]:
    return [processor.state for processor in engine.processors.values()]
