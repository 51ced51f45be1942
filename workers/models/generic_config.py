"""Which transformers models we can serve by their own code, and what the engine must know of them.

A draft that is rejected is taken back by not counting its KV. That needs a model whose every layer
is causal attention over keys and values: a recurrent state cannot be taken back (mlx-lm issue
1109). What the configuration cannot tell, `generic_check.py` finds out from the model itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spectrue.workers.errors import ModelLoadError
from spectrue.workers.models.config import ModelConfig, eos_token_ids, read_json

ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
# Their frequencies follow the longest request of a batch: a text would depend on its company.
UNSTABLE_ROPE = {"dynamic"}
TAKE_BACK = (
    "a rejected draft is taken back by dropping its keys and values, so every layer must be full "
    "or sliding-window attention over a KV cache"
)


def read_hf_config(path: Path) -> Any:
    """The transformers configuration of a directory. Raises ModelLoadError, with the reason, if
    it is not a causal language model that can take drafts back."""
    raw = read_json(path / "config.json")
    kind = raw.get("model_type")
    if "quantization_config" in raw:
        raise ModelLoadError(f"{path}: quantized Hugging Face weights are not supported")

    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        config = AutoConfig.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
    except (ValueError, KeyError, OSError) as error:
        raise ModelLoadError(
            f"{path}: model type {kind!r} is unknown to the installed transformers: {error}"
        ) from error

    def require(ok: bool, why: str) -> None:
        if not ok:
            raise ModelLoadError(f"{path}: model type {kind!r} is not supported: {why}")

    require(not config.is_encoder_decoder, "it is an encoder-decoder model")
    require(
        config.get_text_config() is config and not hasattr(config, "vision_config"),
        "it is multi-modal; only text models are served",
    )
    require(type(config) in MODEL_FOR_CAUSAL_LM_MAPPING, "it is no causal language model")
    stateful = getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "_is_stateful", False)
    other = sorted(set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS)
    require(not other, f"it has layers of type {', '.join(other)}; {TAKE_BACK}")
    require(not stateful, f"it is recurrent; {TAKE_BACK}")
    unstable = UNSTABLE_ROPE & {rope.get("rope_type") for rope in _ropes(config)}
    require(not unstable, f"its rope type {', '.join(unstable)} depends on the batch")
    require(
        isinstance(getattr(config, "max_position_embeddings", None), int),
        "it does not say max_position_embeddings",
    )
    return config


def _ropes(config: Any) -> Iterator[Mapping[str, Any]]:
    """The rope parameters, of each layer type where they differ."""
    rope = getattr(config, "rope_parameters", None) or {}
    yield rope
    yield from (part for part in rope.values() if isinstance(part, Mapping))


def max_positions(config: Any) -> int:
    """Positions at which a token's rotation does not depend on its company.

    longrope has one set of frequencies for short batches and one for long: the short is served.
    """
    limits: list[int] = [config.max_position_embeddings]
    for rope in _ropes(config):
        if rope.get("rope_type") == "longrope":
            original = rope.get("original_max_position_embeddings")
            limits.append(original or config.original_max_position_embeddings)
    return min(limits)


def model_config(
    path: Path,
    hf: Any,
    *,
    vocab_size: int,  # of the logits
    num_heads: int,
    num_kv_heads: int,  # of the whole model
    head_dim: int,  # of the pool
    windows: tuple[int, ...],  # by layer
) -> ModelConfig:
    rope = next(r for r in (*_ropes(hf), {}) if "rope_theta" in r or not r)
    return ModelConfig(
        family=hf.model_type,
        vocab_size=vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=getattr(hf, "intermediate_size", None) or 0,
        num_layers=hf.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=getattr(hf, "rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        max_position_embeddings=max_positions(hf),
        layer_windows=windows,
        tie_word_embeddings=bool(hf.tie_word_embeddings),
        eos_token_ids=eos_token_ids(path, hf),
        bos_token_id=hf.bos_token_id,
    )
