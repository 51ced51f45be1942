"""The weights that a draft head must have, under our names, and their shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from spectrue.workers.models.config import ModelConfig
from spectrue.workers.models.head_config import HeadConfig

Shapes = Mapping[str, tuple[int, ...]]


def with_found_options(model: ModelConfig, found: Shapes) -> ModelConfig:
    """`model` with the biases and norms of attention that the weights have.

    Configurations name them in several ways or not at all (vllm#12831); a bias that is there and
    would not be used is an error later on.
    """
    attention = "layers.0.self_attn."
    return replace(
        model,
        qkv_bias=model.qkv_bias or f"{attention}q_proj.bias" in found,
        attention_output_bias=(
            f"{attention}o_proj.bias" in found if found else model.attention_output_bias
        ),
        mlp_bias=model.mlp_bias or "layers.0.mlp.down_proj.bias" in found,
        qk_norm=model.qk_norm or f"{attention}q_norm.weight" in found,
    )


def decoder_weights(
    model: ModelConfig, layer: int, attention_inputs: int
) -> dict[str, tuple[int, ...]]:
    """A Llama-like decoder layer without its input norms."""
    hidden, inner = model.hidden_size, model.intermediate_size
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    name = f"layers.{layer}."
    weights: dict[str, tuple[int, ...]] = {f"{name}post_attention_layernorm.weight": (hidden,)}
    for part, rows, columns, bias in (
        ("self_attn.q_proj", q, attention_inputs, model.qkv_bias),
        ("self_attn.k_proj", kv, attention_inputs, model.qkv_bias),
        ("self_attn.v_proj", kv, attention_inputs, model.qkv_bias),
        ("self_attn.o_proj", hidden, q, model.attention_output_bias),
        ("mlp.gate_proj", inner, hidden, model.mlp_bias),
        ("mlp.up_proj", inner, hidden, model.mlp_bias),
        ("mlp.down_proj", hidden, inner, model.mlp_bias),
    ):
        weights[f"{name}{part}.weight"] = (rows, columns)
        if bias:
            weights[f"{name}{part}.bias"] = (rows,)
    if model.qk_norm:
        for part in ("q_norm", "k_norm"):
            weights[f"{name}self_attn.{part}.weight"] = (model.head_dim,)
    return weights


def head_weights(config: HeadConfig, found: Shapes) -> dict[str, tuple[int, ...]]:
    """Every weight of a head. `found` decides about those that a checkpoint may leave out."""
    model, hidden = config.model, config.model.hidden_size
    weights: dict[str, tuple[int, ...]] = {}
    for layer in range(model.num_layers):
        first3 = layer == 0 and config.method == "eagle3"
        weights |= decoder_weights(model, layer, 2 * hidden if first3 else hidden)
        if layer or config.method != "eagle":
            weights[f"layers.{layer}.input_layernorm.weight"] = (hidden,)
    if "embed_tokens.weight" in found:
        weights["embed_tokens.weight"] = (model.vocab_size, hidden)
    if "lm_head.weight" in found or config.draft_vocab_size != model.vocab_size:
        weights["lm_head.weight"] = (config.draft_vocab_size, hidden)
    if config.method == "eagle":
        weights["fc.weight"] = (hidden, hidden + config.target_hidden_size)
        if "fc.bias" in found:
            weights["fc.bias"] = (hidden,)
    elif config.method == "mtp":
        weights["eh_proj.weight"] = (hidden, 2 * hidden)
        weights |= {f"{name}.weight": (hidden,) for name in ("enorm", "hnorm", "norm")}
    else:
        weights |= _eagle3_weights(config, found)
    return weights


def _eagle3_weights(config: HeadConfig, found: Shapes) -> dict[str, tuple[int, ...]]:
    hidden, num_aux = config.model.hidden_size, max(1, len(config.aux_layers))
    inputs = num_aux * config.target_hidden_size
    weights: dict[str, tuple[int, ...]] = {
        "norm.weight": (hidden,),
        "layers.0.hidden_norm.weight": (hidden,),
    }
    if config.aux_layers or inputs != hidden or "fc.weight" in found:
        weights["fc.weight"] = (hidden, inputs)
    if config.norm_before_fc:
        weights["input_norm.weight"] = (inputs,)
    if config.fc_norm:
        for j in range(num_aux):
            weights[f"fc_norm.{j}.weight"] = (config.target_hidden_size,)
    return weights
