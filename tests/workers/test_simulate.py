"""Simulated acceptance: as many drafts are accepted as the rates say, and everybody is told."""

from __future__ import annotations

import logging
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spectrue.workers.config import SpeculativeConfig
from spectrue.workers.engine import Engine
from spectrue.workers.errors import ConfigError
from spectrue.workers.executor import GroupExecutor
from spectrue.workers.policy import resolve_speculative
from spectrue.workers.simulate import num_simulated, rates_for

from ..conftest import make_tiny_model
from .harness import complete, make_engine, make_request

LOOP = [5, 9, 12, 7] * 4
RATES = (0.8, 0.6, 0.45)


@pytest.fixture(scope="module")
def other_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("other"), seed=7, layers=1)


# -- settings ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"simulated_acceptance": (0.5, 0.4)}, r"acceptance must be num_speculative_tokens = 3"),
        ({"simulated_acceptance": (0.5, 0.6, 0.1)}, r"do not rise, got \[0\.5, 0\.6, 0\.1\]"),
        ({"simulated_acceptance": (1.1, 0.6, 0.1)}, r"in \[0, 1\]"),
        ({"simulated_acceptance": (0.5, 0.4, -0.1)}, r"in \[0, 1\]"),
        ({"simulated_acceptance": (math.nan, 0.4, 0.1)}, r"in \[0, 1\]"),
        ({"simulated_acceptance": (0.5, 0.4, math.nan)}, r"in \[0, 1\]"),
        ({"simulated_accept_length": 0.9}, r"simulated_accept_length must be in \[1, 4\]"),
        ({"simulated_accept_length": 4.1}, r"simulated_accept_length must be in \[1, 4\]"),
        ({"simulated_accept_length": math.nan}, r"simulated_accept_length must be in \[1, 4\]"),
        (
            {"simulated_accept_length": 2.0, "simulated_acceptance": RATES},
            r"simulated_acceptance and speculative\.simulated_accept_length say the same",
        ),
        ({"simulated_acceptance": RATES, "drafter": "none"}, r"num_speculative_tokens = 0"),
    ],
)
def test_bad_settings_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig(**options)


@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_rates_of_an_accept_length(k: int, part: float) -> None:
    length = 1 + part * k
    rates = rates_for(length, k)
    assert len(rates) == k
    assert 1 + sum(rates) == pytest.approx(length, abs=1e-9)
    assert all(1 >= a >= b >= 0 for a, b in zip(rates, (*rates[1:], 0), strict=True))


def test_auto_is_match_and_rejection_is_refused() -> None:
    """DESIGN 4: no simulated acceptance under rejection, whose law it would take no notice of."""
    drafts: dict[str, Any] = {"drafter": "draft_model", "draft_model": "-"}
    resolved = resolve_speculative(SpeculativeConfig(**drafts, simulated_accept_length=2.5))
    assert resolved.verify_method == "match"
    assert sum(resolved.simulated_acceptance) == pytest.approx(1.5)
    found = {d.setting: d for d in resolved.decisions}
    assert "BENCHMARK" in found["speculative.simulated_acceptance"].reason
    assert "simulated" in found["speculative.verify_method"].reason
    with pytest.raises(ConfigError, match=r"simulated_acceptance.*verify_method: rejection"):
        resolve_speculative(
            SpeculativeConfig(**drafts, simulated_acceptance=RATES, verify_method="rejection")
        )


def test_nothing_is_simulated_by_default() -> None:
    resolved = resolve_speculative(SpeculativeConfig())
    assert resolved.simulated_acceptance == ()
    assert not any("simulated" in d.setting for d in resolved.decisions)


# -- one draw ---------------------------------------------------------------------------------


def test_each_position_has_its_rate() -> None:
    """Exact: over all uniforms of a fine grid, at least i drafts are accepted at the i-th rate."""
    n = 1000
    counts = Counter(num_simulated(RATES, i / n, 3) for i in range(n))
    at_least = [sum(c for a, c in counts.items() if a >= i) / n for i in (1, 2, 3)]
    assert at_least == pytest.approx(RATES)


def test_fewer_drafts() -> None:
    assert num_simulated((1.0, 1.0, 1.0), 0.5, 1) == 1
    assert num_simulated((1.0, 1.0, 1.0), 0.5, 0) == 0
    assert num_simulated((0.0, 0.0), 0.0, 2) == 0
    assert num_simulated((1.0, 1.0), 1 - 2**-24, 2) == 2


# -- in the engine ----------------------------------------------------------------------------


def run(engine: Engine, temperature: float, max_tokens: int = 80) -> None:
    requests = [
        make_request(
            f"r{i}",
            [i + 3, *LOOP],
            max_tokens=max_tokens,
            ignore_eos=True,
            seed=i,
            temperature=temperature,
        )
        for i in range(8)
    ]
    simulated = bool(engine.info.resolved.simulated_acceptance)
    for done in complete(engine, *requests, check=False):
        assert done.last is not None
        assert done.last.spec_decode.simulated == simulated


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("settings", [{"simulated_acceptance": RATES}, {"length": 2.85}])
def test_the_accept_length_is_the_one_asked_for(
    tiny_llama: Path, other_llama: Path, settings: dict[str, Any], temperature: float
) -> None:
    """Though the drafter is of no use at all: another model."""
    length = settings.get("length", 1 + sum(RATES))
    options = {"simulated_accept_length": length} if "length" in settings else settings
    engine = make_engine(tiny_llama, "draft_model", 3, other_llama, **options)
    drafts, accepted, squares = 0, 0, 0
    launch = engine.executor.launch

    def spy(plan: Any) -> Any:
        nonlocal drafts, accepted, squares
        step = launch(plan)()
        for output in step.outputs:
            if output.num_draft_tokens == 3:
                assert output.verify_method == ("greedy" if temperature == 0 else "match")
                assert len(output.token_ids) == output.num_accepted_tokens + 1
                drafts += 1
                accepted += output.num_accepted_tokens
                squares += output.num_accepted_tokens**2
        return lambda: step

    engine.executor.launch = spy  # type: ignore[method-assign]
    run(engine, temperature)
    assert drafts > 200
    mean = accepted / drafts
    error = math.sqrt((squares / drafts - mean**2) / drafts)
    assert abs(1 + mean - length) < 4 * error
    plain = make_engine(tiny_llama, "draft_model", 3, other_llama)
    run(plain, temperature, max_tokens=20)
    assert plain.stats.accept_length < length - 0.5


def test_a_seed_repeats_and_seeds_differ(tiny_llama: Path, other_llama: Path) -> None:
    engine = make_engine(tiny_llama, "draft_model", 3, other_llama, simulated_acceptance=RATES)
    first, again, other = (
        complete(engine, make_request("r", LOOP, max_tokens=60, ignore_eos=True, seed=seed))[0]
        for seed in (1, 1, 2)
    )
    assert first.token_ids == again.token_ids != other.token_ids


def test_committed_drafts_are_drafts_and_the_next_token_is_the_targets(tiny_llama: Path) -> None:
    """A copy drafts what the target says: whatever is made up, the greedy text is the model's."""
    engine = make_engine(tiny_llama, "draft_model", 3, tiny_llama, simulated_acceptance=RATES)
    plain = make_engine(tiny_llama)
    requests = [
        make_request(f"r{i}", [i + 3, *LOOP], max_tokens=40, ignore_eos=True, temperature=0.0)
        for i in range(3)
    ]
    want = [complete(plain, request)[0].token_ids for request in requests]
    assert [done.token_ids for done in complete(engine, *requests)] == want
    stats = engine.stats
    assert stats.num_accepted_tokens < 0.9 * stats.num_draft_tokens


def test_a_row_that_is_no_law_still_ends_its_request(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, "draft_model", 3, tiny_llama, simulated_accept_length=4.0)
    assert isinstance(engine.executor, GroupExecutor)
    target, steps = engine.executor.worker.target, 0
    logits = target.logits

    def spoil(hidden: Tensor) -> Tensor | None:
        nonlocal steps
        steps += 1
        rows = logits(hidden)
        assert rows is not None
        return torch.full_like(rows, math.nan) if steps == 3 else rows

    target.logits = spoil  # type: ignore[method-assign, assignment]
    (done,) = complete(engine, make_request("r", LOOP, ignore_eos=True, temperature=0.0))
    assert done.finish_reason == "error"


def test_it_is_never_silent(tiny_llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        make_engine(tiny_llama, "ngram", 3)
        assert not caplog.records
        engine = make_engine(tiny_llama, "ngram", 3, simulated_acceptance=RATES)
    assert [r for r in caplog.records if "SIMULATED" in r.getMessage()]
    assert any(d.setting == "speculative.simulated_acceptance" for d in engine.info.decisions)
    (real,) = complete(make_engine(tiny_llama, "ngram", 3), make_request("r", LOOP))
    assert real.last is not None
    assert not real.last.spec_decode.simulated
