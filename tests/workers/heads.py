"""Tiny draft heads on disk: random ones in every published layout, and ones that copy a target."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..conftest import make_tiny_model

Weights = dict[str, Tensor]


def random_weights(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 2:
            weights[name] = noise * 1.5 / shape[1] ** 0.5
        else:
            weights[name] = 0.3 * noise if name.endswith("bias") else 1 + 0.2 * noise
    return weights


def decoder_shapes(name: str, hidden: int, inputs: int | None = None) -> dict[str, Any]:
    """4 heads, 2 KV heads; without input norms."""
    inputs = inputs or hidden
    return {
        f"{name}.self_attn.q_proj.weight": (hidden, inputs),
        f"{name}.self_attn.k_proj.weight": (hidden // 2, inputs),
        f"{name}.self_attn.v_proj.weight": (hidden // 2, inputs),
        f"{name}.self_attn.o_proj.weight": (hidden, hidden),
        f"{name}.mlp.gate_proj.weight": (2 * hidden, hidden),
        f"{name}.mlp.up_proj.weight": (2 * hidden, hidden),
        f"{name}.mlp.down_proj.weight": (hidden, 2 * hidden),
        f"{name}.post_attention_layernorm.weight": (hidden,),
    }


def layer_config(hidden: int = 64, vocab_size: int = 128, layers: int = 1) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "vocab_size": vocab_size,
        "max_position_embeddings": 512,
    }


def save(path: Path, weights: Weights, config: dict[str, Any], torch_file: bool = False) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if torch_file:
        torch.save(weights, path / "pytorch_model.bin")
    else:
        save_file({n: w.contiguous() for n, w in weights.items()}, path / "model.safetensors")
    return path


def draft_table(vocab_size: int, draft_size: int, seed: int = 3) -> tuple[Tensor, Weights]:
    """A random draft vocabulary: its target ids, ascending, and d2t and t2d."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(vocab_size, generator=generator)[:draft_size].sort().values
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[ids] = True
    return ids, {"d2t": ids - torch.arange(draft_size), "t2d": t2d}


def eagle_head(
    path: Path,
    *,
    hidden: int = 64,
    layers: int = 1,
    bias: bool = True,
    qkv_bias: bool = False,
    torch_file: bool = False,
    seed: int = 5,
    extra: Mapping[str, tuple[int, ...]] | None = None,
) -> Path:
    shapes: dict[str, Any] = {"fc.weight": (hidden, 2 * hidden)}
    if bias:
        shapes["fc.bias"] = (hidden,)
    for i in range(layers):
        shapes |= decoder_shapes(f"layers.{i}", hidden)
        if i:
            shapes[f"layers.{i}.input_layernorm.weight"] = (hidden,)
        if qkv_bias:
            for part, rows in (("q", hidden), ("k", hidden // 2), ("v", hidden // 2)):
                shapes[f"layers.{i}.self_attn.{part}_proj.bias"] = (rows,)
    weights = random_weights(shapes | dict(extra or {}), seed)
    config = {"architectures": ["LlamaForCausalLM"], **layer_config(hidden, layers=layers)}
    return save(path, weights, config, torch_file)


def eagle3_shapes(
    *,
    hidden: int = 64,
    layers: int = 1,
    draft_size: int = 48,
    num_aux: int = 2,
    target_hidden: int = 64,
    vocab_size: int = 128,
    first: str = "midlayer",
    options: tuple[str, ...] = (),
) -> dict[str, Any]:
    inputs = num_aux * target_hidden
    shapes: dict[str, Any] = decoder_shapes(first, hidden, 2 * hidden)
    shapes |= {
        f"{first}.input_layernorm.weight": (hidden,),
        f"{first}.hidden_norm.weight": (hidden,),
    }
    for i in range(1, layers):
        shapes |= decoder_shapes(f"layers.{i}", hidden)
        shapes[f"layers.{i}.input_layernorm.weight"] = (hidden,)
    shapes["norm.weight"] = (hidden,)
    if "no_fc" not in options:
        shapes["fc.weight"] = (hidden, inputs)
    if "no_lm_head" not in options:
        shapes["lm_head.weight"] = (draft_size, hidden)
    if "embed" in options:
        shapes["embed_tokens.weight"] = (vocab_size, hidden)
    if "norm_before_fc" in options:
        shapes["input_norm.weight"] = (inputs,)
    if "fc_norm" in options:
        shapes |= {f"fc_norm.{j}.weight": (target_hidden,) for j in range(num_aux)}
    if "aux_norm" in options:
        names = ("low", "mid", "high")[:num_aux]
        shapes |= {f"aux_norm_{name}.weight": (target_hidden,) for name in names}
    if "attention_bias" in options:
        for part, rows in (("q", hidden), ("k", hidden // 2), ("v", hidden // 2), ("o", hidden)):
            shapes[f"{first}.self_attn.{part}_proj.bias"] = (rows,)
    return shapes


def eagle3_head(
    path: Path,
    *,
    draft_size: int = 48,
    aux: tuple[int, ...] | None = (0, 1),
    seed: int = 6,
    config: dict[str, Any] | None = None,
    **shape_options: Any,
) -> Path:
    """`aux` in SGLang's convention; None: no auxiliary layers."""
    hidden, vocab_size = shape_options.get("hidden", 64), shape_options.get("vocab_size", 128)
    num_aux = len(aux) if aux is not None else 1
    shapes = eagle3_shapes(draft_size=draft_size, num_aux=num_aux, **shape_options)
    weights = random_weights(shapes, seed)
    if draft_size != vocab_size:
        weights |= draft_table(vocab_size, draft_size)[1]
    eagle_config: dict[str, Any] = {"use_aux_hidden_state": aux is not None}
    if aux is not None:
        eagle_config["eagle_aux_hidden_state_layer_ids"] = list(aux)
    raw = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer_config(hidden, vocab_size, shape_options.get("layers", 1)),
        "draft_vocab_size": draft_size,
        "eagle_config": eagle_config,
        **(config or {}),
    }
    return save(path, weights, raw)


# -- a target that its heads copy exactly -------------------------------------------------------

CODE = 32  # half of the hidden size


def second_order_target(
    path: Path, vocab_size: int = 128, layers: int = 3, only: Tensor | None = None, **config: Any
) -> Path:
    """A llama whose next token is a fixed random function of the last two, and of nothing else.

    A token's embedding is a code of +-1, twice, in the first half; layer 0 attends sharply to the
    token before and writes its code into the second half; the other layers add nothing. Tokens
    that are not `only` are never the likeliest.
    """
    make_tiny_model(path, layers=layers, vocab_size=vocab_size, rms_norm_eps=1e-6, **config)
    file = path / "model.safetensors"
    weights = load_file(file)
    hidden = 2 * CODE
    generator = torch.Generator().manual_seed(11)
    for name, weight in weights.items():
        if weight.ndim == 1:
            weight.fill_(1.0)
        elif "layers" in name:
            weight.zero_()
    embedding = weights["model.embed_tokens.weight"]
    embedding.zero_()
    signs = 2.0 * torch.randint(0, 2, (vocab_size, CODE // 2), generator=generator) - 1
    signs[:, 0] = 1.0  # what queries and keys are made of
    embedding[:, :CODE] = signs.repeat(1, 2)
    head = weights["lm_head.weight"]
    head.copy_(torch.randn(vocab_size, hidden, generator=generator))
    head[:, :: CODE // 2] = 0.0  # the constant would make some tokens likely everywhere
    if only is not None:
        head[~torch.isin(torch.arange(vocab_size), only)] = torch.eye(hidden)[0] * -20
    name = "model.layers.0.self_attn."
    look_back(weights[f"{name}q_proj.weight"], weights[f"{name}k_proj.weight"], back=1)
    copy_code(weights[f"{name}v_proj.weight"], weights[f"{name}o_proj.weight"], CODE)
    save_file(weights, file, metadata={"format": "pt"})
    return path


def look_back(query: Tensor, key: Tensor, back: int) -> None:
    """Heads of 16: each query scores highest the key `back` positions before it.

    All keys are one vector before RoPE turns them; the query is the same turned back by `back`.
    """
    half = 8
    angles = -back * 10000.0 ** (-torch.arange(half) / half)
    query[:, 0] = 60.0 * torch.cat((angles.cos(), angles.sin())).repeat(len(query) // 16)
    key[:, 0] = 60.0 * torch.cat((torch.ones(half), torch.zeros(half))).repeat(len(key) // 16)


def copy_code(value: Tensor, output: Tensor, to: int) -> None:
    """Two KV heads of 16 carry the 32 numbers of a code; query heads 0 and 2 write them."""
    scale = 2**-0.5  # the norm of a vector that is half zeros multiplies by sqrt(2)
    value[:, :CODE] = torch.eye(CODE)
    for kv_head, head in ((0, 0), (1, 2)):
        rows = torch.arange(16)
        output[to + 16 * kv_head + rows, 16 * head + rows] = scale


def _both_codes(hidden: int = 2 * CODE) -> Tensor:
    """[token, hidden states] -> the token's code, then that in the hidden states' first half."""
    weight = torch.zeros(hidden, 2 * hidden)
    rows = torch.arange(CODE)
    weight[rows, rows] = 1.0
    weight[CODE + rows, hidden + rows] = 1.0
    return weight


def copying_eagle(path: Path, vocab_size: int = 128) -> Path:
    """Its fc makes the target's last hidden states; its layer adds nothing."""
    hidden = 2 * CODE
    weights = {n: torch.zeros(s) for n, s in decoder_shapes("layers.0", hidden).items()}
    weights["layers.0.post_attention_layernorm.weight"].fill_(1.0)
    weights["fc.weight"] = _both_codes()
    return save(path, weights, layer_config(hidden, vocab_size))


def copying_eagle3(
    path: Path, target: Path, vocab_size: int = 128, draft_size: int | None = None
) -> Path:
    """Attention of each position to itself carries the codes, and takes back the residual.

    Only the first auxiliary layer, the one that has both codes, is read.
    """
    hidden, half = 2 * CODE, CODE // 2
    size = draft_size or vocab_size
    shapes = eagle3_shapes(hidden=hidden, draft_size=size, num_aux=2, vocab_size=vocab_size)
    attention = "midlayer.self_attn."
    for part in ("k", "v"):
        shapes[f"{attention}{part}_proj.weight"] = (hidden, 2 * hidden)
    weights = {n: torch.ones(s) if len(s) == 1 else torch.zeros(s) for n, s in shapes.items()}
    weights["fc.weight"][:, :hidden] = torch.eye(hidden)
    look_back(weights[f"{attention}q_proj.weight"], weights[f"{attention}k_proj.weight"], back=0)
    value, output = weights[f"{attention}v_proj.weight"], weights[f"{attention}o_proj.weight"]
    rows = torch.arange(half)
    value[rows, rows] = 2**-0.5  # the token's code
    value[half + rows, hidden + rows] = 1.0  # those of the two before it
    value[2 * half + rows, hidden + CODE + rows] = 1.0
    for copy in (0, half):
        output[copy + rows, rows] = 1.0
        output[copy + rows, half + rows] = -1.0
        output[CODE + copy + rows, half + rows] = 1.0
        output[CODE + copy + rows, 2 * half + rows] = -1.0
    head = load_file(target / "model.safetensors")["lm_head.weight"]
    if size != vocab_size:
        ids, tables = draft_table(vocab_size, size)
        head, weights = head[ids], weights | tables
    weights["lm_head.weight"] = head
    config = layer_config(hidden, vocab_size) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_key_value_heads": 4,
        "draft_vocab_size": size,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]},
    }
    return save(path, weights, config)


def with_mtp(target: Path, path: Path, layout: str) -> Path:
    """`target` with an MTP layer that copies it, in DeepSeek's or Qwen's layout."""
    hidden = 2 * CODE
    weights = load_file(target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    block = {n: torch.zeros(s) for n, s in decoder_shapes("", hidden).items()}
    block[".input_layernorm.weight"] = torch.zeros(hidden)
    project = _both_codes()
    project[:CODE] *= 2**-0.5
    one = 0.0 if layout == "qwen" else 1.0  # Qwen's norms multiply by 1 + weight
    norm = torch.full((hidden,), one)
    for name in (".input_layernorm.weight", ".post_attention_layernorm.weight"):
        block[name].fill_(one)
    if layout == "qwen":
        config["mtp_num_hidden_layers"] = 1
        weights |= {f"mtp.layers.0{n}": w for n, w in block.items()}
        weights |= {
            "mtp.fc.weight": project,
            "mtp.pre_fc_norm_embedding.weight": norm.clone(),
            "mtp.pre_fc_norm_hidden.weight": norm.clone(),
            "mtp.norm.weight": norm.clone(),
        }
    else:
        prefix = f"model.layers.{config['num_hidden_layers']}"
        config["num_nextn_predict_layers"] = 1
        weights |= {f"{prefix}{n}": w for n, w in block.items()}
        weights |= {
            f"{prefix}.eh_proj.weight": project,
            f"{prefix}.enorm.weight": norm.clone(),
            f"{prefix}.hnorm.weight": norm.clone(),
            f"{prefix}.shared_head.norm.weight": norm.clone(),
            f"{prefix}.shared_head.head.weight": weights["lm_head.weight"].clone(),
            f"{prefix}.embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
        }
    path.mkdir(parents=True)
    for file in target.iterdir():
        if file.suffix == ".json":
            (path / file.name).write_text(file.read_text())
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path
