"""A real Ray Serve, the real engine and a tiny model on CPU, through HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion

from spectrue.deploy.config import ServerConfig, ServeSection
from spectrue.workers.config import EngineConfig

MODEL = "tiny"

# Not openai.AsyncOpenAI: the tests pass dicts of fields, and what its types forbid.
Client = Any


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def engine_config(model: Path) -> EngineConfig:
    return EngineConfig(
        model=str(model),
        served_model_name=MODEL,
        dtype="float32",
        kv_cache_bytes=2**24,
        tp_size=2,
    )


@pytest.fixture(scope="module")
def url(tiny_llama: Path) -> Iterator[str]:
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray import serve

    from spectrue.deploy.app import build_app

    port = free_port()
    engine = engine_config(tiny_llama)
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(build_app(ServerConfig(engine=engine, serve=ServeSection(port=port))))
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.fixture
async def client(url: str) -> AsyncIterator[Client]:
    http: Any = httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=60)
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http
    ) as client:
        yield client


def status(url: str) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(f"{url}/health", timeout=30).raise_for_status().json()
    return answer


async def until_idle(url: str) -> dict[str, Any]:
    end = time.monotonic() + 20
    while True:
        now = await asyncio.to_thread(status, url)
        if not (now["running"] or now["waiting"] or now["kv_blocks_used"]):
            return now
        assert time.monotonic() < end, now
        await asyncio.sleep(0.1)


EXACT = {"ignore_eos": True}


async def test_openai_client_unary(client: Client) -> None:
    chat = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=9,
        logprobs=True,
        top_logprobs=3,
        n=2,
        seed=5,
        extra_body=EXACT,
    )
    assert [c.index for c in chat.choices] == [0, 1]
    assert chat.choices[0].message.content != chat.choices[1].message.content
    assert chat.usage.completion_tokens == 18
    for choice in chat.choices:
        assert choice.finish_reason == "length"
        assert len(choice.logprobs.content) == 9
        assert all(len(t.top_logprobs) == 3 and t.logprob <= 0 for t in choice.logprobs.content)
    text = await client.completions.create(
        model=MODEL,
        prompt=["abab" * 5, "xy"],
        max_tokens=6,
        temperature=0,
        logprobs=2,
        extra_body=EXACT,
    )
    assert text.usage.completion_tokens == 12
    assert [len(c.logprobs.tokens) for c in text.choices] == [6, 6]
    spec = text.usage.spec_decode
    assert spec["verify_path"] == "greedy"
    assert spec["accept_length"] >= 1


async def test_openai_client_stream_equals_unary(client: Client) -> None:
    """Seeded, so verified by match: the text depends on nothing else. bug-cases 22, 24."""
    for create, prompt in (
        (client.completions.create, {"prompt": "abcabcabc"}),
        (client.chat.completions.create, {"messages": [{"role": "user", "content": "abc"}]}),
    ):
        fields = {"model": MODEL, "max_tokens": 20, "seed": 3, **prompt, "extra_body": EXACT}
        unary = await create(**fields)
        stream = await create(**fields, stream=True, stream_options={"include_usage": True})
        chunks = [c async for c in stream]
        assert chunks[-1].usage.completion_tokens == unary.usage.completion_tokens == 20
        if "prompt" in prompt:
            text = "".join(c.choices[0].text for c in chunks[:-1])
            assert text == unary.choices[0].text
        else:
            text = "".join(c.choices[0].delta.content for c in chunks[:-1])
            assert text == unary.choices[0].message.content
        assert chunks[-2].choices[0].finish_reason == "length"
        other = [await create(**{**fields, "seed": s}) for s in range(4)]
        assert len({o.choices[0].model_dump_json() for o in other}) > 1


async def test_logprobs_mode(client: Client) -> None:
    """Under top_k = 1 the law that is drawn from has one token, the model's own has many."""
    for mode in ("raw", "processed"):
        extra = {**EXACT, "top_k": 1, "logprobs_mode": mode}
        fields = {"model": MODEL, "max_tokens": 4, "extra_body": extra}
        text = await client.completions.create(prompt="ab", logprobs=2, **fields)
        chat = await client.chat.completions.create(
            messages=[{"role": "user", "content": "ab"}], logprobs=True, top_logprobs=2, **fields
        )
        for logprobs, second in (
            (
                text.choices[0].logprobs.token_logprobs,
                [min(top.values()) for top in text.choices[0].logprobs.top_logprobs],
            ),
            (
                [t.logprob for t in chat.choices[0].logprobs.content],
                [t.top_logprobs[1].logprob for t in chat.choices[0].logprobs.content],
            ),
        ):
            assert len(logprobs) == len(second) == 4
            if mode == "processed":
                assert logprobs == [0.0] * 4
                assert second == [-9999.0] * 4  # JSON has no infinity
            else:
                assert all(-20 < b <= a < -1e-3 for a, b in zip(logprobs, second, strict=True))


async def test_errors_through_the_client(client: Client) -> None:
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="gpt-4", prompt="x")
    with pytest.raises(openai.BadRequestError) as e:
        await client.completions.create(model=MODEL, prompt="x", top_p=0)
    assert e.value.param == "top_p"
    with pytest.raises(openai.BadRequestError) as e:
        await client.completions.create(model=MODEL, prompt="x" * 2000)
    assert e.value.code == "context_length_exceeded"
    with pytest.raises(openai.APIStatusError) as too_large:
        await client.completions.create(model=MODEL, prompt="x" * 2**20)
    assert too_large.value.status_code == 413
    assert [m.id async for m in await client.models.list()] == [MODEL]


async def test_64_streams_have_exact_token_counts(client: Client, url: str) -> None:
    async def one(i: int) -> tuple[int, int]:
        stream = await client.completions.create(
            model=MODEL,
            prompt=f"{i} ababab",
            max_tokens=10 + i % 23,
            stream=True,
            stream_options={"include_usage": True},
            logprobs=0,
            extra_body=EXACT,
        )
        tokens, usage = 0, None
        chunk: Completion
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                assert choice.logprobs is not None
                tokens += len(choice.logprobs.tokens or ())
        assert usage is not None
        return tokens, usage.completion_tokens

    counts = await asyncio.gather(*map(one, range(64)))
    assert counts == [(10 + i % 23,) * 2 for i in range(64)]
    await until_idle(url)


async def test_200_requests_of_which_half_disconnect(client: Client, url: str) -> None:
    finished = left = 0

    async def one(i: int) -> None:
        nonlocal finished, left
        fields: dict[str, Any] = {"model": MODEL, "prompt": f"{i} abab", "extra_body": EXACT}
        leaves, streams = i % 2 == 0, i % 4 < 2
        fields["max_tokens"] = 400 if leaves else 12
        if not leaves:
            if streams:
                chunks = [c async for c in await client.completions.create(**fields, stream=True)]
                finished += chunks[-1].choices[0].finish_reason == "length"
            else:
                usage = (await client.completions.create(**fields)).usage
                finished += usage.completion_tokens == 12
        elif streams:
            async with await client.completions.create(**fields, stream=True) as stream:
                async for _ in stream:
                    break
            left += 1
        else:
            try:
                await asyncio.wait_for(client.completions.create(**fields), 0.5 + i / 400)
            except asyncio.TimeoutError:
                left += 1

    before = (await until_idle(url))["committed_tokens"]
    await asyncio.gather(*map(one, range(200)))
    after = await until_idle(url)
    assert (finished, left) == (100, 100)
    assert after["running"] == after["waiting"] == after["kv_blocks_used"] == 0
    # Those that left were stopped, not run to their end.
    assert after["committed_tokens"] - before < 100 * 12 + 100 * 200


async def until_replaced(url: str, pid: int) -> None:
    """Until another rank 0 than `pid` answers."""
    end = time.monotonic() + 120  # three processes start, each with torch
    while True:
        try:
            if (await asyncio.to_thread(status, url))["rank0_pid"] != pid:
                return
        except httpx.HTTPError:
            pass
        assert time.monotonic() < end, "no new replica"
        await asyncio.sleep(0.25)


def rank_pids() -> set[int]:
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "cmdline").read_bytes().startswith(b"ray::Rank"):
                    found.add(int(entry.name))
            except OSError:
                continue
    return found


async def kill_while_streaming(url: str, pid: int, rank: int) -> None:
    """Rank 0 dies, or waits in a collective, or fails in it: the client hears which rank it was."""
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 450, "stream": True, **EXACT}
    started = 0

    async def one(http: httpx.AsyncClient) -> list[Any]:
        nonlocal started
        events = []
        async with http.stream("POST", f"{url}/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line:
                    events.append(line.removeprefix("data: "))
                    started += len(events) == 1
        assert events.pop() == "[DONE]"
        return [json.loads(e) for e in events]

    async with httpx.AsyncClient(timeout=30) as http:
        calls = [asyncio.create_task(one(http)) for _ in range(3)]
        while started < 3:
            await asyncio.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        for events in await asyncio.gather(*calls):
            assert ["error" in e for e in events] == [False] * (len(events) - 1) + [True]
            assert f"rank {rank} died" in events[-1]["error"]["message"]
            assert events[-1]["error"]["code"] == "engine_dead"


async def test_a_killed_rank_fails_its_requests_and_is_replaced(client: Client, url: str) -> None:
    """The last of this file, since the ranks' second death is left to Serve."""
    before = rank_pids()
    assert len(before) == 2
    rank0 = status(url)["rank0_pid"]
    (rank1,) = before - {rank0}
    await kill_while_streaming(url, rank1, 1)
    await until_replaced(url, rank0)
    answer = await client.completions.create(
        model=MODEL, prompt="abc", max_tokens=20, extra_body=EXACT
    )
    assert answer.usage.completion_tokens == 20
    assert not rank_pids() & before

    again = rank_pids()
    await kill_while_streaming(url, status(url)["rank0_pid"], 0)
    end = time.monotonic() + 20
    while rank_pids() & again:
        assert time.monotonic() < end, "the other rank lives on"
        await asyncio.sleep(0.1)
