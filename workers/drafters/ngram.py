"""Prompt lookup: what followed the last time the text ended like this (Saxena 2023)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from spectrue.workers.core import SchedulerOutput
from spectrue.workers.drafters.base import DraftLaw, DraftProposal
from spectrue.workers.forward_batch import ForwardBatch, ForwardOutput
from spectrue.workers.input_buffers import InputBuffers
from spectrue.workers.parallel import TPGroup


def lookup(token_ids: NDArray[np.int64], k: int, ngram_min: int, ngram_max: int) -> list[int]:
    """Up to k tokens that followed the latest earlier occurrence of the longest known suffix.

    When the occurrence is so late that fewer than k tokens followed it, the continuation goes on
    into the drafts themselves: a text that repeats with a period is drafted to full length.
    """
    n = len(token_ids)
    for size in range(min(ngram_max, n - 1), ngram_min - 1, -1):
        suffix = token_ids[n - size :]
        starts = np.flatnonzero(token_ids[: n - size] == suffix[0])
        for i in range(1, size):
            starts = starts[token_ids[starts + i] == suffix[i]]
        if len(starts):
            follow = int(starts[-1]) + size
            drafts: list[int] = []
            for i in range(follow, follow + k):
                drafts.append(int(token_ids[i]) if i < n else drafts[i - n])
            return drafts
    return []


class NgramDrafter:
    """Rank 0 looks up, the others are told. Its drafts have no law: verified by `match`."""

    needs_hidden_states = False
    law: DraftLaw | None = None

    def __init__(self, ngram_min: int, ngram_max: int, group: TPGroup) -> None:
        self.ngram_min = ngram_min
        self.ngram_max = ngram_max
        self.group = group

    def propose(self, plan: SchedulerOutput, buffers: InputBuffers) -> DraftProposal:
        if not any(s.num_draft_tokens for s in plan.scheduled):
            return DraftProposal.empty(plan)
        drafts: list[list[int]] = []
        if self.group.rank == 0:
            for s in plan.scheduled:
                history = buffers.token_ids[s.slot, : buffers.num_tokens[s.slot]].numpy()
                drafts.append(
                    lookup(history, s.num_draft_tokens, self.ngram_min, self.ngram_max)
                    if s.num_draft_tokens
                    else []
                )
        drafts = self.group.broadcast_object(drafts)
        return DraftProposal(
            num_draft_tokens=tuple(len(d) for d in drafts),
            token_ids=torch.tensor([t for d in drafts for t in d], dtype=torch.int64),
        )

    def extend(
        self,
        plan: SchedulerOutput,
        buffers: InputBuffers,
        batch: ForwardBatch,
        output: ForwardOutput,
    ) -> None:
        pass
