"""One token a row, drawn from processed logits."""

from __future__ import annotations

import torch
from torch import Tensor

from spectrue.kernels.philox import GUMBEL_MAX, gumbel, gumbel_chunks
from spectrue.kernels.reference_rows import CHUNK, chunk_sums, in_chunks

_NOISE_CHUNK = 16
_NOISE_BOUND = GUMBEL_MAX + 1e-3  # the slack covers the rounding of logit + noise


def draw_inverse_cdf(
    scaled: Tensor,  # [R, V] from process_logits: the maximum of a row is 0
    uniform: Tensor,  # [R] in [0, 1)
) -> Tensor:  # [R] int64
    """The token where the cumulative law passes `uniform`.

    In [0, V) and of positive probability if the row is valid (`valid_rows`), also where rounding
    runs off the end of the law (sglang's chain kernel gives the last id of the vocabulary there).
    """
    return draw_weights(scaled.exp(), uniform)


def draw_weights(
    weights: Tensor,  # [R, V] non-negative, not normalised
    uniform: Tensor,  # [R] in [0, 1)
) -> Tensor:  # [R] int64
    """Inverse CDF in two levels: sums of chunks, then one chunk."""
    running = chunk_sums(weights).cumsum(1)
    aim = uniform.to(weights.dtype) * running[:, -1]
    chunk = _first_above(running, aim)
    before = running.gather(1, (chunk - 1).clamp(min=0)[:, None]).squeeze(1)
    rest = aim - torch.where(chunk > 0, before, 0)
    vocab_size = weights.shape[1]
    tokens = chunk[:, None] * CHUNK + torch.arange(CHUNK, device=weights.device)
    inside = weights.gather(1, tokens.clamp(max=vocab_size - 1))
    inside = torch.where(tokens < vocab_size, inside, 0)
    return (chunk * CHUNK + _first_above(inside.cumsum(1), rest)).clamp(max=vocab_size - 1)


def _first_above(
    running: Tensor,  # [R, N], non-decreasing
    aim: Tensor,  # [R]
) -> Tensor:  # [R] int64 in [0, N)
    """First place above the aim; if none is, the last place that added anything."""
    place = torch.searchsorted(running, aim[:, None], right=True)
    last = torch.searchsorted(running, running[:, -1:].contiguous())
    return place.minimum(last).squeeze(1).clamp(max=running.shape[1] - 1)


def draw_gumbel(
    scaled: Tensor,  # [R, V] from process_logits
    seed: Tensor,  # [R] int64
    choice: Tensor,  # [R] int64
    position: Tensor,  # [R] int64
    token_ids: Tensor | None = None,  # [V] int64: target token id of each column (d2t); None: equal
) -> Tensor:  # [R] int64, the column
    """argmax(scaled + gumbel noise), the lowest column of equal ones.

    The noise is that of `philox.gumbel`, so a drafter and its target that draw at one (seed,
    choice, position) often agree (arXiv 2408.07978). It is bounded: the chunk with the largest
    logit is scored first, then the chunks that can still reach its score. The result is that of
    scoring every token. In [0, V) whatever the row holds.
    """
    vocab_size = scaled.shape[1]
    chunks = in_chunks(scaled, _NOISE_CHUNK, float("-inf"))
    peaks = chunks.amax(2)  # [R, C]
    rows = torch.arange(scaled.shape[0], device=scaled.device)

    def scores(row: Tensor, chunk: Tensor) -> Tensor:  # [n], [n] -> [n, _NOISE_CHUNK]
        keys = seed[row], choice[row], position[row]
        if token_ids is None:
            noise = gumbel_chunks(*keys, chunk, _NOISE_CHUNK)
        else:
            columns = chunk[:, None] * _NOISE_CHUNK + torch.arange(_NOISE_CHUNK, device=row.device)
            noise = gumbel(*keys, token_ids[columns.clamp(max=vocab_size - 1)])
        return chunks[row, chunk] + noise

    to_beat = scores(rows, peaks.argmax(1)).amax(1, keepdim=True)
    row, chunk = (peaks + _NOISE_BOUND >= to_beat).nonzero(as_tuple=True)
    score, place = scores(row, chunk).max(1)
    best = torch.full_like(peaks[:, 0], float("-inf")).scatter_reduce_(0, row, score, "amax")
    column = torch.where(score == best[row], chunk * _NOISE_CHUNK + place, vocab_size - 1)
    return torch.full_like(rows, vocab_size - 1).scatter_reduce_(0, row, column, "amin")
