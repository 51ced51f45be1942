"""Every decision of a verify step against the reference, over vocabularies, batches and faults.

Integers are equal, but where the reference itself decides otherwise when uniforms, coins, top_p and
min_p move by 1e-5: such cases are counted, and at most 1 % of all.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spectrue.kernels import dispatch

from .batches import decide, make_batch, sampled
from .conftest import BACKEND, SLOW_BACKEND, TIER

VOCABS = (7, 97, 4097, 32000, 49152, 128256, 151666, 248320)
BATCHES = (1, 2, 8, 64, 256)


def grid() -> list[Any]:
    """What a backend is asked; what takes long is marked slow."""
    cases = []
    for vocab_size in TIER.vocabs(*VOCABS):
        for batch in BATCHES:
            rows = batch * 5
            if batch > TIER.max_batch or rows * vocab_size * 4 > 4 << 30:
                continue
            quick = batch <= 8 and vocab_size <= 4097
            if SLOW_BACKEND:  # a core case or two, and the rest in the full ladder
                # 97, 8 has every fault; 4097 has more than one program a row.
                quick = (vocab_size, batch) in {(97, 8), (4097, 1 if "950" in BACKEND else 2)}
            elif BACKEND == "cuda":
                quick = True
            marks = [] if quick else [pytest.mark.slow]
            if quick and SLOW_BACKEND:
                marks = [pytest.mark.core]
            cases.append(pytest.param(vocab_size, batch, marks=marks))
    if BACKEND.startswith("gfx"):  # one real vocabulary
        cases.append(pytest.param(151666, 2, marks=pytest.mark.slow))
    return cases


DTYPES = [torch.float32, torch.bfloat16] if not SLOW_BACKEND else [torch.float32]
if BACKEND.startswith("gfx"):
    DTYPES = [torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("vocab_size", "batch"), grid())
def test_decisions_equal_the_reference(vocab_size: int, batch: int, dtype: torch.dtype) -> None:
    reduced = max(4, vocab_size // 4) if vocab_size % 2 else None
    step = make_batch(vocab_size, batch, dtype, seed=vocab_size + batch, draft_vocab_size=reduced)
    got = decide(step)
    with dispatch.use_backend("reference"):
        if BACKEND == "reference":  # float32 against float64
            exact = make_batch(
                vocab_size, batch, dtype, seed=vocab_size + batch, draft_vocab_size=reduced
            )
            object.__setattr__(exact, "logits", exact.logits.double())
            expected = decide(exact)
        else:
            expected = decide(step)
        others = [decide(step.near(f)) for f in (1 - 1e-5, 1 + 1e-5)]
    at_an_edge = total = 0
    for name, rows in expected.items():
        total += len(rows)
        for i, row in enumerate(rows):
            if got[name][i] == row:
                continue
            near = [other[name][i] for other in others]
            assert got[name][i] in near or any(n != row for n in near), (
                f"{name} of {i}: {got[name][i]}, the reference has {row}"
            )
            at_an_edge += 1
    assert at_an_edge <= max(1, total // 100), f"{at_an_edge} of {total} at an edge"


def test_the_comparison_sees_faults() -> None:
    """Argmax instead of a draw, a guard that does not fire: both change what `decide` gives."""
    step = make_batch(97, 4, torch.float32, seed=1)
    with dispatch.use_backend("reference"):
        expected = decide(step)
        greedy = make_batch(97, 4, torch.float32, seed=1)
        greedy.kind.zero_()
        assert decide(greedy)["sample"] != expected["sample"]
        trusting = make_batch(97, 4, torch.float32, seed=1)
        trusting.law["draft_token_probs"].fill_(0.5)
        assert decide(trusting)["rejection"] != expected["rejection"]
    fired = {int(x) for row in expected["rejection"] for x in row[3].strip("[]").split(",")}
    assert fired == {0, 1}
    assert "-1" in {str(t) for t in expected["sample"]}
    assert bool((sampled(step).params["temperature"] > 0).all())


@pytest.mark.parametrize("vocab_size", [97] if SLOW_BACKEND else TIER.vocabs(7, 97, 4097, 151666))
@pytest.mark.core
def test_ties_in_every_place_of_a_chunk(vocab_size: int) -> None:
    """The lowest of two equal maxima, whichever lanes and chunks they lie in."""
    places = range(0, vocab_size, 1 if vocab_size < 200 and not SLOW_BACKEND else vocab_size // 8)
    pairs = [(i, j) for i in places for j in (i + 1, vocab_size - 1, i + 128) if i < j < vocab_size]
    logits = torch.full((len(pairs), vocab_size), -3.0)
    for row, (i, j) in enumerate(pairs):
        logits[row, [i, j]] = 2.0
    assert dispatch.argmax_lowest(logits).tolist() == [i for i, _ in pairs]
    one = torch.ones(len(pairs))
    law = dispatch.process_logits(logits, temperature=one, top_k=one.long())
    assert (law.scaled() > -1).nonzero().tolist() == [[row, i] for row, (i, _) in enumerate(pairs)]
