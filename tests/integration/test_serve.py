"""A real Ray Serve, the real engine and a tiny model on CPU, through HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from spectrue.deploy.config import ServerConfig, ServeSection
from spectrue.workers.config import EngineConfig

MODEL = "tiny"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture(scope="module")
def url(tiny_llama) -> Iterator[str]:
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray import serve

    from spectrue.deploy.app import build_app

    port = free_port()
    engine = EngineConfig(
        model=str(tiny_llama), served_model_name=MODEL, dtype="float32", kv_cache_bytes=2**24
    )
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
async def client(url):
    http = httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=60)
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http
    ) as client:
        yield client


def status(url: str) -> dict[str, Any]:
    return httpx.get(f"{url}/health", timeout=30).raise_for_status().json()


async def until_idle(url: str) -> dict[str, Any]:
    end = time.monotonic() + 20
    while True:
        now = await asyncio.to_thread(status, url)
        if not (now["running"] or now["waiting"] or now["kv_blocks_used"]):
            return now
        assert time.monotonic() < end, now
        await asyncio.sleep(0.1)


EXACT = {"ignore_eos": True}


async def test_openai_client_unary(client):
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


async def test_openai_client_stream_equals_unary(client):
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


async def test_errors_through_the_client(client):
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="gpt-4", prompt="x")
    with pytest.raises(openai.BadRequestError) as e:
        await client.completions.create(model=MODEL, prompt="x", top_p=0)
    assert e.value.param == "top_p"
    with pytest.raises(openai.BadRequestError) as e:
        await client.completions.create(model=MODEL, prompt="x" * 2000)
    assert e.value.code == "context_length_exceeded"
    with pytest.raises(openai.APIStatusError) as e:
        await client.completions.create(model=MODEL, prompt="x" * 2**20)
    assert e.value.status_code == 413
    assert [m.id async for m in await client.models.list()] == [MODEL]


async def test_64_streams_have_exact_token_counts(client, url):
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
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                tokens += len(choice.logprobs.tokens)
        return tokens, usage.completion_tokens

    counts = await asyncio.gather(*map(one, range(64)))
    assert counts == [(10 + i % 23,) * 2 for i in range(64)]
    await until_idle(url)


async def test_200_requests_of_which_half_disconnect(client, url):
    finished = left = 0

    async def one(i: int) -> None:
        nonlocal finished, left
        fields = {"model": MODEL, "prompt": f"{i} abab", "extra_body": EXACT}
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
            except TimeoutError:
                left += 1

    before = (await until_idle(url))["committed_tokens"]
    await asyncio.gather(*map(one, range(200)))
    after = await until_idle(url)
    assert (finished, left) == (100, 100)
    assert after["running"] == after["waiting"] == after["kv_blocks_used"] == 0
    # Those that left were stopped, not run to their end.
    assert after["committed_tokens"] - before < 100 * 12 + 100 * 200


async def test_a_killed_rank_fails_its_requests_and_is_replaced(client, url):
    pid = status(url)["rank0_pid"]
    stream = await client.completions.create(
        model=MODEL, prompt="abc", max_tokens=450, stream=True, extra_body=EXACT
    )
    await anext(aiter(stream))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(openai.APIError, match="rank 0 died"):
        [c async for c in stream]
    end = time.monotonic() + 45
    while True:
        try:
            if status(url)["rank0_pid"] != pid:
                break
        except httpx.HTTPError:
            pass
        assert time.monotonic() < end, "no new replica"
        await asyncio.sleep(0.25)
    answer = await client.completions.create(model=MODEL, prompt="abc", max_tokens=3)
    assert answer.choices[0].text
