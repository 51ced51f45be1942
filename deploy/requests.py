"""From an HTTP body to the engine's `Request`s: prompts to token ids, fields to SamplingParams.

What the engine could not finish is refused here, naming the field as the client spelt it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from spectrue.deploy.http_errors import ApiError
from spectrue.deploy.protocol import (
    MAX_CHOICES,
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    SamplingBody,
)
from spectrue.workers.core import Request, SamplingParams, cut, shown
from spectrue.workers.errors import InvalidRequestError


class Tokenizer(Protocol):
    """What the ingress needs of `workers.tokenizer.load_tokenizer`'s result."""

    def encode(self, text: str) -> list[int]:
        """With the tokens that the model wants before a text, such as BOS."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> list[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What a request is checked against."""

    name: str
    max_model_len: int  # tokens, prompt and output
    vocab_size: int
    max_draft_tokens: int  # k of the server; 0 when it does not speculate
    max_requests: int  # that the engine holds at once, running and waiting


def build_requests(
    body: CompletionRequest | ChatCompletionRequest,
    request_id: str,
    tokenizer: Tokenizer,
    model: ServedModel,
) -> list[Request]:
    """Prompts x n requests, in the order of the choices. Slow (tokenises): call it in a thread."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options needs stream: true", "stream_options")
    n = 1 if body.n is None else body.n
    if not 1 <= n <= MAX_CHOICES:
        raise InvalidRequestError(f"n must be in [1, {MAX_CHOICES}], got {shown(n)}", "n")
    prompts = _prompts(body, tokenizer)
    if len(prompts) * n > model.max_requests:
        raise InvalidRequestError(
            f"{len(prompts)} prompts x n = {n} is more than the {model.max_requests} requests "
            "that this server holds at once",
            "prompt" if n == 1 else "n",
        )
    field = "messages" if isinstance(body, ChatCompletionRequest) else "prompt"
    requests: list[Request] = []
    for prompt in prompts:
        _check_prompt(prompt, field, model)
        params = _sampling_params(body, tokenizer, model, len(prompt))
        for choice in range(n):
            requests.append(
                Request(
                    request_id=f"{request_id}-{len(requests)}",
                    prompt_token_ids=prompt,
                    params=params,
                    choice=choice,
                )
            )
    return requests


def chat_prompt(messages: Sequence[ChatMessage], tokenizer: Tokenizer) -> tuple[int, ...]:
    plain = [{"role": m.role, "content": m.content} for m in messages]
    try:
        return tuple(tokenizer.apply_chat_template(plain))
    except InvalidRequestError:
        raise
    except Exception as e:  # the template is the checkpoint's code; it refuses orders of roles
        raise InvalidRequestError(
            f"the model's chat template refused these messages: {cut(str(e))}", "messages"
        ) from e


def _prompts(
    body: CompletionRequest | ChatCompletionRequest, tokenizer: Tokenizer
) -> list[tuple[int, ...]]:
    if isinstance(body, ChatCompletionRequest):
        return [chat_prompt(body.messages, tokenizer)]
    return [p if isinstance(p, tuple) else tuple(tokenizer.encode(p)) for p in body.prompt]


def _check_prompt(prompt: tuple[int, ...], field: str, model: ServedModel) -> None:
    if not prompt:
        raise InvalidRequestError(f"{field} must have at least one token", field)
    for token in prompt:
        if not 0 <= token < model.vocab_size:
            raise InvalidRequestError(
                f"{field} must have token ids in [0, {model.vocab_size}), got {shown(token)}", field
            )
    if len(prompt) >= model.max_model_len:
        raise _too_long(
            f"The prompt has {len(prompt)} tokens; the model's context is {model.max_model_len} "
            "tokens, at least one of them for the answer.",
            field,
        )


def _too_long(message: str, param: str) -> ApiError:
    return ApiError(400, message, param=param, code="context_length_exceeded")


def _max_tokens(body: SamplingBody, model: ServedModel, prompt_len: int) -> tuple[int, str]:
    """The limit and the name of the field it came from."""
    value, field = body.max_tokens, "max_tokens"
    newer = getattr(body, "max_completion_tokens", None)
    if newer is not None:
        if value is not None and value != newer:
            raise InvalidRequestError(
                f"max_completion_tokens = {shown(newer)} contradicts max_tokens = {shown(value)}",
                "max_completion_tokens",
            )
        value, field = newer, "max_completion_tokens"
    rest = model.max_model_len - prompt_len
    if value is None:
        return rest, field
    if value < 1:
        raise InvalidRequestError(f"{field} must be at least 1, got {shown(value)}", field)
    if value > rest:
        raise _too_long(
            f"{field} = {shown(value)} and a prompt of {prompt_len} tokens exceed the model's "
            f"context of {model.max_model_len} tokens; at most {rest} are left.",
            field,
        )
    return value, field


def _sampling_params(
    body: CompletionRequest | ChatCompletionRequest,
    tokenizer: Tokenizer,
    model: ServedModel,
    prompt_len: int,
) -> SamplingParams:
    max_tokens, max_tokens_field = _max_tokens(body, model, prompt_len)
    given: dict[str, Any] = {
        name: value
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "seed",
            "ignore_eos",
            "min_tokens",
            "include_stop_str_in_output",
            "logprobs_mode",
        )
        if (value := getattr(body, name)) is not None
    }
    if body.min_tokens is not None and body.min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens = {shown(body.min_tokens)} is more than {max_tokens_field} = {max_tokens}",
            "min_tokens",
        )
    params = SamplingParams(
        **given,
        max_tokens=max_tokens,
        stop=body.stop,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logit_bias=_logit_bias(body.logit_bias),
        bad_words=_bad_words(body.bad_words, tokenizer),
        logprobs=_logprobs(body),
        num_speculative_tokens=_num_speculative_tokens(body, model),
    )
    params.check_token_ids(model.vocab_size)
    return params


def _logprobs(body: CompletionRequest | ChatCompletionRequest) -> int | None:
    if isinstance(body, CompletionRequest):
        return body.logprobs
    top = body.top_logprobs
    if not body.logprobs:
        if top is not None:
            raise InvalidRequestError("top_logprobs needs logprobs: true", "top_logprobs")
        return None
    if top is not None and not 0 <= top <= 20:
        raise InvalidRequestError(
            f"top_logprobs must be in [0, 20], got {shown(top)}", "top_logprobs"
        )
    return top or 0


def _logit_bias(biases: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
    result = {}
    for key, bias in (biases or {}).items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise InvalidRequestError(
                f"logit_bias keys must be token ids, got {shown(key)}", "logit_bias"
            )
        if int(key) in result:
            raise InvalidRequestError(f"logit_bias has token {int(key)} twice", "logit_bias")
        result[int(key)] = bias
    return tuple(result.items())


def _bad_words(words: list[str] | None, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word as it is spelt at the start of a text and after a space."""
    sequences: dict[tuple[int, ...], None] = {}
    before = tokenizer.encode("")  # BOS is no part of a word
    for word in words or ():
        if not word.strip():
            raise InvalidRequestError("bad_words must not have blank strings", "bad_words")
        for text in (word, " " + word.lstrip()):
            tokens = tokenizer.encode(text)
            if tokens[: len(before)] == before:
                tokens = tokens[len(before) :]
            sequences[tuple(tokens)] = None
    return tuple(sequences)


def _num_speculative_tokens(body: SamplingBody, model: ServedModel) -> int | None:
    options = body.speculative
    if options is None:
        return None
    k, most = options.num_speculative_tokens, model.max_draft_tokens
    name = "speculative.num_speculative_tokens"
    if options.enabled and (most == 0 or k == 0):
        why = "this server has no drafter" if most == 0 else f"{name} is 0"
        raise InvalidRequestError(
            f"speculative.enabled cannot be honoured: {why}", "speculative.enabled"
        )
    if k is not None and not 0 <= k <= most:
        raise InvalidRequestError(
            f"{name} must be in [0, {most}] on this server, got {shown(k)}", name
        )
    if options.enabled is False:
        if k:
            raise InvalidRequestError(f"{name} = {k} contradicts speculative.enabled: false", name)
        return 0
    return k
