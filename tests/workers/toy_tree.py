"""The toy step with draft trees, and the tree that a drafter must propose."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from spectrue.kernels import dispatch
from spectrue.workers.drafters.base import Drafter
from spectrue.workers.drafters.eagle import EagleDrafter
from spectrue.workers.parallel import TPGroup
from spectrue.workers.tree import TreeShape

from .toy import Law, Tokens, intervals
from .toy_head import HeadSetup, Pairs, ToyHead


class UntiedHead(ToyHead):
    """Without rounding, so that there is one best tree."""

    def row(self, pairs: Pairs) -> Law:
        if pairs not in self.table:
            rng = np.random.default_rng([self.seed, *(p + 1 for p in pairs)])
            self.table[pairs] = 1.5 * rng.standard_normal(self.hidden_size)
        return self.table[pairs]


@dataclass
class TreeSetup(HeadSetup):
    """The configuration says what tree; k is its depth."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.draft = UntiedHead(self.vocab_size, self.draft_ids, seed=2)

    @property
    def shape(self) -> TreeShape:
        assert self.resolved.tree is not None
        return self.resolved.tree

    @property
    def plan(self) -> dict[str, Any]:
        return {"num_draft_tokens": self.shape.num_nodes(self.k), "tree_depth": self.k}

    @property
    def room(self) -> int:
        return self.shape.num_slots(self.shape.num_nodes(self.k), self.k)

    def drafter(self, rows: int) -> Drafter:
        return self.wrap(
            EagleDrafter(self.draft, TPGroup(), max_num_seqs=rows, k=self.k, tree=self.shape)
        )

    def scenarios(self, prefix: Tokens) -> Iterator[tuple[dict[tuple[int, int], float], float]]:
        """Every text that the target may draw: what is drafted does not matter to `match`."""
        yield from self._texts(prefix, 0)

    def _texts(
        self, prefix: Tokens, depth: int
    ) -> Iterator[tuple[dict[tuple[int, int], float], float]]:
        if depth > self.k:
            yield {}, 1.0
            return
        for token, u, p in intervals(self.target_law(prefix)):
            here = {(len(prefix), dispatch.STREAM_DRAW): u}
            for more, q in self._texts((*prefix, token), depth + 1):
                yield here | more, p * q

    def tree(self, prefix: Tokens, depth: int) -> list[Tokens]:
        """The branches, each as the tokens that lead to a drafted node, in breadth-first order."""
        topk = self.shape.topk
        frontier: list[tuple[Tokens, float]] = [((), 0.0)]
        found: list[tuple[Tokens, float]] = []
        for _ in range(depth):
            children = []
            for branch, score in frontier:
                law = self.draft_law(prefix, branch)
                for rank, token in enumerate(np.argsort(-law, kind="stable")[:topk].tolist()):
                    step = math.log(law[token]) if self.shape.dynamic else -math.log(2) * (rank + 1)
                    children.append(((*branch, token), score + step))
            found += children
            frontier = sorted(children, key=lambda c: -c[1])[:topk]
        best = sorted(found, key=lambda c: -c[1])[: self.shape.num_nodes(depth)]
        return [branch for branch, _ in sorted(best, key=found.index)]
