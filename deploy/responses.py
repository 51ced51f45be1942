"""From the engine's outputs to the OpenAI answers: choices, logprobs, usage. Plain dicts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from spectrue.deploy.http_errors import ApiError
from spectrue.workers.core import Request, RequestOutput, SpecDecodeStats, TokenLogprobs
from spectrue.workers.errors import EngineDeadError

MIN_LOGPROB = -9999.0  # JSON has no infinity
REPLACEMENT = "\ufffd"


class Decoder(Protocol):
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class AnswerFormat(Protocol):
    """What differs between the endpoints."""

    unary_object: str
    stream_object: str

    def choice(self, index: int, output: RequestOutput) -> dict[str, Any]: ...

    def delta(self, index: int, output: RequestOutput) -> dict[str, Any]: ...


def merge(outputs: Iterable[RequestOutput]) -> RequestOutput:
    """Outputs of one request, in order, as if they had come at once."""
    parts = list(outputs)
    last = parts[-1]
    if len(parts) == 1:
        return last
    return RequestOutput(
        request_id=last.request_id,
        token_ids=tuple(t for p in parts for t in p.token_ids),
        text="".join(p.text for p in parts),
        logprobs=tuple(lp for p in parts for lp in p.logprobs),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        error=last.error,
        num_prompt_tokens=last.num_prompt_tokens,
        num_output_tokens=last.num_output_tokens,
        num_cached_tokens=last.num_cached_tokens,
        spec_decode=last.spec_decode,
    )


def check_finished(output: RequestOutput) -> None:
    """Raise what the client must see instead of an answer."""
    if output.finish_reason == "error":
        raise ApiError(
            500, f"The request failed: {output.error or 'unknown'}", code="generation_failed"
        )
    if output.finish_reason == "abort":  # not by this client, who is still here
        raise EngineDeadError(output.error or "the request was aborted")


class Answer:
    """One HTTP answer's constant part, and its usage."""

    def __init__(
        self, request_id: str, model: str, requests: Sequence[Request], form: AnswerFormat
    ) -> None:
        self.form = form
        self._head = {"id": request_id, "created": int(time.time()), "model": model}
        self._requests = requests

    def unary(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = [self.form.choice(i, output) for i, output in enumerate(outputs)]
        head = {**self._head, "object": self.form.unary_object}
        return {**head, "choices": choices, "usage": self.usage(outputs)}

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": self.form.stream_object, "choices": choices}

    def usage(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """`outputs`: the last one of each request. A prompt counts once, whatever n is."""
        prompts = [o for r, o in zip(self._requests, outputs, strict=True) if r.choice == 0]
        prompt_tokens = sum(o.num_prompt_tokens for o in prompts)
        completion_tokens = sum(o.num_output_tokens for o in outputs)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(o.num_cached_tokens for o in prompts)},
            "spec_decode": _spec_decode([o.spec_decode for o in outputs]),
        }


def _spec_decode(stats: Sequence[SpecDecodeStats]) -> dict[str, Any]:
    methods = {s.verify_method for s in stats}
    total = SpecDecodeStats(
        num_verify_steps=sum(s.num_verify_steps for s in stats),
        num_drafts=sum(s.num_drafts for s in stats),
        num_draft_tokens=sum(s.num_draft_tokens for s in stats),
        num_accepted_tokens=sum(s.num_accepted_tokens for s in stats),
        verify_path="sampling" if any(s.verify_path == "sampling" for s in stats) else "greedy",
    )
    flags = {"simulated": True} if any(s.simulated for s in stats) else {}
    return flags | {
        "num_verify_steps": total.num_verify_steps,
        "num_drafts": total.num_drafts,
        "num_draft_tokens": total.num_draft_tokens,
        "num_accepted_tokens": total.num_accepted_tokens,
        "accept_length": total.accept_length,
        "verify_path": total.verify_path,
        "verify_method": methods.pop() if len(methods) == 1 else "mixed",
    }


def _token_text(tokenizer: Decoder, token_id: int) -> str:
    return tokenizer.decode([token_id], skip_special_tokens=False)


class ChatFormat:
    unary_object = "chat.completion"
    stream_object = "chat.completion.chunk"

    def __init__(self, tokenizer: Decoder, logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._started: set[int] = set()

    def choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        message = {"role": "assistant", "content": output.text, "refusal": None}
        return {"index": index, "message": message, **self._end(output)}

    def delta(self, index: int, output: RequestOutput) -> dict[str, Any]:
        delta = {"content": output.text}
        if index not in self._started:  # the role comes once, with the first text
            self._started.add(index)
            delta = {"role": "assistant", **delta}
        return {"index": index, "delta": delta, **self._end(output)}

    def _end(self, output: RequestOutput) -> dict[str, Any]:
        logprobs = None
        if self._logprobs:
            content = [
                {
                    **self._entry(lp.token_id, lp.logprob),
                    "top_logprobs": [self._entry(t, value) for t, value in lp.top],
                }
                for lp in output.logprobs
            ]
            logprobs = {"content": content, "refusal": None}
        return {
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = _token_text(self._tokenizer, token_id)
        whole = REPLACEMENT not in text  # a part of a character has no bytes that we know
        return {
            "token": text,
            "logprob": max(logprob, MIN_LOGPROB),
            "bytes": list(text.encode()) if whole else None,
        }


class CompletionFormat:
    unary_object = "text_completion"
    stream_object = "text_completion"

    def __init__(self, tokenizer: Decoder, logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._offsets: dict[int, int] = {}  # by choice: characters of the tokens so far

    def choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        return {
            "index": index,
            "text": output.text,
            "logprobs": self._rows(index, output.logprobs) if self._logprobs else None,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }

    delta = choice

    def _rows(self, index: int, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        tokens = [_token_text(self._tokenizer, lp.token_id) for lp in logprobs]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [max(lp.logprob, MIN_LOGPROB) for lp in logprobs],
            "top_logprobs": [self._top(lp) for lp in logprobs],
            "text_offset": offsets,
        }

    def _top(self, lp: TokenLogprobs) -> dict[str, float]:
        """As OpenAI does: the alternatives, and the token itself if it is not among them."""
        top: dict[str, float] = {}
        for token_id, value in (*lp.top, (lp.token_id, lp.logprob)):
            top.setdefault(_token_text(self._tokenizer, token_id), max(value, MIN_LOGPROB))
        return top
