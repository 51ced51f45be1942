"""A smaller model of the same vocabulary as the drafter. Its KV shares the target's block table."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from spectrue.workers.core import SchedulerOutput
from spectrue.workers.drafters.base import DraftLaw, DraftProposal
from spectrue.workers.forward_batch import ForwardBatch
from spectrue.workers.input_buffers import InputBuffers
from spectrue.workers.model_runner import ModelRunner
from spectrue.workers.parallel import TPGroup
from spectrue.workers.proposal import DraftRows, sample_draft_proposal


class DraftModelDrafter:
    """Drafts k tokens by k forwards, the first of which also feeds what it has not seen yet."""

    needs_hidden_states = False

    def __init__(
        self, runner: ModelRunner, group: TPGroup, *, max_num_seqs: int, k: int, max_num_tokens: int
    ) -> None:
        self.runner = runner
        self.group = group
        self.max_num_tokens = max_num_tokens  # fed in one step; who is further behind catches up
        rows = max_num_seqs * k
        # The engine's own memory: what a later forward overwrites must not be what verify reads.
        self.law_logits = torch.zeros(rows, runner.vocab_size)
        self.law_normalizer = torch.zeros(rows)
        self.law_probs = torch.zeros(rows)

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
        active = [i for i, k in enumerate(ks) if k]
        if not active:
            return DraftProposal.empty(plan)

        slots = [s.slot for s in plan.scheduled]
        committed = [buffers.num_tokens[slot] for slot in slots]
        has_law = [buffers.methods[slot] == "rejection" for slot in slots]
        law_ends = list(accumulate(k * law for k, law in zip(ks, has_law, strict=True)))
        drafts = torch.zeros(len(slots), max(ks), dtype=torch.int64)
        for depth in range(max(ks)):
            active = [i for i in active if ks[i] > depth]
            tokens, starts = [], []
            for i in active:
                # Depth 0 feeds the committed tokens it lacks, the others the draft before.
                first = buffers.num_draft_computed[slots[i]]
                unseen = buffers.token_ids[slots[i], first : committed[i]]
                tokens.append(drafts[i, depth - 1 : depth] if depth else unseen)
                starts.append(committed[i] + depth - 1 if depth else first)
            hidden = self._forward(buffers, [slots[i] for i in active], tokens, starts)
            logits = self.runner.logits(hidden)
            if logits is not None:
                law_rows = [law_ends[i] - ks[i] + depth if has_law[i] else -1 for i in active]
                positions = [committed[i] + depth for i in active]
                rows = [slots[i] for i in active]
                drafts[active, depth] = self._draw(logits, buffers, rows, positions, law_rows)
            self.group.broadcast_(drafts)
        for i, k in enumerate(ks):
            if k:
                buffers.num_draft_computed[slots[i]] = committed[i] + k - 1

        n = law_ends[-1]
        return DraftProposal(
            num_draft_tokens=tuple(ks),
            token_ids=torch.cat([drafts[i, :k] for i, k in enumerate(ks)]),
            law=DraftLaw(
                logits=self.law_logits[:n],
                inv_temperature=torch.ones(n),
                log_normalizer=self.law_normalizer[:n],
                token_probs=self.law_probs[:n],
            ),
        )

    def extend(self, plan: SchedulerOutput, buffers: InputBuffers, hidden_states: Tensor) -> None:
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
        )
        last = torch.tensor(list(accumulate(batch.query_lens))) - 1
        return self.runner.forward(batch)[last]

    def _draw(
        self,
        logits: Tensor,
        buffers: InputBuffers,
        slots: list[int],
        positions: list[int],
        law_rows: list[int],
    ) -> Tensor:
        """Draw a token a row and record the law of the rows that have a place for it (not -1)."""
        modes = [buffers.draft_modes[slot] for slot in slots]
        draw = sample_draft_proposal(
            logits,
            DraftRows(
                temperature=buffers.temperature[slots],
                top_k=buffers.top_k[slots],
                top_p=buffers.top_p[slots],
                min_p=buffers.min_p[slots],
                seed=buffers.seed[slots],
                choice=buffers.choice[slots],
                position=torch.tensor(positions),
                sampled=torch.tensor([m == "sampled" for m in modes]),
                coupled=torch.tensor([m == "coupled" for m in modes]),
            ),
        )
        for row, law_row in enumerate(law_rows):
            if law_row >= 0:
                self.law_logits[law_row] = draw.logits[row]
                self.law_normalizer[law_row] = draw.log_normalizer[row]
                self.law_probs[law_row] = draw.token_probs[row]
        return draw.token_ids
