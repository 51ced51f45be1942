"""Philox against the published vectors of Random123, and what is built on it."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from spectrue.kernels import philox
from spectrue.kernels.dispatch import gumbel, uniform
from spectrue.kernels.philox import chunk_exponentials
from spectrue.kernels.row_law import CHUNK

from .conftest import SLOW_BACKEND, rng

ONES = 0xFFFFFFFF
KNOWN_ANSWERS = [
    ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES), (ONES, ONES, ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def scalar(value: int) -> Tensor:
    return torch.tensor([value])


@pytest.mark.parametrize(("key", "counter", "words"), KNOWN_ANSWERS)
def test_known_answers(
    key: tuple[int, int], counter: tuple[int, int, int, int], words: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (scalar(c) for c in counter)
    got = philox.philox4x32((scalar(key[0]), scalar(key[1])), (c0, c1, c2, c3))
    assert tuple(int(w) for w in got) == words


def test_layout_of_key_and_counter() -> None:
    """Each input in its own word of the key and the counter."""
    seed = (0x299F31D0 << 32) | 0xA4093822
    position, choice, stream = 0x85A308D3, 0x13198A2E, 0x03707344
    words = philox.philox4x32(
        (scalar(0xA4093822), scalar(0x299F31D0)),
        (scalar(0), scalar(position), scalar(choice), scalar(stream)),
    )
    got = uniform(scalar(seed), scalar(choice), scalar(position), stream)
    assert float(got) == (int(words[0]) >> 8) / 2**24
    # A negative seed is the same 64 bits.
    high = scalar((0xF99F31D0 - 2**32 << 32) | 0xA4093822)
    words = philox.philox4x32(
        (scalar(0xA4093822), scalar(0xF99F31D0)),
        (scalar(0), scalar(position), scalar(choice), scalar(stream)),
    )
    assert float(uniform(high, scalar(choice), scalar(position), stream)) == (
        (int(words[0]) >> 8) / 2**24
    )


def test_uniform_is_uniform_and_each_input_counts() -> None:
    n = 100_000
    zero, count = torch.zeros(n, dtype=torch.int64), torch.arange(n)
    draws = [
        uniform(count, zero, zero, philox.STREAM_DRAW),
        uniform(zero, count, zero, philox.STREAM_DRAW),
        uniform(zero, zero, count, philox.STREAM_DRAW),
        uniform(zero, zero, count, philox.STREAM_COIN),
        uniform(zero, zero, count, philox.STREAM_DRAFT),
        uniform(count - n // 2 - 2**62, zero, zero, philox.STREAM_DRAW),
    ]
    for i, u in enumerate(draws):
        assert u.dtype == torch.float32
        assert 0 <= float(u.min()) < 1e-4
        assert 1 - 1e-4 < float(u.max()) < 1
        assert bool(((u * 2**24) % 1 == 0).all())
        observed = torch.bincount((u * 64).long(), minlength=64)
        assert stats.chisquare(observed.cpu().numpy()).pvalue > 1e-4
        for other in draws[:i]:
            assert abs(float(torch.corrcoef(torch.stack([u, other]))[0, 1])) < 0.02


def test_exponentials_are_finite_and_positive_at_the_ends_of_the_words() -> None:
    least = philox._exponential(torch.tensor([0, 0xFF, 0x80000000, 0xFFFFFE00, 0xFFFFFFFF]))
    assert bool((least.isfinite() & (least > 0)).all())
    assert float(least.max()) == pytest.approx(math.log(2**24), rel=1e-5)
    assert float(least.min()) == pytest.approx(2**-24, rel=1e-5)


def test_gumbel_law_and_keys() -> None:
    zero = torch.zeros(1, dtype=torch.int64)
    noise = gumbel(zero, zero, zero, torch.arange(50_000)[None])
    assert stats.kstest(noise[0].cpu().numpy(), "gumbel_r").pvalue > 1e-3
    ids = torch.tensor([[5, 0, 7, 40_001, 5, 2**31 - 1]])
    base = gumbel(zero, zero, zero, ids)
    assert base[0, 0] == base[0, 4] == noise[0, 5]
    assert base[0, 3] == noise[0, 40_001]
    for keys in ((zero + 1, zero, zero), (zero, zero + 1, zero), (zero, zero, zero + 1)):
        assert not bool((gumbel(*keys, ids) == base).any())


def test_gumbel_noise_is_independent_within_a_chunk() -> None:
    """The two levels make it so: order statistics, the place of the largest, and correlations."""
    n = 2_000 if SLOW_BACKEND else 20_000
    seed, zero = torch.arange(n), torch.zeros(n, dtype=torch.int64)
    ids = torch.arange(2 * CHUNK).expand(n, -1)
    exponential = (-gumbel(seed, zero, zero, ids)).exp().reshape(2 * n, CHUNK)
    least = exponential.topk(3, 1, largest=False)
    order_statistics = {0: least.values[:, 0], 1: least.values[:, 1], 2: least.values[:, 2]}
    order_statistics[CHUNK - 1] = exponential.amax(1)
    for rank, value in order_statistics.items():  # 1 - e^-x is uniform, and its statistics are Beta
        u = 1 - (-value.double()).exp()
        assert stats.kstest(u.cpu().numpy(), "beta", args=(rank + 1, CHUNK - rank)).pvalue > 1e-3
    two = least.indices
    for place in (two[:, 0], two[:, 1], (two[:, 1] - two[:, 0]) % CHUNK - 1):
        counts = torch.bincount(place, minlength=CHUNK)[: CHUNK - int(place.max() < CHUNK - 1)]
        assert stats.chisquare(counts.cpu().numpy()).pvalue > 1e-3
    noise = (-exponential.log())[:, :4].reshape(n, 8).T
    correlation = torch.corrcoef(noise) - torch.eye(8)
    assert float(correlation.abs().max()) < 5 / n**0.5


def test_the_two_least_exponentials_of_a_chunk_are_those_of_its_tokens() -> None:
    n = 37
    seed = torch.randint(-(2**63), 2**63 - 1, (n,), generator=rng(1))
    choice, position, chunk = torch.arange(n) % 3, torch.arange(n) * 11, torch.arange(n) * 5
    least, place, second, other = chunk_exponentials(seed, choice, position, chunk[:, None])
    ids = chunk[:, None] * CHUNK + torch.arange(CHUNK)
    noise = gumbel(seed, choice, position, ids)
    torch.testing.assert_close(noise.amax(1), -least.squeeze(1).log(), rtol=1e-5, atol=2e-6)
    assert torch.equal(ids.gather(1, noise.argmax(1, keepdim=True)), place)
    two = noise.topk(2, 1)
    torch.testing.assert_close(two.values[:, 1], -second.squeeze(1).log(), rtol=1e-5, atol=2e-6)
    assert torch.equal(ids.gather(1, two.indices[:, 1:]), other)
    assert not bool((place == other).any())
