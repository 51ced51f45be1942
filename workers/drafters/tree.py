"""Growing draft trees level by level and choosing the nodes to draft (EAGLE-2, arXiv 2406.16858).

A candidate's score is the sum of the log-probabilities on its branch, so no child has a higher
score than its parent, and the best candidates are a tree. Siblings are different tokens, because
they are different columns of one row. Nothing is drawn: `match` is exact for any tree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from spectrue.kernels import dispatch
from spectrue.workers.tree import TreeShape


def likeliest(logits: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Columns [rows, topk] of the largest logits [rows, vocab], and their log-probabilities."""
    values, columns = logits.float().topk(topk, -1)
    log_probs = (values - dispatch.logsumexp_rows(logits.float())[:, None]).clamp(max=0)
    # Of a row that is no law any tokens will do: the worst of all scores.
    return columns, torch.where(log_probs.isnan(), -math.inf, log_probs)


class TreeGrowth:
    """The trees of some requests, all of one shape, those with fewer levels cut short.

    Rank 0 alone knows candidates and scores. What a level tells the others lies in one tensor,
    `shared`: what the head is fed, and in the end the drafts. No shape depends on a value, so that
    a graph could do all of this.
    """

    def __init__(self, shape: TreeShape, sizes: Sequence[int], depths: Sequence[int]) -> None:
        n, topk, depth = len(sizes), shape.topk, max(depths)
        self.shape = shape
        self.sizes = list(sizes)  # drafts of each request
        self.depths = list(depths)  # levels of each
        fed, size = (depth - 1) * topk, max(sizes)
        self.shared = torch.zeros(n, 2 * (fed + size), dtype=torch.int64)
        parts = self.shared.split([fed, fed, size, size], 1)
        # Expanded nodes, level by level: tokens, and parents among them, -1 the committed text.
        self.fed_ids, self.fed_parents = parts[0], parts[1]
        # The drafts, filled by `choose`: tokens, and parents as in DraftProposal.
        self.token_ids, self.parents = parts[2], parts[3]
        candidates = shape.num_candidates(depth)
        self._ids = torch.zeros(n, candidates, dtype=torch.int64)
        self._parents = torch.full((n, candidates), -1)
        self._scores = torch.full((n, candidates), -math.inf)
        self._frontier = torch.zeros(n, topk, dtype=torch.int64)  # candidates expanded last
        # Static: as if the child of rank r were accepted with probability 2 ** -(r + 1).
        self._assumed = -math.log(2) * torch.arange(1, topk + 1)

    def active(self, level: int) -> list[int]:
        """Indices of the requests that have such a level, counted from 0."""
        return [i for i, depth in enumerate(self.depths) if depth > level]

    def grow(
        self,
        level: int,
        token_ids: Tensor,  # [len(active(level)) * width, topk] int64 of the target's vocabulary
        log_probs: Tensor,  # the same shape
    ) -> None:
        """Add a level: the children of every node expanded last (width topk; at level 0 one)."""
        topk = self.shape.topk
        rows = torch.tensor(self.active(level))
        width = topk if level else 1
        first = topk + (level - 1) * topk**2 if level else 0
        ids = token_ids.view(len(rows), width * topk)
        scores = log_probs if self.shape.dynamic else self._assumed.expand_as(log_probs)
        scores = scores.reshape(len(rows), width * topk)
        candidates = first + torch.arange(width * topk)
        if level:
            parents = self._frontier[rows].repeat_interleave(topk, 1)
            scores = scores + self._scores[rows].gather(1, parents)
            self._parents[rows[:, None], candidates] = parents
        self._ids[rows[:, None], candidates] = ids
        self._scores[rows[:, None], candidates] = scores
        if level + 1 == max(self.depths):
            return
        best = scores.sort(descending=True, stable=True).indices[:, :topk]
        self._frontier[rows] = first + best
        fed = rows[:, None], level * topk + torch.arange(topk)
        self.fed_ids[fed] = ids.gather(1, best)
        # A child's parent is the node of the last frontier that it was drawn for.
        self.fed_parents[fed] = (level - 1) * topk + best // topk if level else best.new_tensor(-1)

    def choose(self) -> None:
        """Fill `token_ids` and `parents`: the best candidates, parents before their children.

        Equal scores go to the earlier level. Places after a request's own size are padding.
        """
        n, num_candidates = self._ids.shape
        places = torch.arange(self.token_ids.shape[1])
        kept = places < torch.tensor(self.sizes)[:, None]
        best = self._scores.sort(descending=True, stable=True).indices[:, : len(places)]
        chosen = torch.where(kept, best, num_candidates).sort().values
        rows = torch.zeros(n, num_candidates + 1, dtype=torch.int64)
        rows.scatter_(1, chosen, (places + 1).expand_as(chosen))
        chosen = chosen.clamp(max=num_candidates - 1)
        parents = self._parents.gather(1, chosen)
        self.token_ids.copy_(self._ids.gather(1, chosen))
        self.parents.copy_(torch.where(parents < 0, 0, rows.gather(1, parents.clamp(min=0))))
