"""The engine's configuration: one frozen tree, which `deploy/config.py` parses into."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from spectrue.workers.errors import ConfigError

DrafterName = Literal["none", "ngram", "draft_model", "eagle", "eagle3", "mtp"]
HAS_CHECKPOINT = ("draft_model", "eagle", "eagle3")  # of their own; that of mtp is the target's
VerifyMethod = Literal["auto", "match", "rejection"]
DraftSampling = Literal["auto", "greedy", "sampled", "coupled"]
Depth = Literal["fixed", "adaptive"]
TreeKind = Literal["dynamic", "static"]
# What the ids of a head's auxiliary layers count: SGLang and SpecForge write the layer whose output
# is read, vLLM and speculators the number of layers that have run, which is one more.
AuxLayerConvention = Literal["auto", "layer_output", "layers_run"]
DType = Literal["auto", "bfloat16", "float16", "float32"]
Device = Literal["auto", "cpu", "cuda"]
KVCacheDType = Literal["auto", "bfloat16", "float16", "float32", "fp8"]
LoadFormat = Literal["auto", "dummy"]


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
    num_speculative_tokens: int = 3  # k: most draft tokens of a request in a step; levels of a tree
    tree_topk: int = 1  # children that a node of the draft tree gets; 1: drafts are a chain
    tree_size: int | None = None  # drafts of a tree; None: tree_topk * num_speculative_tokens
    tree_kind: TreeKind = "dynamic"  # by the drafter's probabilities; static: always one shape
    depth: Depth = "fixed"  # adaptive: each step's k, from 0 up, by what is measured while serving
    depth_schedule: tuple[tuple[int, int, int], ...] = ()  # k by batch size: (from, to, k), ...
    simulated_acceptance: tuple[float, ...] = ()  # benchmarks: draft i is accepted at this rate
    simulated_accept_length: float | None = None  # the same, by 1 + the sum of those rates
    draft_model: str | None = None  # checkpoint of drafter draft_model, eagle or eagle3
    token_map: str | None = None  # of an eagle head: a file with the target ids that it drafts
    aux_layer_convention: AuxLayerConvention = "auto"  # of an eagle3 checkpoint
    strict_draft: bool = False  # refuse to start with a head that drafts nothing right
    draft_top_k: int = 0  # cuts the draft law on top of the request's top_k; 0 is off
    draft_top_p: float = 1.0
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
        _check_choice(p + "depth", Depth, self.depth)
        self._check_schedule()
        self._check_simulation()
        self._check_tree()
        _check_choice(p + "aux_layer_convention", AuxLayerConvention, self.aux_layer_convention)
        _check(self.draft_top_k >= 0, p + "draft_top_k", "at least 0", self.draft_top_k)
        _check(0 < self.draft_top_p <= 1, p + "draft_top_p", "in (0, 1]", self.draft_top_p)
        if self.token_map is not None and self.drafter != "eagle":
            raise ConfigError(
                f"{p}token_map is for {p}drafter: eagle (an eagle3 head has its own d2t), not "
                f"{self.drafter}"
            )
        if (self.drafter in HAS_CHECKPOINT) != (self.draft_model is not None):
            raise ConfigError(
                f"{p}draft_model (a path) and {p}drafter: {', '.join(HAS_CHECKPOINT)} need each "
                f"other, got drafter={self.drafter!r}, draft_model={self.draft_model!r}"
            )

    @property
    def max_draft_tokens(self) -> int:
        return 0 if self.drafter == "none" else self.num_speculative_tokens

    @property
    def simulates(self) -> bool:
        return bool(self.simulated_acceptance) or self.simulated_accept_length is not None

    def _check_tree(self) -> None:
        p, k, size = "speculative.", self.num_speculative_tokens, self.tree_size
        _check_choice(p + "tree_kind", TreeKind, self.tree_kind)
        _check(1 <= self.tree_topk <= 16, p + "tree_topk", "in [1, 16]", self.tree_topk)
        if size is None:
            return
        if self.tree_topk == 1:
            raise ConfigError(f"{p}tree_size is of a tree: it needs {p}tree_topk of at least 2")
        rule = f"in [num_speculative_tokens = {k}, 256]: a tree has room for one whole branch"
        _check(k <= size <= 256, p + "tree_size", rule, size)

    def _check_schedule(self) -> None:
        p, k = "speculative.", self.num_speculative_tokens
        if self.depth_schedule and self.depth != "fixed":
            raise ConfigError(
                f"{p}depth_schedule and {p}depth: {self.depth} both choose k, give one of them"
            )
        expected = 1
        for entry in self.depth_schedule:
            _check(len(entry) == 3, p + "depth_schedule", "entries [from, to, k]", entry)
            low, high, depth = entry
            rule = f"batch sizes without gap or overlap: [{expected}, to, k] next"
            _check(low == expected <= high, p + "depth_schedule", rule, list(entry))
            rule = f"k in [0, num_speculative_tokens = {k}]"
            _check(0 <= depth <= k, p + "depth_schedule", rule, list(entry))
            expected = high + 1

    def _check_simulation(self) -> None:
        p, k = "speculative.", self.max_draft_tokens
        rates, length = self.simulated_acceptance, self.simulated_accept_length
        if rates and length is not None:
            raise ConfigError(
                f"{p}simulated_acceptance and {p}simulated_accept_length say the same, give one"
            )
        if rates:
            falling = all(1 >= a >= b >= 0 for a, b in zip(rates, (*rates[1:], 0.0), strict=True))
            rule = f"num_speculative_tokens = {k} rates in [0, 1] that do not rise"
            _check(falling and len(rates) == k, p + "simulated_acceptance", rule, list(rates))
        if length is not None:
            rule = f"in [1, {k + 1}], which is 1 + num_speculative_tokens"
            _check(1 <= length <= k + 1, p + "simulated_accept_length", rule, length)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One TP group. None means: decided from the model or the machine at start, and logged."""

    model: str
    served_model_name: str | None = None
    dtype: DType = "auto"
    kv_cache_dtype: KVCacheDType = "auto"  # auto: the model's; fp8: e4m3, the drafter's cache too
    load_format: LoadFormat = "auto"  # dummy: random weights of config.json's shapes, for speed
    device: Device = "auto"
    tp_size: int = 1
    cpu_threads: int | None = None  # per rank
    max_model_len: int | None = None  # tokens, prompt and output
    max_num_seqs: int = 32  # requests that run at once
    max_num_batched_tokens: int = 512  # token budget of a step; longer prompts are chunked
    max_queue_len: int = 256  # requests that wait; more are shed
    block_size: int = 16  # tokens
    num_kv_blocks: int | None = None
    kv_cache_bytes: int | None = None  # without num_kv_blocks; default: 512 MiB, or 90 % of a GPU
    enable_prefix_caching: bool = True
    enable_graphs: bool = True  # CUDA and HIP graphs of decode steps; nothing on a CPU
    warm_up_seconds: float = 20.0  # graphs captured before it is ready, at most; 0: at first use
    enable_p2p_all_reduce: bool = True  # between GPUs, for small sums; nothing without tp_size > 1
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)

    def __post_init__(self) -> None:
        _check_choice("dtype", DType, self.dtype)
        _check_choice("kv_cache_dtype", KVCacheDType, self.kv_cache_dtype)
        _check_choice("load_format", LoadFormat, self.load_format)
        _check_choice("device", Device, self.device)
        for name in (
            "tp_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_queue_len",
            "block_size",
        ):
            _check(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        seconds = self.warm_up_seconds
        _check(0 <= seconds < float("inf"), "warm_up_seconds", "at least 0", seconds)
        for name in ("cpu_threads", "max_model_len", "num_kv_blocks", "kv_cache_bytes"):
            value = getattr(self, name)
            _check(value is None or value >= 1, name, "at least 1", value)
        _check(
            self.max_num_batched_tokens >= self.max_num_seqs,  # else some would never get a turn
            "max_num_batched_tokens",
            f"at least max_num_seqs = {self.max_num_seqs}",
            self.max_num_batched_tokens,
        )
        schedule = self.speculative.depth_schedule
        _check(
            not schedule or schedule[-1][1] >= self.max_num_seqs,
            "speculative.depth_schedule",
            f"a schedule that reaches max_num_seqs = {self.max_num_seqs}",
            [list(entry) for entry in schedule],
        )

    @property
    def name(self) -> str:
        return self.served_model_name or self.model.rstrip("/").rsplit("/", 1)[-1]

    def replace(self, **changes: Any) -> EngineConfig:
        return replace(self, **changes)
