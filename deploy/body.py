"""Reads a request's JSON body: bounded, UTF-8, and strict where Python's parser is not."""

from __future__ import annotations

import json
import re
from typing import Any

from fastapi import Request

from spectrue.deploy.http_errors import ApiError
from spectrue.workers.core import cut, shown

MAX_BODY_BYTES = 2**20

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _bad(message: str, *, param: str | None = None, status: int = 400) -> ApiError:
    return ApiError(status, message, param=param, code="invalid_json" if status == 400 else None)


def _too_large() -> ApiError:
    return ApiError(
        413, f"The body is larger than {MAX_BODY_BYTES} bytes.", code="request_too_large"
    )


async def read_json(request: Request) -> dict[str, Any]:
    """The body as an object. Raises ApiError (400, 413, 415)."""
    _check_content_type(request.headers.get("content-type"))
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > MAX_BODY_BYTES:
        raise _too_large()
    body = bytearray()
    async for chunk in request.stream():  # a chunked body has no Content-Length
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise _too_large()
    return parse_object(bytes(body))


def _check_content_type(header: str | None) -> None:
    if header is None:
        return
    kind, _, parameters = header.partition(";")
    kind = kind.strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise _bad(f"Content-Type must be application/json, got {shown(kind)}.", status=415)
    charset = re.search(r"charset\s*=\s*\"?([^\s\";]+)", parameters, re.IGNORECASE)
    if charset and charset[1].lower() not in ("utf-8", "utf8"):
        raise _bad(f"The charset must be utf-8, got {shown(charset[1])}.", status=415)


def parse_object(body: bytes) -> dict[str, Any]:
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as e:
        raise _bad(f"The body is not valid UTF-8 (at byte {e.start}).") from None
    try:
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_duplicates)
    except RecursionError:
        raise _bad("The JSON body is nested too deeply.") from None
    except json.JSONDecodeError as e:
        raise _bad(f"The body is not valid JSON: {e}.") from None
    except ValueError:  # an integer of thousands of digits
        raise _bad("The body is not valid JSON: a number is too long.") from None
    if not isinstance(value, dict):
        raise _bad("The body must be a JSON object.")
    if _SURROGATE.search(text):
        _check_surrogates(value)
    return value


def _no_constant(name: str) -> float:
    raise _bad(f"The body is not valid JSON: {name} is not a JSON number.")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _bad(f"The JSON body has the key {shown(key)} twice.", param=key)
            seen.add(key)
    return result


def _check_surrogates(value: dict[str, Any]) -> None:
    """A lone surrogate is no character: it cannot be encoded, so no tokenizer takes it."""
    stack: list[tuple[str, Any]] = [("", value)]
    while stack:
        path, item = stack.pop()
        if isinstance(item, dict):
            for key, child in item.items():
                stack.append((path or "the body", key))
                stack.append((f"{path}.{key}" if path else key, child))
        elif isinstance(item, list):
            stack.extend((f"{path}.{i}", child) for i, child in enumerate(item))
        elif isinstance(item, str):
            try:
                item.encode("utf-8")
            except UnicodeEncodeError:
                where = path.encode("ascii", "backslashreplace").decode()
                raise _bad(f"{cut(where)} has a lone surrogate.", param=where) from None
