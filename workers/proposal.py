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

    def to(self, device: torch.device) -> DraftRows:
        if device.type == "cpu":
            return self
        moved = {name: getattr(self, name).to(device) for name in self.__dataclass_fields__}
        return DraftRows(**moved)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Drawn tokens and the law of the `sampled` rows, as DraftLaw holds it."""

    token_ids: Tensor  # [rows] int64, of the target's vocabulary
    logits: Tensor  # [rows, draft_vocab] float32, scaled: the law is exp(logits - log_normalizer)
    log_normalizer: Tensor  # [rows] float32
    token_probs: Tensor  # [rows] float32


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftVocab:
    """The tokens that a drafter can propose, where they are not simply the target's."""

    target_ids: Tensor  # [draft_vocab] int64, target id of each draft id
    draft_index: Tensor  # [vocab] int32, draft id of each target id, -1 absent

    def to(self, device: torch.device) -> DraftVocab:
        return DraftVocab(
            target_ids=self.target_ids.to(device), draft_index=self.draft_index.to(device)
        )


def sample_draft_proposal(
    logits: Tensor,  # [rows, draft_vocab] float32
    rows: DraftRows,
    target_ids: Tensor | None = None,  # [draft_vocab] int64, target id of each; None: the same
) -> Draw:
    """Draw one draft token a row.

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
    if target_ids is not None and target_ids.device != logits.device:
        raise ValueError(f"target_ids are on {target_ids.device}, the logits on {logits.device}")
    draft_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    log_normalizer = torch.zeros(len(logits), device=logits.device)
    token_probs = torch.ones(len(logits), device=logits.device)
    if rows.sampled.any():
        i = rows.sampled.nonzero().squeeze(1)
        uniform = dispatch.uniform(
            rows.seed[i], rows.choice[i], rows.position[i], dispatch.STREAM_DRAFT
        )
        sampled = law.select(i)
        draft_ids[i] = dispatch.draw_inverse_cdf(sampled, uniform)
        log_normalizer[i] = dispatch.logsumexp_rows(sampled.scaled())
        drawn = scaled[i, draft_ids[i]]
        token_probs[i] = (drawn - log_normalizer[i]).exp().clamp(max=1.0)
    if rows.coupled.any():
        i = rows.coupled.nonzero().squeeze(1)
        draft_ids[i] = dispatch.draw_gumbel(
            law.select(i), rows.seed[i], rows.choice[i], rows.position[i], token_ids=target_ids
        )
    greedy = ~(rows.sampled | rows.coupled)
    if greedy.any():
        draft_ids[greedy] = dispatch.argmax_lowest(scaled[greedy])
    return Draw(
        token_ids=draft_ids if target_ids is None else target_ids[draft_ids],
        logits=scaled,
        log_normalizer=log_normalizer,
        token_probs=token_probs,
    )
