"""What the endpoints answer when everything is right."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from spectrue.deploy.config import ServeSection

from .conftest import FakeEngine, Server, ServeWith


def events(text: str) -> list[Any]:
    """SSE framing: `data: <json>` and an empty line, `[DONE]` last and only last."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    assert all(b.startswith("data: ") and "\n" not in b for b in blocks)
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(b[6:]) for b in blocks]


async def test_unary_completion_and_usage(server: Server) -> None:
    r = await server.complete(prompt="hello", max_tokens=5)
    assert r.status_code == 200
    body = r.json()
    assert body["object"] == "text_completion"
    assert body["model"] == "tiny"
    assert body["choices"] == [
        {
            "index": 0,
            "text": "abcde",
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 5,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 3},
        "spec_decode": {
            "num_verify_steps": 4,
            "num_drafts": 4,
            "num_draft_tokens": 12,
            "num_accepted_tokens": 6,
            "accept_length": 2.5,
            "verify_path": "sampling",
            "verify_method": "match",
        },
    }


async def test_unary_chat(server: Server) -> None:
    body = (await server.chat()).json()
    assert body["object"] == "chat.completion"
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "abcde", "refusal": None}
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("include_usage", [False, True])
async def test_chat_stream(server: Server, include_usage: bool) -> None:
    r = await server.chat(stream=True, stream_options={"include_usage": include_usage})
    assert r.headers["content-type"].startswith("text/event-stream")
    assert "content-length" not in r.headers
    chunks = events(r.text)
    if include_usage:
        usage = chunks.pop()
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 5
        assert all(c["usage"] is None for c in chunks)
    else:
        assert all("usage" not in c for c in chunks)
    deltas = [c["choices"][0]["delta"] for c in chunks]
    assert [d.get("role") for d in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(d["content"] for d in deltas) == "abcde"
    reasons = [c["choices"][0]["finish_reason"] for c in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert len({c["id"] for c in chunks}) == 1
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}


async def test_one_event_carries_all_tokens_of_a_step(
    serve_with: ServeWith, fake_engine: type[FakeEngine]
) -> None:
    async with serve_with(fake_engine(per_step=4, interval=0.05)) as server:
        chunks = events((await server.complete(max_tokens=10, stream=True)).text)
    assert [c["choices"][0]["text"] for c in chunks] == ["abcd", "efgh", "ij"]


async def test_stream_interval_coalesces(
    serve_with: ServeWith, fake_engine: type[FakeEngine]
) -> None:
    serve = ServeSection(stream_interval_ms=150)
    async with serve_with(fake_engine(per_step=1, interval=0.01), serve=serve) as server:
        chunks = events((await server.complete(max_tokens=26, stream=True)).text)
    texts = [c["choices"][0]["text"] for c in chunks]
    assert "".join(texts) == "abcdefghijklmnopqrstuvwxyz"
    assert 2 <= len(texts) <= 8


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_is_cut_and_named(server: Server, stream: bool) -> None:
    r = await server.complete(max_tokens=20, stop=["zz", "cd"], stream=stream)
    choices = [c["choices"][0] for c in (events(r.text) if stream else [r.json()])]
    assert "".join(c["text"] for c in choices) == "ab"
    assert choices[-1]["finish_reason"] == "stop"
    assert choices[-1]["stop_reason"] == "cd"


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_and_prompts_are_numbered(server: Server, stream: bool) -> None:
    r = await server.complete(prompt=["ab", "cde"], n=2, max_tokens=3, seed=7, stream=stream)
    texts = dict.fromkeys(range(4), "")
    for chunk in events(r.text) if stream else [r.json()]:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {0: "abc", 1: "bcd", 2: "abc", 3: "bcd"}
    requests = server.engine.requests
    assert [r.choice for r in requests] == [0, 1, 0, 1]
    assert [len(r.prompt_token_ids) for r in requests] == [2, 2, 3, 3]
    assert {r.params.seed for r in requests} == {7}
    if not stream:  # a prompt counts once, however many choices it has
        assert r.json()["usage"]["prompt_tokens"] == 5
        assert r.json()["usage"]["completion_tokens"] == 12


async def test_token_id_prompts(server: Server) -> None:
    assert (await server.complete(prompt=[1, 2, 3])).status_code == 200
    assert (await server.complete(prompt=[[4, 5], [6]])).status_code == 200
    prompts = [r.prompt_token_ids for r in server.engine.requests]
    assert prompts == [(1, 2, 3), (4, 5), (6,)]


async def test_seed_reaches_the_engine_from_both_endpoints(server: Server) -> None:
    """bug-cases 24"""
    await server.complete(seed=11)
    await server.chat(seed=12)
    assert [r.params.seed for r in server.engine.requests] == [11, 12]


async def test_every_sampling_field_reaches_the_engine(server: Server) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "presence_penalty": -1,
        "frequency_penalty": 1.25,
        "ignore_eos": True,
        "min_tokens": 2,
        "include_stop_str_in_output": True,
        "max_tokens": 6,
    }
    more = {
        "stop": "q",
        "stop_token_ids": [5],
        "logit_bias": {"97": -100, "3": 1.5},
        "bad_words": ["no"],
        "speculative": {"num_speculative_tokens": 2},
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
    }
    for call in (server.complete, server.chat):
        assert (await call(**fields, **more)).status_code == 200
        params = server.engine.requests[-1].params
        assert {k: getattr(params, k) for k in fields} == fields
        assert params.stop == ("q",)
        assert params.stop_token_ids == (5,)
        assert dict(params.logit_bias) == {97: -100, 3: 1.5}
        assert params.bad_words == ((110, 111), (32, 110, 111))
        assert params.num_speculative_tokens == 2


async def test_lists_at_their_limits_reach_the_engine(server: Server) -> None:
    fields = {"stop_token_ids": [5] * 256, "bad_words": [f"w{i}" for i in range(128)]}
    for call in (server.complete, server.chat):
        assert (await call(**fields)).status_code == 200
        params = server.engine.requests[-1].params
        assert len(params.stop_token_ids) == len(params.bad_words) == 256


async def test_logprobs_mode_reaches_the_engine(server: Server) -> None:
    for call, logprobs in ((server.complete, 1), (server.chat, True)):
        for mode in ("raw", "processed", None):
            assert (await call(logprobs=logprobs, logprobs_mode=mode)).status_code == 200
            assert server.engine.requests[-1].params.logprobs_mode == (mode or "raw")


async def test_null_is_not_given(server: Server) -> None:
    names = ["temperature", "top_p", "n", "stop", "seed", "logit_bias", "tools", "stream", "user"]
    assert (await server.chat(**dict.fromkeys(names))).status_code == 200
    assert server.engine.requests[0].params.temperature == 1.0


async def test_speculation_can_be_turned_off(server: Server) -> None:
    await server.chat(speculative={"enabled": False})
    assert server.engine.requests[0].params.num_speculative_tokens == 0


async def test_max_tokens_defaults_to_the_rest_of_the_context(server: Server) -> None:
    await server.complete(prompt="x" * 60, max_tokens=None)
    assert server.engine.requests[0].params.max_tokens == 4


async def test_chat_logprobs(server: Server) -> None:
    body = (await server.chat(logprobs=True, top_logprobs=2, max_tokens=2)).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert [c["token"] for c in content] == ["a", "b"]
    assert content[0] == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "b", "logprob": -9999.0, "bytes": [98]},
        ],
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_logprobs(server: Server, stream: bool) -> None:
    r = await server.complete(logprobs=1, max_tokens=3, stream=stream)
    rows = [c["choices"][0]["logprobs"] for c in (events(r.text) if stream else [r.json()])]
    joined = {key: [v for row in rows for v in row[key]] for key in rows[0]}
    assert joined == {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [-0.5] * 3,
        "top_logprobs": [{"a": -0.5}, {"b": -0.5}, {"c": -0.5}],
        "text_offset": [0, 1, 2],
    }


async def test_models_and_health_and_tokenize(server: Server) -> None:
    models = (await server.http.get("/v1/models")).json()
    assert [m["id"] for m in models["data"]] == ["tiny"]
    assert (await server.http.get("/v1/models/tiny")).json()["max_model_len"] == 64
    health = (await server.http.get("/health")).json()
    assert health["status"] == "ok"
    assert health["verify_method"] == "match"
    assert (await server.http.head("/health")).status_code == 200  # as load balancers ask
    r = await server.post("/tokenize", prompt="abc")
    assert r.json() == {"tokens": [97, 98, 99], "count": 3, "max_model_len": 64}
    r = await server.post("/tokenize", messages=[{"role": "user", "content": "a"}])
    assert r.json()["count"] == 4
    assert not server.engine.requests


async def test_text_parts_are_joined(server: Server) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert (await server.chat(messages=[{"role": "user", "content": parts}])).status_code == 200
    assert server.engine.requests[0].prompt_token_ids == (60, 117, 62, 97, 98)


async def test_many_streams_at_once_have_exact_counts(
    serve_with: ServeWith, fake_engine: type[FakeEngine]
) -> None:
    async with serve_with(fake_engine(max_requests=64)) as server:
        calls = [
            server.complete(max_tokens=10 + i % 7, stream=True, prompt=[i + 1]) for i in range(64)
        ]
        for i, r in enumerate(await asyncio.gather(*calls)):
            text = "".join(c["choices"][0]["text"] for c in events(r.text))
            assert len(text) == 10 + i % 7
        assert set(server.engine.finals.values()) == {1}
        assert server.replica._client.num_open == 0
