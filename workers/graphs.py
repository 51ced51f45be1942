"""CUDA and HIP graphs of a decode step: target forward, logits, verification and what it decided.

A graph runs one shape: so many requests, each with up to `width` drafts, and the ops that their
parameters need. Requests and drafts that are not there are padding that writes no KV and that
nobody reads. Everything a graph reads lives in buffers of its own, which one copy fills before a
replay; what others read after it is copied out of the graph's memory within it, because the next
graph may use that memory again (sglang#37134).
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from spectrue.workers.core import SchedulerOutput
from spectrue.workers.drafters.base import DraftLaw, DraftProposal
from spectrue.workers.forward_batch import (
    ForwardBatch,
    ForwardOutput,
    feed_batch,
    feed_fields,
    fill_feed,
)
from spectrue.workers.input_buffers import InputBuffers
from spectrue.workers.model_runner import ModelRunner
from spectrue.workers.packed import PackedTensors
from spectrue.workers.rows import Rows, needs_edits
from spectrue.workers.sampler import VerifyResult, collect, decide, process_rows
from spectrue.workers.verify_inputs import VerifyInputs, VerifyShape

logger = logging.getLogger(__name__)

T = TypeVar("T")


def batch_buckets(max_num_seqs: int) -> list[int]:
    """Batch sizes that graphs are made for: powers of two to 8, then in steps of at most an
    eighth, so that padding costs little."""
    sizes = [n for n in (1, 2, 4, 8) if n < max_num_seqs]
    while (last := sizes[-1] if sizes else 0) < max_num_seqs:
        sizes.append(min(max_num_seqs, last + max(8, last // 8) if last >= 8 else max_num_seqs))
    return sizes


def warm_up(step: Callable[[], T], device: torch.device) -> T:
    """Run on a stream of its own: compiles, and allocates what libraries keep for a stream."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        result = step()
    torch.cuda.current_stream(device).wait_stream(stream)
    return result


def record(step: Callable[[], object], pool: Any) -> torch.cuda.CUDAGraph:
    """A graph of what `step` enqueues. What it allocates is the pool's: copy out what must last."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        step()
    return graph


@dataclass(frozen=True, slots=True)
class _Key:
    num_requests: int
    width: int
    verify: VerifyShape


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    feed: PackedTensors
    inputs: VerifyInputs
    decided: Tensor  # [n] int64, on the device
    on_host: tuple[Tensor, Tensor]  # the same, pinned: of two steps in flight


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step that the device runs or will run; `StepGraphs.finish` waits for it."""

    captured: _Captured
    rows: Rows
    on_host: Tensor
    done: torch.cuda.Event


class StepGraphs:
    """Replays a step's graph, capturing it at its first use. One stream, one thread.

    A step without drafts can be launched before the one ahead of it is done: the tokens that are
    not known on the host yet are on the device, in `last_token_ids`.
    """

    def __init__(
        self,
        target: ModelRunner,
        buffers: InputBuffers,
        *,
        device: torch.device,
        max_model_len: int,
        law: DraftLaw | None,  # the drafter's whole buffers, which every step's law begins
        keep_hidden_states: bool,  # a drafter reads them
    ) -> None:
        self.target = target
        self.buffers = buffers
        self.device = device
        self.max_model_len = max_model_len
        self.law = law
        self.keep_hidden_states = keep_hidden_states
        self.sizes = batch_buckets(len(buffers.requests))
        self.output: ForwardOutput | None = None  # engine-owned, of the last step
        self.fallbacks: Counter[str] = Counter()  # steps that ran without a graph, by reason
        self._captured: dict[_Key, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()
        # By slot, with one more that nobody reads: what the last step without drafts committed.
        self.last_token_ids = torch.zeros(
            len(buffers.requests) + 1, dtype=torch.int64, device=device
        )
        self._turn = 0
        self._uploaded = torch.cuda.Event()
        self._done = torch.cuda.Event(), torch.cuda.Event()

    @property
    def num_captured(self) -> int:
        return len(self._captured)

    def launch(
        self, plan: SchedulerOutput, drafts: list[list[int]], proposal: DraftProposal
    ) -> StepInFlight | None:
        """Enqueue the whole step; None where only the eager way can run it (counted by reason)."""
        reason = self.obstacle(plan) or self._missing_law(proposal)
        if reason is not None:
            self.fallbacks[reason] += 1
            return None
        slots = [s.slot for s in plan.scheduled]
        rows = Rows.build(slots, [s.num_computed_tokens + 1 for s in plan.scheduled], drafts)
        exact = VerifyShape.of(self.buffers, rows)
        key = self._key(exact, len(slots), max(rows.num_drafts))
        captured = self._captured.get(key) or self._capture(key)
        self._uploaded.synchronize()  # a step in flight may not have read its inputs yet
        captured.inputs.fill(self.buffers, rows)
        self._fill(captured.feed, plan, drafts)
        captured.feed.upload()
        captured.inputs.packed.upload()
        self._uploaded.record()
        captured.graph.replay()
        on_host, done = captured.on_host[self._turn], self._done[self._turn]
        self._turn = 1 - self._turn
        on_host.copy_(captured.decided, non_blocking=True)
        done.record()
        return StepInFlight(captured, rows, on_host, done)

    def finish(self, step: StepInFlight) -> tuple[VerifyResult, ForwardBatch, ForwardOutput]:
        """Wait for a step: what it decided, and what its forward left for the drafter."""
        step.done.synchronize()
        captured, rows = step.captured, step.rows
        result = collect(
            step.on_host.numpy(),
            captured.inputs.shape,
            self.buffers,
            rows,
            self.target.vocab_size,
            self._simulated,
        )
        batch = self._batch(captured.feed, tuple(len(d) + 1 for d in rows.drafts))
        return result, batch, self._output()

    def _output(self) -> ForwardOutput:
        if self.output is not None:
            return self.output
        return ForwardOutput(hidden_states=torch.empty(0, device=self.device))  # nobody reads it

    def obstacle(self, plan: SchedulerOutput) -> str | None:
        """Why no graph can run a plan, or None."""
        requests = [self.buffers.request(s.slot).request for s in plan.scheduled]
        if not all(s.samples and s.num_scheduled_tokens == 1 for s in plan.scheduled):
            return "prefill"
        if any(request.params.logprobs is not None for request in requests):
            return "logprobs"
        if any(needs_edits(request) for request in requests):
            return "logit edits"
        return None

    def _missing_law(self, proposal: DraftProposal) -> str | None:
        if proposal.law is not None and self.law is None:
            return "law outside the engine's buffers"
        return None

    def _key(self, exact: VerifyShape, num_requests: int, width: int) -> _Key:
        size = self.sizes[bisect_left(self.sizes, num_requests)]
        return _Key(size, width, exact.padded(size, width))

    def _fill(self, feed: PackedTensors, plan: SchedulerOutput, drafts: list[list[int]]) -> None:
        buffers, vocab_size = self.buffers, self.target.vocab_size
        starts = [s.num_computed_tokens for s in plan.scheduled]
        slots = [s.slot for s in plan.scheduled]
        first = buffers.token_ids.numpy()[slots, starts]
        if "slots" in feed.host:
            known = np.array([buffers.num_tokens[slot] for slot in slots]) > starts
            feed.host["input_ids"][: len(first)] = np.where(known, first, -1)
            feed.host["slots"][: len(first)] = slots
            feed.host["slots"][len(first) :] = len(buffers.requests)
        else:
            # A draft that is no token has no embedding; verification sees the id itself.
            pairs = zip(first.tolist(), drafts, strict=True)
            ids = np.array([token for last, draft in pairs for token in (last, *draft)])
            feed.host["input_ids"][: len(ids)] = np.where((ids >= 0) & (ids < vocab_size), ids, 0)
        counts = [len(draft) + 1 for draft in drafts]
        fill_feed(feed, starts, counts, buffers.block_tables.numpy()[slots], buffers.block_size)

    def _capture(self, key: _Key) -> _Captured:
        start = time.perf_counter()
        num_requests, num_tokens = key.num_requests, key.num_requests * (key.width + 1)
        num_blocks = self.buffers.block_tables.shape[1]
        fields = feed_fields(num_requests, num_tokens, num_blocks)
        follows = key.width == 0 and key.verify.reject is None and not self._simulated
        if follows:
            fields["slots"] = torch.int64, num_requests
        feed = PackedTensors(fields, self.device)
        feed.host["slot_mapping"][:] = -1  # the warm-up writes no KV either
        if follows:
            feed.host["slots"][:] = len(self.buffers.requests)
        feed.upload()
        inputs = VerifyInputs(key.verify, self.device)
        batch = self._batch(feed, (key.width + 1,) * num_requests)
        law = None
        if key.verify.reject is not None and self.law is not None:
            law = self.law.first(key.verify.reject.num_drafts)

        def step() -> Tensor:
            fed = batch
            if follows:
                last = self.last_token_ids.index_select(0, feed.device["slots"])
                known = fed.input_ids >= 0
                fed = replace(fed, input_ids=torch.where(known, fed.input_ids, last))
            output = self.target.forward(fed)
            self._keep(output)
            logits = self.target.logits(output.hidden_states)
            assert logits is not None
            found = decide(process_rows(logits, inputs, {}), inputs, law, self._simulated)
            if follows:  # a token of each request comes first in `found`; none is -1
                committed = found[:num_requests].clamp(min=0)
                self.last_token_ids.index_copy_(0, feed.device["slots"], committed)
            return found

        decided = torch.empty_like(warm_up(step, self.device))
        graph = record(lambda: decided.copy_(step()), self._pool)
        on_host = torch.empty(2, *decided.shape, dtype=decided.dtype).pin_memory()
        captured = _Captured(graph, feed, inputs, decided, (on_host[0], on_host[1]))
        self._captured[key] = captured
        logger.debug("captured %s in %.2f s", key, time.perf_counter() - start)
        return captured

    def _keep(self, output: ForwardOutput) -> None:
        """Copy what the drafter reads to where every graph of this engine leaves it."""
        if not self.keep_hidden_states:
            return
        if self.output is None:
            rows = self.sizes[-1] * (self.buffers.resolved.num_speculative_tokens + 1)
            hidden, aux = output.hidden_states, output.aux_hidden_states
            self.output = ForwardOutput(
                hidden_states=hidden.new_zeros(rows, hidden.shape[1]),
                aux_hidden_states=None if aux is None else aux.new_zeros(rows, aux.shape[1]),
                persistent=True,
            )
        for to, of in (
            (self.output.hidden_states, output.hidden_states),
            (self.output.aux_hidden_states, output.aux_hidden_states),
        ):
            if to is not None and of is not None:
                to[: len(of)].copy_(of)

    @property
    def _simulated(self) -> bool:
        return bool(self.buffers.resolved.simulated_acceptance)

    def _batch(self, feed: PackedTensors, query_lens: tuple[int, ...]) -> ForwardBatch:
        """Lengths are bounds where they decide how a kernel is launched."""
        return feed_batch(feed, query_lens, (self.max_model_len,) * len(query_lens))
