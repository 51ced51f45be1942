"""Every bad input is an OpenAI-shaped 4xx that names the field, and never reaches the engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from .conftest import FakeEngine, Server, ServeWith

BIG = 10**400
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


def check(
    response: httpx.Response, status: int, param: str | None, code: str | None = None
) -> None:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {"error"}
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    if code is not None:
        assert error["code"] == code


COMMON: list[tuple[dict[str, Any], str]] = [
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_p": "0.5"}, "top_p"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 1e-9}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": [1]}, "temperature"),
    ({"temperature": BIG}, "temperature"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "7"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": BIG}, "max_tokens"),
    ({"max_tokens": 63}, "max_tokens"),  # with the prompt more than the context
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 129}, "n"),
    ({"n": 9}, "n"),  # the fake server holds 8 requests
    ({"n": 1.0}, "n"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", 5]}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "x" * 300}, "stop"),
    ({"seed": "1"}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"256": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 1, "01": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": "1"}}, "logit_bias.1"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"top_k": BIG}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 6}, "min_tokens"),
    ({"stop_token_ids": [256]}, "stop_token_ids"),
    ({"stop_token_ids": [True]}, "stop_token_ids.0"),
    ({"stop_token_ids": 5}, "stop_token_ids"),
    ({"stop_token_ids": [5] * 257}, "stop_token_ids"),
    ({"stop_token_ids": list(range(256))}, "stop_token_ids"),  # nothing left to choose
    ({"bad_words": "x"}, "bad_words"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": [f"w{i}" for i in range(129)]}, "bad_words"),  # each is two sequences
    ({"bad_words": ["x" * 256]}, "bad_words"),  # and one token longer after a space
    ({"logprobs_mode": "both"}, "logprobs_mode"),
    ({"logprobs_mode": True}, "logprobs_mode"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"include_stop_str_in_output": "x"}, "include_stop_str_in_output"),
    ({"speculative": True}, "speculative"),
    ({"speculative": {"num_speculative_tokens": 4}}, "speculative.num_speculative_tokens"),
    ({"speculative": {"num_speculative_tokens": -1}}, "speculative.num_speculative_tokens"),
    ({"speculative": {"num_speculative_tokens": "1"}}, "speculative.num_speculative_tokens"),
    (
        {"speculative": {"enabled": False, "num_speculative_tokens": 2}},
        "speculative.num_speculative_tokens",
    ),
    ({"speculative": {"enabled": True, "num_speculative_tokens": 0}}, "speculative.enabled"),
    ({"speculative": {"k": 2}}, "speculative.k"),
    ({"user": 5}, "user"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"store": "x"}, "store"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"logits_processors": ["x"]}, "logits_processors"),  # bug-cases 29
    ({"temprature": 1}, "temprature"),
    ({"": 1}, ""),
]
CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages.0"),
    ({"messages": [{"content": "hi"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
        "messages.0.content",
    ),
    ({"messages": [{"role": "tool", "content": "hi"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": "hi", "x": 1}]}, "messages.0.x"),
    ({"messages": [{"role": "user", "content": "hi", "name": "me"}]}, "messages.0.name"),
    ({"messages": [{"role": "assistant", "content": "hi"}]}, "messages"),  # the template refuses
    ({"messages": [{"role": "user", "content": "x" * 61}]}, "messages"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"max_completion_tokens": 0, "max_tokens": None}, "max_completion_tokens"),
    ({"max_completion_tokens": 63, "max_tokens": None}, "max_completion_tokens"),
    ({"max_completion_tokens": 4, "max_tokens": 5}, "max_completion_tokens"),
    ({"prompt": "hi"}, "prompt"),
]
COMPLETION: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [256]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [BIG]}, "prompt"),
    ({"prompt": "x" * 64, "max_tokens": None}, "prompt"),
    ({"prompt": "x" * 64, "max_tokens": 1}, "prompt"),
    ({"prompt": ["a"] * 9}, "prompt"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"echo": True}, "echo"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"max_completion_tokens": 4}, "max_completion_tokens"),
    ({"messages": []}, "messages"),
]


def name(value: object) -> str | None:
    return str(value)[:60] if isinstance(value, dict) else None


@pytest.mark.parametrize(("fields", "param"), COMMON + COMPLETION, ids=name)
async def test_completion_field(server: Server, fields: dict[str, Any], param: str) -> None:
    check(await server.complete(**fields), 400, param)
    assert not server.engine.requests


@pytest.mark.parametrize(("fields", "param"), COMMON + CHAT, ids=name)
async def test_chat_field(server: Server, fields: dict[str, Any], param: str) -> None:
    check(await server.chat(**fields), 400, param)
    assert not server.engine.requests


@pytest.mark.parametrize("field", ["model", "prompt"])
async def test_missing_field(server: Server, field: str) -> None:
    body = {"model": "tiny", "prompt": "hi"}
    del body[field]
    r = await server.http.post("/v1/completions", json=body)
    check(r, 400, field, "missing_required_parameter")


async def test_codes(server: Server) -> None:
    check(await server.complete(foo=1), 400, "foo", "unknown_parameter")
    check(await server.complete(prompt="x" * 99), 400, "prompt", "context_length_exceeded")
    check(await server.complete(max_tokens=99), 400, "max_tokens", "context_length_exceeded")
    check(await server.complete(model="gpt-4"), 404, "model", "model_not_found")
    check(await server.chat(model=""), 404, "model", "model_not_found")
    check(await server.chat(model=None), 400, "model")
    check(await server.chat(model=5), 400, "model", "invalid_type")
    check(await server.http.get("/v1/models/gpt-4"), 404, "model", "model_not_found")


async def test_speculation_without_a_drafter(
    serve_with: ServeWith, fake_engine: type[FakeEngine]
) -> None:
    engine = fake_engine()
    engine.num_speculative_tokens = 0
    async with serve_with(engine) as server:
        check(await server.chat(speculative={"enabled": True}), 400, "speculative.enabled")
        r = await server.chat(speculative={"num_speculative_tokens": 1})
        check(r, 400, "speculative.num_speculative_tokens")
        assert (await server.chat(speculative={"enabled": False})).status_code == 200


async def test_what_the_engine_refuses_is_a_400_too(server: Server) -> None:
    from spectrue.workers.errors import InvalidRequestError

    server.engine.invalid = InvalidRequestError("needs more KV blocks than there are", "prompt")
    check(await server.complete(), 400, "prompt")
    assert server.replica._client.num_open == 0


@pytest.mark.parametrize(("body", "param"), [({}, "prompt"), ({"prompt": 5}, "prompt")])
async def test_tokenize(server: Server, body: dict[str, Any], param: str) -> None:
    check(await server.post("/tokenize", **body), 400, param)


GOOD = b'{"model": "tiny", "prompt": "hi", "max_tokens": 2}'


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b"null", None),
        (b'"x"', None),
        (GOOD + b"x", None),
        (b"{'model': 'tiny'}", None),
        (GOOD.replace(b"hi", b"\xff\xfe"), None),  # broken UTF-8
        (GOOD.replace(b"hi", b"\xed\xa0\x80"), None),  # a surrogate in UTF-8
        (GOOD.decode().encode("utf-16"), None),
        (GOOD.replace(b"hi", rb"\ud800"), "prompt"),
        (GOOD.replace(b'"hi"', rb'["a", "\udfff"]'), "prompt.1"),
        (GOOD.replace(b'"hi"', rb'"hi", "\ud800": 1'), "the body"),
        (GOOD.replace(b": 2", b': 2, "temperature": NaN'), None),
        (GOOD.replace(b": 2", b': 2, "temperature": Infinity'), None),
        (GOOD.replace(b": 2", b': 2, "temperature": -Infinity'), None),
        (GOOD.replace(b": 2", b': 2, "temperature": 1e999'), "temperature"),
        (GOOD.replace(b": 2", b': 2, "top_p": -1e999'), "top_p"),
        (GOOD.replace(b": 2", b': 2, "logit_bias": {"1": 1e999}'), "logit_bias"),
        (GOOD.replace(b": 2", b": " + b"9" * 5000), None),
        (GOOD.replace(b": 2", b': 2, "max_tokens": 3'), "max_tokens"),  # twice
        (GOOD.replace(b'"hi"', b"[" * 100_000), None),
        (GOOD.replace(b'"hi"', b"[" * 100_000 + b"]" * 100_000), None),
        (GOOD.replace(b'"hi"', b"[" * 300 + b"]" * 300), "prompt"),
        (GOOD.replace(b": 2", b': 2, "metadata": ' + b'{"a":' * 300 + b"1" + b"}" * 301), None),
    ],
)
async def test_broken_json(server: Server, body: bytes, param: str | None) -> None:
    r = await server.http.post(
        "/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    check(r, 400, param, None if param else "invalid_json")
    assert not server.engine.requests


async def test_a_surrogate_pair_is_a_character(server: Server) -> None:
    body = GOOD.replace(b"hi", rb"\ud83d\ude00")
    r = await server.http.post("/v1/completions", content=body)
    assert r.status_code == 200


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=UTF-8", 200),
        ("application/x-www-form-urlencoded", 415),
        ("text/plain", 415),
        ("application/json; charset=latin-1", 415),
    ],
)
async def test_content_type(server: Server, kind: str, status: int) -> None:
    r = await server.http.post("/v1/completions", content=GOOD, headers={"content-type": kind})
    assert r.status_code == status
    if status != 200:
        check(r, status, None)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(("size", "status"), [(2**20, 200), (2**20 + 1, 413), (2**22, 413)])
async def test_body_limit(server: Server, size: int, status: int, chunked: bool) -> None:
    sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal sent
        body = GOOD + b" " * (size - len(GOOD))
        for i in range(0, size, 2**16):
            sent += len(body[i : i + 2**16])
            yield body[i : i + 2**16]

    body = chunks() if chunked else GOOD + b" " * (size - len(GOOD))
    r = await server.http.post("/v1/completions", content=body)
    assert r.status_code == status
    assert ("content-length" in r.request.headers) is not chunked
    if status == 413:
        check(r, 413, None, "request_too_large")
        assert not server.engine.requests
        if chunked:
            assert sent <= 2**20 + 2**17  # refused while reading, not after


async def test_unknown_routes_and_methods(server: Server) -> None:
    check(await server.http.get("/v2/x"), 404, None, "not_found")
    check(await server.http.get("/v1/completions"), 405, None, "method_not_allowed")
    r = await server.http.post("/v1/models", content=b"{}")
    check(r, 405, None)
    assert "GET" in r.headers["allow"]


async def test_a_500_says_nothing_of_its_inside(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("secret /path")

    monkeypatch.setattr(server.replica, "_tokenizer", type("T", (), {"encode": broken})())
    r = await server.complete()
    assert r.status_code == 500
    assert r.json()["error"]["type"] == "server_error"
    assert "secret" not in json.dumps(r.json())


LONG = "z" * 100_000


@pytest.mark.parametrize(
    "fields",
    [
        {"model": LONG},
        {"stop": LONG},
        {"stop": [LONG] * 2},
        {"stop": [LONG[:20]] * 10_000},
        {"logit_bias": {str(i): 1 for i in range(50_000)}},
        {"logit_bias": {LONG: 1}},
        {"logit_bias": {"1": LONG}},
        {"logprobs_mode": LONG},
        {"seed": int("9" * 4000)},
        {"n": int("9" * 4000)},
        {"max_tokens": int("9" * 4000)},
        {"min_tokens": int("9" * 4000)},
        {"prompt": [int("9" * 4000)]},
        {LONG: 1},
        {"speculative": {LONG: 1}},
        {"speculative": {"num_speculative_tokens": int("9" * 4000)}},
    ],
    ids=lambda fields: str(fields)[:30],
)
async def test_long_input_is_not_echoed(server: Server, fields: dict[str, Any]) -> None:
    r = await server.complete(**fields)
    assert r.status_code in (400, 404), r.text[:200]
    assert len(r.content) < 600


async def test_other_long_input_is_not_echoed(server: Server) -> None:
    twice = f'{{"{LONG}": 1, "{LONG}": 1}}'.encode()
    surrogate = f'{{"{LONG}": "\\ud800"}}'.encode()
    answers = [
        await server.http.post("/v1/completions", content=twice),
        await server.http.post("/v1/completions", content=surrogate),
        await server.http.post(
            "/v1/completions", content=GOOD, headers={"content-type": "text/" + LONG[:5000]}
        ),
        await server.http.get("/v2/" + LONG[:5000]),
        await server.http.get("/v1/models/" + LONG[:5000]),
    ]
    assert [r.status_code for r in answers] == [400, 400, 415, 404, 404]
    for r in answers:
        assert len(r.content) < 600


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"stop": ["a"] * 10_000}, "got 10000 strings"),
        ({"logit_bias": {str(i): 1 for i in range(2000)}}, "got 2000 entries"),
    ],
    ids=["stop", "logit_bias"],
)
async def test_lists_are_counted(server: Server, fields: dict[str, Any], count: str) -> None:
    r = await server.complete(**fields)
    assert r.json()["error"]["message"].endswith(count)
