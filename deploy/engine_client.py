"""The ingress' side of the engine: submit, abort, one long poll that feeds every open stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from spectrue.workers.core import Request, RequestOutput
from spectrue.workers.errors import EngineDeadError

logger = logging.getLogger(__name__)

POLL_TIMEOUT = 10.0  # seconds one poll may wait


class EngineTransport(Protocol):
    """An engine that is somewhere else. Raises what AsyncEngine raises, and EngineDeadError."""

    async def submit(self, requests: Sequence[Request]) -> None: ...

    async def abort(self, request_ids: Sequence[str]) -> None: ...

    async def poll(self, timeout: float) -> list[RequestOutput]: ...

    async def status(self) -> dict[str, object]: ...

    async def watch(self) -> None:
        """Raise EngineDeadError, naming the rank, as soon as one is gone; else wait forever."""

    async def shutdown(self) -> None: ...

    def kill(self) -> None:
        """End all ranks at once, whatever they are doing."""


class EngineClient:
    """Fans the engine's outputs out. After `start()`, on one event loop.

    When the engine dies every open stream raises EngineDeadError once, later calls raise it at
    once, and `on_death` is called once.
    """

    def __init__(
        self,
        transport: EngineTransport,
        on_death: Callable[[EngineDeadError], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self._transport = transport
        self._on_death = on_death
        self._streams: dict[str, OutputStream] = {}  # by the id of an unfinished request
        self._tasks: set[asyncio.Task[None]] = set()
        self.error: EngineDeadError | None = None

    @property
    def num_open(self) -> int:
        """Requests whose final output has not come."""
        return len(self._streams)

    def start(self) -> None:
        self._spawn(self._poll_loop())
        self._spawn(self._watch())

    async def submit(self, requests: Sequence[Request]) -> OutputStream:
        """All or none. Cancelled midway, what was accepted is aborted."""
        if self.error is not None:
            raise EngineDeadError(str(self.error))
        stream = OutputStream(self, [r.request_id for r in requests])
        for request_id in stream.open:
            self._streams[request_id] = stream  # before: an output may overtake the reply
        call = asyncio.ensure_future(self._transport.submit(requests))
        try:
            await asyncio.shield(call)
        except asyncio.CancelledError:
            self._spawn(self._withdraw(call, stream))
            raise
        except EngineDeadError as e:
            self.fail(e)
            stream.forget()
            raise
        except BaseException:
            stream.forget()
            raise
        return stream

    async def _withdraw(self, call: asyncio.Future[None], stream: OutputStream) -> None:
        """The client left while its requests were being submitted."""
        try:
            await call
        except Exception:
            stream.forget()
        else:
            stream.close()

    def abort(self, request_ids: Sequence[str]) -> None:
        """Returns at once; the engine frees the requests' blocks before its next step."""
        if self.error is None and request_ids:
            self._spawn(self._abort(list(request_ids)))

    async def status(self) -> dict[str, object]:
        if self.error is not None:
            raise EngineDeadError(str(self.error))
        try:
            return await self._transport.status()
        except EngineDeadError as e:
            self.fail(e)
            raise

    async def check(self, heartbeat_timeout: float) -> dict[str, object]:
        """The status of an engine that is alive; else EngineDeadError, and everything is failed."""
        try:
            status = await asyncio.wait_for(self.status(), heartbeat_timeout)
        except asyncio.TimeoutError:  # Python 3.10: not yet the builtin
            error = EngineDeadError(f"rank 0 did not answer for {heartbeat_timeout:g} s")
        else:
            age = status.get("loop_heartbeat_age")
            if status.get("error"):
                error = EngineDeadError(str(status["error"]))
            elif isinstance(age, int | float) and age > heartbeat_timeout:
                error = EngineDeadError(f"rank 0's step loop has been silent for {age:.0f} s")
            else:
                return status
        self.fail(error)
        raise error

    def fail(self, error: EngineDeadError) -> None:
        """The engine is gone. Idempotent."""
        if self.error is None:
            logger.error("engine died, failing %d requests: %s", len(self._streams), error)
            self._end(error)
            if self._on_death is not None:
                self._spawn(self._on_death(error))

    def _end(self, error: EngineDeadError) -> None:
        self.error = error
        for stream in set(self._streams.values()):
            stream.fail(error)
        self._streams.clear()

    async def stop(self) -> None:
        """Shut the engine down; what is still open ends with an error."""
        if self.error is None:
            self._end(EngineDeadError("the server is shutting down"))
            await self._transport.shutdown()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _abort(self, request_ids: list[str]) -> None:
        try:
            await self._transport.abort(request_ids)
        except EngineDeadError as e:
            self.fail(e)

    async def _poll_loop(self) -> None:
        try:
            while self.error is None:
                for output in await self._transport.poll(POLL_TIMEOUT):
                    stream = self._streams.get(output.request_id)
                    if output.finish_reason is not None:
                        self._streams.pop(output.request_id, None)
                    if stream is not None:
                        stream.put(output)
        except EngineDeadError as e:
            self.fail(e)
        except Exception as e:  # without this loop nobody gets an answer
            logger.exception("the poll loop failed")
            self.fail(EngineDeadError(f"the poll of rank 0 failed: {e}"))

    async def _watch(self) -> None:
        try:
            await self._transport.watch()
        except EngineDeadError as e:
            self.fail(e)


class OutputStream:
    """What comes of one HTTP request's requests. One consumer; `close()` it whatever happens."""

    def __init__(self, client: EngineClient, request_ids: Sequence[str]) -> None:
        self.index = {request_id: i for i, request_id in enumerate(request_ids)}
        self.open = set(request_ids)  # their final output was not handed out yet
        self._client = client
        self._pending: list[RequestOutput] = []
        self._ready = asyncio.Event()
        self._error: EngineDeadError | None = None
        self._closed = False

    async def next(self) -> list[RequestOutput]:
        """All that is there, waiting for something to be. [] when every request has ended.

        Raises EngineDeadError after everything that came before the engine's death.
        """
        if not self._pending:
            if not self.open:
                return []
            if self._error is None:
                self._ready.clear()
                await self._ready.wait()
            if not self._pending:
                assert self._error is not None
                self.open.clear()
                raise self._error
        outputs, self._pending = self._pending, []
        self.open.difference_update(o.request_id for o in outputs if o.finish_reason is not None)
        return outputs

    def put(self, output: RequestOutput) -> None:
        if not self._closed:
            self._pending.append(output)
            self._ready.set()

    def fail(self, error: EngineDeadError) -> None:
        self._error = error
        self._ready.set()

    def forget(self) -> None:
        """Nothing was accepted: no output will come."""
        self._closed = True
        for request_id in self.open:
            self._client._streams.pop(request_id, None)
        self.open.clear()

    def close(self) -> None:
        """Abort what has not ended. Its final output is taken by the poll loop and dropped."""
        if not self._closed:
            self._closed = True
            done = {o.request_id for o in self._pending if o.finish_reason is not None}
            self._client.abort(sorted(self.open - done))
            self._pending.clear()
