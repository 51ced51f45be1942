"""The engine of one TP group: admits requests, runs steps, hands out what they produced."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from spectrue.workers.block_manager import BlockManager
from spectrue.workers.config import EngineConfig
from spectrue.workers.core import (
    FinishReason,
    Request,
    RequestOutput,
    SchedulerOutput,
    StepOutput,
    accept_length,
)
from spectrue.workers.depth import depth_policy
from spectrue.workers.errors import EngineOverloadedError, InvalidRequestError
from spectrue.workers.executor import Executor
from spectrue.workers.output import OutputProcessor
from spectrue.workers.scheduler import RequestState, RequestStatus, Scheduler
from spectrue.workers.tokenizer import IncrementalDetokenizer, Tokenizer
from spectrue.workers.worker import ModelInfo

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class EngineStats:
    """Totals since the start; times in seconds."""

    num_steps: int = 0
    num_verify_steps: int = 0  # per request and step that committed tokens
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_committed_tokens: int = 0  # what clients got
    draft_time: float = 0.0
    model_time: float = 0.0
    verify_time: float = 0.0

    @property
    def accept_length(self) -> float:
        return accept_length(self.num_accepted_tokens, self.num_verify_steps)


@dataclass(frozen=True, slots=True)
class _Flight:
    """A launched step. A request of it may end, by an abort or a stop, before the step does."""

    plan: SchedulerOutput
    states: list[RequestState]
    finish: Callable[[], StepOutput]


class Engine:
    """Not thread-safe: `AsyncEngine` gives it a thread of its own.

    Every accepted request ends in exactly one output with a finish_reason, from `step` or `abort`.
    """

    def __init__(
        self, config: EngineConfig, info: ModelInfo, executor: Executor, tokenizer: Tokenizer | None
    ) -> None:
        self.config = config
        self.info = info
        self.executor = executor
        self.tokenizer = tokenizer
        self.blocks = BlockManager(
            info.num_kv_blocks, config.block_size, config.enable_prefix_caching
        )
        self.depth = depth_policy(info.resolved)
        self.scheduler = Scheduler(
            self.blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            recompute_last_block=info.needs_hidden_states,
            depth=self.depth,
            tree=info.resolved.tree,
        )
        self.processors: dict[str, OutputProcessor] = {}
        self.stats = EngineStats()
        self.guards: Counter[str] = Counter()
        self._outputs: list[RequestOutput] = []  # of the step that is being ended
        self._ahead: _Flight | None = None  # the step after it, launched already
        if info.resolved.simulated_acceptance:
            logger.warning(
                "acceptance is SIMULATED (speculative.simulated_acceptance = %s): speed may be "
                "measured, the text is not the model's",
                [round(rate, 4) for rate in info.resolved.simulated_acceptance],
            )

    @property
    def num_unfinished(self) -> int:
        return len(self.processors)

    def check(self, request: Request) -> None:
        """Raise InvalidRequestError for what this model cannot do. Thread-safe."""
        if request.request_id in self.processors:
            raise InvalidRequestError(f"request id {request.request_id} is in use", "request_id")
        num_prompt, limit = len(request.prompt_token_ids), self.info.max_model_len
        if num_prompt == 0:
            raise InvalidRequestError("the prompt is empty", "prompt")
        if num_prompt >= limit:
            raise InvalidRequestError(
                f"the prompt has {num_prompt} tokens, the model's context of {limit} tokens leaves "
                f"room for {limit - 1}",
                "prompt",
            )
        vocab_size = self.info.vocab_size
        if not all(0 <= token < vocab_size for token in request.prompt_token_ids):
            raise InvalidRequestError(f"prompt token ids must be in [0, {vocab_size})", "prompt")
        request.params.check_token_ids(vocab_size)
        k, most = request.params.num_speculative_tokens, self.info.resolved.num_speculative_tokens
        if k is not None and k > most:
            raise InvalidRequestError(
                f"speculative.num_speculative_tokens must be at most {most}, got {k}",
                "speculative.num_speculative_tokens",
            )

    def add_request(self, request: Request) -> None:
        """Accept a request, or raise InvalidRequestError or EngineOverloadedError."""
        self.check(request)
        if len(self.scheduler.waiting) >= self.config.max_queue_len:
            raise EngineOverloadedError(f"{len(self.scheduler.waiting)} requests are waiting")
        self.enqueue(request)

    def enqueue(self, request: Request) -> None:
        """Accept a request that was checked."""
        params = request.params
        k = self.info.resolved.num_speculative_tokens
        if params.num_speculative_tokens is not None:
            k = min(k, params.num_speculative_tokens)
        state = RequestState(
            request,
            seed=params.seed if params.seed is not None else secrets.randbits(63),
            max_len=min(len(request.prompt_token_ids) + params.max_tokens, self.info.max_model_len),
            max_draft_tokens=k,
        )
        detokenizer = None
        if self.tokenizer is not None:
            detokenizer = IncrementalDetokenizer(self.tokenizer, request.prompt_token_ids)
        processor = OutputProcessor(state, detokenizer, self.info.eos_token_ids)
        if self.info.resolved.simulated_acceptance:
            processor.stats = replace(processor.stats, simulated=True)
        self.processors[request.request_id] = processor
        self.scheduler.add(state)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request between steps; None if it is unknown or has ended already."""
        processor = self.processors.get(request_id)
        if processor is None:
            return None
        self.scheduler.finish(processor.state)
        del self.processors[request_id]  # not before: if `finish` fails, `end_all` ends it
        return processor.end("abort")

    def step(self) -> list[RequestOutput]:
        """Run one step; outputs of the requests that committed tokens in it."""
        if not self.processors:
            return []
        if self._ahead is not None and not any(
            state.status is RequestStatus.RUNNING for state in self._ahead.states
        ):
            self.drain()
        start = time.perf_counter()
        flight, self._ahead = self._ahead or self._launch(self.scheduler.schedule()), None
        # The device shall not wait for what the host does between two steps.
        if self.executor.can_follow(flight.plan):
            following = self.scheduler.schedule_ahead(flight.plan)
            if following is not None:
                self._ahead = self._launch(following)
        plan, step = flight.plan, flight.finish()
        self._count(step)
        outputs = zip(plan.scheduled, flight.states, step.outputs, strict=True)
        for scheduled, state, slot_output in outputs:
            if state.status is not RequestStatus.RUNNING:
                continue  # it ended while this step was in flight
            num_computed = scheduled.num_scheduled_tokens
            if not scheduled.samples:
                self.scheduler.commit(
                    state, num_computed, [], slot_output.num_draft_computed_tokens
                )
                continue
            processor = self.processors[state.request.request_id]
            try:
                kept, output = processor.process(slot_output)
            except Exception as e:  # of a tokenizer, say: the fault of one request ends that one
                logger.exception("request %s failed", state.request.request_id)
                kept, output = [], processor.end("error", f"{type(e).__name__}: {e}")
            self._outputs.append(output)  # from here on it is handed out, whatever fails
            if output.finish_reason is not None:
                del self.processors[state.request.request_id]
            num_computed += slot_output.num_accepted_tokens
            self.scheduler.commit(state, num_computed, kept, slot_output.num_draft_computed_tokens)
            if output.finish_reason is not None:
                self.scheduler.finish(state, faulty=output.finish_reason == "error")
            self.stats.num_committed_tokens += len(kept)
            self.stats.num_verify_steps += 1
            self.stats.num_drafts += slot_output.num_draft_tokens > 0
            self.stats.num_draft_tokens += slot_output.num_draft_tokens
            self.stats.num_accepted_tokens += slot_output.num_accepted_tokens
        self.depth.observe(plan, step, time.perf_counter() - start)
        if not self.processors:
            self.check_integrity()
        handed, self._outputs = self._outputs, []
        return handed

    def _launch(self, plan: SchedulerOutput) -> _Flight:
        states = [self.scheduler.slots[s.slot] for s in plan.scheduled]
        assert all(states)
        return _Flight(plan, states, self.executor.launch(plan))  # type: ignore[arg-type]

    def drain(self) -> None:
        """Wait for a step whose requests have all ended: nobody asks what it committed."""
        if self._ahead is not None:
            self._ahead.finish()
            self._ahead = None

    def end_all(self, reason: FinishReason, error: str) -> list[RequestOutput]:
        """End every request, because no further step will be run.

        Includes what a step that failed half way had already produced.
        """
        outputs, self._outputs = self._outputs, []
        for processor in self.processors.values():
            with contextlib.suppress(Exception):  # the queues may be what broke
                self.scheduler.finish(processor.state)
            outputs.append(processor.end(reason, error))
        self.processors.clear()
        return outputs

    def check_integrity(self) -> None:
        """Raise AssertionError if queues, slots, blocks and outputs disagree. Runs when idle."""
        self.scheduler.check_integrity()
        live = {id(s) for s in (*self.scheduler.running, *self.scheduler.waiting)}
        assert live == {id(p.state) for p in self.processors.values()}
        assert all(p.state.status is not RequestStatus.FINISHED for p in self.processors.values())

    def _count(self, step: StepOutput) -> None:
        self.stats.num_steps += 1
        self.stats.draft_time += step.draft_time
        self.stats.model_time += step.model_time
        self.stats.verify_time += step.verify_time
        for guard, count in step.guards.items():
            if guard not in self.guards:
                logger.warning("verify guard %s fired for the first time", guard)
            self.guards[guard] += count
