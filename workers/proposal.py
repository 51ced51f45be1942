"""How a drafter with a law chooses its next token, and the record of the law it drew from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spectrue.kernels import dispatch


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRows:
    """The requests that draft one more token, one row each."""

    temperature: Tensor  # [rows] float32, 0 proposes the argmax
    top_k: Tensor  # [rows] int64, the request's own; <= 0 keeps all
    top_p: Tensor  # [rows] float32
    min_p: Tensor  # [rows] float32
    seed: Tensor  # [rows] int64
    choice: Tensor  # [rows] int64
    position: Tensor  # [rows] int64, of the token to draft
    sampled: Tensor  # [rows] bool, draw from the law with noise of our own
    coupled: Tensor  # [rows] bool, draw with the target's noise; neither: argmax


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Drawn tokens and the law of the `sampled` rows, as DraftLaw holds it."""

    token_ids: Tensor  # [rows] int64
    logits: Tensor  # [rows, draft_vocab] float32, scaled: the law is exp(logits - log_normalizer)
    log_normalizer: Tensor  # [rows] float32
    token_probs: Tensor  # [rows] float32


def sample_draft_proposal(logits: Tensor, rows: DraftRows) -> Draw:
    """Draw one draft token a row from `logits` [rows, draft_vocab] float32.

    The request's temperature, top_k, top_p and min_p shape the draft law as they shape the
    target's: any law is exact as long as it is the one drawn from, and one with the same cuts is
    accepted more often. A row that only may take its argmax (temperature 0, top_k 1) does.

    Raises ValueError for a parameter that is not on the logits' device: skipping it silently
    costs a fifth of the accept length (sglang 0.5.23).
    """
    for name in rows.__dataclass_fields__:
        device = getattr(rows, name).device
        if device != logits.device:
            raise ValueError(f"{name} is on {device}, the draft logits are on {logits.device}")
    law = dispatch.process_logits(
        logits,
        temperature=rows.temperature,
        top_k=rows.top_k,
        top_p=rows.top_p,
        min_p=rows.min_p,
    )
    scaled = law.scaled()
    token_ids = torch.empty(len(logits), dtype=torch.int64)
    log_normalizer = torch.zeros(len(logits))
    token_probs = torch.ones(len(logits))
    if rows.sampled.any():
        i = rows.sampled.nonzero().squeeze(1)
        uniform = dispatch.uniform(
            rows.seed[i], rows.choice[i], rows.position[i], dispatch.STREAM_DRAFT
        )
        sampled = law.select(i)
        token_ids[i] = dispatch.draw_inverse_cdf(sampled, uniform)
        log_normalizer[i] = dispatch.logsumexp_rows(sampled.scaled())
        drawn = scaled[i, token_ids[i]]
        token_probs[i] = (drawn - log_normalizer[i]).exp().clamp(max=1.0)
    if rows.coupled.any():
        i = rows.coupled.nonzero().squeeze(1)
        token_ids[i] = dispatch.draw_gumbel(
            law.select(i), rows.seed[i], rows.choice[i], rows.position[i]
        )
    greedy = ~(rows.sampled | rows.coupled)
    if greedy.any():
        token_ids[greedy] = dispatch.argmax_lowest(scaled[greedy])
    return Draw(
        token_ids=token_ids,
        logits=scaled,
        log_normalizer=log_normalizer,
        token_probs=token_probs,
    )
