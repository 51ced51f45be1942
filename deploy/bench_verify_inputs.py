"""The inputs of `spectrue bench verify`: logits as models give them, and drafts near them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from spectrue.kernels import dispatch
from spectrue.kernels.dispatch import RowLaw

TOP_K, TOP_P, MIN_P = 50, 0.95, 0.02
# Normal noise of this deviation on the target's logits makes a draft law that shares 2 Phi(-s / 2)
# = 0.7 of the mass with it: the accept rate.
DRAFT_NOISE = 0.77
HEAD = 20  # tokens that carry 95 % of a peaked row

RowKind = Literal["peaked", "normal", "top 0.5", "top 0.9"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Of one verify step: `batch` requests of k drafts each. R = batch * (k + 1), D = batch * k."""

    logits: Tensor  # [R, V]
    temperature: Tensor  # [R]
    top_k: Tensor  # [R]
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor  # [R]
    seed: Tensor  # [R]
    choice: Tensor
    position: Tensor
    uniform_kind: Tensor
    gumbel_kind: Tensor
    valid: Tensor  # [R] bool
    target: Tensor  # [R] drawn at temperature 1, for the walk alone
    hit: Tensor  # [D] bool, which drafts of a drafter without a law are right: 70 %
    guess: Tensor  # [D] those drafts, where `target` is right: see guess_near
    coins: Tensor  # [D]
    draft: Tensor  # [D] drawn from the draft law
    draft_logits: Tensor  # [D, Vd]
    draft_inv_temperature: Tensor  # [D]
    draft_log_normalizer: Tensor  # [D]
    draft_token_probs: Tensor  # [D]
    draft_probs: Tensor  # [D, V] float32, for the peers: their drafters hand it over
    cu: Tensor  # [B] int32, inclusive cumulative number of drafts
    draft_index: Tensor | None  # [V]

    @property
    def batch(self) -> int:
        return len(self.cu)

    @property
    def k(self) -> int:
        return len(self.draft) // len(self.cu)

    def requests(self, first: int, count: int) -> Inputs:
        """Some of the requests, as views."""
        rows = slice(first * (self.k + 1), (first + count) * (self.k + 1))
        drafts = slice(first * self.k, (first + count) * self.k)
        parts: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("cu", "draft_index"):
                continue
            of_drafts = field.name in ("hit", "guess", "coins") or field.name.startswith("draft")
            parts[field.name] = value[drafts if of_drafts else rows]
        return replace(self, cu=self.cu[:count], **parts)


def make_inputs(
    rows: RowKind,
    *,
    batch: int,
    k: int,
    vocab_size: int,
    draft_vocab_size: int,
    num_sets: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> list[Inputs]:
    """Independent sets, made together and then cut apart."""
    total = num_sets * batch
    g = torch.Generator(device).manual_seed(seed)
    num_rows, num_drafts = total * (k + 1), total * k
    reduced = draft_vocab_size < vocab_size
    ids = torch.randperm(vocab_size, generator=g, device=device)[:draft_vocab_size].sort()[0]
    logits = _logits(rows, num_rows, vocab_size, ids, g).to(dtype)

    def random(n: int) -> Tensor:  # the resolution that the engine's uniforms have
        return torch.randint(2**24, (n,), generator=g, device=device) * 2.0**-24

    def full(value: float, n: int = num_rows, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((n,), value, dtype=dtype, device=device)

    row = torch.arange(num_rows, device=device).view(total, k + 1)
    noisy = logits[row[:, :k].flatten()].float()
    noisy += DRAFT_NOISE * torch.randn(noisy.shape, generator=g, device=device)
    draft_logits = (noisy[:, ids] if reduced else noisy).to(dtype)
    del noisy
    law = draft_logits.float().softmax(-1)
    column = dispatch.draw_inverse_cdf(RowLaw(law.log()), random(num_drafts))
    token_probs = law.gather(1, column[:, None]).squeeze(1)
    index, draft_probs = None, law
    if reduced:
        index = torch.full((vocab_size,), -1, dtype=torch.int32, device=device)
        index[ids] = torch.arange(draft_vocab_size, dtype=torch.int32, device=device)
        draft_probs = law.new_zeros(num_drafts, vocab_size).index_copy_(1, ids, law)
    uniform = random(num_rows)
    target = dispatch.draw_inverse_cdf(RowLaw(logits, full(1)), uniform)
    hit = random(num_drafts) < 0.7
    ones = full(1, num_drafts)
    every = Inputs(
        logits=logits,
        temperature=full(1),
        top_k=full(TOP_K, dtype=torch.int32),
        top_p=full(TOP_P),
        min_p=full(MIN_P),
        uniform=uniform,
        seed=torch.randint(2**40, (num_rows,), generator=g, device=device),
        choice=full(0, dtype=torch.int64),
        position=row.flatten(),
        uniform_kind=full(dispatch.DRAW_UNIFORM, dtype=torch.int32),
        gumbel_kind=full(dispatch.DRAW_GUMBEL, dtype=torch.int32),
        valid=full(1, dtype=torch.bool),
        target=target,
        hit=hit,
        guess=guess_near(target, hit, k, vocab_size),
        coins=random(num_drafts),
        draft=ids[column] if reduced else column,
        draft_logits=draft_logits,
        draft_inv_temperature=ones,
        draft_log_normalizer=dispatch.logsumexp_rows(draft_logits, ones),
        draft_token_probs=token_probs,
        draft_probs=draft_probs,
        cu=torch.arange(1, total + 1, dtype=torch.int32, device=device) * k,
        draft_index=index,
    )
    return [every.requests(i * batch, batch) for i in range(num_sets)]


def guess_near(target: Tensor, hit: Tensor, k: int, vocab_size: int) -> Tensor:  # [D]
    """Drafts of which the `hit` ones are the target's token."""
    wanted = target.view(-1, k + 1)[:, :k].flatten()
    return torch.where(hit, wanted, (wanted + 1) % vocab_size)


def _logits(kind: RowKind, n: int, vocab_size: int, ids: Tensor, g: torch.Generator) -> Tensor:
    logits = torch.randn(n, vocab_size, generator=g, device=ids.device)
    if kind == "normal":
        return logits
    logits *= 2
    rest = logits.logsumexp(1, keepdim=True)
    count = min(HEAD, len(ids)) if kind == "peaked" else 1
    mass = 0.95 if kind == "peaked" else float(kind.removeprefix("top "))
    shares = (1.5 * torch.randn(n, count, generator=g, device=ids.device)).log_softmax(1)
    where = torch.rand(n, len(ids), generator=g, device=ids.device).topk(count).indices
    head = rest + shares + torch.tensor(mass / (1 - mass), device=ids.device).log()
    return logits.scatter_(1, ids[where], head)
