"""Tiny random models that transformers' own code runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..conftest import make_tiny_model

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
