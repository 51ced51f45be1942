"""Heads against a plain torch version of each, written out for one whole text at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from spectrue.workers.forward_batch import ForwardBatch, ForwardOutput
from spectrue.workers.parallel import TPGroup
from spectrue.workers.weights import load_model
from spectrue.workers.weights_head import load_head

from .heads import Weights, eagle3_head, eagle_head
from .test_heads import VARIANTS

LENGTH = 21
EPS = 1e-6


def norm(weights: Weights, name: str, x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], EPS)


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def attention(weights: Weights, name: str, x: Tensor) -> Tensor:
    """4 heads, 2 KV heads, causal, half-split RoPE from position 0."""
    query, key, value = (
        linear(weights, f"{name}.{part}_proj", x).view(len(x), heads, -1).transpose(0, 1)
        for part, heads in (("q", 4), ("k", 2), ("v", 2))
    )
    dim = query.shape[-1]
    angles = torch.arange(len(x))[:, None] * 1e4 ** (-torch.arange(0, dim, 2) / dim)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

    def rotate(heads: Tensor) -> Tensor:
        left, right = heads.chunk(2, -1)
        return heads * cos + torch.cat((-right, left), -1) * sin

    out = F.scaled_dot_product_attention(
        rotate(query),
        rotate(key).repeat_interleave(2, 0),
        value.repeat_interleave(2, 0),
        is_causal=True,
    )
    return linear(weights, f"{name}.o_proj", out.transpose(0, 1).flatten(1))


def mlp(weights: Weights, name: str, x: Tensor) -> Tensor:
    gate = F.silu(linear(weights, f"{name}.gate_proj", x))
    return linear(weights, f"{name}.down_proj", gate * linear(weights, f"{name}.up_proj", x))


def after_attention(weights: Weights, name: str, x: Tensor) -> Tensor:
    return x + mlp(weights, f"{name}.mlp", norm(weights, f"{name}.post_attention_layernorm", x))


def decoder(weights: Weights, name: str, x: Tensor, normed: bool = True) -> Tensor:
    inputs = norm(weights, f"{name}.input_layernorm", x) if normed else x
    return after_attention(weights, name, x + attention(weights, f"{name}.self_attn", inputs))


def eagle3(
    weights: Weights, config: dict[str, Any], token: Tensor, output: ForwardOutput, layers: int
) -> tuple[Tensor, Tensor]:
    """(recycled hidden states, what the output head reads)."""
    hidden = output.aux_hidden_states
    if hidden is None:
        hidden = output.hidden_states
    legacy = [f"aux_norm_{n}" for n in ("low", "mid", "high") if f"aux_norm_{n}.weight" in weights]
    parts = legacy or [f"fc_norm.{j}" for j in range(3) if f"fc_norm.{j}.weight" in weights]
    if parts:
        chunks = hidden.chunk(len(parts), -1)
        hidden = torch.cat([norm(weights, n, c) for n, c in zip(parts, chunks, strict=True)], -1)
    if "input_norm.weight" in weights:
        hidden = norm(weights, "input_norm", hidden)
    if "fc.weight" in weights:
        hidden = linear(weights, "fc", hidden)
    first = "midlayer" if "midlayer.hidden_norm.weight" in weights else "layers.0"
    normed = norm(weights, f"{first}.hidden_norm", hidden)
    inputs = torch.cat((norm(weights, f"{first}.input_layernorm", token), normed), -1)
    residual = normed if config.get("norm_before_residual") else hidden
    x = residual + attention(weights, f"{first}.self_attn", inputs)
    x = after_attention(weights, first, x)
    for i in range(1, layers):
        x = decoder(weights, f"layers.{i}", x)
    final = norm(weights, "norm", x)
    return (final if config.get("norm_output") else x), final


def fed(pieces: list[int]) -> list[tuple[ForwardBatch, slice]]:
    """One text in pieces."""
    tokens = torch.arange(3, 3 + LENGTH)
    ends = torch.tensor(pieces).cumsum(0).tolist()
    return [
        (
            ForwardBatch.build(
                token_ids=[tokens[end - size : end]],
                starts=[end - size],
                block_tables=torch.tensor([[3, 0, 5, 1, 2, 4]], dtype=torch.int32),
                block_size=4,
            ),
            slice(end - size, end),
        )
        for end, size in zip(ends, pieces, strict=True)
    ]


def target_output(num_aux: int) -> ForwardOutput:
    generator = torch.Generator().manual_seed(1)
    aux = torch.randn(LENGTH, 64 * num_aux, generator=generator) if num_aux else None
    hidden = torch.randn(LENGTH, 64, generator=generator)
    return ForwardOutput(hidden_states=hidden, aux_hidden_states=aux)


def check(
    path: Path, method: str, tiny_llama: Path, output: ForwardOutput, want: tuple[Tensor, Tensor]
) -> None:
    """Hidden states and logits in pieces, as decode and verify feed them."""
    model = load_model(tiny_llama, "float32")
    head, _ = load_head(path, method, model, dtype=torch.float32, group=TPGroup())
    hidden = head.combine(output)
    kv_cache = head.new_kv_cache(6, 4)
    for layer in kv_cache.layers:
        layer.fill_(float("nan"))
    got = torch.cat(
        [head.forward(batch, hidden[rows], kv_cache) for batch, rows in fed([12, 1, 1, 4, 3])]
    )
    torch.testing.assert_close(got, want[0], rtol=1e-4, atol=1e-4)
    logits = head.compute_logits(got)
    torch.testing.assert_close(logits, want[1], rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_eagle3(variant: str, tiny_llama: Path, tmp_path: Path) -> None:
    options = VARIANTS[variant]
    path = eagle3_head(tmp_path / "head", **options)
    weights = load_file(path / "model.safetensors")
    target = load_file(tiny_llama / "model.safetensors")
    aux = options.get("aux", (0, 1))
    output = target_output(len(aux) if aux else 0)
    table = weights.get("embed_tokens.weight", target["model.embed_tokens.weight"])
    config, layers = options.get("config", {}), options.get("layers", 1)
    recycled, final = eagle3(weights, config, table[3 : 3 + LENGTH], output, layers)
    head = weights.get("lm_head.weight", target["lm_head.weight"])
    check(path, "eagle3", tiny_llama, output, (recycled, final @ head.T))


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"bias": False, "qkv_bias": True}, {"layers": 2}], ids=str)
def test_eagle(options: dict[str, Any], tiny_llama: Path, tmp_path: Path) -> None:
    path = eagle_head(tmp_path / "head", **options)
    weights = load_file(path / "model.safetensors")
    target, output = load_file(tiny_llama / "model.safetensors"), target_output(0)
    token = target["model.embed_tokens.weight"][3 : 3 + LENGTH]
    x = linear(weights, "fc", torch.cat((token, output.hidden_states), -1))
    for i in range(options.get("layers", 1)):
        x = decoder(weights, f"layers.{i}", x, normed=i > 0)
    check(path, "eagle", tiny_llama, output, (x, x @ target["lm_head.weight"].T))
