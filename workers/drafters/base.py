"""What a drafter is, and what it hands to verification."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from spectrue.workers.core import SchedulerOutput
from spectrue.workers.forward_batch import ForwardBatch, ForwardOutput
from spectrue.workers.input_buffers import InputBuffers


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLaw:
    """The law that the drafts of `rejection` requests were drawn from, recorded at draw time.

    Rows are the drafts of those requests alone, in batch order. `logits` is the engine's own
    buffer, not a view of the draft model's output: that memory may be reused before verification
    reads it (sglang#37134). The law is `exp(logits * inv_temperature - log_normalizer)`.
    """

    logits: Tensor  # [num_law_rows, draft_vocab] float32
    inv_temperature: Tensor  # [num_law_rows] float32
    log_normalizer: Tensor  # [num_law_rows] float32
    token_probs: Tensor  # [num_law_rows] float32, of the drawn token
    draft_index: Tensor | None = None  # [vocab] int32 target id -> draft id, -1 absent; None: same

    def first(self, n: int) -> DraftLaw:
        """Of the first n rows, the same memory."""
        return replace(
            self,
            logits=self.logits[:n],
            inv_temperature=self.inv_temperature[:n],
            log_normalizer=self.log_normalizer[:n],
            token_probs=self.token_probs[:n],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftProposal:
    """Draft tokens of one step, the same on every rank; laws on rank 0 only."""

    num_draft_tokens: tuple[int, ...]  # per scheduled request, at most its k
    token_ids: Tensor  # [num_drafts] int64, flattened in batch order
    law: DraftLaw | None = None
    # They are on the device, where `StepGraphs.tokens` is, and `token_ids` says nothing. This waits
    # for them and returns them, to a step without a graph.
    fetch: Callable[[], Tensor] | None = None
    # [num_drafts] int64, of each draft of a tree the row of its parent in its request: 0 is the
    # last committed token's, i + 1 that of draft i, which is an earlier one. None: chains.
    parents: Tensor | None = None

    def of_requests(self, flat: Tensor) -> list[list[int]]:
        """One list a scheduled request of what has one entry a draft."""
        values = flat.tolist()
        ends = accumulate(self.num_draft_tokens)
        return [values[e - k : e] for e, k in zip(ends, self.num_draft_tokens, strict=True)]

    def drafts(self) -> list[list[int]]:
        """The drafts of each request; of drafts not fetched yet only their number is right."""
        if self.fetch is not None:
            return [[-1] * k for k in self.num_draft_tokens]
        return self.of_requests(self.token_ids)

    def fetch_into(self, drafts: list[list[int]]) -> None:
        """Complete what `drafts` gave, in place, if they are on the device; waits for them."""
        if self.fetch is not None:
            for draft, tokens in zip(drafts, self.of_requests(self.fetch()), strict=True):
                draft[:] = tokens

    @staticmethod
    def empty(plan: SchedulerOutput) -> DraftProposal:
        return DraftProposal(
            num_draft_tokens=(0,) * len(plan.scheduled),
            token_ids=torch.empty(0, dtype=torch.int64),
        )


class Drafter(Protocol):
    """Proposes draft tokens. Called on every rank with the same arguments.

    Under `rejection` what it proposes, and how much, may depend on the committed tokens and on
    draft laws before their draw, never on a token that was already drawn (DESIGN 4).
    """

    needs_hidden_states: bool  # of the target; a prefix hit then recomputes its last block
    law: DraftLaw | None  # the whole buffers, whose first rows are each step's law; None: none

    def propose(self, plan: SchedulerOutput, buffers: InputBuffers) -> DraftProposal:
        """Draft up to `num_draft_tokens` tokens for each scheduled request, as a chain or, where
        the plan has a `tree_depth`, as a tree of so many levels."""
        ...

    def extend(
        self,
        plan: SchedulerOutput,
        buffers: InputBuffers,
        batch: ForwardBatch,
        output: ForwardOutput,
    ) -> None:
        """Catch up with what the target has just computed: `output` of `batch`, drafts included.

        Called after the commit. Rows of rejected drafts are among those of `batch`. Of a tree the
        rows of `output` are compacted: those of the accepted path follow the root's, as in a chain.
        """
        ...


class NoDrafter:
    """Plain decoding."""

    needs_hidden_states = False
    law: DraftLaw | None = None

    def propose(self, plan: SchedulerOutput, buffers: InputBuffers) -> DraftProposal:
        return DraftProposal.empty(plan)

    def extend(
        self,
        plan: SchedulerOutput,
        buffers: InputBuffers,
        batch: ForwardBatch,
        output: ForwardOutput,
    ) -> None:
        pass
