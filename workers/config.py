"""The engine's configuration: one frozen tree, which `deploy/config.py` parses into."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from spectrue.workers.errors import ConfigError

DrafterName = Literal["none", "ngram", "draft_model"]
VerifyMethod = Literal["auto", "match", "rejection"]
DraftSampling = Literal["auto", "greedy", "sampled", "coupled"]
DType = Literal["auto", "bfloat16", "float16", "float32"]
Device = Literal["auto", "cpu", "cuda"]


def _check(ok: bool, setting: str, rule: str, value: object) -> None:
    if not ok:
        raise ConfigError(f"{setting} must be {rule}, got {value!r}")


def _check_choice(setting: str, choices: Any, value: object) -> None:
    """`choices` is a Literal. Callers without pydantic, such as `generate`, rely on this."""
    names = get_args(choices)
    _check(value in names, setting, f"one of {', '.join(names)}", value)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """What the operator wrote; `policy.resolve_speculative` turns every `auto` into a value."""

    drafter: DrafterName = "ngram"
    num_speculative_tokens: int = 3  # k: most draft tokens a request gets in a step
    draft_model: str | None = None  # path of the drafter's checkpoint, for drafter="draft_model"
    verify_method: VerifyMethod = "auto"
    draft_sampling: DraftSampling = "auto"
    reproducible: bool = False  # every row by `match`: text depends on the seed alone
    ngram_min: int = 2  # shortest suffix that is looked up
    ngram_max: int = 4

    def __post_init__(self) -> None:
        p = "speculative."
        _check_choice(p + "drafter", DrafterName, self.drafter)
        _check_choice(p + "verify_method", VerifyMethod, self.verify_method)
        _check_choice(p + "draft_sampling", DraftSampling, self.draft_sampling)
        k = self.num_speculative_tokens
        _check(0 <= k <= 16, p + "num_speculative_tokens", "in [0, 16]", k)
        _check(self.ngram_min >= 1, p + "ngram_min", "at least 1", self.ngram_min)
        _check(
            self.ngram_max >= self.ngram_min,
            p + "ngram_max",
            f"at least {p}ngram_min = {self.ngram_min}",
            self.ngram_max,
        )
        if (self.drafter == "draft_model") != (self.draft_model is not None):
            raise ConfigError(
                f"{p}draft_model (a path) and {p}drafter: draft_model need each other, got "
                f"drafter={self.drafter!r}, draft_model={self.draft_model!r}"
            )

    @property
    def max_draft_tokens(self) -> int:
        return 0 if self.drafter == "none" else self.num_speculative_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One TP group. None means: decided from the model or the machine at start, and logged."""

    model: str
    served_model_name: str | None = None
    dtype: DType = "auto"
    device: Device = "auto"
    tp_size: int = 1
    cpu_threads: int | None = None  # per rank
    max_model_len: int | None = None  # tokens, prompt and output
    max_num_seqs: int = 32  # requests that run at once
    max_num_batched_tokens: int = 512  # token budget of a step; longer prompts are chunked
    max_queue_len: int = 256  # requests that wait; more are shed
    block_size: int = 16  # tokens
    num_kv_blocks: int | None = None
    kv_cache_bytes: int = 512 * 2**20  # used when num_kv_blocks is None
    enable_prefix_caching: bool = True
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)

    def __post_init__(self) -> None:
        _check_choice("dtype", DType, self.dtype)
        _check_choice("device", Device, self.device)
        for name in (
            "tp_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_queue_len",
            "block_size",
            "kv_cache_bytes",
        ):
            _check(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for name in ("cpu_threads", "max_model_len", "num_kv_blocks"):
            value = getattr(self, name)
            _check(value is None or value >= 1, name, "at least 1", value)
        _check(
            self.max_num_batched_tokens >= self.max_num_seqs,  # else some would never get a turn
            "max_num_batched_tokens",
            f"at least max_num_seqs = {self.max_num_seqs}",
            self.max_num_batched_tokens,
        )

    @property
    def name(self) -> str:
        return self.served_model_name or self.model.rstrip("/").rsplit("/", 1)[-1]

    def replace(self, **changes: Any) -> EngineConfig:
        return replace(self, **changes)
