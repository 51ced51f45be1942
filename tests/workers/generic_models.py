"""Tiny random models that transformers' own code runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ..conftest import make_tiny_model
from .heads import random_weights

MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
WINDOW = 8
OPTIONS: dict[str, dict[str, Any]] = {
    # Latent attention: keys of 24 dimensions, values of 12. The first layer dense, then experts.
    "deepseek_v3": {
        "kv_heads": 4,
        "head_dim": 8,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        **MOE,
    },
    "qwen3_moe": {"num_experts": 8, **MOE},
    # A window in one layer of two, a scale of its own, capped logits.
    "gemma3_text": {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 24,
        "final_logit_softcapping": 5.0,
        "tie_word_embeddings": True,
    },
    # ... and capped scores.
    "gemma2": {
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
        "tie_word_embeddings": True,
    },
}


def make_generic(path: Path, family: str, **changes: Any) -> Path:
    return make_tiny_model(path, family, seed=3, **{**OPTIONS.get(family, {}), **changes})


# Targets whose published checkpoints have a multi-token-prediction layer.
MTP: dict[str, dict[str, Any]] = {
    "deepseek_v3": OPTIONS["deepseek_v3"],
    "glm4_moe": {
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "use_qk_norm": True,
        **MOE,
    },
}


def make_with_mtp(path: Path, family: str, *, copying: bool = False) -> Path:
    """Two layers, and one more that the checkpoint calls an MTP layer, in DeepSeek's layout.

    `copying`: the next token is a function of the last one alone, and the MTP layer knows it.
    """
    make_tiny_model(path, family, seed=3, **MTP[family], layers=3)
    file, hidden, name = path / "model.safetensors", 64, "model.layers.2"
    weights = load_file(file)
    config = json.loads((path / "config.json").read_text())
    config |= {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    for kinds in ("layer_types", "mlp_layer_types"):
        if config.get(kinds):
            config[kinds] = config[kinds][:2]
    (path / "config.json").write_text(json.dumps(config))
    shapes = {
        f"{name}.eh_proj.weight": (hidden, 2 * hidden),
        f"{name}.enorm.weight": (hidden,),
        f"{name}.hnorm.weight": (hidden,),
        f"{name}.shared_head.norm.weight": (hidden,),
    }
    weights |= random_weights(shapes)
    if copying:
        for n, weight in weights.items():
            if n.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
        weights[f"{name}.eh_proj.weight"] = torch.eye(hidden, 2 * hidden)
        weights[f"{name}.enorm.weight"] = torch.ones(hidden)
        weights[f"{name}.shared_head.norm.weight"] = weights["model.norm.weight"].clone()
    else:
        weights[f"{name}.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        weights[f"{name}.shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, file, metadata={"format": "pt"})
    return path
