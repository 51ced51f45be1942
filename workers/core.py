"""The data that crosses the engine's seams: plain Python, no torch, picklable."""

from __future__ import annotations

import math
import time
from collections.abc import Sized
from dataclasses import dataclass, field
from typing import Literal

from spectrue.workers.errors import InvalidRequestError

FinishReason = Literal["stop", "length", "abort", "error"]

MIN_TEMPERATURE = 1e-6  # below it a float32 logit divided by the temperature overflows
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 256
MAX_BAD_WORDS = 256  # token sequences, each at most MAX_STOP_LENGTH long
MAX_STOP_LENGTH = 256


MAX_SHOWN = 100  # characters of a client's value that an error repeats


def shown(value: object) -> str:
    """`value` for an error message, which never repeats long input."""
    return cut(repr(value))


def cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def _check(ok: bool, param: str, rule: str, value: object) -> None:
    if not ok:
        raise InvalidRequestError(f"{param} must be {rule}, got {shown(value)}", param)


def _check_count(ok: bool, param: str, rule: str, items: Sized, what: str) -> None:
    """For lists: says how many there are, and not which."""
    if not ok:
        raise InvalidRequestError(f"{param} must be {rule}, got {len(items)} {what}", param)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request wants its tokens chosen; applied in this order (docs/sampling.md).

    Raises InvalidRequestError, naming the field, for a value that cannot be honoured.
    """

    repetition_penalty: float = 1.0  # over prompt and output, as in Hugging Face
    presence_penalty: float = 0.0  # over output only, as OpenAI does
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that never appear in the output
    min_tokens: int = 0  # EOS and stop tokens are masked before it
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 or -1 keeps all
    top_p: float = 1.0
    min_p: float = 0.0

    seed: int | None = None  # given: verified by `match`, so the text depends on nothing else
    max_tokens: int = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None  # number of alternatives beside the token itself; None is off
    logprobs_mode: Literal["raw", "processed"] = "raw"
    num_speculative_tokens: int | None = None  # None takes the engine's, 0 turns drafting off

    def __post_init__(self) -> None:
        for name in (
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "temperature",
            "top_p",
            "min_p",
        ):
            _check(math.isfinite(getattr(self, name)), name, "a finite number", getattr(self, name))
        _check(
            0.01 <= self.repetition_penalty <= 100,
            "repetition_penalty",
            "in [0.01, 100]",
            self.repetition_penalty,
        )
        for name in ("presence_penalty", "frequency_penalty"):
            _check(-2 <= getattr(self, name) <= 2, name, "in [-2, 2]", getattr(self, name))
        _check(
            self.temperature == 0 or MIN_TEMPERATURE <= self.temperature <= 1e6,
            "temperature",
            f"0 (greedy) or in [{MIN_TEMPERATURE}, 1e6]",
            self.temperature,
        )
        _check(-1 <= self.top_k < 2**31, "top_k", "-1 or 0 (all) or a positive int32", self.top_k)
        _check(0 < self.top_p <= 1, "top_p", "in (0, 1]", self.top_p)
        _check(0 <= self.min_p <= 1, "min_p", "in [0, 1]", self.min_p)
        _check(
            self.seed is None or -(2**63) <= self.seed < 2**63,
            "seed",
            "a 64-bit integer",
            self.seed,
        )
        _check(self.max_tokens >= 1, "max_tokens", "at least 1", self.max_tokens)
        _check(
            0 <= self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"in [0, max_tokens = {self.max_tokens}]",
            self.min_tokens,
        )
        _check_count(
            len(self.stop) <= MAX_STOP_STRINGS
            and all(0 < len(s) <= MAX_STOP_LENGTH for s in self.stop),
            "stop",
            f"at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_LENGTH} characters",
            self.stop,
            "strings",
        )
        _check_count(
            len(self.logit_bias) <= MAX_LOGIT_BIAS
            and all(-100 <= bias <= 100 for _, bias in self.logit_bias),
            "logit_bias",
            f"at most {MAX_LOGIT_BIAS} entries in [-100, 100]",
            self.logit_bias,
            "entries",
        )
        _check_count(
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
            "stop_token_ids",
            f"at most {MAX_STOP_TOKEN_IDS} token ids",
            self.stop_token_ids,
            "ids",
        )
        _check_count(
            len(self.bad_words) <= MAX_BAD_WORDS
            and all(0 < len(word) <= MAX_STOP_LENGTH for word in self.bad_words),
            "bad_words",
            f"at most {MAX_BAD_WORDS} sequences of 1 to {MAX_STOP_LENGTH} tokens",
            self.bad_words,
            "sequences",
        )
        _check(
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            "logprobs",
            f"in [0, {MAX_LOGPROBS}]",
            self.logprobs,
        )
        _check(
            self.num_speculative_tokens is None or self.num_speculative_tokens >= 0,
            "speculative.num_speculative_tokens",
            "at least 0",
            self.num_speculative_tokens,
        )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def check_token_ids(self, vocab_size: int) -> None:
        """Raise InvalidRequestError for a token id that the model does not have."""
        ids = {
            "logit_bias": [token for token, _ in self.logit_bias],
            "bad_words": [token for word in self.bad_words for token in word],
            "stop_token_ids": list(self.stop_token_ids),
        }
        for name, tokens in ids.items():
            for token in tokens:
                _check(0 <= token < vocab_size, name, f"token ids in [0, {vocab_size})", token)
        _check_count(
            len({word[0] for word in self.bad_words if len(word) == 1} | set(self.stop_token_ids))
            < vocab_size,
            "stop_token_ids",
            "such that with bad_words they leave a token to choose",
            self.stop_token_ids,
            "ids",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to complete, as the ingress hands it to the engine."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    choice: int = 0  # index among the n choices of one HTTP request; part of the noise key
    arrival_time: float = field(default_factory=time.time)  # seconds since the epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Natural logarithms of one emitted token's law; `top` is sorted, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def accept_length(num_accepted_tokens: int, num_verify_steps: int) -> float:
    """1 + raw accepted drafts, a mean over verify steps, those with k = 0 included."""
    return 1 + num_accepted_tokens / max(num_verify_steps, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecDecodeStats:
    """One request's speculation so far. Raw accepts, before stop cuts (vLLM's meanings)."""

    num_verify_steps: int = 0  # steps that committed tokens, k = 0 included
    num_drafts: int = 0  # steps with k > 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    verify_path: Literal["greedy", "sampling"] = "greedy"
    verify_method: Literal["greedy", "match", "rejection"] = "greedy"
    simulated: bool = False  # acceptance was made up for a benchmark: the text means nothing

    @property
    def accept_length(self) -> float:
        """1 + accepted drafts, a mean over verify steps."""
        return accept_length(self.num_accepted_tokens, self.num_verify_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What became known about a request since its last output. `finish_reason` ends it, once.

    `token_ids` are what `usage` counts: a stop token or the tokens that spell a stop string are in
    it, tokens after the stop are not. `text` is the new text, already cut before a stop string.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token id if they were asked for
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or string that ended it; None for EOS
    error: str | None = None  # set with finish_reason "error" (and "abort" by the engine's death)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0  # all of them so far
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    spec_decode: SpecDecodeStats = SpecDecodeStats()


# -- scheduler -> workers ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """A request that enters (or, after preemption, re-enters) a slot of the workers' buffers."""

    slot: int
    request: Request
    seed: int  # the client's, or drawn from entropy
    output_token_ids: tuple[int, ...] = ()  # already committed before a preemption
    num_draft_computed_tokens: int = 0  # of the prefix hit, how much the drafter has KV for too


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRequest:
    """One request's share of a step. Decoding: the last committed token and k drafts."""

    slot: int
    num_computed_tokens: int  # tokens whose KV is valid; the position of the first token fed
    num_scheduled_tokens: int  # committed tokens fed, drafts not included
    num_draft_tokens: int  # k of this step; 0 while prefilling
    samples: bool  # False for a chunk of a prompt that is not its last
    new_block_ids: tuple[int, ...] = ()  # appended to the slot's block table
    tree_depth: int = 0  # levels of the tree that the drafts are; 0: they are a chain
    # The step before is in flight. What that one commits is known on the device alone, and comes on
    # top of `num_computed_tokens`.
    ahead: bool = False

    @property
    def depth(self) -> int:
        """The most drafts that can be accepted."""
        return self.tree_depth or self.num_draft_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """The plan of one step, the same for every rank."""

    scheduled: tuple[ScheduledRequest, ...]
    new_requests: tuple[NewRequest, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(s.num_scheduled_tokens + s.num_draft_tokens for s in self.scheduled)


# -- workers -> engine ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotOutput:
    """What a step committed for one scheduled request, before stop cuts."""

    slot: int
    token_ids: tuple[int, ...] = ()  # accepted drafts, then the recovered, drawn or bonus token
    num_draft_tokens: int = 0  # as verified: a drafter may propose fewer than k
    num_accepted_tokens: int = 0  # raw accepted drafts
    num_draft_computed_tokens: int = 0  # tokens whose KV the drafter holds now
    logprobs: tuple[TokenLogprobs, ...] = ()
    verify_method: Literal["greedy", "match", "rejection"] = "greedy"
    error: str | None = None  # the request must end: its logits were not numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """One step of rank 0. Times in seconds."""

    outputs: tuple[SlotOutput, ...]
    guards: dict[str, int] = field(default_factory=dict)  # guard -> times fired
    draft_time: float = 0.0
    model_time: float = 0.0
    verify_time: float = 0.0
