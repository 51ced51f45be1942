"""What another engine does with the same settings: SGLang 0.5.23, frozen as truth tables.

`spectrue doctor` shows it beside our own choice, and tests say exactly where they differ. Read from
`eagle_utils` and `arg_groups/speculative_hook` of that version (sglang#37134); nothing here decides
what we do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spectrue.workers.config import DrafterName
from spectrue.workers.policy import ResolvedSpeculative

Platform = Literal["cpu", "cuda", "hip", "xpu"]

ALGORITHMS: dict[DrafterName, str | None] = {
    "none": None,
    "ngram": "NGRAM",
    "draft_model": "STANDALONE",
    "eagle": "EAGLE",
    "eagle3": "EAGLE3",
    "mtp": "EAGLE",  # NEXTN is resolved to it first
}


def verify_uses_greedy(*, all_greedy: bool, platform: Platform, rejection_sampling: bool) -> bool:
    """The gate: whether a whole batch commits argmax, sampled rows included."""
    return (
        all_greedy or platform in ("cpu", "xpu") or (platform == "hip" and not rejection_sampling)
    )


def verify_used_greedy(*, all_greedy: bool, platform: Platform) -> bool:
    """The gate before that change, when HIP never sampled."""
    return all_greedy or platform in ("cpu", "xpu", "hip")


def auto_enables_rejection(
    *,
    platform: Platform,
    already_on: bool,
    algorithm: str | None,
    token_map: bool,
    topk: int,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = False,
    simulated_accept_length: float = -1.0,
) -> bool:
    """Whether a HIP server turns rejection sampling on by itself."""
    return (
        platform == "hip"
        and not already_on
        and algorithm == "EAGLE"
        and not token_map
        and topk == 1
        and threshold_single == 1.0
        and threshold_acc == 1.0
        and not deterministic
        and simulated_accept_length <= 0
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What sampled rows get there."""

    samples: bool
    reason: str


def reference_outcome(
    resolved: ResolvedSpeculative, platform: Platform, reduced_vocab: bool
) -> Outcome:
    """For a deployment like ours, with no flag of that engine set by hand.

    `reduced_vocab`: the head drafts a part of the vocabulary, by a token map or by its own d2t.
    """
    algorithm = ALGORITHMS[resolved.drafter]
    if algorithm is None or resolved.num_speculative_tokens == 0:
        return Outcome(True, "no speculation")
    if platform in ("cpu", "xpu"):
        return Outcome(False, f"{platform} always verifies by argmax")
    if platform == "cuda":
        return Outcome(True, "CUDA verifies by a sampling kernel")
    topk = 1 if resolved.tree is None else resolved.tree.topk
    # A list, so that the first reason is the one that is said.
    hindrances = [
        (algorithm != "EAGLE", f"HIP turns sampling on for EAGLE alone, not for {algorithm}"),
        (reduced_vocab, "HIP does not turn sampling on for a head with a token map"),
        (topk != 1, f"HIP does not turn sampling on for trees (topk {topk})"),
        (resolved.reproducible, "HIP does not turn sampling on for deterministic inference"),
        (bool(resolved.simulated_acceptance), "acceptance is simulated"),
    ]
    enabled = auto_enables_rejection(
        platform=platform,
        already_on=False,
        algorithm=algorithm,
        token_map=reduced_vocab,
        topk=topk,
        deterministic=resolved.reproducible,
        simulated_accept_length=1.0 if resolved.simulated_acceptance else -1.0,
    )
    samples = not verify_uses_greedy(
        all_greedy=False, platform=platform, rejection_sampling=enabled
    )
    if samples:
        return Outcome(True, "HIP turns rejection sampling on by itself for this")
    reason = next(text for hinders, text in hindrances if hinders)
    return Outcome(False, f"{reason}; it commits argmax and does not say so")
