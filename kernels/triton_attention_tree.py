"""The bits of a tree mask that a tile of KV needs."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tree_bits(tree, tree_words, valid, node, BLOCK_N: tl.constexpr):
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
def ones(count):
    """The lowest `count` of 64 bits: none if negative, at most all."""
    count = tl.minimum(tl.maximum(count, 0), 64).to(tl.uint64)
    one = tl.full([], 1, tl.uint64)
    return ((one << (count >> 1)) << (count - (count >> 1))) - 1
