"""The attention kernel: a tile of queries against one split of a request's KV.

An online softmax over tiles of KV (FlashAttention-2, arXiv 2307.08691). A tile's rows are queries x
the query heads of one KV head, so that K and V are read once for all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spectrue.kernels.triton_attention_tree import ones, tree_bits
from spectrue.kernels.triton_common import await_previous


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
    v_scale,  # None: the pool is not fp8
    NUM_KV_HEADS: tl.constexpr,
    FOLD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    WHOLE: tl.constexpr,
    WINDOW: tl.constexpr,
    TREE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr = False,
):
    await_previous(PDL)
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
    query = query_at
    if CHUNK_D == BLOCK_D:
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
            CHUNK_D,
            masked == 1,
            WINDOW,
            TREE,
            PRECISION,
            query_ptr.dtype.element_ty,
        )

    seen = total != 0  # a NaN that the row does see stays one
    acc = acc / tl.where(seen, total, 1.0)[:, None]
    if v_scale is not None:
        acc *= v_scale
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
    CHUNK_D: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    TREE: tl.constexpr,
    PRECISION: tl.constexpr,
    DTYPE: tl.constexpr,  # that the matrices are multiplied in
):
    """Add positions [begin, end) to the online softmax; whole tiles seen by all if not MASKED.

    `query` are the tile's queries, or pointers to them, which are then read CHUNK_D dims at a time.
    """
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
        key_at = key_ptr + slot * (2 * NUM_KV_HEADS * HEAD_DIM)
        at = key_at[:, None] + dim[None, :]
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
        # Nothing where the pool has the dtype of the queries
        key = key.to(DTYPE)
        value = value.to(DTYPE)
        if CHUNK_D == BLOCK_D:
            scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        else:
            scores = _scores_by_chunk(
                query, key_at, valid, inside, HEAD_DIM, BLOCK_D, CHUNK_D, PRECISION
            )
        scores *= scale_log2
        if MASKED:
            if TREE:
                bits = tree_bits(tree, tree_words, valid, start - context, BLOCK_N)
                bits = (bits & ones(end - start)) | ones(context - start)
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
def _scores_by_chunk(
    query_at,
    key_at,
    valid,
    inside,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Queries x keys, for heads of which the registers do not hold all dims at once."""
    scores = tl.zeros([valid.shape[0], inside.shape[0]], tl.float32)
    for start in tl.range(0, BLOCK_D, CHUNK_D):  # not unrolled, or the loads would all be early
        dim = start + tl.arange(0, CHUNK_D)
        known = (dim < HEAD_DIM)[None, :]
        at = query_at[:, None] + dim[None, :]
        query = tl.load(at, mask=valid[:, None] & known, other=0.0)
        key = tl.load(key_at[:, None] + dim[None, :], mask=inside[:, None] & known, other=0.0)
        key = key.to(query.dtype)
        scores = tl.dot(query, tl.trans(key), scores, input_precision=PRECISION)
    return scores
