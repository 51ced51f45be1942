"""LLMReplica: one TP group behind the OpenAI endpoints. Undecorated; `app.py` gives it to Serve.

Holds no device context: models and devices are the ranks', which are other processes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any
from uuid import uuid4

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from spectrue.deploy import http_errors
from spectrue.deploy.body import read_json
from spectrue.deploy.config import ServerConfig
from spectrue.deploy.engine_client import EngineClient, EngineTransport
from spectrue.deploy.http_errors import ApiError, model_not_found, to_api_error
from spectrue.deploy.protocol import ChatCompletionRequest, CompletionRequest, TokenizeRequest
from spectrue.deploy.requests import ServedModel, Tokenizer, build_requests, chat_prompt
from spectrue.deploy.responses import Answer, AnswerFormat, ChatFormat, CompletionFormat
from spectrue.deploy.streaming import (
    ClientDisconnected,
    EventStreamResponse,
    collect,
    events,
    unless_disconnected,
)
from spectrue.workers.errors import EngineDeadError, InvalidRequestError

logger = logging.getLogger(__name__)

FLUSH_TIMEOUT = 2.0  # seconds that the last answers have to leave a process that must die


def _exit_process() -> None:
    os._exit(1)  # at once: Serve then starts a new replica


class LLMReplica:
    def __init__(
        self,
        config: ServerConfig,
        transport: EngineTransport,
        tokenizer: Tokenizer,
        exit_process: Callable[[], None] = _exit_process,
    ) -> None:
        self._config = config
        self._transport = transport
        self._tokenizer = tokenizer
        self._exit_process = exit_process
        self._client = EngineClient(transport, self._on_death)
        self._model: ServedModel | None = None
        self._created = int(time.time())
        self._num_answering = 0

    def __serve_build_asgi_app__(self) -> FastAPI:
        app = FastAPI(lifespan=self._lifespan, docs_url=None, redoc_url=None, openapi_url=None)
        http_errors.install(app)
        app.add_api_route("/v1/completions", self.completions, methods=["POST"])
        app.add_api_route("/v1/chat/completions", self.chat_completions, methods=["POST"])
        app.add_api_route("/v1/models", self.models, methods=["GET"])
        app.add_api_route("/v1/models/{model:path}", self.model, methods=["GET"])
        app.add_api_route("/health", self.health, methods=["GET", "HEAD"])
        app.add_api_route("/tokenize", self.tokenize, methods=["POST"])
        return app

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        status = await self._client.status()
        engine = self._config.engine
        self._model = ServedModel(
            name=engine.name,
            max_model_len=_int(status, "max_model_len"),
            vocab_size=_int(status, "vocab_size"),
            max_draft_tokens=_int(status, "num_speculative_tokens"),
            max_requests=engine.max_queue_len,  # they all enter the queue first
        )
        self._client.start()
        yield
        await self._client.stop()

    # -- for Ray Serve -------------------------------------------------------------------------

    async def check_health(self) -> None:
        await self._client.check(self._config.serve.heartbeat_timeout)

    async def engine_status(self) -> dict[str, object]:
        """Through a deployment handle: what `spectrue serve` prints."""
        return await self._client.status()

    async def _on_death(self, error: EngineDeadError) -> None:
        """Running requests were failed by the client; let the answers out, then go."""
        logger.critical("replica exits: %s", error)
        self._transport.kill()
        end = time.monotonic() + FLUSH_TIMEOUT
        while self._num_answering and time.monotonic() < end:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.1)  # Serve's own buffers
        self._exit_process()

    # -- endpoints -----------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        body = CompletionRequest.model_validate(await read_json(request))
        form = CompletionFormat(self._tokenizer, body.logprobs is not None)
        return await self._generate(request, body, form, f"cmpl-{uuid4().hex}")

    async def chat_completions(self, request: Request) -> Response:
        body = ChatCompletionRequest.model_validate(await read_json(request))
        form = ChatFormat(self._tokenizer, bool(body.logprobs))
        return await self._generate(request, body, form, f"chatcmpl-{uuid4().hex}")

    async def _generate(
        self,
        request: Request,
        body: CompletionRequest | ChatCompletionRequest,
        form: AnswerFormat,
        request_id: str,
    ) -> Response:
        model = self._served(body.model)
        requests = await asyncio.to_thread(build_requests, body, request_id, self._tokenizer, model)
        answer = Answer(request_id, model.name, requests, form)
        # Before any response exists: a full queue is a 429, never a 200 that is cut.
        stream = await self._client.submit(requests)
        if body.stream:
            chunks = events(
                stream,
                answer,
                include_usage=bool(body.stream_options and body.stream_options.include_usage),
                interval_ms=self._config.serve.stream_interval_ms,
            )
            return EventStreamResponse(self._answering(chunks), stream)
        try:
            async with self._counted():
                outputs = await unless_disconnected(request.receive, collect(stream))
                return JSONResponse(answer.unary(outputs))
        except ClientDisconnected:
            return Response(status_code=499)
        finally:
            stream.close()

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._model_card()]}

    async def model(self, model: str) -> dict[str, Any]:
        self._served(model)
        return self._model_card()

    async def tokenize(self, request: Request) -> dict[str, Any]:
        body = TokenizeRequest.model_validate(await read_json(request))
        model = self._served(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("exactly one of prompt and messages is needed", "prompt")
        if body.messages is not None:
            tokens = await asyncio.to_thread(chat_prompt, body.messages, self._tokenizer)
        else:
            tokens = tuple(await asyncio.to_thread(self._tokenizer.encode, body.prompt or ""))
        return {
            "tokens": list(tokens),
            "count": len(tokens),
            "max_model_len": model.max_model_len,
        }

    async def health(self) -> Response:
        """Is the engine alive, and what does it do? 503 when it is not."""
        try:
            status = await self._client.check(self._config.serve.heartbeat_timeout)
        except EngineDeadError as e:
            return to_api_error(e).response()
        return JSONResponse({"status": "ok", "model": self._config.engine.name, **status})

    def _served(self, name: str | None) -> ServedModel:
        if self._model is None:
            raise ApiError(503, "The model is still loading.", headers={"Retry-After": "1"})
        if name is not None and name != self._model.name:
            raise model_not_found(name, self._model.name)
        return self._model

    def _model_card(self) -> dict[str, Any]:
        model = self._served(None)
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "spectrue",
            "max_model_len": model.max_model_len,
        }

    @asynccontextmanager
    async def _counted(self) -> AsyncIterator[None]:
        self._num_answering += 1
        try:
            yield
        finally:
            self._num_answering -= 1

    async def _answering(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async with self._counted(), aclosing(chunks):  # type: ignore[type-var]
            async for chunk in chunks:
                yield chunk


def _int(status: dict[str, object], key: str) -> int:
    value = status[key]
    assert isinstance(value, int), (key, value)
    return value
