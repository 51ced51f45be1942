"""One token a row, drawn from processed logits."""

from __future__ import annotations

import torch
from torch import Tensor

from spectrue.kernels.philox import chunk_exponentials, gumbel
from spectrue.kernels.reference_rows import (
    argmax_lowest,
    chunk_sums,
    logsumexp_rows,
    valid_rows,
)
from spectrue.kernels.row_law import CHUNK, RowLaw

# How a row draws its token, for sample_rows.
DRAW_ARGMAX = 0
DRAW_UNIFORM = 1
DRAW_GUMBEL = 2

_SLACK = 1e-3  # of the noise's upper bound, covers the rounding of logit + noise


def sample_rows(
    law: RowLaw,
    kind: Tensor | None,  # [R] int32, DRAW_*; None: argmax, all of them
    *,
    uniform: Tensor | None,  # [R] in [0, 1); None where no row is DRAW_UNIFORM
    seed: Tensor,  # [R] int64
    choice: Tensor,  # [R] int64
    position: Tensor,  # [R] int64
) -> tuple[Tensor, Tensor]:  # [R] int64, [R] bool
    """The target's own token at each row, each drawn its own way, and which rows are laws.

    Argmax rows take the lowest index of their maximum, whatever their neighbours are. A row with
    NaN or +inf, or of -inf only, is no law: it gives some id in [0, V), and False.
    """
    scaled = law.scaled()
    if kind is None:
        return argmax_lowest(scaled), valid_rows(scaled)
    token_ids = torch.empty_like(kind, dtype=torch.int64)
    for how in (DRAW_ARGMAX, DRAW_UNIFORM, DRAW_GUMBEL):
        chosen = kind == how
        if not chosen.any():
            continue
        whole = bool(chosen.all())
        rows = scaled if whole else scaled[chosen]
        if how == DRAW_ARGMAX:
            token_ids[chosen] = argmax_lowest(rows)
        elif how == DRAW_GUMBEL:
            keys = seed[chosen], choice[chosen], position[chosen]
            token_ids[chosen] = draw_gumbel(RowLaw(rows), *keys)
        else:
            assert uniform is not None
            token_ids[chosen] = draw_inverse_cdf(RowLaw(rows), uniform[chosen])
    return token_ids, valid_rows(scaled)


def draw_inverse_cdf(
    law: RowLaw,
    uniform: Tensor,  # [R] in [0, 1)
) -> Tensor:  # [R] int64
    """The token where the cumulative law passes `uniform`.

    In [0, V) and of positive probability if the row is valid (`valid_rows`), also where rounding
    runs off the end of the law (sglang's chain kernel gives the last id of the vocabulary there).
    """
    return draw_weights(law.scaled().exp(), uniform)


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
    law: RowLaw,
    seed: Tensor,  # [R] int64
    choice: Tensor,  # [R] int64
    position: Tensor,  # [R] int64
    token_ids: Tensor | None = None,  # [V] int64: target token id of each column (d2t); None: equal
) -> Tensor:  # [R] int64, the column
    """argmax(scaled + gumbel noise), the lowest column of equal ones.

    The noise is that of `philox.gumbel`, so a drafter and its target that draw at one (seed,
    choice, position) often agree (arXiv 2408.07978). The two largest noises of each chunk of ids
    bound what its tokens can score; those that can win are scored. The result is that of scoring
    every token. In [0, V) whatever the row holds.
    """
    scaled = law.scaled()
    vocab_size = scaled.shape[1]
    columns = torch.arange(vocab_size, device=scaled.device)
    ids = columns if token_ids is None else token_ids
    rows = torch.arange(scaled.shape[0], device=scaled.device)

    def scores(row: Tensor, column: Tensor) -> Tensor:  # [n], [n] -> [n]
        noise = gumbel(seed[row], choice[row], position[row], ids[column, None])
        return scaled[row, column] + noise.squeeze(1)

    num_chunks = -(-vocab_size // CHUNK) if token_ids is None else int(ids.max()) // CHUNK + 1
    chunks = torch.arange(num_chunks, device=scaled.device).expand(scaled.shape[0], -1)
    noise = chunk_exponentials(seed, choice, position, chunks)
    # No token's noise is above its chunk's second, but for the one that has the first.
    chunk = ids // CHUNK
    first = ids == noise.place[:, chunk]
    bound = scaled - torch.where(first, noise.least.log()[:, chunk], noise.second.log()[:, chunk])
    to_beat = scores(rows, bound.argmax(1))
    row, column = (bound + _SLACK >= to_beat[:, None]).nonzero(as_tuple=True)
    score = scores(row, column)
    best = torch.full_like(scaled[:, 0], float("-inf")).scatter_reduce_(0, row, score, "amax")
    column = torch.where(score == best[row], column, vocab_size - 1)
    return torch.full_like(rows, vocab_size - 1).scatter_reduce_(0, row, column, "amin")


def record_law(
    law: RowLaw,  # R rows
    token_ids: Tensor,  # [R] int64, what was drawn, columns of the law
    rows: Tensor,  # [R] int64, where each row is recorded
    *,
    logits: Tensor,  # [N, V] float32, contiguous; written
    log_normalizer: Tensor,  # [N] float32; written
    token_probs: Tensor,  # [N] float32; written
) -> None:
    """Record the law that tokens were drawn from: exp(logits - log_normalizer), and of the token.

    Into memory of the caller's own, at the draw: what a drafter computes next may reuse its own
    (sglang#37134). Two rows may go to one place only if nobody reads it. Rows that are no law leave
    something that is no probability. Raises ValueError naming the argument.
    """
    check_record(law, token_ids, rows, logits, log_normalizer, token_probs)
    scaled = law.scaled().float()
    normalizer = logsumexp_rows(scaled)
    drawn = scaled.gather(1, token_ids[:, None]).squeeze(1)
    logits.index_copy_(0, rows, scaled)
    log_normalizer.index_copy_(0, rows, normalizer)
    token_probs.index_copy_(0, rows, (drawn - normalizer).exp().clamp(max=1.0))


def check_record(
    law: RowLaw,
    token_ids: Tensor,
    rows: Tensor,
    logits: Tensor,
    log_normalizer: Tensor,
    token_probs: Tensor,
) -> None:
    for name, ids in (("token_ids", token_ids), ("rows", rows)):
        if ids.shape != (law.num_rows,) or ids.dtype != torch.int64:
            raise ValueError(f"{name} must be int64 [{law.num_rows}], not {tuple(ids.shape)}")
    if logits.dim() != 2 or logits.shape[1] != law.vocab_size or not logits.is_contiguous():
        raise ValueError(f"logits must be contiguous [N, {law.vocab_size}]")
    for name, out in (("log_normalizer", log_normalizer), ("token_probs", token_probs)):
        if out.shape != logits.shape[:1]:
            raise ValueError(f"{name} must be [{logits.shape[0]}], not {tuple(out.shape)}")
    for name, out in (
        ("logits", logits),
        ("log_normalizer", log_normalizer),
        ("token_probs", token_probs),
    ):
        if out.dtype != torch.float32:
            raise ValueError(f"{name} must be float32, not {out.dtype}")
