"""Which model class serves which family, and the weights that it must find."""

from __future__ import annotations

from pathlib import Path

from spectrue.workers.models.config import HF_FAMILIES, ModelConfig, read_json
from spectrue.workers.models.llama import LlamaModel

MODELS: dict[str, type[LlamaModel]] = {
    "llama": LlamaModel,
    "mistral": LlamaModel,
    "qwen2": LlamaModel,
    "qwen3": LlamaModel,
}


def is_generic(path: Path) -> bool:
    """Whether no model file of ours serves this checkpoint, so that transformers' code does."""
    if not path.is_dir():
        return False
    return read_json(path / "config.json").get("model_type") not in HF_FAMILIES


def expected_weights(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name (Hugging Face's) -> shape of every weight of a whole, unsharded model."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (q, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q, config.attention_output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}

    weights: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        weights["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        for name, (rows, columns, bias) in linears.items():
            weights[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                weights[f"{prefix}{name}.bias"] = (rows,)
        for name, size in norms.items():
            weights[f"{prefix}{name}.weight"] = (size,)
    return weights
