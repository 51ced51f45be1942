"""Paged attention in Triton: one kernel for decode, verify and prefill, and one that joins splits.

KV is read through a block table (PagedAttention, arXiv 2309.06180); a long context is cut into
splits that run side by side (Flash-Decoding).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from spectrue.kernels.fp8 import FP8_DTYPES
from spectrue.kernels.reference_attention import check_paged_attention
from spectrue.kernels.reference_layers import check_scales
from spectrue.kernels.triton_attention_kernel import _attend
from spectrue.kernels.triton_attention_plan import MIN_SPLIT, Plan
from spectrue.kernels.triton_attention_plan import gpu_kind as _gpu
from spectrue.kernels.triton_attention_plan import make_plan as _plan
from spectrue.kernels.triton_common import await_previous
from spectrue.kernels.triton_launch import launch

JOIN_BLOCK = 8  # splits that the joining kernel reads at once


def paged_attention(
    query: Tensor,
    kv: Tensor,
    *,
    block_tables: Tensor,
    block_size: int,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float | None = None,
    window: int = 0,
    tree_mask: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
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
    num_kv_heads = kv.shape[2]
    fold = num_heads // num_kv_heads
    batch = seq_lens.shape[0]
    units, kind = _gpu(query.device)
    plan: Plan = _plan(
        batch=batch,
        num_tokens=num_tokens,
        fold=fold,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        itemsize=query.element_size(),
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        units=units,
        kind=kind,
    )
    out = query.new_empty(num_tokens, num_heads * head_dim)
    splits = plan.num_splits
    partial = lse = None
    if splits > 1:
        partial = query.new_empty(num_tokens, num_heads, splits, head_dim, dtype=torch.float32)
        lse = query.new_empty(num_tokens, num_heads, splits, dtype=torch.float32)
    queries = plan.block_m // fold  # of a tile
    whole = max_query_len <= queries  # a request is one tile
    tiles = batch if whole else num_tokens // queries + batch
    padding = 0  # tiles of rows after the last request; _join writes their zeros if it runs
    if splits == 1:
        padding = triton.cdiv(num_tokens, queries) if whole else 1
    block_d = max(16, triton.next_power_of_2(head_dim))
    launch(
        _attend,
        (num_kv_heads * (tiles + padding), splits),
        query,
        kv,
        out,
        partial,
        lse,
        block_tables,
        cu_query_lens,
        seq_lens,
        tree_mask,
        query.stride(0),
        block_tables.stride(0),
        0 if tree_mask is None else tree_mask.shape[1],
        num_tokens,
        batch,
        window,
        (head_dim**-0.5 if scale is None else scale) * k_scale * math.log2(math.e),
        v_scale if kv.dtype in FP8_DTYPES else None,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        NUM_KV_HEADS=num_kv_heads,
        FOLD=fold,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n if tree_mask is None else min(plan.block_n, 64),
        BLOCK_D=block_d,
        CHUNK_D=min(plan.chunk_d or block_d, block_d),
        SPLITS=splits,
        MIN_SPLIT=max(MIN_SPLIT, plan.block_n),
        WHOLE=whole,
        WINDOW=window > 0,
        TREE=tree_mask is not None,
        PRECISION="ieee",
    )
    if splits > 1:
        block_s = min(splits, JOIN_BLOCK)
        launch(
            _join,
            (num_tokens * num_heads,),
            partial,
            lse,
            out,
            cu_query_lens,
            batch,
            num_warps=max(1, block_s * block_d // 512),
            num_stages=1,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            SPLITS=splits,
            BLOCK_S=block_s,
        )
    return out


@triton.jit(do_not_specialize=["batch"])
def _join(
    partial_ptr,
    lse_ptr,
    out_ptr,
    cu_query_lens_ptr,
    batch,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """The splits of one token and head, weighted by their share of the softmax's sum."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, BLOCK_D)
    lse_row = lse_ptr + row * SPLITS
    num_tokens = tl.load(cu_query_lens_ptr + batch)  # rows after these were never written
    written = tl.where(row // NUM_HEADS < num_tokens, SPLITS, 0)
    split = tl.arange(0, SPLITS)
    peak = tl.max(tl.load(lse_row + split, mask=split < written, other=float("-inf")), 0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in tl.static_range(0, SPLITS, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        lse = tl.load(lse_row + split, mask=split < written, other=float("-inf"))
        seen = lse != float("-inf")
        weight = tl.exp2(lse - shift)
        at = partial_ptr + ((row * SPLITS + split) * HEAD_DIM)[:, None] + dim[None, :]
        part = tl.load(at, mask=seen[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
        total += tl.sum(weight, 0)
        acc += tl.sum(part * weight[:, None], 0)
    out = acc / tl.where(total != 0, total, 1.0)
    at = out_ptr + row * HEAD_DIM + dim
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)
