"""The ingress on a fake engine: no Ray, no torch, no sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any, Protocol

import httpx
import pytest

from spectrue.deploy.config import ServerConfig, ServeSection
from spectrue.deploy.local_transport import LocalTransport
from spectrue.deploy.replica import LLMReplica
from spectrue.workers.config import EngineConfig
from spectrue.workers.core import Request, RequestOutput, SpecDecodeStats, TokenLogprobs
from spectrue.workers.errors import EngineDeadError, EngineOverloadedError, InvalidRequestError

CONTEXT = 64


class FakeTokenizer:
    """A character is a token."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) % 256 for c in text]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(t) for t in token_ids)

    def apply_chat_template(self, messages: Sequence[Any]) -> list[int]:
        if messages[0]["role"] == "assistant":
            raise ValueError("Conversation roles must alternate")
        return self.encode("".join(f"<{m['role'][0]}>{m['content']}" for m in messages))


class _Running:
    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.text = ""


class FakeEngine:
    """AsyncEngine's interface. Says "abcdef..." from a letter that the choice gives, `per_step`
    tokens at a time; steps run only while `running` is set."""

    def __init__(self, max_requests: int = 8, per_step: int = 2, interval: float = 0.001) -> None:
        self.requests: list[Request] = []  # every one accepted
        self.finals: dict[str, int] = {}
        self.aborted: list[str] = []
        self.max_requests, self.per_step, self.interval = max_requests, per_step, interval
        self.running = threading.Event()
        self.running.set()
        self.heartbeat_age = 0.0
        self.num_speculative_tokens = 3
        self.poison: str | None = None  # fail requests with this error
        self.invalid: InvalidRequestError | None = None
        self._live: dict[str, _Running] = {}
        self._out: list[RequestOutput] = []
        self._dead: str | None = None
        self._cond = threading.Condition()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> None:
        with self._cond:
            if self._dead:
                raise EngineDeadError(self._dead)
            if self.invalid:
                raise self.invalid
            if len(self._live) + len(requests) > self.max_requests:
                raise EngineOverloadedError("the queue is full")
            for r in requests:
                self.requests.append(r)
                self._live[r.request_id] = _Running(r)

    def abort(self, request_ids: Sequence[str]) -> None:
        with self._cond:
            for i in request_ids:
                self.aborted.append(i)
                if i in self._live:
                    self._put(self._live.pop(i), (), "", "abort")

    def poll(self, timeout: float) -> list[RequestOutput]:
        with self._cond:
            self._cond.wait_for(lambda: self._out or self._dead, timeout)
            if not self._out and self._dead:
                raise EngineDeadError(self._dead)
            out, self._out = self._out, []
            return out

    def status(self) -> dict[str, object]:
        with self._cond:
            if self._dead:
                raise EngineDeadError(self._dead)
            return {
                "max_model_len": CONTEXT,
                "vocab_size": 256,
                "num_speculative_tokens": self.num_speculative_tokens,
                "verify_method": "match",
                "verify_reason": "the drafter is ngram",
                "running": len(self._live),
                "waiting": 0,
                "kv_blocks_used": len(self._live),
                "loop_heartbeat_age": self.heartbeat_age,
                "error": None,
            }

    def shutdown(self) -> None:
        self.die("shut down")

    def die(self, error: str) -> None:
        with self._cond:
            self._dead = error
            self._cond.notify_all()

    def _loop(self) -> None:
        while not self._dead:
            self.running.wait()
            with self._cond:
                for run in list(self._live.values()):
                    self._step(run)
            time.sleep(self.interval)

    def _step(self, run: _Running) -> None:
        params = run.request.params
        if self.poison:
            del self._live[run.request.request_id]
            self._put(run, (), "", "error", error=self.poison)
            return
        tokens: list[int] = []
        text, reason, stop_reason = "", None, None
        while len(tokens) < self.per_step and reason is None:
            token = ord("a") + (run.request.choice + len(run.tokens)) % 26
            run.tokens.append(token)
            tokens.append(token)
            run.text += chr(token)
            text += chr(token)
            for stop in params.stop:
                if run.text.endswith(stop):
                    text, reason, stop_reason = text[: len(text) - len(stop)], "stop", stop
            if reason is None and len(run.tokens) == params.max_tokens:
                reason = "length"
        if reason:
            del self._live[run.request.request_id]
        self._put(run, tuple(tokens), text, reason, stop_reason=stop_reason)

    def _put(
        self, run: _Running, tokens: tuple[int, ...], text: str, reason: Any, **more: Any
    ) -> None:
        n, request = run.request.params.logprobs, run.request
        logprobs = (
            ()
            if n is None
            else tuple(
                TokenLogprobs(
                    token_id=t,
                    logprob=-0.5,
                    top=((t, -0.5), (t + 1, float("-inf")))[:n],
                )
                for t in tokens
            )
        )
        if reason:
            self.finals[request.request_id] = self.finals.get(request.request_id, 0) + 1
        self._out.append(
            RequestOutput(
                request_id=request.request_id,
                token_ids=tokens,
                text=text,
                logprobs=logprobs,
                finish_reason=reason,
                num_prompt_tokens=len(request.prompt_token_ids),
                num_output_tokens=len(run.tokens),
                num_cached_tokens=3,
                spec_decode=SpecDecodeStats(
                    num_verify_steps=4,
                    num_drafts=4,
                    num_draft_tokens=12,
                    num_accepted_tokens=6,
                    verify_path="sampling",
                    verify_method="match",
                ),
                **more,
            )
        )
        self._cond.notify_all()


class Server:
    """The app, its fake engine, and a client on it."""

    def __init__(self, engine: FakeEngine, replica: LLMReplica, app: Any, exits: list[int]) -> None:
        self.engine, self.replica, self.app, self.exits = engine, replica, app, exits
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20)

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json={"model": "tiny", **body})

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.post("/v1/completions", **{"prompt": "hi", "max_tokens": 5, **body})

    async def chat(self, **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "hi"}]
        return await self.post(
            "/v1/chat/completions", **{"messages": messages, "max_tokens": 5, **body}
        )


class ServeWith(Protocol):
    """`async with serve_with(FakeEngine(...), serve=ServeSection(...), **engine_settings)`."""

    def __call__(
        self,
        engine: FakeEngine | None = None,
        serve: ServeSection | None = None,
        **changes: Any,
    ) -> AbstractAsyncContextManager[Server]: ...


@asynccontextmanager
async def serving(
    engine: FakeEngine | None = None, serve: ServeSection | None = None, **changes: Any
) -> AsyncIterator[Server]:
    engine = engine or FakeEngine()
    config = EngineConfig(model="/models/tiny", max_num_seqs=4, max_queue_len=8)
    exits: list[int] = []
    replica = LLMReplica(
        ServerConfig(engine=replace(config, **changes), serve=serve or ServeSection()),
        LocalTransport(engine),
        FakeTokenizer(),
        exit_process=lambda: exits.append(1),
    )
    app = replica.__serve_build_asgi_app__()
    async with app.router.lifespan_context(app):
        server = Server(engine, replica, app, exits)
        async with server.http:
            yield server
    engine.running.set()
    engine.die("test over")


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving() as server:
        yield server


@pytest.fixture
def serve_with() -> ServeWith:
    return serving


@pytest.fixture
def fake_engine() -> type[FakeEngine]:
    return FakeEngine
