"""Tensor parallelism of a transformers model: its own plan, by our collectives.

A plan names, by module or parameter, which dimension of a weight is cut over the ranks. Attention
then sees this rank's heads, and sums over the ranks happen where a plan says `rowwise` or
`moe_tp_experts`. Embeddings, norms, routers and what a plan does not name are the same on every
rank.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from spectrue.workers.errors import ConfigError
from spectrue.workers.parallel import TPGroup

# Styles that mean something for gradients only, or that keep a weight whole.
WHOLE = {
    "replicated_with_grad_allreduce",
    "mla_kv_a_proj",
    "embedding_rowwise",
    "vocab_parallel_embedding",
}


@torch.no_grad()
def shard(hf: Any, group: TPGroup) -> None:
    """Keep this rank's part of every weight that the model's plan cuts, in place.

    Raises ConfigError for a model without a plan, for a style that is not served and for a size
    that `tp_size` does not divide.
    """
    config, head = hf.config, hf.get_output_embeddings()
    plan: dict[str, str] = {k: v for k, v in (hf.tp_plan or {}).items() if v not in WHOLE}
    if not plan:
        raise ConfigError(
            f"tp_size = {group.size}: transformers has no tensor-parallel plan for model type "
            f"{config.model_type!r}, set tp_size to 1"
        )
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    for name, size in (("attention", heads), ("key-value", kv_heads)):
        if size % group.size:
            raise ConfigError(f"tp_size = {group.size} must divide the {size} {name} heads")
    if head is not None:
        _shard_head(head, group)
    for name, module in hf.named_modules():
        style = plan.get(_pattern(name))
        if style is None or module is head:
            continue
        if style == "colwise":
            _cut(module, "weight", -2, name, group)
            _cut(module, "bias", -1, name, group)
        elif style == "rowwise":
            _cut(module, "weight", -1, name, group)
            if getattr(module, "bias", None) is not None and group.rank:
                module.bias.zero_()  # the sum must have it once
            module.register_forward_hook(_sum(group))
        elif style == "moe_tp_experts":
            module.register_forward_hook(_sum(group))
        else:
            raise ConfigError(
                f"tp_size = {group.size}: the plan of model type {config.model_type!r} cuts {name} "
                f"by {style!r}, which is not supported; set tp_size to 1"
            )
    for name, _ in list(hf.named_parameters()):
        style = plan.get(_pattern(name))
        parent, _, last = name.rpartition(".")
        if style == "packed_colwise":
            _cut(hf.get_submodule(parent), last, -2, name, group, packed=2)
        elif style in ("rowwise", "colwise"):
            _cut(hf.get_submodule(parent), last, -1 if style == "rowwise" else -2, name, group)
        elif style is not None:
            raise ConfigError(f"tp_size = {group.size}: {name} is cut by {style!r}, not supported")


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _cut(
    module: nn.Module, name: str, dim: int, where: str, group: TPGroup, packed: int = 1
) -> None:
    """Replace a parameter by this rank's part of a dimension, of each of `packed` blocks in it."""
    whole = getattr(module, name, None)
    if whole is None:
        return
    size = whole.shape[dim]
    if size % (group.size * packed):
        raise ConfigError(f"tp_size = {group.size} must divide dimension {size} of {where}.{name}")
    parts = [block.chunk(group.size, dim)[group.rank] for block in whole.chunk(packed, dim)]
    own = torch.cat(parts, dim).contiguous() if packed > 1 else parts[0].clone()
    setattr(module, name, nn.Parameter(own, requires_grad=False))


def _shard_head(head: Any, group: TPGroup) -> None:
    """Rank 0 gets the logits of all parts, the others keep their own, which nobody reads.

    The vocabulary is padded to equal parts. The weight is no longer that of a tied embedding,
    which stays whole.
    """
    vocab_size = head.weight.shape[0]
    part = -(-vocab_size // group.size)

    def own(whole: Any) -> nn.Parameter:
        rows = whole[group.rank * part : (group.rank + 1) * part]
        padded = rows.new_zeros(part, *rows.shape[1:])
        padded[: len(rows)] = rows
        return nn.Parameter(padded, requires_grad=False)

    head.weight = own(head.weight)
    if getattr(head, "bias", None) is not None:
        head.bias = own(head.bias)

    def gather(_: nn.Module, __: Any, logits: Tensor) -> Tensor:
        full = group.gather_vocab(logits)
        return logits if full is None else full[..., :vocab_size]

    head.register_forward_hook(gather)


def _sum(group: TPGroup) -> Any:
    def hook(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return group.all_reduce_(output.contiguous())

    return hook
