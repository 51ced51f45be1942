"""Counter-based random numbers: Philox 4x32-10, in integer arithmetic that every backend repeats.

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.

The layout, for every stream (all words unsigned 32 bit; wider inputs give their low 32 bits):

    key     = (seed bits 0..31, seed bits 32..63)
    counter = (block, position, choice, stream)

`uniform` reads word 0 of block 0. `gumbel` reads word `token_id % 4` of block `token_id // 4`, so
one call makes the noise of four consecutive token ids. In Triton this is
`tl.philox(seed, block, position, choice, stream)`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Streams: one a use, so that no two decisions at a position share a number.
STREAM_DRAW = 0  # a plain, match or bonus draw from the target law
STREAM_COIN = 1  # accept or reject a draft token
STREAM_DRAFT = 2  # the drafter's own draw
STREAM_GUMBEL = 3  # noise that drafter and target share

# A Gumbel uniform is an odd multiple of 2^-24, so the noise lies within these bounds.
GUMBEL_MIN = -math.log(-math.log(2**-24))  # -2.81
GUMBEL_MAX = -math.log(-math.log1p(-(2**-24)))  # 16.64

_MASK = 0xFFFFFFFF
_MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(key: tuple[Tensor, Tensor], counter: Words) -> Words:
    """Four random words for each key and counter.

    All tensors int64 holding unsigned 32-bit words, of shapes that broadcast; so do the results.
    """
    key0, key1 = key
    c0, c1, c2, c3 = counter
    for round_index in range(_ROUNDS):
        # A product of two 32-bit words needs 64 bits: int64 wraps, and the mask drops the sign
        # that the shift drags in. Low words stay unmasked: they are only xored, then masked.
        product0 = c0 * _MULTIPLIER[0]
        product1 = c2 * _MULTIPLIER[1]
        round_key0 = (key0 + round_index * _WEYL[0]) & _MASK
        round_key1 = (key1 + round_index * _WEYL[1]) & _MASK
        c0 = ((product1 >> 32) ^ (c1 ^ round_key0)) & _MASK
        c2 = ((product0 >> 32) ^ (c3 ^ round_key1)) & _MASK
        c1, c3 = product1, product0
    return c0, c1 & _MASK, c2, c3 & _MASK


def _words(seed: Tensor, choice: Tensor, position: Tensor, block: Tensor, stream: int) -> Words:
    key = (seed & _MASK, (seed >> 32) & _MASK)
    counter = (
        block & _MASK,
        position & _MASK,
        choice & _MASK,
        torch.full((), stream, dtype=torch.int64, device=seed.device),
    )
    return philox4x32(key, counter)


def uniform(
    seed: Tensor,  # [N] int64, the whole signed range is a key
    choice: Tensor,  # [N] int64
    position: Tensor,  # [N] int64
    stream: int,  # STREAM_*
) -> Tensor:  # [N] float32
    """Uniforms in [0, 1), multiples of 2^-24, a function of (seed, choice, position, stream)."""
    word = _words(seed, choice, position, torch.zeros_like(seed), stream)[0]
    return (word >> 8).to(torch.float32) * 2**-24


def _to_gumbel(word: Tensor) -> Tensor:
    # Odd multiples of 2^-24 are exact in float32 and never 0 or 1. (24 bits + 0.5 would not be:
    # above 2^23 the half is rounded away, the largest value becomes 1 and its noise infinite.)
    odd = ((word >> 8) | 1).to(torch.float32) * 2**-24
    return odd.log_().neg_().log_().neg_()


def gumbel(
    seed: Tensor,  # [N] int64
    choice: Tensor,  # [N] int64
    position: Tensor,  # [N] int64
    token_ids: Tensor,  # [N, M] int64, target token ids
) -> Tensor:  # [N, M] float32
    """Gumbel(0, 1) noise, a function of (seed, choice, position, token id).

    Within [GUMBEL_MIN, GUMBEL_MAX]. Drafter and target that add it to their own logits and take
    the argmax draw from their own laws, often the same token (arXiv 2408.07978).
    """
    words = _words(seed[:, None], choice[:, None], position[:, None], token_ids // 4, STREAM_GUMBEL)
    lane = token_ids % 4
    word = torch.where(
        lane < 2,
        torch.where(lane == 0, words[0], words[1]),
        torch.where(lane == 2, words[2], words[3]),
    )
    return _to_gumbel(word)


def gumbel_chunks(
    seed: Tensor,  # [N] int64
    choice: Tensor,  # [N] int64
    position: Tensor,  # [N] int64
    chunk: Tensor,  # [N] int64
    chunk_size: int,  # a multiple of 4
) -> Tensor:  # [N, chunk_size] float32
    """`gumbel` of the token ids chunk * chunk_size .. + chunk_size - 1, a Philox call for four."""
    num_blocks = chunk_size // 4
    lane_block = torch.arange(num_blocks, device=chunk.device)[:, None]
    block = chunk * num_blocks + lane_block  # [num_blocks, N]: the long axis is innermost
    words = _words(seed, choice, position, block, STREAM_GUMBEL)
    noise = _to_gumbel(torch.stack(words))  # [4, num_blocks, N]
    return noise.permute(2, 1, 0).reshape(-1, chunk_size)
