"""Load shedding, clients that leave, and engines that die: every request ends exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, MutableMapping
from typing import Any

import pytest

from spectrue.deploy.config import ServeSection
from spectrue.deploy.streaming import EventStreamResponse
from spectrue.workers.core import Request, SamplingParams
from spectrue.workers.errors import EngineDeadError

from .conftest import FakeEngine, Server, ServeWith
from .test_replica import events


async def until(condition: Callable[[], object], timeout: float = 5.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "the condition never held"
        await asyncio.sleep(0.005)


def body(stream: bool, **more: object) -> dict[str, object]:
    return {"model": "tiny", "prompt": "hi", "max_tokens": 60, "stream": stream, **more}


class RawClient:
    """Speaks ASGI itself, so that it can hang up at any moment."""

    def __init__(self, app: Any, fields: dict[str, object], slow: float = 0.0) -> None:
        self._slow = slow
        self.started = asyncio.Event()
        self.status: int | None = None
        self.chunks: list[bytes] = []
        self._gone = asyncio.Event()
        self._body: bytes | None = json.dumps(fields).encode()
        path = "/v1/completions"
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "scheme": "http",
            "server": ("test", 80),
            "client": ("test", 1),
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    def hang_up(self) -> None:
        self._gone.set()

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            sent, self._body = self._body, None
            return {"type": "http.request", "body": sent, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["body"]:
            await asyncio.sleep(self._slow)
            self.chunks.append(message["body"])
            self.started.set()


@pytest.mark.parametrize("stream", [False, True])
async def test_overload_is_a_429_before_any_header(
    serve_with: ServeWith, fake_engine: type[FakeEngine], stream: bool
) -> None:
    engine = fake_engine(max_requests=2)
    engine.running.clear()
    async with serve_with(engine) as server:
        first = asyncio.create_task(server.complete(n=2, stream=stream))
        await until(lambda: len(engine.requests) == 2)
        r = await server.complete(stream=stream)
        assert r.status_code == 429
        assert r.headers["retry-after"] == "1"
        assert r.headers["content-type"] == "application/json"
        assert r.json()["error"]["type"] == "rate_limit_error"
        assert r.json()["error"]["code"] == "engine_overloaded"
        engine.running.set()
        assert (await first).status_code == 200
        assert (await server.complete(stream=stream)).status_code == 200
        assert server.replica._client.num_open == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["hang_up", "cancel"])  # uvicorn does one, Ray Serve the other
@pytest.mark.parametrize("when", ["waiting", "running"])
async def test_a_client_that_leaves_frees_its_requests(
    serve_with: ServeWith, fake_engine: type[FakeEngine], stream: bool, how: str, when: str
) -> None:
    engine = fake_engine(per_step=1, interval=0.05)
    if when == "waiting":
        engine.running.clear()
    async with serve_with(engine) as server:
        client = RawClient(server.app, body(stream, n=2))
        await until(lambda: len(engine.requests) == 2)
        if when == "running" and stream:
            await client.started.wait()
        client.hang_up() if how == "hang_up" else client.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait_for(client.task, 1)
        ids = sorted(r.request_id for r in engine.requests)
        await until(lambda: sorted(engine.aborted) == ids)
        await until(lambda: engine.status()["running"] == 0)
        engine.running.set()
        await until(lambda: server.replica._client.num_open == 0)
        assert engine.finals == dict.fromkeys(ids, 1)
        assert b"".join(client.chunks).count(b"[DONE]") == 0


async def test_a_client_that_leaves_while_submitting(
    serve_with: ServeWith, fake_engine: type[FakeEngine]
) -> None:
    engine = fake_engine()
    engine.running.clear()
    async with serve_with(engine) as server:
        with engine._cond:  # submit() blocks
            client = RawClient(server.app, body(False))
            await until(lambda: server.replica._client.num_open == 1)
            client.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await client.task
        await until(lambda: server.replica._client.num_open == 0)
        assert engine.status()["running"] == 0
        assert len(engine.requests) == 1


async def test_a_stream_that_never_starts_frees_its_requests(server: Server) -> None:
    engine = server.engine
    engine.running.clear()
    request = Request(request_id="r", prompt_token_ids=(1,), params=SamplingParams())
    stream = await server.replica._client.submit([request])

    async def chunks() -> AsyncIterator[bytes]:
        yield b"x"

    async def receive() -> MutableMapping[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: MutableMapping[str, Any]) -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        await EventStreamResponse(chunks(), stream)({}, receive, send)
    await until(lambda: engine.aborted == ["r"])


async def test_finished_requests_are_not_aborted(server: Server) -> None:
    await server.complete(n=2)
    await server.complete(n=2, stream=True)
    assert server.engine.aborted == []


async def test_engine_death_mid_stream_is_one_error_event(
    serve_with: ServeWith, fake_engine: type[FakeEngine]
) -> None:
    engine = fake_engine(per_step=1, interval=0.02)
    async with serve_with(engine) as server:
        client = RawClient(server.app, body(True, n=2))
        unary = asyncio.create_task(server.complete(max_tokens=60))
        await client.started.wait()
        await until(lambda: len(engine.requests) == 3)
        engine.die("rank 1 died")
        await asyncio.wait_for(client.task, 5)
        chunks = events(b"".join(client.chunks).decode())
        assert client.status == 200
        assert ["error" in c for c in chunks] == [False] * (len(chunks) - 1) + [True]
        assert "rank 1 died" in chunks[-1]["error"]["message"]
        assert chunks[-1]["error"]["code"] == "engine_dead"
        r = await unary
        assert r.status_code == 503
        assert r.headers["retry-after"] == "5"
        assert r.json()["error"]["type"] == "server_error"
        for r in (await server.complete(), await server.complete(stream=True)):
            assert r.status_code == 503
        assert (await server.http.get("/health")).status_code == 503
        assert (await server.http.head("/health")).status_code == 503
        with pytest.raises(EngineDeadError, match="rank 1 died"):
            await server.replica.check_health()
        await until(lambda: server.exits == [1])
        await asyncio.sleep(0.1)
        assert server.exits == [1]


async def test_answers_leave_before_the_process_does(
    serve_with: ServeWith, fake_engine: type[FakeEngine]
) -> None:
    engine = fake_engine(per_step=1, interval=0.02)
    async with serve_with(engine) as server:
        client = RawClient(server.app, body(True), slow=0.2)
        await client.started.wait()
        engine.die("rank 0 died")
        await until(lambda: server.exits)
        assert client.task.done()
        assert client.chunks[-1] == b"data: [DONE]\n\n"


@pytest.mark.parametrize("stream", [False, True])
async def test_one_failed_request(
    serve_with: ServeWith, fake_engine: type[FakeEngine], stream: bool
) -> None:
    engine = fake_engine()
    engine.poison = "its logits were not numbers"
    async with serve_with(engine) as server:
        r = await server.complete(stream=stream)
        if stream:
            assert r.status_code == 200
            (error,) = events(r.text)
        else:
            assert r.status_code == 500
            error = r.json()
        assert "not numbers" in error["error"]["message"]
        assert error["error"]["code"] == "generation_failed"
        engine.poison = None
        assert (await server.complete()).status_code == 200
        assert server.exits == []


async def test_an_old_heartbeat_is_death(
    serve_with: ServeWith, fake_engine: type[FakeEngine]
) -> None:
    engine = fake_engine()
    async with serve_with(engine, serve=ServeSection(heartbeat_timeout=0.5)) as server:
        await server.replica.check_health()
        engine.running.clear()
        waiting = asyncio.create_task(server.complete())
        await until(lambda: engine.requests)
        engine.heartbeat_age = 0.6
        with pytest.raises(EngineDeadError, match=r"rank 0's step loop"):
            await server.replica.check_health()
        assert (await waiting).status_code == 503
        await until(lambda: server.exits)


async def test_an_engine_that_does_not_answer_is_dead(
    serve_with: ServeWith, fake_engine: type[FakeEngine]
) -> None:
    engine = fake_engine()
    async with serve_with(engine, serve=ServeSection(heartbeat_timeout=0.2)) as server:
        with engine._cond, pytest.raises(EngineDeadError, match="did not answer"):
            await server.replica.check_health()


async def test_shutdown_ends_open_requests(
    serve_with: ServeWith, fake_engine: type[FakeEngine]
) -> None:
    engine = fake_engine(per_step=1, interval=0.05)
    async with serve_with(engine) as server:
        client = RawClient(server.app, body(True))
        await client.started.wait()
        server.app.router  # noqa: B018
        await server.replica._client.stop()
        await asyncio.wait_for(client.task, 2)
        assert "shutting down" in events(b"".join(client.chunks).decode())[-1]["error"]["message"]
    assert server.exits == []
