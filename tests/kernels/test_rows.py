"""Row reductions: argmax at awkward sizes, validity, normalisers."""

from __future__ import annotations

import math

import pytest
import torch

from spectrue.kernels.dispatch import (
    RowLaw,
    argmax_lowest,
    logsumexp_rows,
    process_logits,
    row_statistics,
    valid_rows,
)

from .conftest import BACKEND, TIER, rng

INF, NAN = float("inf"), float("nan")
VOCABS = TIER.vocabs(1, 7, 127, 128, 129, 255, 257, 4097, 151666)


@pytest.mark.parametrize("vocab_size", VOCABS)
def test_argmax_is_the_lowest_index_of_the_maximum(vocab_size: int) -> None:
    last, middle = vocab_size - 1, vocab_size // 2
    rows = torch.full((9, vocab_size), -5.0)
    expected = []
    rows[0, last] = 3.0
    expected.append(last)
    rows[1, [middle, last]] = 3.0  # tie
    expected.append(middle)
    expected.append(0)  # all equal and negative: a padded tail of zeros would win
    rows[3] = -INF
    expected.append(0)
    rows[4] = -INF
    rows[4, last] = -1e30
    expected.append(last)
    rows[5] = 0.0
    rows[5, middle:] = 1e-45  # denormal, above zero
    expected.append(middle if vocab_size > 1 else 0)
    rows[6] = torch.linspace(0, 1, vocab_size)
    expected.append(last)
    rows[7, [0, last]] = torch.finfo(torch.float32).max
    expected.append(0)
    rows[8] = -1e-45
    rows[8, middle] = -0.0
    expected.append(middle)
    for dtype in TIER.floats:
        assert argmax_lowest(rows.to(dtype)).tolist() == expected


@pytest.mark.parametrize("vocab_size", TIER.vocabs(7, 4097, 151666))
@pytest.mark.parametrize("bad", [NAN, INF])
def test_argmax_of_an_invalid_row_stays_in_the_vocabulary(vocab_size: int, bad: float) -> None:
    rows = torch.randn(3, vocab_size)
    rows[0] = bad
    rows[1, vocab_size - 1] = bad
    got = argmax_lowest(rows)
    assert bool(((got >= 0) & (got < vocab_size)).all())
    assert int(got[2]) == int(rows[2].argmax())


def test_argmax_of_random_rows_with_many_ties() -> None:
    rows = torch.randint(0, 5, (TIER.max_batch, 1003), generator=rng(0)).float()
    expected = [r.index(max(r)) for r in rows.tolist()]
    assert argmax_lowest(rows).tolist() == expected
    assert argmax_lowest(rows.bfloat16()).tolist() == expected


@pytest.mark.parametrize("vocab_size", [1, 7, 4097])
def test_valid_rows(vocab_size: int) -> None:
    rows = torch.randn(7, vocab_size)
    last = vocab_size - 1
    rows[1, last] = NAN
    rows[2, last] = INF
    rows[3] = -INF
    rows[4] = -INF
    rows[4, last] = 0.0
    rows[5] = -3e38
    rows[6, last] = NAN
    rows[6, 0] = INF
    assert valid_rows(rows).tolist() == [True, False, False, False, True, True, False]


def test_logsumexp_rows() -> None:
    dtype = TIER.floats[-1]
    rows = torch.randn(6, 4097, dtype=dtype) * 50
    rows[1, 5:] = -INF
    rows[2] = -INF
    rows[3, 9] = NAN
    rows[4, 9] = INF
    got = logsumexp_rows(rows)
    torch.testing.assert_close(got[[0, 1, 5]], torch.logsumexp(rows, 1)[[0, 1, 5]])
    assert float(got[2]) == -INF
    assert not math.isfinite(float(got[3]))
    assert not math.isfinite(float(got[4]))
    inv = torch.full((6,), 2.0, dtype=dtype)
    torch.testing.assert_close(logsumexp_rows(rows, inv)[0], torch.logsumexp(rows * 2, 1)[0])


@pytest.mark.parametrize("vocab_size", TIER.vocabs(7, 97, 4097, 32000, 151666))
@pytest.mark.parametrize("cut", [False, True])
def test_row_statistics(vocab_size: int, cut: bool) -> None:
    """Against float64 sums over the row; the surprisal of a token outside is infinite."""
    logits = torch.randn(4, vocab_size, generator=rng(vocab_size)) * 4
    temperature = torch.tensor([1.0, 0.7, 1.3, 1.0])
    top_k = torch.full((4,), 20 if cut else 0)
    law = process_logits(logits, temperature=temperature, top_k=top_k)
    scaled = process_logits(logits, temperature=temperature, top_k=top_k).scaled().double()
    logp = scaled.log_softmax(1)
    surprise = torch.where(logp > -INF, -logp, 0)
    entropy = (logp.exp() * surprise).sum(1)
    token_ids = torch.tensor([0, vocab_size - 1, 1, int(scaled[3].argmax())])
    got = row_statistics(law, token_ids)
    expected = {
        "logsumexp": scaled.logsumexp(1),
        "entropy": entropy,
        "surprisal": -logp.gather(1, token_ids[:, None])[:, 0],
        "variance": (logp.exp() * (surprise - entropy[:, None]) ** 2).sum(1),
    }
    for name, value in expected.items():
        torch.testing.assert_close(
            getattr(got, name).double(), value, rtol=1e-4, atol=1e-3, msg=name
        )
    assert got.argmax.tolist() == scaled.argmax(1).tolist()
    if BACKEND != "reference":  # there the law has its temperature applied
        torch.testing.assert_close(got.peak, logits.amax(1))


def test_row_statistics_of_some_rows_of_a_law() -> None:
    law = RowLaw(torch.randn(5, 97, generator=rng(1)).log_softmax(1))
    index = torch.tensor([1, 3])
    whole = row_statistics(law, torch.arange(5))
    some = row_statistics(law.select(index), index)
    for a, b in zip(some, whole, strict=True):
        torch.testing.assert_close(a, b[index])
