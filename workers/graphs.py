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

from spectrue.kernels import dispatch
from spectrue.workers.core import SchedulerOutput
from spectrue.workers.drafters.base import DraftLaw, DraftProposal
from spectrue.workers.forward_batch import ForwardBatch, ForwardOutput
from spectrue.workers.input_buffers import InputBuffers
from spectrue.workers.model_runner import ModelRunner
from spectrue.workers.packed import PackedTensors
from spectrue.workers.parallel import TPGroup
from spectrue.workers.places import Places, SlotLengths, copy_tables
from spectrue.workers.rows import Rows, needs_edits
from spectrue.workers.sampler import (
    VerifyResult,
    collect,
    decide,
    decided_at,
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


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    feed: PackedTensors
    places: Places  # of the feed
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

    What the host does not know when it launches a step is on the device: in `tokens` the last token
    of a slot, if the step before is still in flight, and the drafts of its head; in `lengths` how
    many tokens the slot has.
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
    ) -> None:
        self.target = target
        self.buffers = buffers
        self.group = group
        self.device = device
        self.max_model_len = max_model_len
        self.law = law
        self.sizes = batch_buckets(len(buffers.requests))
        self.fallbacks: Counter[str] = Counter()  # steps that ran without a graph, by reason
        self._captured: dict[_Key, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()
        # A slot's last token, then its drafts; one more slot that nobody reads.
        shape = len(buffers.requests) + 1, buffers.resolved.num_speculative_tokens + 1
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self.lengths = SlotLengths(len(buffers.requests), device)
        self.feed_head: FeedHead | None = None  # a draft head's, captured with a step
        self.last: StepInFlight | None = None  # the last step, if it went by a graph
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
            assert not any(s.ahead for s in plan.scheduled), "no eager step can be ahead"
            self.fallbacks[reason] += 1
            self.last = None
            return None
        slots = [s.slot for s in plan.scheduled]
        bases, committed = self.lengths.origins(plan)
        rows = Rows.build(slots, committed, drafts, bases=bases)
        key = self._key(rows, proposal)
        captured = self._captured.get(key) or self._capture(key)
        self._uploaded.synchronize()  # a step in flight may not have read its inputs yet
        captured.inputs.fill(self.buffers, rows)
        self._fill(captured, plan, rows, key)
        captured.feed.upload()
        captured.inputs.packed.upload()
        self._uploaded.record()
        captured.graph.replay()
        on_host, done = captured.on_host[self._turn], self._done[self._turn]
        self._turn = 1 - self._turn
        on_host.copy_(captured.decided, non_blocking=True)
        done.record()
        self.last = StepInFlight(captured, rows, on_host, done)
        return self.last

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
        )
        # Of this batch only the lengths are read: the next step may have its tensors already.
        batch = self._batch(captured.feed, tuple(len(d) + 1 for d in rows.drafts))
        return result, batch, ForwardOutput(hidden_states=torch.empty(0), fed=True)

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

    def _missing_law(self, proposal: DraftProposal) -> str | None:
        if proposal.law is not None and self.law is None:
            return "law outside the engine's buffers"
        return None

    def _key(self, rows: Rows, proposal: DraftProposal) -> _Key:
        size = self.sizes[bisect_left(self.sizes, len(rows.slots))]
        width = max(rows.num_drafts)
        on_device = proposal.fetch is not None
        shape = VerifyShape.of(self.buffers, rows).padded(size, width, on_device)
        return _Key(size, width, shape)

    def _fill(self, captured: _Captured, plan: SchedulerOutput, rows: Rows, key: _Key) -> None:
        buffers, vocab_size, places = self.buffers, self.target.vocab_size, captured.places
        host = captured.feed.host
        counts = np.array(rows.num_drafts) + 1
        n, num_rows = len(counts), len(rows.slot)
        ahead = np.array([s.ahead for s in plan.scheduled])
        starts = [s.num_computed_tokens for s in plan.scheduled]
        ids = np.zeros(num_rows, dtype=np.int64)
        ids[rows.starts] = buffers.token_ids.numpy()[rows.slots, starts]
        known = np.ones(num_rows, dtype=bool)
        known[rows.starts] = ~ahead
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
        host["slots"][:n], host["slots"][n:] = rows.slots, self.lengths.nobody
        rejects = [buffers.methods[slot] == "rejection" for slot in rows.slots]
        host["tokens_at"][:n], host["accepted_at"][:n] = decided_at(key.verify, rejects)
        ends = np.cumsum(counts)
        host["cu_query_lens"][1 : n + 1], host["cu_query_lens"][n + 1 :] = ends, num_rows

        places.clear(host, self.lengths)
        assert rows.base is not None
        committed, base = rows.position[rows.starts], rows.base[rows.starts]
        (offset,), (of,), (request,) = places.of(host, "row")
        offset[:num_rows], of[:num_rows] = rows.position - 1, rows.base
        request[:num_rows] = np.repeat(np.arange(n), counts)
        for name, added in (("kv_len", counts - 1), ("before", 0)):
            (offset,), (of,), _ = places.of(host, name)
            offset[:n], of[:n] = committed + added, base
        copy_tables(host, buffers, rows.slots)

    def _capture(self, key: _Key) -> _Captured:
        start = time.perf_counter()
        num_requests, num_tokens = key.num_requests, key.num_requests * (key.width + 1)
        places = Places({"row": num_tokens, "kv_len": num_requests, "before": num_requests})
        feed = PackedTensors(
            {
                "input_ids": (torch.int64, num_tokens),
                "source": (torch.int64, num_tokens),
                "slots": (torch.int64, num_requests),
                "tokens_at": (torch.int64, num_requests),
                "accepted_at": (torch.int64, num_requests),
                "cu_query_lens": (torch.int32, num_requests + 1),
                "block_tables": (torch.int32, num_requests * self.buffers.block_tables.shape[1]),
                **places.fields,
            },
            self.device,
        )
        # The warm-up writes nothing that is read either.
        places.clear(feed.host, self.lengths)
        feed.host["source"][:] = -1
        feed.host["slots"][:] = self.lengths.nobody
        feed.upload()
        simulated = bool(self.buffers.resolved.simulated_acceptance)
        inputs = VerifyInputs(key.verify, self.device, self.tokens, simulated=simulated, based=True)
        law = None
        if key.verify.reject is not None and self.law is not None:
            law = self.law.first(key.verify.reject.num_drafts)
        decided = torch.zeros(num_decided(key.verify), dtype=torch.int64, device=self.device)
        shapes = self._batch(feed, (key.width + 1,) * num_requests)

        def step() -> None:
            at = feed.device
            placed = places.place(at, self.lengths, shapes.block_tables, self.buffers.block_size)
            inputs.place(self.lengths.tensor)
            ids = from_device(at["input_ids"], at["source"], self.tokens)
            batch = replace(
                shapes,
                input_ids=ids.clamp(0, self.target.vocab_size - 1),
                positions=placed["row"].positions,
                slot_mapping=placed["row"].slots,
                kv_lens=placed["kv_len"].narrow,
            )
            output = self.target.forward(batch)
            logits = self.target.logits(output.hidden_states)
            if logits is not None:  # on rank 0
                decided.copy_(decide(process_rows(logits, inputs, {}), inputs, law))
            self.group.broadcast_(decided)
            # Leave for the next step what it needs of this one, before the host has seen it. Rows
            # after the last accepted draft are fed what comes: the next steps write over them.
            following, last = dispatch.advance_slots(
                decided,
                at["tokens_at"],
                at["accepted_at"],
                placed["before"].positions,
                at["slots"],
                at["cu_query_lens"],
                num_tokens,
                self.tokens,
                self.lengths.tensor,
            )
            if self.feed_head is not None:
                self.feed_head(batch, output, following, last, at["slots"])

        warm_up(step, self.device)
        graph = record(step, self._pool)
        on_host = torch.empty(2, *decided.shape, dtype=decided.dtype).pin_memory()
        captured = _Captured(graph, feed, places, inputs, decided, (on_host[0], on_host[1]))
        self._captured[key] = captured
        logger.debug("captured %s in %.2f s", key, time.perf_counter() - start)
        return captured

    def _batch(self, feed: PackedTensors, query_lens: tuple[int, ...]) -> ForwardBatch:
        """Lengths are bounds where they decide how a kernel is launched. Positions are for the
        graph to say."""
        at, nothing = feed.device, torch.empty(0, dtype=torch.int64)
        return ForwardBatch(
            input_ids=at["input_ids"],
            positions=nothing,
            slot_mapping=nothing,
            block_tables=at["block_tables"].view(len(at["slots"]), -1),
            query_lens=query_lens,
            seq_lens=(self.max_model_len,) * len(query_lens),
            cu_query_lens=at["cu_query_lens"],
        )
