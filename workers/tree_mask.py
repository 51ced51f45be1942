"""Who sees whom among the tokens of a forward that holds draft trees.

A request's fed tokens have parents: a row of the same request before them, or -1, the context that
has KV already. A chunk of a prompt is a chain. NumPy, because all of it is integers of the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WORD = 32  # bits


def depths_of(parents: Sequence[int]) -> list[int]:
    """Of each row, 0 where the parent is the context."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


def tree_mask(
    parents: Sequence[Sequence[int]],  # batch x [query_len]
) -> Tensor:  # [num_tokens, words] int32
    """Each row's bits for itself and its ancestors, as `dispatch.paged_attention` reads them."""
    words = -(-max(len(p) for p in parents) // WORD)
    return torch.from_numpy(np.concatenate([_words(p, words) for p in parents]).view(np.int32))


def _words(parents: Sequence[int], words: int) -> NDArray[np.uint32]:  # [query_len, words]
    n = len(parents)
    rows = np.arange(n)
    if n and parents[0] == -1 and np.array_equal(parents[1:], rows[:-1]):  # a chain: one triangle
        ones = np.clip(rows[:, None] + 1 - WORD * np.arange(words), 0, WORD).astype(np.uint64)
        triangle: NDArray[np.uint32] = ((np.uint64(1) << ones) - np.uint64(1)).astype(np.uint32)
        return triangle
    mask: NDArray[np.uint32] = np.zeros((n, words), dtype=np.uint32)
    mask[rows, rows // WORD] = np.uint32(1) << (rows % WORD).astype(np.uint32)
    for row, parent in enumerate(parents):
        if parent >= 0:
            mask[row] |= mask[parent]
    return mask
