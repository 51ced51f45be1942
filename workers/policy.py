"""Which verify method a deployment and each of its rows get, and why. Pure functions.

Every `auto` is resolved once, into a new object, and what is validated is the resolved value: an
automatic choice must stand the same checks as a written one (sglang#37134 skipped them).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spectrue.workers.config import Depth, DrafterName, SpeculativeConfig
from spectrue.workers.core import SamplingParams
from spectrue.workers.errors import ConfigError
from spectrue.workers.simulate import rates_of
from spectrue.workers.tree import TreeShape

ResolvedMethod = Literal["match", "rejection"]
RowMethod = Literal["greedy", "match", "rejection"]
DraftMode = Literal["greedy", "sampled", "coupled"]

# Drafters that draw from a law which they hand over; the others propose without one.
DRAWS_FROM_LAW: dict[DrafterName, bool] = {
    "none": False,
    "ngram": False,
    "draft_model": True,
    "eagle": True,
    "eagle3": True,
    "mtp": True,
}
DRAFTS_TREES: tuple[DrafterName, ...] = ("eagle", "eagle3", "mtp")


@dataclass(frozen=True, slots=True)
class Decision:
    """One automatic setting: logged at start, exported, shown by `spectrue serve`."""

    setting: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSpeculative:
    """A SpeculativeConfig without `auto`. `verify_method` holds for sampled rows without a seed."""

    drafter: DrafterName
    num_speculative_tokens: int
    verify_method: ResolvedMethod
    draft_sampling: DraftMode
    reproducible: bool
    decisions: tuple[Decision, ...]
    depth: Depth = "fixed"
    depth_schedule: tuple[tuple[int, int, int], ...] = ()
    simulated_acceptance: tuple[float, ...] = ()  # rate of each draft; not empty: no real output
    tree: TreeShape | None = None  # None: drafts are chains

    @property
    def verify_reason(self) -> str:
        for decision in self.decisions:
            if decision.setting == "speculative.verify_method":
                return decision.reason
        return "set by the configuration"


def resolve_speculative(config: SpeculativeConfig) -> ResolvedSpeculative:
    """Resolve every `auto`, the same on every platform (DESIGN 4). Raises ConfigError."""
    decisions: list[Decision] = []
    draws = DRAWS_FROM_LAW[config.drafter]
    simulated = rates_of(config)
    if simulated:
        rates = ", ".join(f"{rate:.3g}" for rate in simulated)
        reason = "BENCHMARK: how many drafts are accepted is made up, the text is not the model's"
        decisions.append(Decision("speculative.simulated_acceptance", rates, reason))

    tree = _tree(config, decisions)

    method: ResolvedMethod
    if config.verify_method != "auto":
        method = config.verify_method
    else:
        wants_rejection = config.draft_sampling in ("auto", "sampled")
        if config.max_draft_tokens == 0:
            method, reason = "match", "nothing is drafted: every token is drawn from the target"
        elif not draws:
            method, reason = "match", f"{config.drafter} drafts have no law, match needs none"
        elif tree is not None:
            method, reason = (
                "match",
                "match is exact for any draft tree; rejection would need the joint law of siblings",
            )
        elif simulated:
            method, reason = "match", "simulated acceptance takes no notice of the draft law"
        elif config.reproducible:
            method, reason = "match", "reproducible: the text depends on the seed alone"
        elif not wants_rejection:
            method, reason = "match", f"{config.draft_sampling} drafts are not drawn from a law"
        else:
            method, reason = (
                "rejection",
                f"{config.drafter} drafts a chain from a law it hands over",
            )
        decisions.append(Decision("speculative.verify_method", method, reason))

    sampling: DraftMode
    if config.draft_sampling != "auto":
        sampling = config.draft_sampling
    else:
        if not draws:
            sampling, reason = "greedy", f"{config.drafter} proposes tokens, not a law"
        elif tree is not None:
            sampling, reason = "greedy", "a tree holds the likeliest tokens, nothing is drawn"
        elif method == "rejection":
            sampling, reason = "sampled", "rejection needs drafts drawn from the law it is given"
        else:
            sampling, reason = "coupled", "shared noise makes match accept more often"
        decisions.append(Decision("speculative.draft_sampling", sampling, reason))

    resolved = ResolvedSpeculative(
        drafter=config.drafter,
        num_speculative_tokens=config.max_draft_tokens,
        verify_method=method,
        draft_sampling=sampling,
        reproducible=config.reproducible,
        decisions=tuple(decisions),
        depth=config.depth,
        depth_schedule=config.depth_schedule,
        simulated_acceptance=simulated,
        tree=tree,
    )
    _validate(resolved)
    return resolved


def _tree(config: SpeculativeConfig, decisions: list[Decision]) -> TreeShape | None:
    """The shape of draft trees; None where drafts are chains."""
    if config.tree_topk == 1:
        return None
    if config.drafter not in DRAFTS_TREES:
        raise ConfigError(
            f"speculative.tree_topk: {config.tree_topk} needs a drafter that drafts trees "
            f"({', '.join(DRAFTS_TREES)}), not {config.drafter}; set it to 1"
        )
    if config.max_draft_tokens == 0:
        return None
    size = config.tree_size
    if size is None:
        size = config.tree_topk * config.max_draft_tokens
        reason = "tree_topk drafts for each of num_speculative_tokens levels"
        decisions.append(Decision("speculative.tree_size", str(size), reason))
    return TreeShape(topk=config.tree_topk, size=size, dynamic=config.tree_kind == "dynamic")


def _validate(resolved: ResolvedSpeculative) -> None:
    """Raise ConfigError for a combination that would not be exact, or not what it says."""
    draws = DRAWS_FROM_LAW[resolved.drafter]
    if resolved.tree is not None:
        if resolved.verify_method == "rejection":
            raise ConfigError(
                "speculative.verify_method: rejection judges a chain, and speculative.tree_topk: "
                f"{resolved.tree.topk} drafts a tree; use match or auto"
            )
        if resolved.draft_sampling != "greedy":
            raise ConfigError(
                f"speculative.draft_sampling: {resolved.draft_sampling} draws a chain, and "
                f"speculative.tree_topk: {resolved.tree.topk} takes a tree's likeliest tokens; use "
                f"greedy or auto"
            )
    if resolved.draft_sampling != "greedy" and not draws:
        raise ConfigError(
            f"speculative.draft_sampling: {resolved.draft_sampling} needs a drafter with a law "
            f"({', '.join(d for d, law in DRAWS_FROM_LAW.items() if law)}), "
            f"not {resolved.drafter}"
        )
    if resolved.verify_method == "rejection":
        if not draws:
            raise ConfigError(
                f"speculative.verify_method: rejection needs the law of the drafts, which "
                f"speculative.drafter: {resolved.drafter} does not have; use match or auto"
            )
        if resolved.draft_sampling != "sampled":
            raise ConfigError(
                f"speculative.verify_method: rejection needs speculative.draft_sampling: sampled, "
                f"not {resolved.draft_sampling}: its accept test would be biased"
            )
        if resolved.simulated_acceptance:
            raise ConfigError(
                "speculative.simulated_acceptance replaces a match walk and contradicts "
                "speculative.verify_method: rejection; use match or auto"
            )
        if resolved.reproducible:
            raise ConfigError(
                "speculative.reproducible verifies every row by match and contradicts "
                "speculative.verify_method: rejection"
            )


def row_method(params: SamplingParams, resolved: ResolvedSpeculative) -> RowMethod:
    """How one request's rows are decided: per row, whatever its batch neighbours are."""
    if params.greedy:
        return "greedy"
    if params.seed is not None or resolved.reproducible:
        return "match"  # so that the text does not depend on k, load or batch
    if resolved.num_speculative_tokens == 0:
        return "match"  # nothing is ever drafted: there is nothing to reject
    return resolved.verify_method


def draft_mode(params: SamplingParams, resolved: ResolvedSpeculative) -> DraftMode:
    """How one request's drafts are chosen by a drafter that has a law."""
    method = row_method(params, resolved)
    if method == "greedy" or not DRAWS_FROM_LAW[resolved.drafter]:
        return "greedy"
    if method == "rejection":
        return "sampled"
    if resolved.verify_method == "rejection":
        return "coupled"  # a seeded row of a deployment that otherwise uses rejection
    return resolved.draft_sampling


def draws_by_gumbel(params: SamplingParams, resolved: ResolvedSpeculative) -> bool:
    """Whether a sampled row is drawn by Gumbel-max rather than by inverse CDF.

    Coupled drafts need it. Seeded rows take it under every drafter, so that a seed gives the same
    text whichever drafter is configured.
    """
    if row_method(params, resolved) != "match":
        return False
    seeded = params.seed is not None or resolved.reproducible
    return seeded or draft_mode(params, resolved) == "coupled"


def verify_path(all_greedy: bool) -> Literal["greedy", "sampling"]:
    """All rows greedy: the argmax path. Anything else samples, on every platform."""
    return "greedy" if all_greedy else "sampling"
