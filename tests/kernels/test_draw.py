"""Draws: the law, the edges of the uniform, and Gumbel-max against scoring every token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from spectrue.kernels.dispatch import (
    DRAW_ARGMAX,
    DRAW_GUMBEL,
    DRAW_UNIFORM,
    STREAM_DRAW,
    RowLaw,
    argmax_lowest,
    draw_gumbel,
    draw_inverse_cdf,
    gumbel,
    process_logits,
    sample_rows,
    uniform,
    valid_rows,
)

from .conftest import SLOW_BACKEND, TIER, rng

INF, NAN = float("inf"), float("nan")
LARGEST = 1 - 2**-24


def random_scaled(
    num_rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0, top_k: int = 0
) -> Tensor:
    logits = torch.randn(num_rows, vocab_size, generator=rng(seed)) * scale
    return process_logits(
        logits, temperature=torch.ones(num_rows), top_k=torch.full((num_rows,), top_k)
    ).scaled()


@pytest.mark.parametrize("vocab_size", [5, 300] if SLOW_BACKEND else [1, 5, 128, 300, 4097])
def test_inverse_cdf_is_the_inverse_of_the_cdf(vocab_size: int) -> None:
    n = min(50, TIER.max_batch)
    slack = 1e-12 if TIER.exact else 1e-6
    scaled = random_scaled(n, vocab_size).to(TIER.floats[-1])
    scaled[::2, ::3] = -INF
    scaled -= scaled.amax(1, keepdim=True) if vocab_size > 1 else 0
    scaled[~valid_rows(scaled)] = 0
    law = scaled.double().softmax(1)
    above = law.cumsum(1)
    below = above - law
    for u in (0.0, 0.1, 0.5, 0.77, 0.999, LARGEST):
        token = draw_inverse_cdf(RowLaw(scaled), torch.full((n,), u, dtype=scaled.dtype))[:, None]
        assert bool((below.gather(1, token) <= u + slack).all())
        assert bool((above.gather(1, token) > u - slack).all())


@pytest.mark.parametrize("dtype", TIER.floats)
@pytest.mark.parametrize(
    "vocab_size", [1, 3, 129, 4097] if SLOW_BACKEND else [1, 3, 127, 129, 513, 4097, 151666]
)
def test_edges_of_the_uniform_never_leave_the_support(vocab_size: int, dtype: torch.dtype) -> None:
    """sglang's chain kernel commits VOCAB_SIZE - 1 there, which may be a padding id."""
    rows = []
    for support in ([0], [vocab_size - 1], [vocab_size // 2], [0, vocab_size // 2]):
        for tail in (0.0, -16.0, -40.0, -100.0):  # a last token lost in the rounding of the sum
            row = torch.full((vocab_size,), -INF, dtype=dtype)
            row[support] = 0
            row[support[-1]] = tail if len(support) > 1 else 0
            rows.append(row - row.max())
    dense = random_scaled(4, vocab_size).to(dtype)
    dense[:, vocab_size // 2 + 1 :] = -INF
    dense -= dense.amax(1, keepdim=True)
    scaled = torch.cat([torch.stack(rows), dense])
    if SLOW_BACKEND:
        scaled = scaled[::3]
    for u in (0.0, LARGEST) if SLOW_BACKEND else (0.0, 2**-24, 0.5, 1 - 2**-23, LARGEST, 1.0):
        token = draw_inverse_cdf(RowLaw(scaled), torch.full((len(scaled),), u))
        assert bool(((token >= 0) & (token < vocab_size)).all())
        assert bool((scaled.gather(1, token[:, None]).exp() > 0).all())


@pytest.mark.parametrize("vocab_size", [7, 300])
def test_invalid_rows_give_an_id_and_disturb_nobody(vocab_size: int) -> None:
    scaled = random_scaled(5, vocab_size)
    scaled[1] = -INF
    scaled[2, 3] = NAN
    scaled[3] = INF
    u, keys = torch.full((5,), 0.6), torch.arange(5)

    def inverse(rows: Tensor, i: Tensor) -> Tensor:
        return draw_inverse_cdf(RowLaw(rows), u[i])

    def noisy(rows: Tensor, i: Tensor) -> Tensor:
        return draw_gumbel(RowLaw(rows), keys[i], keys[i], keys[i])

    for draw in (inverse, noisy):
        token = draw(scaled, torch.arange(5))
        assert bool(((token >= 0) & (token < vocab_size)).all())
        for i in (0, 4):
            assert int(draw(scaled[i : i + 1], torch.tensor([i]))) == int(token[i])


def test_rows_do_not_depend_on_their_neighbours() -> None:
    n = 4 if SLOW_BACKEND else 32
    scaled = random_scaled(n, 300 if SLOW_BACKEND else 4097)
    keys = torch.arange(n)
    u = uniform(keys, keys, keys, STREAM_DRAW)
    inverse, noisy = (
        draw_inverse_cdf(RowLaw(scaled), u),
        draw_gumbel(RowLaw(scaled), keys, keys, keys),
    )
    for i in range(n):
        one = slice(i, i + 1)
        assert int(draw_inverse_cdf(RowLaw(scaled[one]), u[one])) == int(inverse[i])
        assert int(draw_gumbel(RowLaw(scaled[one]), keys[one], keys[one], keys[one])) == int(
            noisy[i]
        )


@pytest.mark.skipif(SLOW_BACKEND, reason="see test_distribution.py")
@pytest.mark.parametrize("method", ["inverse_cdf", "gumbel"])
@pytest.mark.parametrize(("top_k", "scale"), [(0, 1.5), (12, 3.0)])
def test_law_of_1e5_draws(method: str, top_k: int, scale: float) -> None:
    """sglang#31214: 1e5 draws at temperature 1 follow the law, not its maximum."""
    n, vocab_size = 100_000, 40
    scaled = random_scaled(1, vocab_size, seed=top_k, scale=scale, top_k=top_k).expand(n, -1)
    seed, zero = torch.arange(n) * 7919 - 10**6, torch.zeros(n, dtype=torch.int64)
    if method == "gumbel":
        token = draw_gumbel(RowLaw(scaled), seed, zero, zero)
    else:
        token = draw_inverse_cdf(RowLaw(scaled), uniform(seed, zero, zero, STREAM_DRAW))
    observed = torch.bincount(token, minlength=vocab_size).double()
    expected = scaled[0].double().softmax(0) * n
    assert float(observed[expected == 0].sum()) == 0
    rare = expected < 10
    if bool(rare.any()):
        observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    assert stats.chisquare(observed.cpu().numpy(), expected.cpu().numpy()).pvalue > 1e-3


def brute_force(
    scaled: Tensor, seed: Tensor, choice: Tensor, position: Tensor, token_ids: Tensor | None = None
) -> list[int]:
    ids = torch.arange(scaled.shape[1]) if token_ids is None else token_ids
    score = scaled + gumbel(seed, choice, position, ids.expand(scaled.shape[0], -1))
    return [row.index(max(row)) for row in score.tolist()]


@pytest.mark.parametrize("dtype", TIER.floats)
@pytest.mark.parametrize("vocab_size", [1, 3, 97, 300] if SLOW_BACKEND else [1, 3, 16, 97, 4097])
@pytest.mark.parametrize("scale", [0.0, 4.0] if SLOW_BACKEND else [0.0, 1.0, 4.0, 30.0])
def test_gumbel_equals_scoring_every_token(
    vocab_size: int, scale: float, dtype: torch.dtype
) -> None:
    n = 3 if SLOW_BACKEND else 60
    scaled = random_scaled(n, vocab_size, seed=int(scale), scale=scale).to(dtype)
    scaled[::3, 1::2] = -INF
    seed, choice, position = torch.arange(n) - 30, torch.arange(n) % 4, torch.arange(n) * 13
    expected = brute_force(scaled, seed, choice, position)
    assert draw_gumbel(RowLaw(scaled), seed, choice, position).tolist() == expected


def test_gumbel_finds_a_winner_far_below_the_maximum() -> None:
    """Logits 16 below the maximum win with noise near its bound; a bound too small loses them."""
    vocab_size, n = (2000, 4) if SLOW_BACKEND else (30_000, 40)
    scaled = torch.full((n, vocab_size), -9.0)
    scaled[:, 0] = 0
    keys = torch.arange(n)
    expected = brute_force(scaled, keys, keys, keys)
    assert sum(token > 0 for token in expected) > n // 2 or SLOW_BACKEND
    assert draw_gumbel(RowLaw(scaled), keys, keys, keys).tolist() == expected


def test_gumbel_by_target_token_id() -> None:
    """A drafter with a reduced vocabulary sees the target's noise for the target's tokens."""
    n, vocab_size = min(50, TIER.max_batch), 200
    d2t = torch.randperm(vocab_size, generator=rng(0))[:61]
    scaled = random_scaled(n, 61)
    keys = torch.arange(n)
    column = draw_gumbel(RowLaw(scaled), keys, keys, keys, d2t)
    assert column.tolist() == brute_force(scaled, keys, keys, keys, d2t)
    target = torch.full((n, vocab_size), -INF)
    target[:, d2t] = scaled
    assert d2t[column].tolist() == draw_gumbel(RowLaw(target), keys, keys, keys).tolist()


def test_gumbel_ties_go_to_the_lowest_column() -> None:
    """Equal scores, made by columns that share one target token."""
    scaled = torch.zeros(20, 50)
    keys = torch.arange(20)
    same = torch.full((50,), 9)
    assert draw_gumbel(RowLaw(scaled), keys, keys, keys, same).tolist() == [0] * 20
    scaled[:, :17] = -INF
    assert draw_gumbel(RowLaw(scaled), keys, keys, keys, same).tolist() == [17] * 20


@pytest.mark.parametrize("vocab_size", [300] if SLOW_BACKEND else [7, 300, 4097])
def test_sample_rows_draws_each_row_its_own_way(vocab_size: int) -> None:
    """A greedy row stays the argmax of its own logits beside sampled ones, ties included."""
    n = 6
    logits = torch.randn(n, vocab_size, generator=rng(3)) * 2
    logits[0, [2, 5]] = 9.0  # a tie at the top of a greedy row
    logits[5, 3] = NAN
    kind = torch.tensor(
        [DRAW_ARGMAX, DRAW_UNIFORM, DRAW_GUMBEL, DRAW_UNIFORM, DRAW_GUMBEL, DRAW_UNIFORM],
        dtype=torch.int32,
    )
    temperature = torch.where(kind == DRAW_ARGMAX, 0.0, 0.8)
    keys = torch.arange(n) * 3 + 1
    u = uniform(keys, keys, keys, STREAM_DRAW)
    no_cuts: dict[str, Any] = {}
    for cuts in (no_cuts, {"top_k": torch.full((n,), 5), "min_p": torch.full((n,), 0.01)}):
        law = process_logits(logits, temperature=temperature, **cuts)
        token, valid = sample_rows(law, kind, uniform=u, seed=keys, choice=keys, position=keys)
        assert valid.tolist() == [True] * 5 + [False]
        assert int(token[0]) == 2
        assert 0 <= int(token[5]) < vocab_size
        by_uniform, by_noise = draw_inverse_cdf(law, u), draw_gumbel(law, keys, keys, keys)
        assert token[[1, 3]].tolist() == by_uniform[[1, 3]].tolist()
        assert token[[2, 4]].tolist() == by_noise[[2, 4]].tolist()
        some = torch.tensor([0, 2, 4])
        token, valid = sample_rows(
            law.select(some),
            kind[some],
            uniform=None,
            seed=keys[some],
            choice=keys[some],
            position=keys[some],
        )
        assert token.tolist() == [2, *by_noise[[2, 4]].tolist()]
        assert bool(valid.all())


def test_scaled_is_the_same_law_whoever_describes_it() -> None:
    logits = torch.randn(4, 300, generator=rng(8)).round() * 2
    temperature = torch.tensor([1.0, 0.5, 0.0, 2.0])
    law = process_logits(
        logits,
        temperature=temperature,
        top_k=torch.tensor([7, 0, 3, 300]),
        top_p=torch.full((4,), 0.9),
    )
    scaled = law.scaled()
    assert torch.equal(scaled[2], logits[2])
    assert (scaled[[0, 1, 3]].amax(1) == 0).all()
    index = torch.tensor([1, 3])
    assert torch.equal(law.select(index).scaled(), scaled[index])
    assert torch.equal(argmax_lowest(scaled), argmax_lowest(logits))
