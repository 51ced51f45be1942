"""What a checkpoint says about its model, from a Hugging Face directory or GGUF metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spectrue.workers.errors import ConfigError, ModelLoadError

# family -> Hugging Face `model_type` and GGUF `general.architecture`
HF_FAMILIES = {"llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3"}
GGUF_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)  # transformers' keys
    rope_freq_factors: tuple[float, ...] = ()  # GGUF's llama3 scaling: divisors of inv_freq
    max_position_embeddings: int
    sliding_window: int | None = None  # of a GGUF file, which does not say of which layers
    layer_windows: tuple[int, ...] = ()  # of each layer, 0: all positions; (): none has one
    tie_word_embeddings: bool
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def max_context(self) -> int:
        """Tokens that are served exactly. A window of unknown layers acts only beyond itself."""
        return min(
            self.max_position_embeddings, self.sliding_window or self.max_position_embeddings
        )

    def check_context(self, max_model_len: int) -> None:
        if max_model_len > self.max_position_embeddings:
            raise ConfigError(
                f"max_model_len = {max_model_len} is more than the model's "
                f"max_position_embeddings = {self.max_position_embeddings}"
            )
        if max_model_len > self.max_context:
            raise ConfigError(
                f"max_model_len = {max_model_len} needs sliding-window attention, which is not "
                f"supported in GGUF: the model's sliding_window is {self.sliding_window}; set it "
                f"to at most that"
            )


def _require(ok: bool, path: Path, what: str) -> None:
    if not ok:
        raise ModelLoadError(f"{path}: {what}")


def _check_family(name: object, known: Mapping[str, str], path: Path) -> str:
    _require(
        isinstance(name, str) and name in known,
        path,
        f"architecture {name!r} is not supported; supported: {', '.join(sorted(known))}",
    )
    return known[str(name)]


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)


def read_json(file: Path) -> dict[str, Any]:
    """Raises ModelLoadError if the file is missing or is not JSON."""
    _require(file.is_file(), file.parent, f"no {file.name} in it")
    try:
        raw: dict[str, Any] = json.loads(file.read_text())
    except ValueError as error:
        raise ModelLoadError(f"{file} is not JSON: {error}") from error
    return raw


def eos_token_ids(path: Path, hf: Any) -> tuple[int, ...]:
    """Those of a transformers config and of the directory's `generation_config.json`."""
    eos = set(_ids(hf.eos_token_id))
    generation = path / "generation_config.json"
    if generation.is_file():
        eos.update(_ids(json.loads(generation.read_text()).get("eos_token_id")))
    return tuple(sorted(eos))


def _quantizes_weights(quantization: Mapping[str, Any] | None) -> bool:
    """Not if it only says that scales of an fp8 KV cache come along (compressed-tensors)."""
    if quantization is None:
        return False
    scheme = quantization.get("kv_cache_scheme") or {}
    fp8 = (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)
    known = quantization.get("quant_method") == "compressed-tensors"
    return bool(quantization.get("config_groups")) or not (known and fp8)


def config_from_hf(path: Path) -> ModelConfig:
    """Read `config.json` (and the EOS ids of `generation_config.json`) of a directory."""
    raw = read_json(path / "config.json")
    family = _check_family(raw.get("model_type"), HF_FAMILIES, path)

    from transformers import AutoConfig

    # Fills in each family's defaults, and brings old rope keys into one form.
    hf = AutoConfig.from_pretrained(str(path), local_files_only=True)
    rope = dict(hf.rope_parameters or {})
    rope_type = rope.get("rope_type", "default")
    _require(
        rope_type in ROPE_TYPES,
        path,
        f"rope type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}",
    )
    _require(hf.hidden_act == "silu", path, f"hidden_act {hf.hidden_act!r}: only silu is supported")
    partial = rope.get("partial_rotary_factor", getattr(hf, "partial_rotary_factor", None))
    _require(partial in (None, 1.0), path, f"partial_rotary_factor {partial} is not supported")
    _require(
        not _quantizes_weights(raw.get("quantization_config")),
        path,
        "quantized Hugging Face weights are not supported",
    )
    window = getattr(hf, "sliding_window", None)  # Qwen's is None unless use_sliding_window is set
    kinds = getattr(hf, "layer_types", None) or ["sliding_attention"] * hf.num_hidden_layers
    windows: tuple[int, ...] = ()
    if window:
        windows = tuple(window if kind == "sliding_attention" else 0 for kind in kinds)

    attention_bias = bool(getattr(hf, "attention_bias", False))
    return ModelConfig(
        family=family,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads or hf.num_attention_heads,
        head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        rms_norm_eps=hf.rms_norm_eps,
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        rope_scaling=rope if rope_type != "default" else {},
        max_position_embeddings=hf.max_position_embeddings,
        layer_windows=windows,
        tie_word_embeddings=bool(hf.tie_word_embeddings),
        qkv_bias=family == "qwen2" or attention_bias,
        attention_output_bias=attention_bias and family != "qwen2",
        mlp_bias=bool(getattr(hf, "mlp_bias", False)),
        qk_norm=family == "qwen3",
        eos_token_ids=eos_token_ids(path, hf),
        bos_token_id=hf.bos_token_id,
    )


def config_from_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],  # of every tensor in the file
    rope_factors: tuple[float, ...] = (),
) -> ModelConfig:
    arch = metadata.get("general.architecture")
    family = _check_family(arch, GGUF_FAMILIES, path)

    def get(key: str, *default: Any) -> Any:
        value = metadata.get(f"{arch}.{key}", *default)
        _require(value is not None or bool(default), path, f"no {arch}.{key} in its metadata")
        return value

    _require(not get("expert_count", 0), path, "mixture-of-experts models are not supported")
    hidden, heads = get("embedding_length"), get("attention.head_count")
    kv_heads = get("attention.head_count_kv", heads)
    _require(
        isinstance(heads, int) and isinstance(kv_heads, int),
        path,
        "a head count that differs between layers is not supported",
    )
    head_dim = get("attention.key_length", hidden // heads)
    rotary = get("rope.dimension_count", head_dim)
    _require(rotary == head_dim, path, f"rope.dimension_count {rotary} of {head_dim}: only all")
    _require("token_embd.weight" in shapes, path, "no token_embd.weight in it")

    eos = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    return ModelConfig(
        family=family,
        vocab_size=shapes["token_embd.weight"][0],
        hidden_size=hidden,
        intermediate_size=get("feed_forward_length"),
        num_layers=get("block_count"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=get("attention.layer_norm_rms_epsilon"),
        rope_theta=float(get("rope.freq_base", 10000.0)),
        rope_scaling=_gguf_rope_scaling(path, get),
        rope_freq_factors=rope_factors,
        max_position_embeddings=get("context_length"),
        sliding_window=get("attention.sliding_window", None) or None,
        tie_word_embeddings="output.weight" not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        attention_output_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
        qk_norm="blk.0.attn_q_norm.weight" in shapes,
        eos_token_ids=tuple(sorted({e for e in eos if e is not None})),
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
    )


def _gguf_rope_scaling(path: Path, get: Any) -> dict[str, Any]:
    kind = get("rope.scaling.type", "none")
    if kind == "none":
        return {}
    _require(kind in ("linear", "yarn"), path, f"rope scaling {kind!r} is not supported in GGUF")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": get("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = get("rope.scaling.original_context_length")
    return scaling
