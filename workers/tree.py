"""The size of draft trees, in integers: what scheduler, drafter and buffers must agree on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeShape:
    """Each level expands `topk` nodes of the one before, and each of them gets `topk` children.

    Of all these candidates the best `size` are drafted. `dynamic` goes by the drafter's own
    probabilities (EAGLE-2, Li et al., arXiv 2406.16858), else the shape is the same at every step.
    """

    topk: int
    size: int
    dynamic: bool = True

    def num_candidates(self, depth: int) -> int:
        """Nodes of `depth` levels: the first has topk, each other one topk * topk."""
        return self.topk + (depth - 1) * self.topk**2 if depth else 0

    def num_nodes(self, depth: int) -> int:
        """Drafts of a tree of at most `depth` levels."""
        return min(self.size, self.num_candidates(depth))

    def num_slots(self, num_nodes: int, depth: int) -> int:
        """KV slots that such a tree takes after the last committed token's.

        The target writes one for each node. The head writes one for each expanded node, the first
        of them in the last committed token's own slot.
        """
        return max(num_nodes, (depth - 1) * self.topk - 1) if depth else 0
