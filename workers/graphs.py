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
from spectrue.workers.parallel import TPGroup
from spectrue.workers.rows import Rows, needs_edits
from spectrue.workers.sampler import (
    VerifyResult,
    collect,
    decide,
    num_decided,
    process_rows,
)
from spectrue.workers.verify_inputs import VerifyInputs, VerifyShape, from_device

logger = logging.getLogger(__name__)

T = TypeVar("T")

# (batch, the model's output, tokens after each [num_tokens], last row of each request, slots)
FeedHead = Callable[[ForwardBatch, ForwardOutput, Tensor, Tensor, Tensor], None]


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
    feeds: bool  # the draft head, with what was committed


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
    proposal: DraftProposal
    fed: bool  # the draft head, with what the step committed
    on_host: Tensor
    done: torch.cuda.Event


class StepGraphs:
    """Replays a step's graph, capturing it at its first use. One stream, one thread.

    What the host does not know when it launches a step is in `tokens`, on the device: the last
    token of a slot, if the step before is still in flight, and the drafts of its head.
    """

    def __init__(
        self,
        target: ModelRunner,
        buffers: InputBuffers,
        *,
        group: TPGroup,
        device: torch.device,
        max_model_len: int,
        law: DraftLaw | None,  # the drafter's whole buffers, which every step's law begins
        keep_hidden_states: bool,  # a drafter reads them
    ) -> None:
        self.target = target
        self.buffers = buffers
        self.group = group
        self.device = device
        self.max_model_len = max_model_len
        self.law = law
        self.keep_hidden_states = keep_hidden_states
        self.sizes = batch_buckets(len(buffers.requests))
        self.output: ForwardOutput | None = None  # engine-owned, of the last step
        self.fallbacks: Counter[str] = Counter()  # steps that ran without a graph, by reason
        self._captured: dict[_Key, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()
        # A slot's last token, then its drafts; one more slot that nobody reads.
        shape = len(buffers.requests) + 1, buffers.resolved.num_speculative_tokens + 1
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self.feed_head: FeedHead | None = None  # a draft head's, captured with a step
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
        key = self._key(plan, rows, proposal)
        captured = self._captured.get(key) or self._capture(key)
        self._uploaded.synchronize()  # a step in flight may not have read its inputs yet
        captured.inputs.fill(self.buffers, rows)
        self._fill(captured.feed, plan, rows, key)
        captured.feed.upload()
        captured.inputs.packed.upload()
        self._uploaded.record()
        captured.graph.replay()
        on_host, done = captured.on_host[self._turn], self._done[self._turn]
        self._turn = 1 - self._turn
        on_host.copy_(captured.decided, non_blocking=True)
        done.record()
        return StepInFlight(captured, rows, proposal, key.feeds, on_host, done)

    def finish(self, step: StepInFlight) -> tuple[VerifyResult, ForwardBatch, ForwardOutput]:
        """Wait for a step: what it decided, and what its forward left for the drafter."""
        step.done.synchronize()
        captured, rows = step.captured, step.rows
        step.proposal.fetch_into(rows.drafts)
        result = collect(
            step.on_host.numpy(),
            captured.inputs.shape,
            self.buffers,
            rows,
            self.target.vocab_size,
            self._simulated,
        )
        batch = self._batch(captured.feed, tuple(len(d) + 1 for d in rows.drafts))
        output = self.output
        if output is None or step.fed:  # nobody reads it
            output = ForwardOutput(hidden_states=torch.empty(0), fed=step.fed)
        return result, batch, output

    def obstacle(self, plan: SchedulerOutput) -> str | None:
        """Why no graph can run a plan, or None."""
        if any(s.tree_depth for s in plan.scheduled):
            return "draft tree"
        requests = [self.buffers.request(s.slot).request for s in plan.scheduled]
        if not all(s.samples and s.num_scheduled_tokens == 1 for s in plan.scheduled):
            return "prefill"
        if any(request.params.logprobs is not None for request in requests):
            return "logprobs"
        if any(needs_edits(request) for request in requests):
            return "logit edits"
        return None

    def leaves_tokens(self, plan: SchedulerOutput) -> bool:
        """Whether a plan's graph leaves its last tokens on the device (see `_go_on`)."""
        return self.obstacle(plan) is None and all(
            s.num_draft_tokens == 0 and self.buffers.methods[s.slot] != "rejection"
            for s in plan.scheduled
        )

    def _missing_law(self, proposal: DraftProposal) -> str | None:
        if proposal.law is not None and self.law is None:
            return "law outside the engine's buffers"
        return None

    def _key(self, plan: SchedulerOutput, rows: Rows, proposal: DraftProposal) -> _Key:
        size = self.sizes[bisect_left(self.sizes, len(rows.slots))]
        width = max(rows.num_drafts)
        on_device = proposal.fetch is not None
        shape = VerifyShape.of(self.buffers, rows).padded(size, width, on_device)
        # All are decided by one op, so its output is in their order; none has a gap in its KV.
        one = (shape.walk or shape.reject) if None in (shape.walk, shape.reject) else None
        feeds = (
            self.feed_head is not None
            and one is not None
            and all(
                self.buffers.num_draft_computed[s.slot] >= s.num_computed_tokens
                for s in plan.scheduled
            )
        )
        return _Key(size, width, shape, feeds)

    def _fill(self, feed: PackedTensors, plan: SchedulerOutput, rows: Rows, key: _Key) -> None:
        buffers, vocab_size, host = self.buffers, self.target.vocab_size, feed.host
        starts = [s.num_computed_tokens for s in plan.scheduled]
        counts = [k + 1 for k in rows.num_drafts]
        n, num_rows = len(starts), len(rows.slot)
        first = buffers.token_ids.numpy()[rows.slots, starts]
        ids = np.zeros(num_rows, dtype=np.int64)
        ids[rows.starts] = first
        known = np.ones(num_rows, dtype=bool)
        known[rows.starts] = np.array([buffers.num_tokens[slot] for slot in rows.slots]) > starts
        if key.verify.on_device:
            known &= rows.offset == 0
        elif key.width:
            drafts = np.array([token for draft in rows.drafts for token in draft], dtype=np.int64)
            # A draft that is no token has no embedding; verification sees the id itself.
            ids[rows.offset > 0] = np.where((drafts >= 0) & (drafts < vocab_size), drafts, 0)
        host["input_ids"][:num_rows] = ids
        source = rows.slot * self.tokens.shape[1] + rows.offset
        host["source"][:num_rows] = np.where(known, -1, source)
        host["source"][num_rows:] = -1
        host["slots"][:n], host["slots"][n:] = rows.slots, len(buffers.requests)
        if key.feeds:
            request = np.repeat(np.arange(n), counts)
            host["decided_at"][:num_rows] = request * (key.width + 1) + rows.offset
            host["decided_at"][num_rows:] = 0
        fill_feed(
            feed, starts, counts, buffers.block_tables.numpy()[rows.slots], buffers.block_size
        )

    def _capture(self, key: _Key) -> _Captured:
        start = time.perf_counter()
        num_requests, num_tokens = key.num_requests, key.num_requests * (key.width + 1)
        num_blocks = self.buffers.block_tables.shape[1]
        feed = PackedTensors(
            {
                **feed_fields(num_requests, num_tokens, num_blocks),
                "source": (torch.int64, num_tokens),
                "slots": (torch.int64, num_requests),
                **({"decided_at": (torch.int64, num_tokens)} if key.feeds else {}),
            },
            self.device,
        )
        # The warm-up writes nothing that is read either.
        feed.host["slot_mapping"][:] = feed.host["source"][:] = -1
        feed.host["slots"][:] = len(self.buffers.requests)
        feed.upload()
        inputs = VerifyInputs(key.verify, self.device, self.tokens)
        batch = self._batch(feed, (key.width + 1,) * num_requests)
        law = None
        if key.verify.reject is not None and self.law is not None:
            law = self.law.first(key.verify.reject.num_drafts)

        length = num_decided(key.verify, self._simulated)
        decided = torch.zeros(length, dtype=torch.int64, device=self.device)

        def step() -> None:
            ids = from_device(batch.input_ids, feed.device["source"], self.tokens)
            fed = replace(batch, input_ids=ids.clamp(0, self.target.vocab_size - 1))
            output = self.target.forward(fed)
            if not key.feeds:
                self._keep(output)
            logits = self.target.logits(output.hidden_states)
            if logits is not None:  # on rank 0
                law_of_rows = process_rows(logits, inputs, {})
                decided.copy_(decide(law_of_rows, inputs, law, self._simulated))
            self.group.broadcast_(decided)
            self._go_on(key, feed, fed, output, decided)

        warm_up(step, self.device)
        graph = record(step, self._pool)
        on_host = torch.empty(2, *decided.shape, dtype=decided.dtype).pin_memory()
        captured = _Captured(graph, feed, inputs, decided, (on_host[0], on_host[1]))
        self._captured[key] = captured
        logger.debug("captured %s in %.2f s", key, time.perf_counter() - start)
        return captured

    def _go_on(
        self,
        key: _Key,
        feed: PackedTensors,
        batch: ForwardBatch,
        output: ForwardOutput,
        found: Tensor,
    ) -> None:
        """Leave for the next step what it needs of this one, before the host has seen it."""
        n, width, slots = key.num_requests, key.width + 1, feed.device["slots"]
        # Tokens of each request come first in what was found, then how many drafts it accepted.
        committed, accepted = found[: n * width].clamp(min=0), found[n * width : n * (width + 1)]
        if key.width == 0 and key.verify.reject is None:  # as `leaves_tokens` says
            self.tokens[:, 0].index_copy_(0, slots, committed)
        if key.feeds:
            # Rows after the last accepted draft are fed what comes: the next steps write over them.
            # (Made-up acceptance is the host's: the head then goes on from another row.)
            assert self.feed_head is not None
            assert batch.cu_query_lens is not None
            following = committed.index_select(0, feed.device["decided_at"])
            last = batch.cu_query_lens[:-1] + accepted
            self.feed_head(batch, output, following, last, slots)

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
