"""Chi-square of what the kernels draw, method by method, and of the same with a fault planted.

1e6 draws a method on a GPU, 2e4 as AMD code (5e3 with cuts or a reduced vocabulary: an hour each
otherwise). None may be rejected at p < 1e-4; every fault must be.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from spectrue.kernels import dispatch, reference
from spectrue.kernels.dispatch import DRAW_ARGMAX, DRAW_GUMBEL, DRAW_UNIFORM

from .conftest import BACKEND, SLOW_BACKEND, TIER, rng

VOCAB = 24
CUTS = {"top_k": 12, "top_p": 0.9, "min_p": 0.02}
METHODS = ("match", "match cut", "coupled", "rejection", "rejection cut", "rejection reduced")
# As AMD code one method is drawn in every run, the others in the full ladder.
QUICK = METHODS if not SLOW_BACKEND else ("match",) if BACKEND == "gfx942" else ()
IN_THE_LADDER = [
    pytest.param(m, marks=[pytest.mark.core] if m in QUICK else [pytest.mark.slow]) for m in METHODS
]


def laws() -> tuple[Tensor, Tensor]:
    """[VOCAB] logits of a target and of a drafter that is near it."""
    target = torch.randn(VOCAB, generator=rng(0)) * 1.5
    return target, target + torch.randn(VOCAB, generator=rng(1)) * 0.8


def params(n: int, method: str) -> dict[str, Any]:
    cuts = CUTS if "cut" in method else {}
    return {
        "temperature": torch.full((n,), 0.9),
        **{name: torch.full((n,), value) for name, value in cuts.items()},
    }


def first_tokens(method: str, n: int, fault: str = "") -> Tensor:
    """The first token that each of n requests commits, at one law."""
    target, drafter = laws()
    keys = torch.arange(n) * 7919 + 13
    at = keys, keys % 3, keys % 97  # seed, choice, position
    key = dict(zip(("seed", "choice", "position"), at, strict=True))
    if not method.startswith("rejection"):
        law = dispatch.process_logits(target.expand(n, -1), **params(n, method))
        kind = DRAW_ARGMAX if fault == "argmax" else DRAW_UNIFORM
        kind = DRAW_GUMBEL if method == "coupled" and not fault else kind
        tokens, valid = dispatch.sample_rows(
            law,
            torch.full((n,), kind, dtype=torch.int32),
            uniform=dispatch.uniform(*at, dispatch.STREAM_DRAW),
            **key,
        )
        # A draft that is always the likeliest token: the walk must not change the law.
        draft = target.argmax().expand(n)
        rows = torch.arange(n) * 2
        two = torch.zeros(2 * n, dtype=torch.int64)
        two[rows], two[rows + 1] = tokens, 0
        good = torch.ones(2 * n, dtype=torch.bool)
        good[rows] = valid
        output = dispatch.verify_match(
            two, draft, torch.arange(1, n + 1), good, max_draft_tokens=1
        ).output_token_ids
        return output[:, 0]

    d2t = torch.arange(VOCAB)
    draft_index = None
    if "reduced" in method:
        d2t = torch.randperm(VOCAB, generator=rng(2))[: VOCAB // 2]
        draft_index = torch.full((VOCAB,), -1, dtype=torch.int32)
        draft_index[d2t] = torch.arange(len(d2t), dtype=torch.int32)
    logits = drafter[d2t]
    inv = torch.full((n,), 1.1)
    drawn_from = (logits * 1.1).log_softmax(0).exp()
    uniform = reference.uniform(*at, dispatch.STREAM_DRAFT)
    ids = torch.searchsorted(drawn_from.cumsum(0), uniform, right=True).clamp(max=len(d2t) - 1)
    handed = logits
    if fault == "another law":  # with its own normaliser and probabilities: nothing looks wrong
        handed = logits.flip(0)
    normalizer = (handed * 1.1).logsumexp(0)
    recorded = (handed[ids] * 1.1 - normalizer).exp()
    if fault.startswith("guard"):  # a recycled buffer: zeros, and what was recorded at the draw
        handed = torch.zeros_like(logits)
        normalizer = torch.tensor(float(len(d2t))).log()
    two_rows = target.expand(2 * n, -1)
    output, *_ = dispatch.verify_rejection(
        dispatch.process_logits(two_rows, **params(2 * n, method)),
        d2t[ids],
        torch.arange(1, n + 1),
        draft_logits=handed.expand(n, -1),
        draft_inv_temperature=inv,
        draft_log_normalizer=normalizer.expand(n),
        draft_token_probs=recorded,
        draft_index=draft_index,
        coins=dispatch.uniform(*at, dispatch.STREAM_COIN),
        uniforms=dispatch.uniform(
            *(at[0].repeat_interleave(2), at[1].repeat_interleave(2), at[2].repeat_interleave(2)),
            dispatch.STREAM_DRAW,
        ),
        max_draft_tokens=1,
    )
    return output[:, 0]


def p_value(method: str, tokens: Tensor) -> float:
    """Of the tokens under the target's law; 0 if one lies outside its support."""
    target, _ = laws()
    law = reference.process_logits(target.double()[None], **params(1, method)).scaled()[0]
    expected = (law.softmax(0) * len(tokens)).cpu()
    observed = torch.bincount(tokens.cpu(), minlength=VOCAB).double()
    if float(observed[expected == 0].sum()):
        return 0.0
    keep = expected > 0
    return float(stats.chisquare(observed[keep].numpy(), expected[keep].numpy()).pvalue)


@pytest.mark.parametrize("method", IN_THE_LADDER)
def test_the_law_is_the_targets(method: str) -> None:
    draws = TIER.draws // 4 if SLOW_BACKEND and " " in method else TIER.draws
    assert p_value(method, first_tokens(method, draws)) > 1e-4


def faulty(module: str, old: str, new: str, folder: Path) -> ModuleType:
    """A module of spectrue.kernels with one line changed: its kernels are compiled anew."""
    spec = importlib.util.find_spec(f"spectrue.kernels.{module}")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    assert source.count(old) == 1, f"{module} has {old!r} {source.count(old)} times"
    path = folder / f"{module}_faulty.py"
    path.write_text(source.replace(old, new))
    changed = importlib.util.spec_from_file_location(path.stem, path)
    assert changed is not None
    assert changed.loader is not None
    loaded = importlib.util.module_from_spec(changed)
    sys.modules[path.stem] = loaded
    changed.loader.exec_module(loaded)
    return loaded


GUARD = {
    "reference": ("reference_verify", "<= _LAW_TOLERANCE * recorded", "<= 9"),
    "triton": ("triton_rejection", "<= TOLERANCE * recorded", "<= 9"),
}
CLAMP = {
    "reference": ("reference_verify", "(target - law).clamp_(min=0)", "(target - law).abs()"),
    "triton": ("triton_residual", "tl.maximum(target - prob, 0.0)", "tl.abs(target - prob)"),
}
SIDE = "reference" if BACKEND == "reference" else "triton"
FEW = min(TIER.draws, 4000)
slow_in_python = pytest.mark.slow if SLOW_BACKEND else pytest.mark.core


def test_fault_argmax_instead_of_a_draw() -> None:
    assert p_value("match", first_tokens("match", FEW, "argmax")) < 1e-4


@slow_in_python
def test_fault_the_law_of_another_draft() -> None:
    assert p_value("rejection", first_tokens("rejection", FEW, "another law")) < 1e-4


@slow_in_python
@pytest.mark.parametrize("planted", [False, True])
def test_fault_a_guard_removed(
    planted: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the guard a zeroed law costs acceptance alone; without it, the law of the text."""
    if planted:
        module = faulty(*GUARD[SIDE], tmp_path)
        monkeypatch.setitem(dispatch.BACKENDS[SIDE], "verify_rejection", module.verify_rejection)
    p = p_value("rejection", first_tokens("rejection", FEW, "guard"))
    assert (p < 1e-4) == planted


@slow_in_python
def test_fault_a_residual_without_the_clamp(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = faulty(*CLAMP[SIDE], tmp_path)
    if SIDE == "reference":
        monkeypatch.setitem(dispatch.BACKENDS[SIDE], "verify_rejection", module.verify_rejection)
    else:
        op = importlib.import_module("spectrue.kernels.triton_rejection")
        for kernel in ("residual_kernel", "final_kernel"):
            monkeypatch.setattr(op, kernel, getattr(module, kernel))
    assert p_value("rejection", first_tokens("rejection", FEW)) < 1e-4
