"""Our paged attention inside a transformers model, by transformers' AttentionInterface.

Two implementations are registered. `PAGED` serves: it writes the layer's KV and attends over the
pool. `PROBE` computes nothing: it notes what each layer asks for, so that a model whose attention
is more than ours is refused when it is loaded, and not served wrongly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrue.workers.attention import AttentionMetadata, paged_attention
from spectrue.workers.errors import ModelLoadError
from spectrue.workers.forward_batch import ForwardBatch
from spectrue.workers.kv_cache import KVCachePool

PAGED, PROBE = "spectrue_paged", "spectrue_probe"

# Arguments that change nothing here: there is no dropout, and the mask follows from the positions.
HARMLESS = {"dropout", "position_ids", "use_cache", "output_attentions", "output_router_logits"}
HARMLESS |= {"position_embeddings", "cache_position", "logits_to_keep", "return_dict"}
MAX_PROBED_POSITION = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAttention:
    """What one layer asks of attention."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int  # positions that a query sees, its own included; 0: all
    softcap: float | None


@dataclass(frozen=True, slots=True)
class _Running:
    """The forward in progress."""

    layers: Sequence[LayerAttention]
    batch: ForwardBatch
    kv_cache: KVCachePool
    metadata: AttentionMetadata


@dataclass(frozen=True, slots=True)
class _MaskRule:
    """Stands for a mask in a probe: the rule that transformers would fill the mask by."""

    sees: Callable[..., Any]  # (batch, head, query position, key position) -> bool, broadcast

    def window(self, max_position: int) -> int:
        """Raises ModelLoadError if the rule is not causal with at most a sliding window."""
        last = min(max_position, MAX_PROBED_POSITION) - 1
        queries = torch.tensor([0, last // 3, last // 2, last])[:, None]
        keys = torch.arange(last + 1)
        zero = torch.tensor(0)
        seen = torch.as_tensor(self.sees(zero, zero, queries, keys)).expand(4, last + 1)
        window = int(seen[-1].sum())
        expected = (keys <= queries) & (keys > queries - window)
        if not torch.equal(seen, expected):
            raise ModelLoadError("attention sees more or other than a causal sliding window")
        return window if window <= last else 0


_running: ContextVar[_Running] = ContextVar("spectrue_running")
_probed: ContextVar[dict[int, LayerAttention]] = ContextVar("spectrue_probed")
_max_position: ContextVar[int] = ContextVar("spectrue_max_position")


@functools.cache
def register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(PAGED, _attend)
    AttentionInterface.register(PROBE, _note)
    AttentionMaskInterface.register(PROBE, lambda *_, mask_function, **__: _MaskRule(mask_function))


@contextmanager
def running(
    layers: Sequence[LayerAttention],
    batch: ForwardBatch,
    kv_cache: KVCachePool,
    dtype: torch.dtype,  # of the queries
) -> Iterator[None]:
    """Within it a model set to `PAGED` serves this batch."""
    metadata = AttentionMetadata.build(
        batch,
        kv_cache.block_size,
        layers[0].num_heads // layers[0].num_kv_heads,
        dtype,
        windows={layer.window for layer in layers},
    )
    token = _running.set(_Running(layers, batch, kv_cache, metadata))
    try:
        yield
    finally:
        _running.reset(token)


@contextmanager
def probing(max_position: int) -> Iterator[dict[int, LayerAttention]]:
    """Within it a model set to `PROBE` notes its layers here, by index."""
    found: dict[int, LayerAttention] = {}
    tokens = _probed.set(found), _max_position.set(max_position)
    try:
        yield found
    finally:
        _probed.reset(tokens[0])
        _max_position.reset(tokens[1])


def _attend(
    module: nn.Module,
    query: Tensor,  # [1, num_heads, num_tokens, key_dim]
    key: Tensor,  # [1, num_kv_heads, num_tokens, key_dim]
    value: Tensor,  # [1, num_kv_heads, num_tokens, value_dim]
    *_: Any,
    **__: Any,
) -> tuple[Tensor, None]:  # [1, num_tokens, num_heads, value_dim]
    now = _running.get()
    index: Any = module.layer_idx
    layer = now.layers[index]
    slots = now.kv_cache.layers[index]
    size = slots.shape[-1]  # keys and values shorter than the pool's are padded with zeros
    query, key, value = (
        F.pad(x[0].transpose(0, 1), (0, size - x.shape[-1])) for x in (query, key, value)
    )
    now.kv_cache.write(index, now.batch.slot_mapping, torch.stack((key, value), 1))
    out = paged_attention(
        query.contiguous(),
        slots,
        now.metadata,
        scale=layer.scale,
        window=layer.window,
        softcap=layer.softcap,
        scales=now.kv_cache.scales[index],
    )
    return out.view(1, -1, layer.num_heads, size)[..., : layer.value_dim], None


def _note(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: _MaskRule | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    found = _probed.get()
    index: Any = getattr(module, "layer_idx", None)
    if not isinstance(index, int) or index in found:
        raise ModelLoadError(f"attention layer {index} is not one that has its own index")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ModelLoadError("attention is not causal")
    unknown = sorted(
        name for name, given in others.items() if given is not None and name not in HARMLESS
    )
    if unknown:
        raise ModelLoadError(f"attention takes {', '.join(unknown)}, which ours does not")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if not isinstance(scale, float | int):
        raise ModelLoadError("the scale of attention is not one number")
    # What a mask says is what transformers computes; models without one say it by argument.
    if attention_mask is not None:
        window = attention_mask.window(_max_position.get())
    else:
        window = sliding_window or 0
    found[index] = LayerAttention(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        key_dim=key.shape[-1],
        value_dim=value.shape[-1],
        scale=float(scale),
        window=window,
        softcap=softcap,
    )
    _, num_heads, num_tokens, _ = query.shape
    return query.new_zeros(1, num_tokens, num_heads, value.shape[-1]), None
