"""Ours against the reference backend on the same tensors, for some of the rows.

Integers must be equal, unless the reference itself is within 1e-5 of another answer: such rows
are counted apart, and must be right for one of the answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from spectrue.deploy.bench_verify_cases import Case, process
from spectrue.deploy.bench_verify_inputs import Inputs
from spectrue.kernels import dispatch
from spectrue.kernels.dispatch import RowLaw

EDGE = 1e-5
MAX_WRONG = 0.01  # of the rows
_SETS, _REQUESTS = 3, 8  # of a case


@dataclass(slots=True)
class Checked:
    rows: int = 0  # requests, for a pipeline
    near_edge: int = 0
    wrong: int = 0

    @property
    def ok(self) -> bool:
        return self.wrong <= MAX_WRONG * self.rows


def check(case: Case, sets: Sequence[Inputs]) -> Checked:
    result = Checked()
    for x in sets[:_SETS]:
        part = x.requests(0, min(x.batch, _REQUESTS))
        got = _compared(case.run(x if case.prepare is None else case.prepare(x)))
        with dispatch.use_backend("reference"):
            want = _compared(_run(case, part))
            count = len(want[0])
            cut = [g[:count] for g in got]
            equal = torch.ones(count, dtype=torch.bool, device=want[0].device)
            for g, w in zip(cut, want, strict=True):
                equal &= _equal_rows(g, w)
            near = torch.zeros_like(equal)
            if not bool(equal.all()):
                near = _near_edge(case, part, cut) & ~equal
        result.rows += count
        result.near_edge += int(near.sum())
        result.wrong += int((~equal & ~near).sum())
    return result


def _run(case: Case, x: Inputs) -> Any:
    return case.run(x if case.prepare is None else case.prepare(x))


def _compared(output: Any) -> list[Tensor]:
    """The tensors that are compared row by row."""
    if isinstance(output, RowLaw):
        return [output.scaled() > float("-inf")]
    return [output] if isinstance(output, Tensor) else list(output)


def _equal_rows(a: Tensor, b: Tensor) -> Tensor:
    same = torch.isclose(a, b, rtol=EDGE, atol=EDGE) if a.is_floating_point() else a == b
    return same.flatten(1).all(1) if same.dim() > 1 else same


def _moved(x: Inputs, by: float) -> Inputs:
    return replace(x, uniform=(x.uniform + by).clamp(0, 1 - 2.0**-24))


def _near_edge(case: Case, x: Inputs, got: Sequence[Tensor]) -> Tensor:  # [rows] bool
    """Whether `got` is what an exact backend could have answered within EDGE."""
    low, high = _moved(x, -EDGE), _moved(x, EDGE)
    if case.name.startswith("process_logits"):
        less, more = (process(replace(x, top_p=x.top_p + by), case.cuts) for by in (-EDGE, EDGE))
        kept = got[0].sum(1)  # supports are nested: their sizes say all
        fewest, most = ((law.scaled() > float("-inf")).sum(1) for law in (less, more))
        return (fewest <= kept) & (kept <= most)
    if case.name == "draw_inverse_cdf":
        first, last = _compared(_run(case, low))[0], _compared(_run(case, high))[0]
        return (first <= got[0]) & (got[0] <= last)
    if case.floor in ("rejection", "verify"):
        return _near_rejection(case, low, high, got)
    if case.method == "match":
        return _near_match(case, low, high, got)
    return torch.zeros(len(got[0]), dtype=torch.bool, device=got[0].device)


def _near_match(case: Case, low: Inputs, high: Inputs, got: Sequence[Tensor]) -> Tensor:
    """Every reached row's token lies between the draws at both ends, and the walk follows them."""
    output, accepted = got[:2]
    law = process(low, case.cuts)
    at_least, at_most = (
        dispatch.draw_inverse_cdf(law, x.uniform).view(x.batch, x.k + 1) for x in (low, high)
    )
    depth = torch.arange(low.k + 1, device=output.device)
    reached = depth <= accepted[:, None]
    inside = (at_least <= output) & (output <= at_most)
    same = output[:, :-1] == low.guess.view(low.batch, low.k)
    walks = (same == (depth[:-1] < accepted[:, None])) | ~reached[:, :-1]
    return (inside | ~reached).all(1) & walks.all(1) & ~got[2]


def _near_rejection(case: Case, low: Inputs, high: Inputs, got: Sequence[Tensor]) -> Tensor:
    """With coins moved towards the answer the reference stops there too, its token around ours."""
    output, accepted = got[:2]
    depth = torch.arange(low.k, device=output.device)
    towards = torch.where(depth < accepted[:, None], 1 - EDGE, 1 + EDGE)
    ends = []
    for x in (low, high):
        coins = (x.coins.view(x.batch, x.k) * towards).flatten()
        ends.append(_run(case, replace(x, coins=coins)))
    fits: Tensor = (ends[0][1] == accepted) & (ends[1][1] == accepted) & ~got[2]
    for depth_, token in enumerate(output.unbind(1)):
        fits &= (ends[0][0][:, depth_] <= token) & (token <= ends[1][0][:, depth_])
    return fits
