"""A verify step's inputs, ragged and full of what goes wrong, and all that it decides."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from spectrue.kernels import dispatch, reference
from spectrue.kernels.row_law import CHUNK

from .conftest import rng

INF, NAN = float("inf"), float("nan")
DRAFT_FAULTS = ("zeroed", "other row", "nan", "inf", "-inf", "one nan", "one inf", "drawn nan")


@dataclass(frozen=True)
class Batch:
    """B requests with k = 0..8 drafts: R = D + B rows."""

    logits: Tensor  # [R, V]
    params: dict[str, Any]  # [R] tensors
    kind: Tensor  # [R] DRAW_*
    keys: dict[str, Tensor]  # seed, choice, position [R]
    uniforms: Tensor  # [R]
    coins: Tensor  # [D]
    draft: Tensor  # [D]
    cu: Tensor  # [B]
    law: dict[str, Any]  # what verify_rejection takes of the drafter
    width: int

    def near(self, factor: float) -> Batch:
        """The same with everything that has an edge moved by a little."""
        params = dict(self.params)
        params["top_p"] = (params["top_p"] + (factor - 1)).clamp(1e-6, 1)
        params["min_p"] = (params["min_p"] * factor).clamp(max=1)
        return replace(
            self, params=params, uniforms=self.uniforms * factor, coins=self.coins * factor
        )


def make_batch(
    vocab_size: int, batch: int, dtype: torch.dtype, seed: int, draft_vocab_size: int | None = None
) -> Batch:
    g = rng(seed)
    ks = torch.randint(0, 9, (batch,), generator=g)
    ks[: min(batch, 3)] = torch.tensor([8, 0, 1])[:batch]
    cu = ks.cumsum(0)
    d, r = int(cu[-1]), int(cu[-1]) + batch
    logits = torch.randn(r, vocab_size, generator=g) * 3
    rows = torch.arange(r)
    # Ties at the top in every place of a chunk, across chunks, and rows made of ties.
    tied = rows[rows % 4 == 1]
    if vocab_size > 4:
        spots = torch.randint(0, vocab_size, (len(tied), 3), generator=g)
        spots[:, 0] = (tied * 37 + tied % CHUNK) % vocab_size
        logits[tied[:, None], spots] = logits[tied].amax(1, keepdim=True).ceil()
    logits[rows % 8 == 2] = logits[rows % 8 == 2].round()
    logits[rows % 16 == 3, vocab_size // 2 :] = -INF
    logits[rows % 32 == 11] *= 1e-40  # denormals
    logits = logits.to(dtype)
    drafts = torch.arange(d)
    row_of_draft = drafts + torch.searchsorted(cu, drafts, right=True)

    size = draft_vocab_size or vocab_size
    d2t = torch.randperm(vocab_size, generator=g)[:size]
    draft_index = None
    if draft_vocab_size is not None:
        draft_index = torch.full((vocab_size,), -1, dtype=torch.int32)
        draft_index[d2t] = torch.arange(size, dtype=torch.int32)
    else:
        d2t = torch.arange(vocab_size)
    near = logits[row_of_draft][:, d2t].float().clamp(min=-30)
    draft_logits = near + torch.randn(d, size, generator=g) * 0.7
    inv = torch.full((d,), 1.25)
    normalizer = reference.logsumexp_rows(draft_logits, inv)
    temperatures = reference.process_logits(draft_logits, temperature=1 / inv)
    ids = reference.draw_inverse_cdf(temperatures, torch.rand(d, generator=g))
    probs = (draft_logits.gather(1, ids[:, None])[:, 0] * inv - normalizer).exp()
    draft = d2t[ids]

    # Rows that are no law, and laws that are not what was drawn from: some of each.
    if batch > 3:
        logits[r // 2, vocab_size // 3] = NAN
        logits[r // 3, vocab_size - 1] = INF
        logits[r // 5] = -INF
    for i, fault in enumerate(DRAFT_FAULTS if d > 16 else ()):
        at = (i * 5 + 3) % d
        if fault == "zeroed":
            draft_logits[at] = 0
        elif fault == "other row":
            draft_logits[at] = draft_logits[(at + 1) % d]
        elif fault.startswith("one"):
            draft_logits[at, size // 2] = NAN if "nan" in fault else INF
        elif fault == "drawn nan":
            draft_logits[at, ids[at]] = NAN
        else:
            draft_logits[at] = {"nan": NAN, "inf": INF, "-inf": -INF}[fault]
    if d > 16:
        draft[[1, d - 1]] = torch.tensor([-1, vocab_size])
    temperature = torch.rand(r, generator=g) + 0.4
    kind = rows % 3
    temperature[kind == dispatch.DRAW_ARGMAX] = 0
    cuts = rows % 5
    return Batch(
        logits=logits,
        params={
            "temperature": temperature,
            "top_k": torch.where(cuts == 1, 50, torch.where(cuts == 2, rows * 7 % 400 + 1, 0)),
            "top_p": torch.where((cuts == 1) | (cuts == 3), 0.9, 1.0),
            "min_p": torch.where((cuts == 4) | (cuts == 1), 0.02, 0.0),
        },
        kind=kind.to(torch.int32),
        keys={
            "seed": torch.randint(-(2**62), 2**62, (r,), generator=g),
            "choice": rows % 3,
            "position": rows * 11,
        },
        uniforms=torch.rand(r, generator=g),
        coins=torch.rand(d, generator=g),
        draft=draft,
        cu=cu,
        law={
            "draft_logits": draft_logits,
            "draft_inv_temperature": inv,
            "draft_log_normalizer": normalizer,
            "draft_token_probs": probs,
            "draft_index": draft_index,
        },
        width=8,
    )


def sampled(batch: Batch) -> Batch:
    """The same with no greedy row: rejection judges none."""
    temperature = batch.params["temperature"]
    return replace(
        batch, params={**batch.params, "temperature": temperature.where(temperature > 0, 1.0)}
    )


def decide(batch: Batch) -> dict[str, list[Any]]:
    """Every integer that a verify step decides, by row or by request, through the public ops."""
    law = dispatch.process_logits(batch.logits, **batch.params)
    token, valid = dispatch.sample_rows(law, batch.kind, uniform=batch.uniforms, **batch.keys)
    match = dispatch.verify_match(token, batch.draft, batch.cu, valid, max_draft_tokens=batch.width)
    every = sampled(batch)
    rejection = dispatch.verify_rejection(
        dispatch.process_logits(every.logits, **every.params),
        batch.draft,
        batch.cu,
        **batch.law,
        coins=batch.coins,
        uniforms=batch.uniforms,
        max_draft_tokens=batch.width,
    )
    return {
        "valid": valid.tolist(),
        "sample": torch.where(valid, token, -1).tolist(),
        "support": (law.scaled() > -INF).sum(1).where(valid, 0).tolist(),
        "match": [list(map(str, row)) for row in zip(*(t.tolist() for t in match), strict=True)],
        "rejection": [
            list(map(str, row)) for row in zip(*(t.tolist() for t in rejection), strict=True)
        ],
    }
