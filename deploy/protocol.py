"""Request bodies of the OpenAI endpoints: shapes and types. `requests.py` gives them meaning.

Accepted and ignored: `user`, `metadata`, `store`. A field that is not here is a 400 naming it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

MAX_CHOICES = 128  # n, as OpenAI has it


class Body(BaseModel):
    """Strict: "0.5" is no number and true is no integer."""

    model_config = ConfigDict(extra="forbid", strict=True)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _stop(value: Any) -> Any:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(s, str) for s in value):
        return tuple(value)
    raise PydanticCustomError("stop_type", "must be a string or a list of strings")


def _prompt(value: Any) -> Any:
    """To a tuple of prompts, each a text or a tuple of token ids."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if all(isinstance(v, str) for v in value):
            return tuple(value)
        if all(_is_int(v) for v in value):
            return (tuple(value),)
        if all(isinstance(v, list) and all(_is_int(t) for t in v) for v in value):
            return tuple(tuple(v) for v in value)
    raise PydanticCustomError(
        "prompt_type", "must be a string, a list of token ids, or a non-empty list of either"
    )


def _unsupported(*allowed: Any) -> BeforeValidator:
    """A field of OpenAI's that takes only null and the values which ask for nothing."""

    def check(value: Any) -> Any:
        if value is None or any(type(value) is type(a) and value == a for a in allowed):
            return None
        raise PydanticCustomError("unsupported", "it is not supported yet")

    return BeforeValidator(check)


class StreamOptions(Body):
    include_usage: bool | None = None


class SpeculativeOptions(Body):
    """Per request: `enabled: false` decodes plainly, `num_speculative_tokens` lowers k."""

    enabled: bool | None = None
    num_speculative_tokens: int | None = None


class SamplingBody(Body):
    """What both endpoints have in common. None stands for "not given" throughout."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_stop)] = ()
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    # extensions
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    logprobs_mode: Literal["raw", "processed"] | None = None
    speculative: SpeculativeOptions | None = None

    # accepted and ignored
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None

    # known, not offered
    tools: Annotated[Any, _unsupported([])] = None
    tool_choice: Annotated[Any, _unsupported("none")] = None
    parallel_tool_calls: Annotated[Any, _unsupported()] = None
    functions: Annotated[Any, _unsupported([])] = None
    function_call: Annotated[Any, _unsupported("none")] = None
    response_format: Annotated[Any, _unsupported({"type": "text"})] = None


class CompletionRequest(SamplingBody):
    prompt: Annotated[
        tuple[str | tuple[int, ...], ...], BeforeValidator(_prompt), Field(strict=False)
    ]
    logprobs: int | None = None
    echo: Annotated[Any, _unsupported(False)] = None
    best_of: Annotated[Any, _unsupported(1)] = None
    suffix: Annotated[Any, _unsupported("")] = None


def _content(value: Any) -> Any:
    """To one text. The parts of a list are joined."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("content_type", "must be a string or a list of text parts")
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise PydanticCustomError(
                "content_part",
                "every part must have the type 'text'; images, audio and files are not supported",
            )
        if part.keys() != {"type", "text"} or not isinstance(part["text"], str):
            raise PydanticCustomError(
                "content_part", "a text part has exactly the fields 'type' and 'text' (a string)"
            )
    return "".join(part["text"] for part in value)


class ChatMessage(Body):
    """`null` is taken for the fields that clients send back from an earlier answer."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_content)]
    name: Annotated[Any, _unsupported()] = None
    refusal: Annotated[Any, _unsupported()] = None
    audio: Annotated[Any, _unsupported()] = None
    annotations: Annotated[Any, _unsupported([])] = None
    tool_calls: Annotated[Any, _unsupported([])] = None
    function_call: Annotated[Any, _unsupported()] = None


Messages = Annotated[list[ChatMessage], Field(min_length=1)]


class ChatCompletionRequest(SamplingBody):
    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class TokenizeRequest(Body):
    """`prompt` as it is, or `messages` through the chat template; exactly one of them."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
