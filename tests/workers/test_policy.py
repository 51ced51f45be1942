from __future__ import annotations

import itertools
from typing import Any

import pytest

from spectrue.workers.config import HAS_CHECKPOINT, EngineConfig, SpeculativeConfig
from spectrue.workers.core import SamplingParams
from spectrue.workers.errors import ConfigError
from spectrue.workers.policy import (
    draft_mode,
    draws_by_gumbel,
    resolve_speculative,
    row_method,
    verify_path,
)
from spectrue.workers.tree import TreeShape

HEADS = ("eagle", "eagle3", "mtp")
DRAFTERS = ("none", "ngram", "draft_model", *HEADS)


def config(drafter: str, **options: Any) -> SpeculativeConfig:
    draft_model = "-" if drafter in HAS_CHECKPOINT else None
    return SpeculativeConfig(drafter=drafter, draft_model=draft_model, **options)  # type: ignore[arg-type]


# (drafter, verify_method, draft_sampling, reproducible) -> (method, sampling); absent: refused.
LEGAL = {
    ("none", "auto", "auto", False): ("match", "greedy"),
    ("none", "auto", "auto", True): ("match", "greedy"),
    ("none", "auto", "greedy", False): ("match", "greedy"),
    ("none", "auto", "greedy", True): ("match", "greedy"),
    ("draft_model", "auto", "auto", False): ("rejection", "sampled"),
    ("draft_model", "auto", "auto", True): ("match", "coupled"),
    ("draft_model", "auto", "greedy", False): ("match", "greedy"),
    ("draft_model", "auto", "greedy", True): ("match", "greedy"),
    ("draft_model", "auto", "sampled", False): ("rejection", "sampled"),
    ("draft_model", "auto", "sampled", True): ("match", "sampled"),
    ("draft_model", "auto", "coupled", False): ("match", "coupled"),
    ("draft_model", "auto", "coupled", True): ("match", "coupled"),
    ("draft_model", "match", "auto", False): ("match", "coupled"),
    ("draft_model", "match", "auto", True): ("match", "coupled"),
    ("draft_model", "match", "greedy", False): ("match", "greedy"),
    ("draft_model", "match", "greedy", True): ("match", "greedy"),
    ("draft_model", "match", "sampled", False): ("match", "sampled"),
    ("draft_model", "match", "sampled", True): ("match", "sampled"),
    ("draft_model", "match", "coupled", False): ("match", "coupled"),
    ("draft_model", "match", "coupled", True): ("match", "coupled"),
    ("draft_model", "rejection", "auto", False): ("rejection", "sampled"),
    ("draft_model", "rejection", "sampled", False): ("rejection", "sampled"),
}
# Heads draw from a law as draft models do.
LEGAL |= {
    (head, method, sampling, reproducible): resolved
    for (drafter, method, sampling, reproducible), resolved in list(LEGAL.items())
    for head in HEADS
    if drafter == "draft_model"
}
for sampling, reproducible in itertools.product(("auto", "greedy"), (False, True)):
    LEGAL["none", "match", sampling, reproducible] = ("match", "greedy")
    for method in ("auto", "match"):
        LEGAL["ngram", method, sampling, reproducible] = ("match", "greedy")


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("sampling", ["auto", "greedy", "sampled", "coupled"])
@pytest.mark.parametrize("method", ["auto", "match", "rejection"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_resolution(drafter: str, method: str, sampling: str, reproducible: bool) -> None:
    """The full product: each combination resolves as written here, or is refused by name."""
    c = config(drafter, verify_method=method, draft_sampling=sampling, reproducible=reproducible)
    want = LEGAL.get((drafter, method, sampling, reproducible))
    if want is None:
        with pytest.raises(ConfigError, match=r"speculative\.(draft_sampling|verify_method|repro)"):
            resolve_speculative(c)
        return
    resolved = resolve_speculative(c)
    assert (resolved.verify_method, resolved.draft_sampling) == want
    automatic = {d.setting: d.value for d in resolved.decisions}
    assert ("speculative.verify_method" in automatic) == (method == "auto")
    assert ("speculative.draft_sampling" in automatic) == (sampling == "auto")
    assert all(d.reason for d in resolved.decisions)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("method", ["auto", "match", "rejection"])
@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("seed", [None, 3])
def test_rows(
    drafter: str, method: str, reproducible: bool, temperature: float, seed: int | None
) -> None:
    try:
        resolved = resolve_speculative(
            config(drafter, verify_method=method, reproducible=reproducible)
        )
    except ConfigError:
        return
    params = SamplingParams(temperature=temperature, seed=seed)
    row = row_method(params, resolved)
    if temperature == 0:
        assert row == "greedy"
        assert not draws_by_gumbel(params, resolved)
        assert draft_mode(params, resolved) == "greedy"
    elif seed is not None or reproducible:
        assert row == "match"
        assert draws_by_gumbel(params, resolved)  # whichever the drafter is
    else:
        assert row == resolved.verify_method
    if row == "rejection":
        assert draft_mode(params, resolved) == "sampled"
        assert not draws_by_gumbel(params, resolved)
    if draft_mode(params, resolved) == "coupled":
        assert draws_by_gumbel(params, resolved)


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("drafter", HEADS)
def test_trees_are_verified_by_match(drafter: str, reproducible: bool) -> None:
    resolved = resolve_speculative(config(drafter, tree_topk=4, reproducible=reproducible))
    assert (resolved.verify_method, resolved.draft_sampling) == ("match", "greedy")
    reasons = {d.setting: d.reason for d in resolved.decisions}
    assert "match is exact for any draft tree" in reasons["speculative.verify_method"]
    assert "nothing is drawn" in reasons["speculative.draft_sampling"]
    assert "tree_topk" in reasons["speculative.tree_size"]
    assert resolved.tree == TreeShape(topk=4, size=12)
    for seed in (None, 3):
        params = SamplingParams(seed=seed)
        assert row_method(params, resolved) == "match"
        assert draft_mode(params, resolved) == "greedy"
        assert draws_by_gumbel(params, resolved) == (reproducible or seed is not None)
    assert resolve_speculative(config(drafter, tree_topk=1)).tree is None
    assert resolve_speculative(config(drafter, tree_topk=2, num_speculative_tokens=0)).tree is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafter": "ngram"}, "speculative.tree_topk: 2 needs a drafter that drafts trees"),
        ({"drafter": "draft_model"}, "speculative.tree_topk: 2 needs a drafter that drafts trees"),
        ({"drafter": "none"}, "speculative.tree_topk: 2 needs a drafter that drafts trees"),
        ({"verify_method": "rejection"}, "speculative.verify_method: rejection judges a chain"),
        ({"draft_sampling": "coupled"}, "speculative.draft_sampling: coupled draws a chain"),
        ({"tree_topk": 60}, r"speculative.tree_topk must be in \[1, 16\]"),
        ({"tree_size": 2}, r"speculative.tree_size must be in \[num_speculative_tokens = 3"),
        ({"tree_topk": 1, "tree_size": 4}, "speculative.tree_topk of at least 2"),
        ({"tree_kind": "round"}, "speculative.tree_kind must be one of dynamic, static"),
    ],
)
def test_what_a_tree_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_speculative(config(**{"drafter": "eagle3", "tree_topk": 2, **options}))


def test_only_all_greedy_is_greedy() -> None:
    assert verify_path(all_greedy=True) == "greedy"
    assert verify_path(all_greedy=False) == "sampling"


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"num_speculative_tokens": -1}, "speculative.num_speculative_tokens"),
        ({"num_speculative_tokens": 99}, "speculative.num_speculative_tokens"),
        ({"ngram_min": 0}, "speculative.ngram_min"),
        ({"ngram_min": 5}, "speculative.ngram_max"),
        ({"drafter": "draft_model"}, "speculative.draft_model"),
        ({"drafter": "ngram", "draft_model": "x"}, "speculative.draft_model"),
    ],
)
def test_bad_settings_are_named(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        SpeculativeConfig(**options)


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("drafter", "none, ngram, draft_model, eagle, eagle3, mtp"),
        ("verify_method", "auto, match, rejection"),
        ("draft_sampling", "auto, greedy, sampled, coupled"),
    ],
)
def test_unknown_choices_are_refused(name: str, choices: str) -> None:
    with pytest.raises(ConfigError) as e:
        SpeculativeConfig(**{name: "foo"})  # type: ignore[arg-type]
    assert str(e.value) == f"speculative.{name} must be one of {choices}, got 'foo'"


@pytest.mark.parametrize("name", ["dtype", "device"])
def test_unknown_engine_choices_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} must be one of auto, .*, got 'foo'$"):
        EngineConfig(model="m", **{name: "foo"})  # type: ignore[arg-type]
