"""Uniforms and Gumbel noise by key: what kernels/philox.py specifies."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spectrue.kernels.philox import STREAM_GUMBEL, STREAM_GUMBEL_REST
from spectrue.kernels.row_law import CHUNK
from spectrue.kernels.triton_common import exponential, to_uniform, words
from spectrue.kernels.triton_launch import launch

_BLOCK = 256


@triton.jit
def _uniform_kernel(out, seed, choice, position, n, STREAM: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    block = tl.zeros([BLOCK], tl.uint32)
    w0, _, _, _ = words(
        tl.load(seed + i, mask=mask, other=0),
        block,
        tl.load(position + i, mask=mask, other=0),
        tl.load(choice + i, mask=mask, other=0),
        STREAM,
    )
    tl.store(out + i, to_uniform(w0), mask=mask)


def uniform(seed: Tensor, choice: Tensor, position: Tensor, stream: int) -> Tensor:
    out = torch.empty(seed.shape, dtype=torch.float32, device=seed.device)
    n = seed.numel()
    grid = (triton.cdiv(n, _BLOCK),)
    launch(
        _uniform_kernel,
        grid,
        out,
        seed.contiguous(),
        choice.contiguous(),
        position.contiguous(),
        n,
        STREAM=stream,
        BLOCK=_BLOCK,
    )
    return out


@triton.jit
def two_least(seed, choice, position, chunk, GUMBEL: tl.constexpr, CHUNK: tl.constexpr):
    """(least exponential, its place in the chunk, the second, its place) of each chunk."""
    w0, w1, w2, w3 = words(seed, chunk, position, choice, GUMBEL)
    least = exponential(w0) * (1.0 / CHUNK)
    second = least + exponential(w2) * (1.0 / (CHUNK - 1))
    place = (w1 >> 25).to(tl.int32)
    other = ((w3 >> 8).to(tl.int64) * (CHUNK - 1) >> 24).to(tl.int32)
    return least, place, second, other + (other >= place).to(tl.int32)


@triton.jit
def gumbel_noise(
    seed,
    choice,
    position,
    token,  # [BLOCK] int, target token ids
    GUMBEL: tl.constexpr,
    REST: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The noise of any token ids: two Philox calls each. Draws by chunk need far fewer."""
    least, place, second, other = two_least(seed, choice, position, token // CHUNK, GUMBEL, CHUNK)
    r0, r1, r2, r3 = words(seed, token // 4, position, choice, REST)
    lane = token % 4
    word = tl.where(lane < 2, tl.where(lane == 0, r0, r1), tl.where(lane == 2, r2, r3))
    value = tl.where(token % CHUNK == other, second, second + exponential(word))
    return -tl.log(tl.where(token % CHUNK == place, least, value))


@triton.jit
def chunk_noise(
    seed,
    choice,
    position,
    chunk,  # [N] int, chunks of target token ids
    N: tl.constexpr,
    GUMBEL: tl.constexpr,
    REST: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The noise of whole chunks, [N, CHUNK]: one Philox call for four tokens."""
    least, place, second, other = two_least(seed, choice, position, chunk, GUMBEL, CHUNK)
    block = chunk[:, None] * (CHUNK // 4) + tl.arange(0, CHUNK // 4)[None, :]
    r0, r1, r2, r3 = words(seed, block, position, choice, REST)
    word = tl.reshape(tl.join(tl.join(r0, r2), tl.join(r1, r3)), [N, CHUNK])
    i = tl.arange(0, CHUNK)[None, :]
    value = second[:, None] + tl.where(i == other[:, None], 0.0, exponential(word))
    return -tl.log(tl.where(i == place[:, None], least[:, None], value))


@triton.jit
def _gumbel_kernel(
    out,
    seed,
    choice,
    position,
    token_ids,
    width,
    GUMBEL: tl.constexpr,
    REST: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    parts = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // parts).to(tl.int64)
    i = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ids + row * width + i, mask=i < width, other=0).to(tl.int32)
    noise = gumbel_noise(
        tl.load(seed + row),
        tl.load(choice + row),
        tl.load(position + row),
        token,
        GUMBEL,
        REST,
        CHUNK,
    )
    tl.store(out + row * width + i, noise, mask=i < width)


def gumbel(seed: Tensor, choice: Tensor, position: Tensor, token_ids: Tensor) -> Tensor:
    num_rows, width = token_ids.shape
    out = torch.empty(num_rows, width, dtype=torch.float32, device=seed.device)
    launch(
        _gumbel_kernel,
        (triton.cdiv(width, _BLOCK) * num_rows,),
        out,
        seed.contiguous(),
        choice.contiguous(),
        position.contiguous(),
        token_ids.contiguous(),
        width,
        GUMBEL=STREAM_GUMBEL,
        REST=STREAM_GUMBEL_REST,
        CHUNK=CHUNK,
        BLOCK=_BLOCK,
    )
    return out
