"""Server-sent events, and answers that stop when their client is gone."""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from spectrue.deploy.engine_client import OutputStream
from spectrue.deploy.http_errors import to_api_error
from spectrue.deploy.responses import Answer, check_finished, merge
from spectrue.workers.core import RequestOutput

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


class ClientDisconnected(Exception):
    """Nobody is left to answer."""


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes. Needs the body to be read."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnected
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def collect(stream: OutputStream) -> list[RequestOutput]:
    """Everything of every request, merged; in the order of the choices."""
    parts: dict[int, list[RequestOutput]] = defaultdict(list)
    try:
        while outputs := await stream.next():
            for output in outputs:
                check_finished(output)
                parts[stream.index[output.request_id]].append(output)
    finally:
        stream.close()
    return [merge(parts[i]) for i in range(len(stream.index))]


async def events(
    stream: OutputStream, answer: Answer, *, include_usage: bool, interval_ms: float
) -> AsyncIterator[bytes]:
    """SSE bytes. An error in the middle becomes an event; the stream always ends with [DONE]."""
    last: dict[int, RequestOutput] = {}
    extra: dict[str, Any] = {"usage": None} if include_usage else {}
    try:
        while outputs := await stream.next():
            sent = time.monotonic()
            by_choice: dict[int, list[RequestOutput]] = defaultdict(list)
            for output in outputs:
                by_choice[stream.index[output.request_id]].append(output)
            data = []
            for index, parts in by_choice.items():
                last[index] = output = merge(parts)
                check_finished(output)
                if output.text or output.logprobs or output.finish_reason:
                    data.append(
                        _event({**answer.chunk([answer.form.delta(index, output)]), **extra})
                    )
            if data:
                yield b"".join(data)
            if interval_ms and stream.open:  # meanwhile more tokens gather
                await asyncio.sleep(max(0.0, sent + interval_ms / 1000 - time.monotonic()))
        if include_usage:
            usage = answer.usage([last[i] for i in range(len(stream.index))])
            yield _event({**answer.chunk([]), "usage": usage})
    except Exception as e:
        yield _event(to_api_error(e).body())
    finally:
        stream.close()
    yield DONE


def _event(data: dict[str, Any]) -> bytes:
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


class EventStreamResponse(Response):
    """Sends what the iterator gives. Closes it, at once, when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, body: AsyncIterator[bytes], stream: OutputStream) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._iterator = body
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send(send))
        except ClientDisconnected:
            pass
        finally:
            self._stream.close()  # also when the generator was never entered

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async with aclosing(self._iterator) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
