"""Paged attention in Triton: one kernel for decode, verify and prefill, and one that joins splits.

An online softmax over tiles of KV (FlashAttention-2, arXiv 2307.08691), through a block table
(PagedAttention, arXiv 2309.06180), a long context cut into splits that run side by side
(Flash-Decoding). A tile's rows are queries x the query heads of one KV head, so that K and V are
read once for all of them.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from spectrue.kernels.reference_attention import check_paged_attention
from spectrue.kernels.triton_launch import launch

MAX_SPLITS = 64
MIN_SPLIT = 128  # tokens: fewer are not worth a program
LONG_SPLIT = 4096  # tokens: a sequence of more than this a split is cut further, batch or no batch
# (kind of GPU, float32) -> largest block_m, block_n, num_stages, num_warps: what fits without
# spilling registers. NVIDIA keeps tiles in flight in shared memory, two stages each (the block
# table, then the KV); AMD keeps the next tile in registers. float32, where there is no matrix unit
# for it, is for tests.
TILES = {
    ("sm_90", False): (128, 64, 3, 8),
    ("sm_90", True): (16, 16, 1, 8),
    ("sm_80", False): (64, 32, 3, 4),
    ("sm_80", True): (16, 16, 1, 8),
    ("wave64", False): (64, 32, 2, 4),
    ("wave64", True): (32, 16, 2, 4),
    ("wave32", False): (64, 16, 1, 8),
    ("wave32", True): (16, 16, 1, 8),
}
JOIN_BLOCK = 8  # splits that the joining kernel reads at once


@dataclass(frozen=True)
class Plan:
    """How the work is cut. A row's result depends on this and on its own request alone."""

    block_m: int  # rows of a tile: queries x fold
    block_n: int  # KV tokens of a tile
    num_splits: int
    num_warps: int
    num_stages: int


def _plan(
    *,
    batch: int,
    num_tokens: int,
    fold: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    max_query_len: int,
    max_seq_len: int,
    device: torch.device,
) -> Plan:
    """From host-known sizes alone, in coarse steps: never from the lengths of single requests."""
    units, kind = _gpu(device)
    block_m, block_n, num_stages, num_warps = TILES[kind, itemsize == 4]
    block_m = min(max(triton.next_power_of_2(max_query_len * fold), 16), block_m)
    block_m = max(block_m, triton.next_power_of_2(fold))
    if kind.startswith("sm_") and block_m < 64 and itemsize < 4:
        num_stages = 5
    if block_m < 64 and itemsize < 4:
        num_warps = 4
    if head_dim > 128:
        block_n = max(block_n // 2, 16)

    queries = block_m // fold
    tiles = batch if max_query_len <= queries else num_tokens // queries + batch
    wanted = units * (8 if block_m < 64 else 2) // max(tiles * num_kv_heads, 1)
    wanted = max(wanted, triton.cdiv(max_seq_len, LONG_SPLIT))
    num_splits = max(min(wanted, triton.cdiv(max_seq_len, MIN_SPLIT), MAX_SPLITS), 1)
    num_splits = 1 << num_splits.bit_length() - 1
    return Plan(block_m, block_n, num_splits, num_warps, num_stages)


@functools.cache
def _gpu(device: torch.device) -> tuple[int, str]:
    """Its compute units and its kind."""
    if device.type != "cuda":
        return 64, "wave64"  # AMD's code, interpreted or executed on the CPU: tests
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is None:
        kind = "sm_90" if properties.major >= 9 else "sm_80"
        return properties.multi_processor_count, kind
    return properties.multi_processor_count, f"wave{properties.warp_size}"


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
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = kv.shape[2]
    fold = num_heads // num_kv_heads
    batch = seq_lens.shape[0]
    plan = _plan(
        batch=batch,
        num_tokens=num_tokens,
        fold=fold,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        itemsize=query.element_size(),
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        device=query.device,
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
        (head_dim**-0.5 if scale is None else scale) * math.log2(math.e),
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        NUM_KV_HEADS=num_kv_heads,
        FOLD=fold,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n if tree_mask is None else min(plan.block_n, 64),
        BLOCK_D=block_d,
        SPLITS=splits,
        MIN_SPLIT=max(MIN_SPLIT, plan.block_n),
        WHOLE=whole,
        WINDOW=window > 0,
        TREE=tree_mask is not None,
        PRECISION="ieee",
    )
    if splits > 1:
        launch(
            _join,
            (num_tokens * num_heads,),
            partial,
            lse,
            out,
            cu_query_lens,
            batch,
            num_warps=1,
            num_stages=1,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            SPLITS=splits,
            BLOCK_S=min(splits, JOIN_BLOCK),
        )
    return out


@triton.jit(do_not_specialize=["num_tokens", "batch", "window"])
def _attend(
    query_ptr,
    kv_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    table_ptr,
    cu_query_lens_ptr,
    seq_lens_ptr,
    tree_ptr,
    query_stride,
    table_stride,
    tree_words,
    num_tokens,
    batch,
    window,
    scale_log2,
    NUM_KV_HEADS: tl.constexpr,
    FOLD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    WHOLE: tl.constexpr,
    WINDOW: tl.constexpr,
    TREE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    QUERIES: tl.constexpr = BLOCK_M // FOLD
    kv_head = tl.program_id(0) % NUM_KV_HEADS  # the heads of a token lie side by side in memory
    tile = tl.program_id(0) // NUM_KV_HEADS
    split = tl.program_id(1)

    # Request `batch` is the padding after the last: rows that see nothing.
    if WHOLE:
        request = tl.minimum(tile, batch)
        first = (tile - request) * QUERIES
    else:
        tile = tl.num_programs(0) // NUM_KV_HEADS - 1 - tile  # late queries see most: first
        request = _find_request(cu_query_lens_ptr, tile, batch, QUERIES)
        first = (tile - tl.load(cu_query_lens_ptr + request) // QUERIES - request) * QUERIES
    query_start = tl.load(cu_query_lens_ptr + request)
    if request < batch:
        query_end = tl.load(cu_query_lens_ptr + request + 1)
        seq_len = tl.load(seq_lens_ptr + request)
    else:
        query_end = num_tokens
        seq_len = 0
    query_len = query_end - query_start
    if first >= query_len:
        return
    context = seq_len - query_len  # tokens before the queries

    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    own = first + row // FOLD  # index of the row's query in its request
    head = kv_head * FOLD + row % FOLD
    valid = (row < QUERIES * FOLD) & (own < query_len)
    token = (query_start + own).to(tl.int64)
    query_at = query_ptr + token * query_stride + head * HEAD_DIM
    stored = valid[:, None]
    if HEAD_DIM < BLOCK_D:
        stored = stored & (dim < HEAD_DIM)[None, :]
    query = tl.load(query_at[:, None] + dim[None, :], mask=stored, other=0.0)

    # [low, high): what the tile's rows see together; [low, full): what each of them sees.
    high = seq_len if TREE else tl.minimum(seq_len, context + first + QUERIES)
    full = context if TREE else context + first + 1
    low = 0
    if WINDOW:
        low = tl.maximum(context + first - window + 1, 0) // BLOCK_N * BLOCK_N
    length = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), SPLITS), MIN_SPLIT) * MIN_SPLIT
    begin = low + split * length
    end = tl.minimum(begin + length, high)
    middle = begin
    if not WINDOW:
        middle += tl.maximum(tl.minimum(end, full) - begin, 0) // BLOCK_N * BLOCK_N

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    key_ptr = kv_ptr + kv_head * HEAD_DIM
    table = table_ptr + request.to(tl.int64) * table_stride  # a stride of 1 is a constant
    tree = tree_ptr + token * tree_words if TREE else token
    # First the tiles that every row sees whole, then the others; under a window there are none.
    for masked in tl.static_range(1 if WINDOW else 0, 2):
        acc, peak, total = _attend_range(
            acc,
            peak,
            total,
            query,
            key_ptr,
            table,
            tree,
            tree_words,
            context,
            own,
            valid,
            middle if masked else begin,
            end if masked else middle,
            window,
            scale_log2,
            NUM_KV_HEADS,
            HEAD_DIM,
            BLOCK_SIZE,
            BLOCK_N,
            BLOCK_D,
            masked == 1,
            WINDOW,
            TREE,
            PRECISION,
        )

    seen = total != 0  # a NaN that the row does see stays one
    acc = acc / tl.where(seen, total, 1.0)[:, None]
    head_row = token * (NUM_KV_HEADS * FOLD) + head
    if SPLITS == 1:
        at = out_ptr + (head_row * HEAD_DIM)[:, None] + dim[None, :]
        tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=stored)
    else:
        part = head_row * SPLITS + split
        at = partial_ptr + (part * HEAD_DIM)[:, None] + dim[None, :]
        tl.store(at, acc, mask=stored & seen[:, None])
        lse = tl.where(seen, peak + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
        tl.store(lse_ptr + part, lse, mask=valid)


@triton.jit
def _find_request(cu_query_lens_ptr, tile, batch, QUERIES: tl.constexpr):
    """Request i has tiles from `cu_query_lens[i] // QUERIES + i`: room enough for each of them."""
    at_or_before = 0
    for start in range(0, batch + 1, 256):
        index = start + tl.arange(0, 256)
        first = tl.load(cu_query_lens_ptr + index, mask=index <= batch, other=0) // QUERIES + index
        at_or_before += tl.sum(((first <= tile) & (index <= batch)).to(tl.int32), 0)
    return at_or_before - 1


@triton.jit
def _attend_range(
    acc,
    peak,
    total,
    query,
    key_ptr,
    table,
    tree,
    tree_words,
    context,
    own,
    valid,
    begin,
    end,
    window,
    scale_log2,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    TREE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add positions [begin, end) to the online softmax; whole tiles seen by all if not MASKED."""
    dim = tl.arange(0, BLOCK_D)
    # No pipeline for the one or two tiles at the end of the context
    STAGES: tl.constexpr = 1 if MASKED and not WINDOW else None
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        position = start + tl.arange(0, BLOCK_N)
        inside = position < end
        if MASKED:
            block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0)
        else:
            block = tl.load(table + position // BLOCK_SIZE)
        slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        at = key_ptr + (slot * (2 * NUM_KV_HEADS * HEAD_DIM))[:, None] + dim[None, :]
        # What is not the request's may be NaN, and 0 * NaN is NaN: it is never loaded.
        if MASKED or HEAD_DIM < BLOCK_D:
            loaded = inside[:, None]
            if HEAD_DIM < BLOCK_D:
                loaded = loaded & (dim < HEAD_DIM)[None, :]
            key = tl.load(at, mask=loaded, other=0.0)
            value = tl.load(at + NUM_KV_HEADS * HEAD_DIM, mask=loaded, other=0.0)
        else:
            key = tl.load(at)
            value = tl.load(at + NUM_KV_HEADS * HEAD_DIM)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale_log2
        if MASKED:
            if TREE:
                bits = _tree_bits(tree, tree_words, valid, start - context, BLOCK_N)
                bits = (bits & _ones(end - start)) | _ones(context - start)
                column = tl.arange(0, BLOCK_N)[None, :]
                visible = ((bits[:, None] >> column.to(tl.uint64)) & 1) != 0
            else:
                distance = (context + own)[:, None] - position[None, :]
                if WINDOW:  # as unsigned numbers, what lies ahead is far away
                    visible = distance.to(tl.uint32, bitcast=True) < window.to(tl.uint32)
                else:
                    visible = distance >= 0
            scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(peak - shift)
        total = total * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None]
        acc = tl.dot(weights.to(value.dtype), value, acc, input_precision=PRECISION)
        peak = new_peak
    return acc, peak, total


@triton.jit
def _tree_bits(tree, tree_words, valid, node, BLOCK_N: tl.constexpr):
    """Bits node, node + 1, ... of each row's mask, of which the first BLOCK_N <= 64 count.

    A word that does not exist, where `node` is negative or near the end, is one that does.
    """
    low = _tree_word(tree, tree_words, valid, node >> 5)
    middle = _tree_word(tree, tree_words, valid, (node >> 5) + 1)
    skip = (node & 31).to(tl.uint64)
    bits = (low | (middle << 32)) >> skip
    if BLOCK_N > 32:
        high = _tree_word(tree, tree_words, valid, (node >> 5) + 2)
        bits |= (high << 32) << (32 - skip)
    return bits


@triton.jit
def _tree_word(tree, tree_words, valid, index):
    index = tl.minimum(tl.maximum(index, 0), tree_words - 1)
    word = tl.load(tree + index, mask=valid, other=0)
    return word.to(tl.uint32, bitcast=True).to(tl.uint64)


@triton.jit
def _ones(count):
    """The lowest `count` of 64 bits: none if negative, at most all."""
    count = tl.minimum(tl.maximum(count, 0), 64).to(tl.uint64)
    one = tl.full([], 1, tl.uint64)
    return ((one << (count >> 1)) << (count - (count >> 1))) - 1


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
):
    """The splits of one token and head, weighted by their share of the softmax's sum."""
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
