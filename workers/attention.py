"""Attention over the paged KV, for prefill chunks, decode and verify rows in one ragged batch.

On CPU torch's SDPA over requests of like length, on GPUs the paged kernel, and where it is asked
for vLLM's flash-attention.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrue.kernels import dispatch
from spectrue.workers.errors import ConfigError
from spectrue.workers.forward_batch import ForwardBatch

AttentionBackend = Literal["auto", "sdpa", "triton", "flash"]
FLASH_MODULES = ("vllm_flash_attn", "vllm.vllm_flash_attn")  # the second is in vLLM's own wheel

logger = logging.getLogger(__name__)

MAX_GROUPED_QUERIES = 16  # longer query lengths are prefill: one call per request
GROUP_SLACK = 1.25  # requests share a call while the longest KV is at most this times the shortest
GROUP_TOKENS = 64  # ... plus this
KV_MULTIPLE = 64  # tokens; see _attend on why decode and verify shall see one KV length


@dataclass(frozen=True, slots=True)
class _Group:
    """Requests of one query length that share one SDPA call, KV padded to the longest."""

    size: int
    query_len: int
    kv_len: int
    slots: Tensor  # [size * kv_len] int64
    mask: Tensor | None  # additive, [size, 1, queries, kv_len]
    causal: bool  # a whole prompt: SDPA's own causal mask
    rows: Tensor | None  # [size * query_len] int64, None when the group is the whole batch in order


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedBatch:
    """The arguments of `dispatch.paged_attention` that all layers share.

    A captured graph keeps its tensors and copies into them; its lengths are upper bounds.
    """

    block_tables: Tensor  # [batch, max_blocks] int32
    block_size: int
    cu_query_lens: Tensor  # [batch + 1] int32
    seq_lens: Tensor  # [batch] int32
    max_query_len: int
    max_seq_len: int
    tree_mask: Tensor | None = None  # [num_tokens, words] int32
    flash: bool = False

    @staticmethod
    def build(
        batch: ForwardBatch, block_size: int, *, tree_mask: Tensor | None, flash: bool
    ) -> PagedBatch:
        assert batch.cu_query_lens is not None
        assert batch.kv_lens is not None
        return PagedBatch(
            block_tables=batch.block_tables,
            block_size=block_size,
            cu_query_lens=batch.cu_query_lens,
            seq_lens=batch.kv_lens,
            max_query_len=max(batch.query_lens),
            max_seq_len=max(batch.seq_lens),
            tree_mask=tree_mask,
            flash=flash,
        )


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """What does not depend on the layer: built once per forward."""

    groups: tuple[_Group, ...] = ()
    windowed: Mapping[int, tuple[_Group, ...]] = field(default_factory=dict)  # by window
    paged: PagedBatch | None = None  # if set, groups are not looked at

    @staticmethod
    def build(
        batch: ForwardBatch,
        block_size: int,
        queries_per_kv: int,
        dtype: torch.dtype,
        *,
        attention_backend: AttentionBackend = "auto",
        tree_mask: Tensor | None = None,  # as in dispatch.paged_attention; None: the batch's own
        windows: Collection[int] = (),  # of the layers: what `paged_attention` will be asked for
    ) -> AttentionMetadata:
        """Raises ConfigError for a backend that does not exist or cannot work here."""
        platform = dispatch.platform_of(batch.input_ids.device)
        backend = resolve_backend(attention_backend, platform)
        tree_mask = batch.tree_mask if tree_mask is None else tree_mask
        if tree_mask is not None and backend != "triton":
            _log_tree(backend)
        if tree_mask is not None or backend != "sdpa":
            flash = backend == "flash" and tree_mask is None
            return AttentionMetadata(
                paged=PagedBatch.build(batch, block_size, tree_mask=tree_mask, flash=flash)
            )
        members = _group(batch.query_lens, batch.seq_lens)
        starts = torch.tensor((0, *batch.query_lens)).cumsum(0)
        whole = len(members) == 1
        groups = tuple(
            _make(batch, m, starts, whole, block_size, queries_per_kv, dtype) for m in members
        )
        windowed = {}
        for window in set(windows) - {0}:
            windowed[window] = tuple(
                _with_window(group, [batch.seq_lens[i] for i in m], window, queries_per_kv, dtype)
                for group, m in zip(groups, members, strict=True)
            )
        return AttentionMetadata(groups, windowed)


def resolve_backend(
    requested: str, platform: dispatch.Platform
) -> Literal["sdpa", "triton", "flash"]:
    """The backend of all forwards. Raises ConfigError with the reason where it cannot work.

    `auto` is SDPA on CPU and Triton on GPUs. Flash-attention is not chosen by itself: no
    measurement says yet where it wins.
    """
    if requested not in get_args(AttentionBackend):
        names = ", ".join(get_args(AttentionBackend))
        raise ConfigError(f"attention_backend must be one of {names}, got {requested!r}")
    if requested in ("auto", "sdpa") and platform == "cpu":
        return "sdpa"
    if requested in ("auto", "triton") and platform != "cpu":
        return "triton"
    if requested == "flash" and platform == "cuda":
        flash_attention()
        return "flash"
    where = {"sdpa": "CPU", "triton": "GPUs", "flash": "NVIDIA GPUs"}[requested]
    raise ConfigError(f"attention_backend = {requested} works on {where}, not on {platform}")


@functools.cache
def flash_attention() -> Callable[..., Any]:
    """vLLM's `flash_attn_varlen_func`. Raises ConfigError with what each import said."""
    reasons = []
    for name in FLASH_MODULES:
        try:
            found: Callable[..., Any] = importlib.import_module(name).flash_attn_varlen_func
            return found
        except (ImportError, AttributeError, OSError) as error:  # OSError: built for other CUDA
            reasons.append(f"{name}: {error}")
    raise ConfigError("attention_backend = flash cannot be imported; " + "; ".join(reasons))


@functools.cache
def _log_tree(backend: str) -> None:
    logger.info("attention_backend = %s has no tree masks: trees go by the paged kernel", backend)


def _group(query_lens: tuple[int, ...], seq_lens: tuple[int, ...]) -> list[list[int]]:
    """Indices of the requests of each call. One group is always in batch order."""
    groups: list[list[int]] = []
    order = sorted(range(len(query_lens)), key=lambda i: (query_lens[i], seq_lens[i]))
    for i in order:
        first = groups[-1][0] if groups else -1
        if (
            first >= 0
            and query_lens[first] == query_lens[i] <= MAX_GROUPED_QUERIES
            and seq_lens[i] <= seq_lens[first] * GROUP_SLACK + GROUP_TOKENS
        ):
            groups[-1].append(i)
        else:
            groups.append([i])
    return [sorted(group) for group in groups]


def _make(
    batch: ForwardBatch,
    members: list[int],
    starts: Tensor,  # [batch + 1] first row of each request
    whole: bool,
    block_size: int,
    queries_per_kv: int,
    dtype: torch.dtype,
) -> _Group:
    device = batch.input_ids.device
    query_len = batch.query_lens[members[0]]
    lens = [batch.seq_lens[i] for i in members]
    kv_len = max(lens)
    if query_len <= MAX_GROUPED_QUERIES:
        kv_len = -(-kv_len // KV_MULTIPLE) * KV_MULTIPLE
    seq_lens = torch.tensor(lens, device=device)[:, None]
    # Padding reads the request's own last token, never a slot that may hold another's NaN: a masked
    # weight is 0, and 0 * NaN is NaN.
    kv_positions = torch.arange(kv_len, device=device)
    valid = torch.minimum(kv_positions, seq_lens - 1)
    tables = batch.block_tables if whole else batch.block_tables[members]
    blocks = tables.gather(1, valid // block_size).long()
    slots = (blocks * block_size + valid % block_size).flatten()

    rows = None
    if not whole:
        rows = (starts[members][:, None] + torch.arange(query_len)).flatten().to(device)
    causal = query_len > MAX_GROUPED_QUERIES and query_len == kv_len
    mask = None
    if not causal and (query_len > 1 or min(lens) < kv_len):
        mask = _mask(seq_lens, query_len, kv_len, 0, queries_per_kv, dtype)
    return _Group(len(members), query_len, kv_len, slots, mask, causal, rows)


def _mask(
    seq_lens: Tensor,  # [size, 1] int64
    query_len: int,
    kv_len: int,
    window: int,  # 0: none
    queries_per_kv: int,
    dtype: torch.dtype,
) -> Tensor:  # additive, [size, 1, queries, kv_len]
    kv_positions = torch.arange(kv_len, device=seq_lens.device)
    queries = torch.arange(query_len, device=seq_lens.device)
    query_positions = (seq_lens - query_len + queries)[:, :, None]
    hidden = kv_positions > query_positions  # [size, query_len, kv_len]
    if window:
        hidden |= kv_positions <= query_positions - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=seq_lens.device)
    mask = mask.masked_fill_(hidden, float("-inf"))[:, None]
    if 1 < query_len <= MAX_GROUPED_QUERIES:  # query heads are folded into the query axis
        mask = mask.repeat(1, 1, queries_per_kv, 1)
    return mask


def _with_window(
    group: _Group, lens: list[int], window: int, queries_per_kv: int, dtype: torch.dtype
) -> _Group:
    """The same call with the positions before the window hidden.

    They are read all the same: a KV length that moves with the query would be summed in another
    order by decode than by verify.
    """
    if window >= max(lens):
        return group
    seq_lens = torch.tensor(lens, device=group.slots.device)[:, None]
    mask = _mask(seq_lens, group.query_len, group.kv_len, window, queries_per_kv, dtype)
    return replace(group, mask=mask, causal=False)


def paged_attention(
    query: Tensor,  # [num_tokens, num_heads, head_dim]
    kv: Tensor,  # [num_slots, 2, num_kv_heads, head_dim], one layer of the pool, already written
    metadata: AttentionMetadata,
    *,
    scale: float | None = None,  # of the scores; None: 1 / sqrt(head_dim)
    window: int = 0,  # a query sees the last `window` positions, its own included; 0: all
    softcap: float | None = None,  # scores become softcap * tanh(score / softcap)
    scales: tuple[float, float] = (1.0, 1.0),  # of an fp8 layer: `KVCachePool.scales`
) -> Tensor:
    """Causal softmax attention by position, [num_tokens, num_heads * head_dim].

    A window must be one of those that the metadata were built for. Raises ConfigError for a
    softcap on a backend that has none.
    """
    if metadata.paged is not None:
        return _attend_paged(query, kv, metadata.paged, scale, window, softcap, scales)
    groups = metadata.windowed[window] if window else metadata.groups
    k_scale, v_scale = scales
    if k_scale != 1:
        scale = (query.shape[2] ** -0.5 if scale is None else scale) * k_scale
    if len(groups) == 1 and groups[0].rows is None:
        out = _attend(query, kv, groups[0], scale, softcap)
        return out if v_scale == 1 else out * v_scale
    out = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
    for group in groups:
        assert group.rows is not None
        rows = query.index_select(0, group.rows)
        out.index_copy_(0, group.rows, _attend(rows, kv, group, scale, softcap))
    return out if v_scale == 1 else out * v_scale


def _attend_paged(
    query: Tensor,
    kv: Tensor,
    batch: PagedBatch,
    scale: float | None,
    window: int,
    softcap: float | None,
    scales: tuple[float, float],
) -> Tensor:
    if batch.flash and kv.dtype != query.dtype:
        raise ConfigError(
            f"attention_backend = flash reads no {kv.dtype} KV for {query.dtype} queries: set "
            f"attention_backend = triton or kv_cache_dtype = auto"
        )
    if softcap is not None and not batch.flash:
        raise ConfigError(
            "the model caps its attention scores, which the attention kernel of GPUs does not do "
            "yet: set device: cpu"
        )
    if batch.flash:
        key, value = kv.unflatten(0, (-1, batch.block_size)).unbind(2)
        out: Tensor = flash_attention()(
            q=query,
            k=key,  # [num_blocks, block_size, num_kv_heads, head_dim], strided
            v=value,
            max_seqlen_q=batch.max_query_len,
            cu_seqlens_q=batch.cu_query_lens,
            max_seqlen_k=batch.max_seq_len,
            seqused_k=batch.seq_lens,
            softmax_scale=query.shape[2] ** -0.5 if scale is None else scale,
            causal=True,
            **({"window_size": (window - 1, 0)} if window else {}),
            **({"softcap": softcap} if softcap is not None else {}),
            block_table=batch.block_tables,
        )
        return out.flatten(1)
    return dispatch.paged_attention(
        query,
        kv,
        block_tables=batch.block_tables,
        block_size=batch.block_size,
        cu_query_lens=batch.cu_query_lens,
        seq_lens=batch.seq_lens,
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
        scale=scale,
        window=window,
        tree_mask=batch.tree_mask,
        k_scale=scales[0],
        v_scale=scales[1],
    )


def _softmax(
    query: Tensor,  # [..., queries, head_dim]
    key: Tensor,  # [..., kv_len, head_dim]
    value: Tensor,
    mask: Tensor | None,  # additive
    *,
    causal: bool,
    scale: float | None,
    softcap: float | None,
) -> Tensor:
    if softcap is None:
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=causal, scale=scale
        )
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query.float() @ key.float().transpose(-1, -2) * scale
    scores = scores.div_(softcap).tanh_().mul_(softcap)
    if causal:
        scores = scores.masked_fill_(torch.ones_like(scores).tril_() == 0, float("-inf"))
    if mask is not None:
        scores += mask
    return (scores.softmax(-1) @ value.float()).to(query.dtype)


def _attend(
    query: Tensor, kv: Tensor, group: _Group, scale: float | None, softcap: float | None
) -> Tensor:
    _, num_heads, head_dim = query.shape
    num_kv_heads = kv.shape[2]
    fold = num_heads // num_kv_heads
    size, query_len, kv_len = group.size, group.query_len, group.kv_len
    gathered = kv.index_select(0, group.slots).to(query.dtype)
    gathered = gathered.view(size, kv_len, 2, num_kv_heads, head_dim)
    key, value = gathered.permute(2, 0, 3, 1, 4).unbind(0)  # [size, num_kv_heads, kv_len, head_dim]

    if query_len <= MAX_GROUPED_QUERIES:
        # Query heads of one KV head go into the query axis, so that K and V are read once.
        grouped = query.view(size, query_len, num_kv_heads, fold, head_dim)
        grouped = grouped.permute(0, 2, 3, 1, 4).reshape(size, num_kv_heads, -1, head_dim)
        if query_len == 1:
            # Twice the same row: a product with few rows is summed in another order, and in bf16
            # one last bit here is 0.3 of a logit thirty layers on. So decode equals verify.
            grouped = grouped.repeat(1, 1, 2, 1)
        out = _softmax(grouped, key, value, group.mask, causal=False, scale=scale, softcap=softcap)
        if query_len == 1:
            out = out[:, :, :fold]
        else:
            out = out.view(size, num_kv_heads, fold, query_len, head_dim).permute(0, 3, 1, 2, 4)
        return out.reshape(size * query_len, num_heads * head_dim)

    # One request: KV heads are the batch axis, their query heads share K and V by a stride of 0.
    heads = query.view(query_len, num_kv_heads, fold, head_dim).permute(1, 2, 0, 3)
    shape = (num_kv_heads, fold, kv_len, head_dim)
    out = _softmax(
        heads,
        key.transpose(0, 1).expand(shape),
        value.transpose(0, 1).expand(shape),
        group.mask,
        causal=group.causal,
        scale=scale,
        softcap=softcap,
    )
    return out.permute(2, 0, 1, 3).reshape(query_len, num_heads * head_dim)
