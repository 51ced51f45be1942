"""Where a head begins: at what the target has already."""

from __future__ import annotations

import torch
from torch import Tensor

from spectrue.workers.models.base import Model
from spectrue.workers.training.vocabulary import HotVocab


@torch.no_grad()
def initial_weights(target: Model, random: dict[str, Tensor], vocab: HotVocab) -> dict[str, Tensor]:
    """`random` with the target's output head for the hot vocabulary, if it is known as rows, and an
    fc that begins as the last auxiliary layer beside a little of all."""
    weights = {name: value.clone() for name, value in random.items()}
    hidden = weights["fc.weight"].shape[0]
    fc = weights["fc.weight"] * 0.3
    fc[:, -hidden:] += torch.eye(hidden, device=fc.device)
    weights["fc.weight"] = fc
    rows = output_rows(target, vocab.target_ids)
    if rows is not None:
        weights["lm_head.weight"] = rows.to(fc)
    norm = getattr(getattr(target, "norm", None), "weight", None)
    if norm is not None and norm.shape == weights["norm.weight"].shape:
        weights["norm.weight"] = norm.to(fc).clone()
    return weights


def output_rows(target: Model, token_ids: Tensor) -> Tensor | None:
    """Rows of the target's output head: where they are packed away, by asking it for the logits of
    unit vectors."""
    size = target.config.hidden_size
    columns = []
    for part in torch.eye(size, dtype=target.dtype, device=target.device).split(64):
        logits = target.compute_logits(part)
        if logits is None:
            return None
        columns.append(logits[:, token_ids.to(logits.device)].float())
    return torch.cat(columns).t().contiguous()
