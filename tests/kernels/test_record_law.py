"""The law recorded at a draw is the one drawn from, in the rows asked for and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spectrue.kernels import reference
from spectrue.kernels.dispatch import process_logits, record_law

from .conftest import SLOW_BACKEND, rng

NAN, INF = float("nan"), float("inf")
VOCABS = [7, 97, 4097] if SLOW_BACKEND else [7, 97, 4097, 32000]
CUTS = [{}, {"top_k": 5}, {"top_p": 0.7, "min_p": 0.02}]


@pytest.mark.parametrize("cuts", CUTS, ids=["whole", "top_k", "top_p"])
@pytest.mark.parametrize(
    "vocab", [pytest.param(v, marks=[pytest.mark.core] if v == 97 else []) for v in VOCABS]
)
def test_a_law_is_recorded(vocab: int, cuts: dict[str, float]) -> None:
    logits = torch.randn(5, vocab, generator=rng(vocab)) * 3
    logits[1, 3] = logits[1, 5] = logits[1].max() + 1  # a tie at the top
    logits[2, vocab // 2] = -INF
    temperature = torch.tensor([0.7, 1.0, 2.5, 0.0, 1.3])
    columns: dict[str, Any] = {name: torch.full((5,), value) for name, value in cuts.items()}
    law = process_logits(logits, temperature=temperature, **columns)
    rows = torch.tensor([4, 0, 6, 7, 2])
    out = torch.full((9, vocab), 77.0), torch.full((9,), 77.0), torch.full((9,), 77.0)
    token_ids = torch.tensor([0, 3, vocab - 1, int(logits[3].argmax()), 1])
    names = "logits", "log_normalizer", "token_probs"
    record_law(law, token_ids, rows, **dict(zip(names, out, strict=True)))

    exact = reference.process_logits(logits.double(), temperature=temperature, **columns).scaled()
    want = exact.softmax(1)
    got = (out[0][rows].double() - out[1][rows].double()[:, None]).exp()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)
    assert ((out[0][rows] == -INF) == (exact == -INF)).all()
    drawn = want.gather(1, token_ids[:, None]).squeeze(1)
    torch.testing.assert_close(out[2][rows].double(), drawn, rtol=1e-5, atol=1e-7)
    others = [i for i in range(9) if i not in rows.tolist()]
    assert all((tensor[others] == 77).all() for tensor in out)


@pytest.mark.parametrize("bad", [NAN, INF, "all -inf"])
def test_a_row_that_is_no_law_leaves_no_probability(bad: float | str) -> None:
    logits = torch.randn(2, 97, generator=rng(1))
    if isinstance(bad, str):
        logits[0] = -INF
    else:
        logits[0, 40] = bad
    law = process_logits(logits, temperature=torch.ones(2))
    out = torch.zeros(2, 97), torch.zeros(2), torch.zeros(2)
    record_law(
        law,
        torch.tensor([40, 3]),
        torch.arange(2),
        logits=out[0],
        log_normalizer=out[1],
        token_probs=out[2],
    )
    assert not 0 < float(out[2][0]) <= 1
    assert 0 < float(out[2][1]) < 1


@pytest.mark.parametrize("name", ["token_ids", "rows", "logits", "log_normalizer", "token_probs"])
def test_bad_arguments_are_named(name: str) -> None:
    arguments = {
        "token_ids": torch.zeros(2, dtype=torch.int64),
        "rows": torch.zeros(2, dtype=torch.int64),
        "logits": torch.zeros(4, 7),
        "log_normalizer": torch.zeros(4),
        "token_probs": torch.zeros(4),
    }
    arguments[name] = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(ValueError, match=name):
        record_law(process_logits(torch.zeros(2, 7), temperature=torch.ones(2)), **arguments)
