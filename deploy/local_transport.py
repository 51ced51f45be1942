"""An engine in this process as an EngineTransport: each blocking call in a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from spectrue.workers.core import Request, RequestOutput

T = TypeVar("T")


class InProcessEngine(Protocol):
    """`workers.async_engine.AsyncEngine`, or a test's fake."""

    def submit(self, requests: Sequence[Request]) -> None: ...
    def abort(self, request_ids: Sequence[str]) -> None: ...
    def poll(self, timeout: float) -> list[RequestOutput]: ...
    def status(self) -> dict[str, object]: ...
    def shutdown(self) -> None: ...


class LocalTransport:
    def __init__(self, engine: InProcessEngine) -> None:
        self._engine = engine
        self._poll = ThreadPoolExecutor(1, "spectrue-poll")
        self._call = ThreadPoolExecutor(1, "spectrue-call")  # one thread keeps the calls' order
        self._control = ThreadPoolExecutor(1, "spectrue-control")

    async def submit(self, requests: Sequence[Request]) -> None:
        await self._run(self._call, self._engine.submit, requests)

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._run(self._call, self._engine.abort, request_ids)

    async def poll(self, timeout: float) -> list[RequestOutput]:
        return await self._run(self._poll, self._engine.poll, timeout)

    async def status(self) -> dict[str, object]:
        return await self._run(self._control, self._engine.status)

    async def watch(self) -> None:
        await asyncio.Event().wait()  # one process: poll() tells

    async def shutdown(self) -> None:
        await self._run(self._control, self._engine.shutdown)
        self.kill()

    def kill(self) -> None:
        for pool in (self._poll, self._call, self._control):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _run(self, pool: ThreadPoolExecutor, call: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, call, *args)
