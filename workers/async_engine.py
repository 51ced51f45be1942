"""An engine with a thread of its own: the step loop, and calls into it from any thread."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence

from spectrue.workers.config import EngineConfig
from spectrue.workers.core import Request, RequestOutput
from spectrue.workers.engine import Engine
from spectrue.workers.errors import EngineDeadError, EngineOverloadedError, InvalidRequestError
from spectrue.workers.executor import GroupExecutor
from spectrue.workers.parallel import TPGroup
from spectrue.workers.tokenizer import has_tokenizer, load_tokenizer
from spectrue.workers.warm_up import warm_up
from spectrue.workers.worker import Progress, Worker

logger = logging.getLogger(__name__)


def load_engine(
    config: EngineConfig, group: TPGroup | None = None, progress: Progress | None = None
) -> Engine:
    """Load the model and build the engine of this process (rank 0 of `group`). Slow."""
    group = group or TPGroup()
    worker = Worker(config, group, progress)
    path = worker.info.model_path
    bare = config.load_format == "dummy" and not has_tokenizer(path)
    tokenizer = None if bare else load_tokenizer(path)
    executor = GroupExecutor(worker, group)
    if worker.graphs is not None and config.warm_up_seconds > 0:
        start = time.perf_counter()
        # Its blocks, its queue and what it measures are thrown away with it.
        first = Engine(config.replace(enable_prefix_caching=False), worker.info, executor, None)
        report = progress or (lambda what, done, total: None)
        done, total = warm_up(
            first, config.warm_up_seconds, lambda done, total: report("graphs", done, total)
        )
        seconds = time.perf_counter() - start
        logger.info("%d of %d usual batches captured in %.1f s", done, total, seconds)
    return Engine(config, worker.info, executor, tokenizer)


class AsyncEngine:
    """Owns the step loop. Submits and aborts wait in a mailbox until the step in flight is done.

    When the loop ends, however it does, every open request gets one final output, "abort" with
    the reason as `error`; later calls raise EngineDeadError.
    """

    def __init__(
        self,
        config: EngineConfig,
        group: TPGroup | None = None,
        progress: Progress | None = None,
        engine_factory: Callable[..., Engine] = load_engine,
    ) -> None:
        self.engine = engine_factory(config, group, progress)
        self._lock = threading.Condition()
        self._submitted: list[Request] = []
        self._aborted: list[str] = []
        self._outputs: list[RequestOutput] = []
        self._error: str | None = None
        self._closing = False
        self._heartbeat = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> None:
        """Accept all of `requests` or none. Raises InvalidRequestError, EngineOverloadedError or
        EngineDeadError."""
        ids = {request.request_id for request in requests}
        for request in requests:
            self.engine.check(request)
        with self._lock:
            self._check_alive()
            ids.difference_update(request.request_id for request in self._submitted)
            ids.difference_update(self.engine.processors)
            if len(ids) < len(requests):
                raise InvalidRequestError("a request id is in use", "request_id")
            waiting = len(self._submitted) + len(self.engine.scheduler.waiting)
            if waiting + len(requests) > self.engine.config.max_queue_len:
                raise EngineOverloadedError(f"{waiting} requests are waiting")
            self._wake()
            self._submitted.extend(requests)

    def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests with finish_reason "abort"; unknown ones are ignored."""
        with self._lock:
            self._wake()
            self._aborted.extend(request_ids)

    def poll(self, timeout: float) -> list[RequestOutput]:
        """All outputs since the last call; blocks until there are any, or `timeout` seconds.

        Raises EngineDeadError once the loop has died and everything was handed out.
        """
        with self._lock:
            self._lock.wait_for(lambda: self._outputs or self._error, timeout)
            outputs, self._outputs = self._outputs, []
            if not outputs and self._error is not None:
                raise EngineDeadError(self._error)
            return outputs

    def status(self) -> dict[str, object]:
        """What an operator or a health check wants to know; plain data."""
        engine, info = self.engine, self.engine.info
        with self._lock:
            busy = self._busy()
            age = time.monotonic() - self._heartbeat if busy else 0.0
            waiting = len(self._submitted) + len(engine.scheduler.waiting)
        stats = engine.stats
        return {
            "max_model_len": info.max_model_len,
            "vocab_size": info.vocab_size,
            "dtype": info.dtype,
            "device": info.device,
            "eos_token_ids": list(info.eos_token_ids),
            "drafter": info.resolved.drafter,
            "num_speculative_tokens": info.resolved.num_speculative_tokens,
            "verify_method": info.resolved.verify_method,
            "verify_reason": info.resolved.verify_reason,
            "decisions": [
                {"setting": d.setting, "value": d.value, "reason": d.reason} for d in info.decisions
            ],
            "running": len(engine.scheduler.running),
            "waiting": waiting,
            "kv_blocks_used": engine.blocks.num_used,
            "kv_blocks_total": engine.blocks.num_blocks,
            "prefix_cache_queries": engine.blocks.prefix_queries,
            "prefix_cache_hits": engine.blocks.prefix_hits,
            "preemptions": engine.scheduler.num_preemptions,
            "steps": stats.num_steps,
            "committed_tokens": stats.num_committed_tokens,
            "accept_length": stats.accept_length,
            "guards": dict(engine.guards),
            "loop_heartbeat_age": age,
            "error": self._error,
        }

    def shutdown(self) -> None:
        """Abort what is open, stop the loop and release the followers."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._take_mail():
                outputs = self.engine.step()
                with self._lock:
                    self._heartbeat = time.monotonic()
                    if outputs:
                        self._outputs.extend(outputs)
                        self._lock.notify_all()
            self._finish("the engine was shut down")
        except Exception as e:
            # Whatever broke, nobody may wait for a step that will not come. Followers may be in
            # the middle of one: they are not told, they end with this process.
            logger.exception("the engine loop died")
            self._finish(f"the engine died: {type(e).__name__}: {e}")
        else:
            with contextlib.suppress(Exception):  # a follower may have died since the last step
                self.engine.executor.shutdown()

    def _wake(self) -> None:
        if not self._busy():
            self._heartbeat = time.monotonic()  # its nap is over, no step is late yet
        self._lock.notify_all()

    def _busy(self) -> bool:
        return bool(self._submitted or self._aborted or self.engine.num_unfinished)

    def _take_mail(self) -> bool:
        """Wait for work, let submits and aborts in; False when it is time to close."""
        with self._lock:
            self._lock.wait_for(lambda: self._closing or self._busy())
            self._heartbeat = time.monotonic()
            while self._submitted:
                self.engine.enqueue(self._submitted[0])
                del self._submitted[0]
            for request_id in self._aborted:
                if (output := self.engine.abort(request_id)) is not None:
                    self._outputs.append(output)
                    self._lock.notify_all()
            self._aborted.clear()
            return not self._closing

    def _finish(self, message: str) -> None:
        """Every open request, let in or still in the mailbox, ends as aborted, with the reason."""
        with self._lock:
            self._error = message
            self._outputs.extend(self.engine.end_all("abort", message))
            self._outputs.extend(
                RequestOutput(
                    request_id=request.request_id,
                    finish_reason="abort",
                    error=message,
                    num_prompt_tokens=len(request.prompt_token_ids),
                )
                for request in self._submitted
            )
            self._submitted.clear()
            self._lock.notify_all()

    def _check_alive(self) -> None:
        if self._error is not None or self._closing:
            raise EngineDeadError(self._error or "the engine is shutting down")
