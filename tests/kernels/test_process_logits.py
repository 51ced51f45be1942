"""process_logits against a naive implementation that takes one row at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spectrue.kernels.dispatch import process_logits, valid_rows

from .conftest import SLOW_BACKEND, TIER, rng, spread

FLOAT = TIER.floats[-1]
INF, NAN = float("inf"), float("nan")


@dataclass
class Row:
    """One row and its parameters."""

    logits: list[float]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    counts: dict[int, int] = field(default_factory=dict)  # token of prompt or output -> in output
    bias: dict[int, float] = field(default_factory=dict)
    mask: set[int] = field(default_factory=set)


def naive(row: Row) -> list[float]:
    x = list(row.logits)
    for token, count in row.counts.items():
        x[token] = x[token] / row.repetition if x[token] > 0 else x[token] * row.repetition
        if count > 0:
            x[token] -= row.presence + row.frequency * count
    for token, value in row.bias.items():
        x[token] += value
    for token in row.mask:
        x[token] = -INF
    if row.temperature == 0:
        return x
    peak = max(x)
    x = [(v - peak) / row.temperature for v in x]
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if row.top_k > 0:
        order = order[: row.top_k]
    if row.top_p < 1:
        total = math.fsum(math.exp(x[i]) for i in order)
        mass, n = 0.0, 0
        for i in order:
            mass += math.exp(x[i])
            n += 1
            if mass >= row.top_p * total:
                break
        order = order[:n]
    stay = {i for i in order if row.min_p == 0 or x[i] >= math.log(row.min_p)}
    return [v if i in stay else -INF for i, v in enumerate(x)]


def batch(rows: list[Row], dtype: torch.dtype = FLOAT) -> Tensor:
    def column(name: str) -> Tensor:
        return torch.tensor([getattr(row, name) for row in rows])

    counts = [(r, t, c) for r, row in enumerate(rows) for t, c in row.counts.items()]
    bias = [(r, t, b) for r, row in enumerate(rows) for t, b in row.bias.items()]
    mask = [(r, t) for r, row in enumerate(rows) for t in row.mask]

    def columns(entries: Sequence[tuple[float, ...]], n: int) -> list[Tensor]:
        return [torch.tensor([entry[i] for entry in entries]) for i in range(n)]

    penalties = columns(counts, 3) if counts else None
    biases = columns(bias, 3) if bias else None
    masks = columns(mask, 2) if mask else None
    logits = torch.tensor([row.logits for row in rows], dtype=dtype)
    before = logits.clone()
    law = process_logits(
        logits,
        temperature=torch.tensor([row.temperature for row in rows], dtype=FLOAT),
        top_k=column("top_k"),
        top_p=torch.tensor([row.top_p for row in rows], dtype=FLOAT),
        min_p=torch.tensor([row.min_p for row in rows], dtype=FLOAT),
        penalties=None if penalties is None else (penalties[0], penalties[1], penalties[2]),
        repetition=column("repetition"),
        presence=column("presence"),
        frequency=column("frequency"),
        bias=None if biases is None else (biases[0], biases[1], biases[2]),
        mask=None if masks is None else (masks[0], masks[1]),
    )
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0)), "the input was changed"
    return law.scaled()


def support(row: Row) -> set[int]:
    return {i for i, v in enumerate(naive(row)) if v > -INF}


def check(rows: list[Row], dtype: torch.dtype = FLOAT) -> None:
    """Supports are equal; in float32 they may differ where a cut has a margin below 1e-5."""
    got = batch(rows, dtype)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-4
    at_the_margin = 0
    for i, row in enumerate(rows):
        row.logits = torch.tensor(row.logits, dtype=dtype).tolist()
        expected = torch.tensor(naive(row), dtype=dtype)
        stays = got[i] > -INF
        if dtype == torch.float32 and row.top_p < 1 and not torch.equal(stays, expected > -INF):
            at_the_margin += 1
            tokens = set(stays.nonzero().squeeze(1).tolist())
            assert support(replace(row, top_p=row.top_p - 1e-5)) <= tokens
            assert tokens <= support(replace(row, top_p=row.top_p + 1e-5))
            expected = torch.where(stays & (expected == -INF), got[i], expected)
            expected = torch.where(stays, expected, -INF)
        about = replace(row, logits=[])
        assert torch.equal(stays, expected > -INF), f"support of row {i}: {about}"
        torch.testing.assert_close(got[i], expected, rtol=tolerance, atol=tolerance)
        if not SLOW_BACKEND or i == 0:
            alone = batch([row], dtype)[0]
            assert torch.equal(alone, got[i]), f"{about} depends on its neighbours"
    assert at_the_margin <= max(1, len(rows) // 50)


def logits_of(vocab_size: int, seed: int, ties: bool, scale: float = 3.0) -> list[float]:
    x = torch.randn(vocab_size, generator=rng(seed)).double() * scale
    if ties:
        x = (x * 2).round() / 2
    values: list[float] = x.tolist()
    return values


@pytest.mark.parametrize("dtype", TIER.floats)
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocab_size", [7, 97, 4097] if SLOW_BACKEND else [7, 97, 4097, 9001])
def test_truncations_in_one_batch(vocab_size: int, ties: bool, dtype: torch.dtype) -> None:
    rows: list[Row] = []
    for top_k in (0, -1, 1, 3, 6, 7, 8, 63, 64, 65, 1023, 1024, 1500, 9000):
        for top_p, min_p in ((1.0, 0.0), (0.9, 0.0), (1e-4, 0.0), (0.999, 0.0), (0.8, 0.05)):
            seed = len(rows)
            rows.append(
                Row(
                    logits_of(vocab_size, seed, ties, scale=(0.5, 1.0, 3.0)[seed % 3]),
                    temperature=(1.0, 0.7, 1.3, 0.0)[seed % 4],
                    top_k=top_k,
                    top_p=top_p,
                    min_p=min_p,
                )
            )
    rows.append(Row(logits_of(vocab_size, 1000, ties), min_p=0.3))
    rows.append(Row(logits_of(vocab_size, 1001, ties), min_p=1.0))
    # The specification sorts a long row in Python; every second one has each cut with each other.
    few = 8 if SLOW_BACKEND else len(rows) if vocab_size < 4096 else 36
    check([rows[i] for i in spread(rows, few)], dtype)


def test_everything_mixed() -> None:
    generator = rng(5)

    def pick(choices: list[float]) -> float:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    rows = []
    for seed in range(60):
        tokens: list[int] = torch.randperm(97, generator=generator)[:12].tolist()
        rows.append(
            Row(
                logits_of(97, seed, ties=seed % 2 == 0),
                temperature=pick([0.0, 0.5, 1.0, 2.0]),
                top_k=int(pick([0, 1, 5, 200])),
                top_p=pick([1.0, 0.5, 0.9]),
                min_p=pick([0.0, 0.1]),
                repetition=pick([1.0, 1.5, 0.5]),
                presence=pick([0.0, 1.5, -1.0]),
                frequency=pick([0.0, 0.5, -2.0]),
                counts={t: i % 4 for i, t in enumerate(tokens)},
                bias={t: pick([-100.0, 5.0, -1.0]) for t in tokens[3:8]},
                mask=set(tokens[6:9]),
            )
        )
    rows = rows[:8] if SLOW_BACKEND else rows
    for dtype in TIER.floats:
        check(rows, dtype)


@pytest.mark.skipif(SLOW_BACKEND, reason="150 batches")
@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from([-INF, -2.0, -1.0, 0.0, 0.5, 1.0]), min_size=7, max_size=7),
            st.sampled_from([0.0, 0.5, 1.0]),
            st.integers(-1, 9),
            st.sampled_from([1.0, 0.25, 0.5, 0.75, 1e-6]),
            st.sampled_from([0.0, 0.4, 1.0]),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_small_rows(
    cases: list[tuple[list[float], float, int, float, float]],
) -> None:
    rows = [
        Row(x, temperature=t, top_k=k, top_p=p, min_p=m) for x, t, k, p, m in cases if max(x) > -INF
    ]
    if rows:
        check(rows)


def test_support_of_known_rows() -> None:
    """sglang#10617 (min_p, logit_bias), and a tie at every cut."""
    law = [math.log(p) for p in (0.4, 0.4, 0.2)]
    got = batch(
        [
            Row(law, top_k=1),
            Row(law, top_p=0.5),
            Row(law, min_p=0.5),
            Row(law, min_p=0.51),
            Row([0.0] * 3, top_k=2),
            Row([0.0] * 3, top_p=0.6),
            Row(law, bias={0: -100.0}, top_k=1),
            Row(law, mask={0, 1}, top_p=0.1),
            Row(law, top_p=1e-30, min_p=1.0, top_k=50),
        ]
    )
    assert (got > -INF).int().tolist() == [
        [1, 0, 0],
        [1, 1, 0],
        [1, 1, 1],
        [1, 1, 0],
        [1, 1, 0],
        [1, 1, 0],
        [0, 1, 0],
        [0, 0, 1],
        [1, 0, 0],
    ]


@pytest.mark.parametrize(("vocab_size", "kept"), [(4, 2), (128, 96)])
def test_top_p_that_is_reached_exactly(vocab_size: int, kept: int) -> None:
    """The smallest set whose mass reaches it, by the short prefix and by the histogram."""
    got = batch([Row([0.0] * vocab_size, top_p=kept / vocab_size)])
    assert (got[0] > -INF).tolist() == [True] * kept + [False] * (vocab_size - kept)


def test_top_p_of_one_changes_nothing() -> None:
    row = logits_of(4097, 3, ties=False, scale=30.0)
    with_it, without = batch([Row(row), Row(row, top_p=1 - 1e-6)], torch.float32)
    assert torch.equal(
        with_it, process_logits(torch.tensor([row]), temperature=torch.ones(1)).scaled()[0]
    )
    assert int((with_it > -INF).sum()) == 4097
    assert int((without > -INF).sum()) < 4097  # the check can fail


def test_temperature_zero_keeps_values_untruncated() -> None:
    row = logits_of(97, 0, ties=True)
    got = batch([Row(row, temperature=0.0, top_k=1, top_p=0.1, min_p=0.9)])
    assert torch.equal(got[0], torch.tensor(row, dtype=FLOAT))


def test_small_and_large_temperatures_stay_finite() -> None:
    got = batch([Row([50.0, 49.0, -50.0], temperature=t) for t in (1e-6, 1e6)], torch.float32)
    assert float(got[0, 0]) == 0.0
    assert not bool(got.isnan().any())
    assert bool(valid_rows(got).all())


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_invalid_rows_stay_visible_and_alone(bad: float, temperature: float) -> None:
    """vllm#45060 and others: a NaN row must be found, whatever cuts and masks stand over it."""
    good = logits_of(97, 0, ties=False)
    rows = [Row(list(good), temperature=temperature, **p) for p in PARAMS for _ in range(2)]  # type: ignore[arg-type]
    for row in rows[::2]:
        row.logits[3] = bad
    got = batch(rows, torch.float32)
    assert valid_rows(got).tolist() == [False, True] * len(PARAMS)
    for i, row in enumerate(rows[1::2]):
        assert torch.equal(got[2 * i + 1], batch([row], torch.float32)[0])


PARAMS: list[dict[str, object]] = [
    {},
    {"top_k": 5},
    {"top_p": 0.5},
    {"min_p": 0.5},
    {"mask": {3}},
    {"bias": {3: -100.0}},
    {"counts": {3: 1}, "repetition": 2.0, "frequency": 2.0},
    {"top_k": 5, "top_p": 0.5, "min_p": 0.1, "mask": {3}},
]


def test_a_row_masked_out_altogether_is_invalid() -> None:
    got = batch([Row([1.0, 2.0], mask={0, 1}, temperature=t) for t in (0.0, 1.0)])
    assert valid_rows(got).tolist() == [False, False]


def test_bfloat16_gives_float32_and_optional_parameters() -> None:
    logits = torch.randn(2, 50).bfloat16()
    got = process_logits(logits, temperature=torch.tensor([1.0, 0.5])).scaled()
    assert got.dtype == torch.float32
    assert float(got.max()) == 0.0
    assert process_logits(logits[:0], temperature=torch.ones(0)).scaled().shape == (0, 50)
    entry = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="repetition"):
        process_logits(logits, temperature=torch.ones(2), penalties=(entry, entry, entry))
