"""What a draft head's checkpoint says of it: EAGLE, EAGLE3 and speculators configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from spectrue.workers.config import AuxLayerConvention
from spectrue.workers.errors import ConfigError, ModelLoadError
from spectrue.workers.models.config import ROPE_TYPES, ModelConfig

HeadMethod = Literal["eagle", "eagle3", "mtp"]
_LAYER_KEYS = (  # of LlamaConfig, which fills in what is missing
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "max_position_embeddings",
    "attention_bias",
    "mlp_bias",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """A draft head. `aux_layers` are the target's decoder layers whose outputs it reads."""

    method: HeadMethod
    model: ModelConfig  # of its decoder layers; vocab_size is the target's
    draft_vocab_size: int
    target_hidden_size: int
    aux_layers: tuple[int, ...] = ()  # ascending; (): it reads the last hidden states
    aux_reason: str = ""  # where aux_layers come from
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False  # the normalised hidden states are those recycled (EAGLE-3.1)
    norm_before_residual: bool = False


def _get(raw: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """From the top level or, as SpecForge writes it, from `eagle_config`."""
    for section in (raw, raw.get("eagle_config") or {}):
        if section.get(key) is not None:
            return section[key]
    return default


def llama_config(raw: Mapping[str, Any], path: Path) -> ModelConfig:
    """The decoder layers of a head; biases and norms of Q and K are for the weights to say."""
    from transformers import LlamaConfig

    hf: Any = LlamaConfig(**{k: raw[k] for k in _LAYER_KEYS if raw.get(k) is not None})
    rope = dict(hf.rope_parameters or {})
    rope_type = rope.get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        raise ModelLoadError(
            f"{path}: rope type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelLoadError(f"{path}: hidden_act {raw['hidden_act']!r}: only silu is supported")
    return ModelConfig(
        family="llama",
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=hf.head_dim,
        rms_norm_eps=hf.rms_norm_eps,
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        rope_scaling=rope if rope_type != "default" else {},
        max_position_embeddings=hf.max_position_embeddings,
        tie_word_embeddings=False,
        qkv_bias=bool(raw.get("attention_bias") or raw.get("qkv_bias")),
        attention_output_bias=bool(raw.get("attention_bias")),
        mlp_bias=bool(raw.get("mlp_bias")),
    )


def head_config(
    raw: Mapping[str, Any],
    path: Path,
    method: HeadMethod,
    target: ModelConfig,
    convention: AuxLayerConvention = "auto",
) -> HeadConfig:
    """Read the config.json of an EAGLE or EAGLE3 head, of SafeAILab, SpecForge or speculators.

    Raises ModelLoadError for what is not supported and ConfigError for what does not fit the
    target.
    """
    _refuse_lossy(raw, path)
    if _get(raw, "mask_hidden") or _get(raw, "parallel_drafting"):
        raise ModelLoadError(f"{path} is a parallel (P-EAGLE) head, which is not supported")
    model = llama_config(raw.get("transformer_layer_config") or raw, path)
    if model.vocab_size != target.vocab_size:
        raise ConfigError(
            f"speculative.draft_model must be a head of the target's vocabulary of "
            f"{target.vocab_size} tokens, {path} is of one of {model.vocab_size}"
        )
    declared = raw.get("target_hidden_size")
    if declared is not None and declared != target.hidden_size:
        raise ConfigError(
            f"speculative.draft_model must be a head of a target with hidden_size "
            f"{target.hidden_size}, {path} is of one with {declared}"
        )
    if method != "eagle3":
        return HeadConfig(
            method=method,
            model=model,
            draft_vocab_size=model.vocab_size,
            target_hidden_size=target.hidden_size,
        )
    aux, reason = _aux_layers(raw, path, target.num_layers, convention)
    return HeadConfig(
        method=method,
        model=model,
        draft_vocab_size=raw.get("draft_vocab_size") or model.vocab_size,
        target_hidden_size=target.hidden_size,
        aux_layers=aux,
        aux_reason=reason,
        norm_before_fc=bool(_get(raw, "norm_before_fc")),
        fc_norm=bool(_get(raw, "fc_norm") or _get(raw, "use_aux_norm")),
        norm_output=bool(_get(raw, "norm_output")),
        # speculators' own default; vLLM reads True where the key is missing.
        norm_before_residual=bool(_get(raw, "norm_before_residual")),
    )


def _aux_layers(
    raw: Mapping[str, Any], path: Path, num_layers: int, convention: AuxLayerConvention
) -> tuple[tuple[int, ...], str]:
    """Decoder layers whose outputs the head was trained on, and how we know.

    Engines agree on the default, hidden states entering layers 2, N/2 and N-3, but not on what an
    explicit id counts: SGLang and SpecForge write the layer whose output is read, vLLM and
    speculators the number of layers that have run. They concatenate in the order of the layers.
    """
    if _get(raw, "use_aux_hidden_state") is False:
        return (), "use_aux_hidden_state is false: the last hidden states"
    nested = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    ids = _get(raw, "eagle_aux_hidden_state_layer_ids")
    if ids is None:
        ids = (1, num_layers // 2 - 1, num_layers - 4)
        reason = "the default of all engines (no ids in config.json)"
    else:
        if convention == "auto":
            sglang = nested is not None and raw.get("speculators_model_type") is None
            convention = "layer_output" if sglang else "layers_run"
            reason = f"ids {list(ids)} read as {convention}, the convention of this format"
        else:
            reason = f"ids {list(ids)} read as {convention}, as set"
        ids = [i - (convention == "layers_run") for i in ids]
    layers = tuple(sorted(ids))
    if len(set(layers)) != len(layers) or not all(0 <= i < num_layers for i in layers):
        raise ConfigError(
            f"{path} reads the outputs of layers {list(layers)} ({reason}), but the target has "
            f"{num_layers}; set speculative.aux_layer_convention, or "
            f"eagle_aux_hidden_state_layer_ids in its config.json"
        )
    return layers, reason


def _refuse_lossy(raw: Mapping[str, Any], path: Path) -> None:
    """speculators can ask for acceptance of drafts that the target would not have drawn."""
    for proposal in (raw.get("speculators_config") or {}).get("proposal_methods", ()):
        accept_k = proposal.get("verifier_accept_k", 1)
        tolerance = proposal.get("accept_tolerance", 0.0)
        if accept_k not in (None, 1) or tolerance:
            raise ModelLoadError(
                f"{path} asks for lossy acceptance (verifier_accept_k = {accept_k}, "
                f"accept_tolerance = {tolerance}); this engine is exact: set them to 1 and 0"
            )
