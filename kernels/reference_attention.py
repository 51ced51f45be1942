"""Attention over the paged KV: what a query sees, and the softmax over it."""

from __future__ import annotations

import torch
from torch import Tensor

from spectrue.kernels.reference_layers import check_scales


def paged_attention(
    query: Tensor,  # [T, H, D] floating; may be a slice of the fused qkv: a row is contiguous
    kv: Tensor,  # [num_slots, 2, Hkv, D] contiguous, floating or fp8: one layer, already written
    *,
    block_tables: Tensor,  # [B, max_blocks] int32, physical block of each logical one
    block_size: int,  # tokens a block, a power of two; slot = block * block_size + offset
    cu_query_lens: Tensor,  # [B + 1] int32, first row of each request, then their end
    seq_lens: Tensor,  # [B] int32, tokens with valid KV, the queries' own included
    max_query_len: int,  # at least the longest query length
    max_seq_len: int,  # at least the longest sequence
    scale: float | None = None,  # of the scores; None: 1 / sqrt(D)
    window: int = 0,  # a query sees the last `window` positions, its own included; 0: all
    tree_mask: Tensor | None = None,  # [T, W] int32, see below
    k_scale: float = 1.0,  # of an fp8 pool: a key is what is stored * k_scale
    v_scale: float = 1.0,
) -> Tensor:  # [T, H * D] of query's dtype
    """Softmax attention of decode, verify and prefill rows in one ragged batch.

    Query j of request i sits at position `seq_lens[i] - query_lens[i] + j` and sees the positions
    up to its own. Query heads `h * H / Hkv ...` share KV head h. With a tree mask, bit j % 32 of
    word j // 32 of a query's row alone says whether it sees the j-th token of its own request's
    queries; the context before them is seen by all.

    A row that sees nothing is zero: that of a request with `seq_lens` 0, or after the last
    request (padding of a graph). Slots that are not the request's may hold NaN.

    Inside float32, or float64 where the query is; a pool of another dtype than the query's is
    converted as it is read. Raises ValueError naming the argument whose
    shape, dtype or value is wrong; what the tensors on the device hold is not checked.
    """
    check_paged_attention(
        query,
        kv,
        block_tables=block_tables,
        block_size=block_size,
        cu_query_lens=cu_query_lens,
        seq_lens=seq_lens,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        window=window,
        tree_mask=tree_mask,
    )
    check_scales(kv, k_scale, v_scale)
    num_tokens, num_heads, head_dim = query.shape
    fold = num_heads // kv.shape[2]
    inside = torch.promote_types(query.dtype, torch.float32)
    out = query.new_zeros(num_tokens, num_heads, head_dim)
    starts = cu_query_lens.tolist()
    for i, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(starts[i], starts[i + 1])
        query_len = starts[i + 1] - starts[i]
        if not query_len or not seq_len:
            continue
        positions = torch.arange(seq_len, device=query.device)
        blocks = block_tables[i, positions // block_size].long()
        key, value = kv[blocks * block_size + positions % block_size].to(inside).unbind(1)
        own = torch.arange(seq_len - query_len, seq_len, device=query.device)
        if tree_mask is None:
            visible = positions <= own[:, None]
            if window:
                visible &= positions > own[:, None] - window
        else:
            nodes = torch.arange(query_len, device=query.device)
            bits = tree_mask[rows, nodes // 32] >> (nodes % 32) & 1
            visible = torch.ones(query_len, seq_len, dtype=torch.bool, device=query.device)
            visible[:, seq_len - query_len :] = bits.bool()
        heads = query[rows].to(inside).unflatten(1, (-1, fold))  # [queries, Hkv, fold, D]
        scores = torch.einsum("qgfd,kgd->gfqk", heads, key)
        scores = scores * ((head_dim**-0.5 if scale is None else scale) * k_scale)
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1).nan_to_num(0.0)
        mixed = torch.einsum("gfqk,kgd->qgfd", weights, value) * v_scale
        out[rows] = mixed.flatten(1, 2).to(query.dtype)
    return out.flatten(1)


def check_paged_attention(
    query: Tensor,
    kv: Tensor,
    *,
    block_tables: Tensor,
    block_size: int,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    window: int,
    tree_mask: Tensor | None,
) -> None:
    """What the host can know of the arguments, shared by every implementation."""

    def check(ok: bool, argument: str, rule: str) -> None:
        if not ok:
            raise ValueError(f"{argument} must be {rule}")

    check(query.dim() == 3, "query", "[T, H, D]")
    num_tokens, num_heads, head_dim = query.shape
    check(query.stride()[1:] == (head_dim, 1), "query", "[T, H, D] with contiguous rows")
    check(16 <= head_dim <= 256, "query", f"of a head size in [16, 256], not {head_dim}")
    check(
        kv.dim() == 4 and kv.shape[1] == 2 and kv.shape[3] == head_dim and kv.is_contiguous(),
        "kv",
        f"[num_slots, 2, Hkv, {head_dim}] contiguous, not {tuple(kv.shape)}",
    )
    check(kv.is_floating_point(), "kv", f"floating, not {kv.dtype}")
    check(num_heads % kv.shape[2] == 0, "kv", f"of a number of heads that divides {num_heads}")
    check(block_size >= 1 and block_size & (block_size - 1) == 0, "block_size", "a power of two")
    batch = seq_lens.shape[0]
    for name, tensor, shape in (
        ("block_tables", block_tables, (batch, *block_tables.shape[1:])),
        ("cu_query_lens", cu_query_lens, (batch + 1,)),
        ("seq_lens", seq_lens, (batch,)),
    ):
        ok = tensor.shape == shape and tensor.dtype == torch.int32 and tensor.stride(-1) == 1
        check(ok, name, f"int32 {list(shape)}, not {tensor.dtype} {list(tensor.shape)}")
    check(block_tables.dim() == 2, "block_tables", "[B, max_blocks]")
    check(max_query_len >= 1, "max_query_len", "at least 1")
    check(
        1 <= max_seq_len <= block_tables.shape[1] * block_size or batch == 0,
        "max_seq_len",
        f"at least 1 and no more than block_tables hold, not {max_seq_len}",
    )
    check(window >= 0, "window", "at least 0")
    if tree_mask is not None:
        check(window == 0, "tree_mask", "None where window is set: a node's depth is not known")
        check(
            tree_mask.dim() == 2
            and tree_mask.shape[0] == num_tokens
            and tree_mask.shape[1] * 32 >= max_query_len
            and tree_mask.dtype == torch.int32
            and tree_mask.is_contiguous(),
            "tree_mask",
            f"int32 [{num_tokens}, W] with 32 * W >= max_query_len = {max_query_len}",
        )
