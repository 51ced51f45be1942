"""Counter-based random numbers: Philox 4x32-10, in integer arithmetic that every backend repeats.

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.

The layout, for every stream (all words unsigned 32 bit; wider inputs give their low 32 bits):

    key     = (seed bits 0..31, seed bits 32..63)
    counter = (block, position, choice, stream)

In Triton this is `tl.philox(seed, block, position, choice, stream)`. `uniform` reads word 0 of
block 0.

Gumbel noise is -log of Exp(1) variables, and those of a chunk of 128 token ids are made from the
least up: the least of n is itself exponential (with rate n), lies at a uniform place, and the
others exceed it by fresh Exp(1) variables (they have no memory). So the two largest noises of a
chunk cost one Philox call, and a draw looks only into chunks where the rest can still win.

    least of chunk c  -log(uniform of word 0) / 128, at place word 1 >> 25
    second            that plus -log(uniform of word 2) / 127, at the place (word 3 >> 8) * 127
                      >> 24 of the 127 others, both of block c of GUMBEL
    another token t   the second plus -log(uniform of word t % 4), block t // 4 of GUMBEL_REST

The law is that of independent noise for every token id; the noise depends on the id alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spectrue.kernels.row_law import CHUNK

# Streams: one a use, so that no two decisions at a position share a number.
STREAM_DRAW = 0  # a plain, match or bonus draw from the target law
STREAM_COIN = 1  # accept or reject a draft token
STREAM_DRAFT = 2  # the drafter's own draw
STREAM_GUMBEL = 3  # noise that drafter and target share: the two largest of each chunk
STREAM_GUMBEL_REST = 4  # ... and what the other tokens of a chunk lie below them

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


def _exponential(word: Tensor) -> Tensor:
    # Odd multiples of 2^-24 are exact in float32 and never 0 or 1. (24 bits + 0.5 would not be:
    # above 2^23 the half is rounded away, the largest value becomes 1 and its noise infinite.)
    odd = ((word >> 8) | 1).to(torch.float32) * 2**-24
    return odd.log_().neg_()


class ChunkExponentials(NamedTuple):
    """Of each chunk of CHUNK token ids, [N, M] each."""

    least: Tensor  # float32
    place: Tensor  # int64, the token id that has it
    second: Tensor  # float32
    second_place: Tensor  # int64


def chunk_exponentials(
    seed: Tensor,  # [N] int64
    choice: Tensor,  # [N] int64
    position: Tensor,  # [N] int64
    chunk: Tensor,  # [N, M] int64
) -> ChunkExponentials:
    """The two least exponentials of each chunk."""
    words = _words(seed[:, None], choice[:, None], position[:, None], chunk, STREAM_GUMBEL)
    least = _exponential(words[0]) / CHUNK
    place = words[1] >> 25
    other = (words[3] >> 8) * (CHUNK - 1) >> 24
    other = other + (other >= place)  # the places but for the first
    second = least + _exponential(words[2]) / (CHUNK - 1)
    return ChunkExponentials(least, chunk * CHUNK + place, second, chunk * CHUNK + other)


def gumbel(
    seed: Tensor,  # [N] int64
    choice: Tensor,  # [N] int64
    position: Tensor,  # [N] int64
    token_ids: Tensor,  # [N, M] int64, target token ids
) -> Tensor:  # [N, M] float32
    """Gumbel(0, 1) noise, a function of (seed, choice, position, token id), always finite.

    Drafter and target that add it to their own logits and take the argmax draw from their own
    laws, often the same token (Daliri et al., arXiv 2408.07978).
    """
    chunk = chunk_exponentials(seed, choice, position, token_ids // CHUNK)
    keys = seed[:, None], choice[:, None], position[:, None]
    words = _words(*keys, token_ids // 4, STREAM_GUMBEL_REST)
    lane = token_ids % 4
    word = torch.where(
        lane < 2,
        torch.where(lane == 0, words[0], words[1]),
        torch.where(lane == 2, words[2], words[3]),
    )
    exponential = chunk.second + _exponential(word)
    exponential = torch.where(token_ids == chunk.second_place, chunk.second, exponential)
    return torch.where(token_ids == chunk.place, chunk.least, exponential).log_().neg_()
