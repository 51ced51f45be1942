"""Reductions over rows of logits: maximum, validity, normaliser.

Sums go through chunks of a fixed width. torch splits a long sum differently for different batch
sizes, and then a row's result would depend on its neighbours.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrue.kernels.row_law import CHUNK, RowLaw


def in_chunks(
    rows: Tensor,  # [R, V]
    size: int,
    pad: float,  # value of the places after V
) -> Tensor:  # [R, ceil(V / size), size]
    """A view of the rows as chunks; a padded copy where V is not a multiple of size."""
    missing = -rows.shape[1] % size
    if missing:
        rows = F.pad(rows, (0, missing), value=pad)
    return rows.reshape(rows.shape[0], rows.shape[1] // size, size)


def chunk_sums(weights: Tensor) -> Tensor:  # [R, V] -> [R, ceil(V / CHUNK)]
    return in_chunks(weights, CHUNK, 0.0).sum(2)


def row_sums(weights: Tensor) -> Tensor:  # [R, V] -> [R]
    return chunk_sums(weights).sum(1)


def argmax_lowest(
    logits: Tensor,  # [R, V] floating
) -> Tensor:  # [R] int64
    """The lowest index of each row's maximum, in [0, V) whatever the row holds.

    Exact for any V: no tail beyond the vocabulary is compared (sglang#35872, ids out of the
    vocabulary at V = 151666). A row with a NaN gives the id of a NaN: see `valid_rows`.
    """
    chunks = in_chunks(logits, CHUNK, float("-inf"))
    chunk = chunks.amax(2).argmax(1)
    rows = torch.arange(logits.shape[0], device=logits.device)
    return chunk * CHUNK + chunks[rows, chunk].argmax(1)


def valid_rows(
    logits: Tensor,  # [R, V] floating, raw or processed
) -> Tensor:  # [R] bool
    """False where a row has a NaN or +inf, or is all -inf. One pass: the maximum carries NaN."""
    return logits.amax(1).isfinite()


def logsumexp_rows(
    logits: Tensor,  # [R, V] float32 or float64
    inv_temperature: Tensor | None = None,  # [R]
) -> Tensor:  # [R] of the same dtype
    """log sum exp(logits * inv_temperature): the log normaliser of a draft law.

    -inf for a row of -inf, +inf or NaN for one that has them.
    """
    if inv_temperature is not None:
        logits = logits * inv_temperature[:, None]
    peak = logits.amax(1, keepdim=True)
    shift = torch.where(peak.isfinite(), peak, 0)
    return row_sums((logits - shift).exp_()).log() + shift.squeeze(1)


class RowStatistics(NamedTuple):
    """Of the law of each row, [R] each, float32 (float64 where the law is)."""

    peak: Tensor  # the largest logit, before temperature if the law keeps that apart
    logsumexp: Tensor  # of the processed logits: the log of the sum of weights, 0 for a one-hot law
    argmax: Tensor  # int64, lowest index
    entropy: Tensor  # nats
    surprisal: Tensor  # nats, -log p of the token asked for; inf outside the support
    variance: Tensor  # of the surprisal of a token drawn from the law, nats^2


def row_statistics(
    law: RowLaw,
    token_ids: Tensor,  # [R] integer in [0, V)
) -> RowStatistics:
    """What the fidelity audit compares: the surprisal of a token against what its law expects.

    Rows that are no law (see valid_rows) give NaN or inf.
    """
    scaled = law.scaled()
    logits = law.logits if law.index is None else law.logits[law.index]
    weights = (scaled - scaled.amax(1, keepdim=True)).exp()
    total = row_sums(weights)
    logprobs = weights.log() - total.log()[:, None]
    inside = weights > 0
    surprise = torch.where(inside, -logprobs, 0)
    probs = weights / total[:, None]
    entropy = row_sums(probs * surprise)
    return RowStatistics(
        peak=logits.amax(1).to(scaled.dtype),
        logsumexp=total.log(),
        argmax=argmax_lowest(scaled),
        entropy=entropy,
        surprisal=-logprobs.gather(1, token_ids.to(torch.int64)[:, None]).squeeze(1),
        variance=row_sums(probs * (surprise - entropy[:, None]) ** 2),
    )
