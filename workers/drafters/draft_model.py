"""A smaller model of the same vocabulary as the drafter. Its KV shares the target's block table."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from spectrue.workers.core import SchedulerOutput
from spectrue.workers.drafters.base import DraftLaw, DraftProposal
from spectrue.workers.drafters.chain import ChainDraws, DraftCuts
from spectrue.workers.forward_batch import ForwardBatch, ForwardOutput
from spectrue.workers.input_buffers import InputBuffers
from spectrue.workers.model_runner import ModelRunner
from spectrue.workers.parallel import TPGroup


class DraftModelDrafter:
    """Drafts k tokens by k forwards, the first of which also feeds what it has not seen yet."""

    needs_hidden_states = False

    def __init__(
        self,
        runner: ModelRunner,
        group: TPGroup,
        *,
        max_num_seqs: int,
        k: int,
        max_num_tokens: int,
        cuts: DraftCuts | None = None,
    ) -> None:
        self.runner = runner
        self.group = group
        self.max_num_tokens = max_num_tokens  # fed in one step; who is further behind catches up
        self.draws = ChainDraws(
            max_num_seqs=max_num_seqs,
            k=k,
            draft_vocab_size=runner.vocab_size,
            cuts=cuts,
            device=runner.device,
        )
        self.law: DraftLaw | None = self.draws.law

    def propose(self, plan: SchedulerOutput, buffers: InputBuffers) -> DraftProposal:
        ks, budget = [], self.max_num_tokens
        for s in plan.scheduled:
            lag = buffers.num_tokens[s.slot] - buffers.num_draft_computed[s.slot]
            # Far behind after a prefix hit on blocks that were made without drafting: catch up,
            # draft later. It depends on committed tokens alone, so any verify method allows it.
            ks.append(s.num_draft_tokens if lag <= budget else 0)
            if ks[-1]:
                budget -= lag
            elif s.num_draft_tokens and budget:
                end = buffers.num_draft_computed[s.slot] + budget
                self._catch_up(buffers, s.slot, min(end, buffers.num_tokens[s.slot] - 1))
                budget = 0
        if not any(ks):
            return DraftProposal.empty(plan)

        chain = self.draws.begin(plan, buffers, ks)
        for depth in range(max(ks)):
            active = chain.active(depth)
            tokens, starts = [], []
            for i in active:
                # Depth 0 feeds the committed tokens it lacks, the others the draft before.
                slot, committed = chain.slots[i], chain.committed[i]
                first = buffers.num_draft_computed[slot]
                unseen = buffers.token_ids[slot, first:committed]
                tokens.append(chain.token_ids[i, depth - 1 : depth] if depth else unseen)
                starts.append(committed + depth - 1 if depth else first)
            hidden = self._forward(buffers, [chain.slots[i] for i in active], tokens, starts)
            logits = self.runner.logits(hidden)
            if logits is not None:
                chain.draw(logits, depth)
            self.group.broadcast_(chain.token_ids)
        for i in chain.active(0):
            buffers.num_draft_computed[chain.slots[i]] = chain.committed[i] + ks[i] - 1
        return chain.finish()

    def extend(
        self,
        plan: SchedulerOutput,
        buffers: InputBuffers,
        batch: ForwardBatch,
        output: ForwardOutput,
    ) -> None:
        """Prefill beside the target, chunk by chunk, those requests that may draft."""
        for s in plan.scheduled:
            k = buffers.request(s.slot).request.params.num_speculative_tokens
            if s.num_scheduled_tokens > 1 and k != 0:
                self._catch_up(buffers, s.slot, s.num_computed_tokens + s.num_scheduled_tokens)

    def _catch_up(self, buffers: InputBuffers, slot: int, end: int) -> None:
        """Feed committed tokens up to `end`, one chunk at most."""
        start = buffers.num_draft_computed[slot]
        end = min(end, start + self.max_num_tokens)
        if end > start:
            self._forward(buffers, [slot], [buffers.token_ids[slot, start:end]], [start])
            buffers.num_draft_computed[slot] = end

    def _forward(
        self,
        buffers: InputBuffers,
        slots: Sequence[int],
        token_ids: list[Tensor],
        starts: list[int],
    ) -> Tensor:
        """Hidden states of each request's last token, [len(slots), hidden]."""
        batch = ForwardBatch.build(
            token_ids=token_ids,
            starts=starts,
            block_tables=buffers.block_tables[list(slots)],
            block_size=buffers.block_size,
            device=self.runner.device,
        )
        last = torch.tensor(list(accumulate(batch.query_lens))) - 1
        return self.runner.forward(batch).hidden_states[last]
