"""What the workers know of the running requests: one row a slot, owned by the engine.

Every rank holds the same rows, since admissions come in the plan and commits are rank 0's. A
request keeps its slot while it runs, so nothing here moves when others join or leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from spectrue.kernels import dispatch
from spectrue.workers.core import NewRequest, SchedulerOutput
from spectrue.workers.policy import (
    DraftMode,
    ResolvedSpeculative,
    RowMethod,
    draft_mode,
    draws_by_gumbel,
    row_method,
)


class InputBuffers:
    """Per-slot tensors, [max_num_seqs, ...]."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        resolved: ResolvedSpeculative,
        eos_token_ids: Sequence[int],
    ) -> None:
        n = max_num_seqs
        self.block_size = block_size
        self.resolved = resolved
        self.eos_token_ids = tuple(eos_token_ids)
        self.token_ids = torch.zeros(n, max_model_len, dtype=torch.int64)
        self.num_tokens = [0] * n  # committed
        self.num_draft_computed = [0] * n  # committed tokens that the drafter has KV for
        # A tree's nodes have slots beyond the context's end, where their positions are not.
        spare = 0
        if resolved.tree is not None:
            k = resolved.num_speculative_tokens
            spare = resolved.tree.num_slots(resolved.tree.num_nodes(k), k)
        max_blocks = -(-(max_model_len + spare) // block_size)
        self.block_tables = torch.zeros(n, max_blocks, dtype=torch.int32)
        self.num_blocks = [0] * n
        self.requests: list[NewRequest | None] = [None] * n
        self.methods: list[RowMethod] = ["greedy"] * n
        self.draft_modes: list[DraftMode] = ["greedy"] * n
        self.draw_kind = torch.zeros(n, dtype=torch.int32)  # DRAW_*
        self.cut = [False] * n  # whether top_k, top_p or min_p cut anything

        self.temperature = torch.zeros(n)
        self.top_k = torch.zeros(n, dtype=torch.int64)
        self.top_p = torch.ones(n)
        self.min_p = torch.zeros(n)
        self.repetition_penalty = torch.ones(n)
        self.presence_penalty = torch.zeros(n)
        self.frequency_penalty = torch.zeros(n)
        self.seed = torch.zeros(n, dtype=torch.int64)
        self.choice = torch.zeros(n, dtype=torch.int64)

    def apply(self, plan: SchedulerOutput) -> None:
        """Take in the plan's admissions and new blocks."""
        for new in plan.new_requests:
            self._add(new)
        for s in plan.scheduled:
            if s.new_block_ids:
                start = self.num_blocks[s.slot]
                end = start + len(s.new_block_ids)
                self.block_tables[s.slot, start:end] = torch.tensor(
                    s.new_block_ids, dtype=torch.int32
                )
                self.num_blocks[s.slot] = end

    def _add(self, new: NewRequest) -> None:
        slot, params = new.slot, new.request.params
        tokens = (*new.request.prompt_token_ids, *new.output_token_ids)
        self.token_ids[slot, : len(tokens)] = torch.tensor(tokens)
        self.num_tokens[slot] = len(tokens)
        self.num_draft_computed[slot] = new.num_draft_computed_tokens
        self.num_blocks[slot] = 0
        self.requests[slot] = new
        self.methods[slot] = row_method(params, self.resolved)
        self.draft_modes[slot] = draft_mode(params, self.resolved)
        if params.temperature == 0:
            self.draw_kind[slot] = dispatch.DRAW_ARGMAX
        elif draws_by_gumbel(params, self.resolved):
            self.draw_kind[slot] = dispatch.DRAW_GUMBEL
        else:
            self.draw_kind[slot] = dispatch.DRAW_UNIFORM
        for name in (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        ):
            getattr(self, name)[slot] = getattr(params, name)
        self.cut[slot] = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        self.seed[slot] = new.seed
        self.choice[slot] = new.request.choice

    def commit(self, slot: int, token_ids: Sequence[int]) -> None:
        """Append committed tokens. What does not fit belongs to a request that ends now."""
        start = self.num_tokens[slot]
        kept = token_ids[: self.token_ids.shape[1] - start]
        # NumPy: a small tensor costs more to make than to copy.
        self.token_ids.numpy()[slot, start : start + len(kept)] = kept
        self.num_tokens[slot] = start + len(kept)
        # A drafter may have run ahead on drafts that were then rejected.
        self.num_draft_computed[slot] = min(
            self.num_draft_computed[slot], self.num_tokens[slot] - 1
        )

    def settle(self, plan: SchedulerOutput) -> SchedulerOutput:
        """A plan that was launched ahead, once the step before it is committed."""
        if not any(s.ahead for s in plan.scheduled):
            return plan
        scheduled = tuple(
            replace(s, num_computed_tokens=self.num_tokens[s.slot] - 1, ahead=False)
            for s in plan.scheduled
        )
        return replace(plan, scheduled=scheduled)

    def request(self, slot: int) -> NewRequest:
        new = self.requests[slot]
        assert new is not None, f"slot {slot} was never admitted"
        return new
