"""The other engine's predicates as frozen truth tables, and exactly where ours differs, and why."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from spectrue.workers.config import HAS_CHECKPOINT, SpeculativeConfig
from spectrue.workers.core import SamplingParams
from spectrue.workers.errors import ConfigError
from spectrue.workers.policy import resolve_speculative, row_method, verify_path
from spectrue.workers.reference_policy import (
    auto_enables_rejection,
    reference_outcome,
    verify_used_greedy,
    verify_uses_greedy,
)

PLATFORMS = ("cpu", "cuda", "hip", "xpu")

# (all_greedy, platform, rejection_sampling) -> the whole batch commits argmax.
GATE = {
    (True, "cpu", False): True,
    (True, "cpu", True): True,
    (True, "cuda", False): True,
    (True, "cuda", True): True,
    (True, "hip", False): True,
    (True, "hip", True): True,
    (True, "xpu", False): True,
    (True, "xpu", True): True,
    (False, "cpu", False): True,
    (False, "cpu", True): True,
    (False, "cuda", False): False,
    (False, "cuda", True): False,
    (False, "hip", False): True,
    (False, "hip", True): False,
    (False, "xpu", False): True,
    (False, "xpu", True): True,
}


def test_the_gate_is_the_frozen_one() -> None:
    product = itertools.product((True, False), PLATFORMS, (False, True))
    assert set(product) == set(GATE)
    for (all_greedy, platform, rejection), want in GATE.items():
        got = verify_uses_greedy(
            all_greedy=all_greedy,
            platform=platform,  # type: ignore[arg-type]
            rejection_sampling=rejection,
        )
        assert got == want
        before = verify_used_greedy(all_greedy=all_greedy, platform=platform)  # type: ignore[arg-type]
        # Their change touched one case: HIP with the flag on.
        assert (before != got) == ((all_greedy, platform, rejection) == (False, "hip", True))


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("all_greedy", [True, False])
def test_ours_is_greedy_for_greedy_rows_and_nothing_else(platform: str, all_greedy: bool) -> None:
    """Equal to theirs on CUDA; elsewhere we sample where they commit argmax, because `match` needs
    nothing but logits, so there is no platform that cannot."""
    ours = verify_path(all_greedy) == "greedy"
    assert ours == all_greedy
    for rejection in (False, True):
        theirs = GATE[all_greedy, platform, rejection]
        differs = not all_greedy and (
            platform in ("cpu", "xpu") or (platform, rejection) == ("hip", False)
        )
        assert (ours != theirs) == differs


def test_hip_turns_sampling_on_in_one_case_of_all() -> None:
    options: dict[str, tuple[Any, ...]] = {
        "platform": PLATFORMS,
        "already_on": (False, True),
        "algorithm": ("EAGLE", "EAGLE3", "STANDALONE", "NGRAM", "DFLASH", None),
        "token_map": (False, True),
        "topk": (1, 2, 8),
        "threshold_single": (1.0, 0.5),
        "threshold_acc": (1.0, 0.7),
        "deterministic": (False, True),
        "simulated_accept_length": (-1.0, 0.0, 3.39),
    }
    on = [
        case
        for values in itertools.product(*options.values())
        if auto_enables_rejection(**(case := dict(zip(options, values, strict=True))))
    ]
    assert {case.pop("simulated_accept_length") for case in on} == {-1.0, 0.0}
    only = {
        "platform": "hip",
        "already_on": False,
        "algorithm": "EAGLE",
        "token_map": False,
        "topk": 1,
        "threshold_single": 1.0,
        "threshold_acc": 1.0,
        "deterministic": False,
    }
    assert on == [only, only]


DRAFTERS = ("none", "ngram", "draft_model", "eagle", "eagle3", "mtp")


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_where_theirs_commits_argmax_ours_samples(drafter: str, platform: str) -> None:
    """Over every deployment: ours draws from a law for each sampled row; theirs is silent about
    the cases listed here."""
    for topk, reproducible, reduced in itertools.product((1, 2), (False, True), (False, True)):
        draft_model = "-" if drafter in HAS_CHECKPOINT else None
        config = SpeculativeConfig(
            drafter=drafter,  # type: ignore[arg-type]
            draft_model=draft_model,
            tree_topk=topk,
            reproducible=reproducible,
        )
        try:
            resolved = resolve_speculative(config)
        except ConfigError:
            assert topk == 2
            assert drafter in ("none", "ngram", "draft_model")
            continue
        assert row_method(SamplingParams(temperature=0.7), resolved) in ("match", "rejection")
        theirs = reference_outcome(resolved, platform, reduced)  # type: ignore[arg-type]
        if drafter == "none" or platform == "cuda":
            expected = True
        elif platform == "hip":
            plain = topk == 1 and not reproducible and not reduced
            expected = drafter in ("eagle", "mtp") and plain
        else:
            expected = False
        assert theirs.samples == expected
        assert theirs.reason
