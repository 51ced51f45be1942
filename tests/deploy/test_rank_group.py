"""Who is blamed when a TP group breaks: Ray's reports stubbed as futures, no actor runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from spectrue.workers import ray_actor
from spectrue.workers.core import RequestOutput
from spectrue.workers.errors import EngineDeadError
from spectrue.workers.ray_actor import RankDiedError, RankGroup

BROKEN = "the engine died: RuntimeError: connection closed by peer"


class Rank0:
    poll: Any = None


class Group:
    """Ranks 0 to 2; `one` and `two` are the followers' endless calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, poll: list[RequestOutput] | Exception):
        loop = asyncio.get_running_loop()
        self.one: asyncio.Future[None] = loop.create_future()
        self.two: asyncio.Future[None] = loop.create_future()
        self.group = RankGroup([Rank0()], {})
        self.group._calls = {self.one, self.two}

        async def answer() -> list[RequestOutput]:
            if isinstance(poll, Exception):
                raise poll
            return poll

        def call(method: object, group: str, timeout: float) -> Awaitable[list[RequestOutput]]:
            return answer()

        monkeypatch.setattr(ray_actor, "_call", call)
        monkeypatch.setattr(ray_actor, "BLAME_TIMEOUT", 0.3)

    def after(self, seconds: float, call: asyncio.Future[None], error: Exception | None) -> None:
        end = call.set_result if error is None else call.set_exception
        asyncio.get_running_loop().call_later(seconds, end, error)  # type: ignore[arg-type]


def aborted(error: str | None) -> RequestOutput:
    return RequestOutput(request_id="r", finish_reason="abort", error=error)


async def test_a_death_that_is_reported_late_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other follower fails first, in the collective that the death broke."""
    done = RequestOutput(request_id="q", finish_reason="length")
    ranks = Group(monkeypatch, [done, aborted(BROKEN), aborted(None)])
    ranks.after(0.02, ranks.two, EngineDeadError("rank 2 failed: RuntimeError: closed"))
    ranks.after(0.1, ranks.one, RankDiedError("rank 1 died: SIGKILL"))
    watch = asyncio.create_task(ranks.group.watch())
    outputs = await ranks.group.poll(1)
    assert outputs == [done, aborted("rank 1 died: SIGKILL"), aborted(None)]
    with pytest.raises(RankDiedError, match="rank 1 died"):
        await watch


async def test_rank_0_that_stopped_by_itself_keeps_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Group(monkeypatch, EngineDeadError("the engine died: AssertionError"))
    ranks.after(0.02, ranks.one, None)  # it lets its followers go
    ranks.after(0.04, ranks.two, None)
    watch = asyncio.create_task(ranks.group.watch())
    with pytest.raises(EngineDeadError, match="AssertionError"):
        await ranks.group.poll(1)
    await asyncio.sleep(0.05)
    assert not watch.done()
    watch.cancel()


async def test_nobody_waits_long_for_a_report_that_does_not_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Group(monkeypatch, [aborted(BROKEN)])
    assert await asyncio.wait_for(ranks.group.poll(1), 2) == [aborted(BROKEN)]
    ranks.after(0, ranks.one, EngineDeadError("rank 1 failed: ValueError: x"))
    with pytest.raises(EngineDeadError, match="rank 1 failed"):
        await asyncio.wait_for(ranks.group.watch(), 2)
