"""Drafting from the target's hidden states: heads of EAGLE, EAGLE3 and MTP alike.

The head's position i holds token i + 1 beside the hidden states at i. With n committed tokens the
target has hidden states up to position n - 2, so `extend` feeds the head up to there, and what it
computes at n - 2 predicts the first draft. Its KV shares the target's block table, position i in
the slot of token i. That entry depends on token i + 1 too: in a cached block the last one may be of
another continuation, which costs a draft and never an output (the prefix hit drops a block so that
hidden states exist to go on from).
"""

from __future__ import annotations

from itertools import accumulate

import torch

from spectrue.workers.core import SchedulerOutput
from spectrue.workers.drafters.base import DraftLaw, DraftProposal
from spectrue.workers.drafters.chain import ChainDraws, DraftCuts
from spectrue.workers.drafters.eagle_graphs import EagleGraphs
from spectrue.workers.drafters.eagle_tree import EagleTree
from spectrue.workers.forward_batch import ForwardBatch, ForwardOutput
from spectrue.workers.graphs import StepGraphs
from spectrue.workers.input_buffers import InputBuffers
from spectrue.workers.model_runner import HeadRunner
from spectrue.workers.parallel import TPGroup
from spectrue.workers.tree import TreeShape


class EagleDrafter:
    """Drafts k tokens as a chain by k - 1 forwards of the head, after one in `extend`, or a tree.

    `num_draft_computed` counts the positions that were fed the target's own hidden states. Those
    that were fed recycled ones are not counted, so the next `extend` writes over them.
    """

    needs_hidden_states = True

    def __init__(
        self,
        runner: HeadRunner,
        group: TPGroup,
        *,
        max_num_seqs: int,
        k: int,
        cuts: DraftCuts | None = None,
        tree: TreeShape | None = None,  # for plans that ask for trees
    ) -> None:
        self.runner = runner
        self.group = group
        self.draws = ChainDraws(
            max_num_seqs=max_num_seqs,
            k=0 if tree is not None else k,  # `match` needs no law
            draft_vocab_size=runner.draft_vocab_size,
            vocab=runner.vocab,
            cuts=cuts,
            device=runner.device,
        )
        self.law: DraftLaw | None = self.draws.law
        self.k = k
        self.graphs: EagleGraphs | None = None
        # Of the last position fed, for each slot: it waits here for the next step. A spare row.
        self.hidden = torch.zeros(
            max_num_seqs + 1, runner.hidden_size, dtype=runner.dtype, device=runner.device
        )
        self.tree = None if tree is None else EagleTree(runner, group, tree, self.hidden)

    def propose(self, plan: SchedulerOutput, buffers: InputBuffers) -> DraftProposal:
        ks = [s.num_draft_tokens if self._ready(buffers, s.slot) else 0 for s in plan.scheduled]
        if not any(ks):
            return DraftProposal.empty(plan)
        if self.tree is not None and any(s.tree_depth for s in plan.scheduled):
            return self.tree.propose(plan, buffers, ks)
        if self.graphs is not None:
            return self.graphs.propose(plan, buffers, ks)
        chain = self.draws.begin(plan, buffers, ks)
        hidden = self.hidden[[chain.slots[i] for i in chain.active(0)]]
        for depth in range(max(ks)):
            if depth:
                # Who drafts on is fed its last draft and the hidden states that led to it.
                before, active = chain.active(depth - 1), chain.active(depth)
                hidden = hidden[[before.index(i) for i in active]]
                slots = [chain.slots[i] for i in active]
                batch = ForwardBatch.build(
                    token_ids=[chain.token_ids[i, depth - 1 : depth] for i in active],
                    starts=[chain.committed[i] + depth - 2 for i in active],
                    block_tables=buffers.block_tables[slots],
                    block_size=buffers.block_size,
                    device=self.runner.device,
                )
                hidden = self.runner.forward(batch, hidden)
            logits = self.runner.logits(hidden)
            if logits is not None:
                chain.draw(logits, depth)
            self.group.broadcast_(chain.token_ids)
        return chain.finish()

    def extend(
        self,
        plan: SchedulerOutput,
        buffers: InputBuffers,
        batch: ForwardBatch,
        output: ForwardOutput,
    ) -> None:
        """Feed the target's hidden states of what is committed, also of who does not draft now.

        A request that is skipped could never draft again, nor could who shares its blocks.
        """
        slots, starts, counts, rows = [], [], [], []
        row = 0
        for s, query_len in zip(plan.scheduled, batch.query_lens, strict=True):
            start = s.num_computed_tokens
            end = min(start + query_len, buffers.num_tokens[s.slot] - 1)
            if start < end and buffers.num_draft_computed[s.slot] >= start:  # else: a gap
                slots.append(s.slot)
                starts.append(start)
                counts.append(end - start)
                rows.append(row)
                buffers.num_draft_computed[s.slot] = end
            row += query_len
        if not slots or output.fed:
            return
        fed = ForwardBatch.build(
            token_ids=[
                buffers.token_ids[slot, start + 1 : start + 1 + n]
                for slot, start, n in zip(slots, starts, counts, strict=True)
            ],
            starts=starts,
            block_tables=buffers.block_tables[slots],
            block_size=buffers.block_size,
            device=self.runner.device,
        )
        index = torch.cat([torch.arange(r, r + n) for r, n in zip(rows, counts, strict=True)])
        hidden = self.runner.combine(output)[index.to(self.runner.device)]
        last = torch.tensor(list(accumulate(counts))) - 1
        self.hidden[slots] = self.runner.forward(fed, hidden)[last.to(self.runner.device)]

    def use_graphs(self, steps: StepGraphs) -> None:
        """Capture what can be, from the next step on: the buffers must be the final ones."""
        self.graphs = EagleGraphs(
            self.runner,
            self.draws,
            self.hidden,
            steps.tokens,
            steps.lengths,
            self.group,
            k=self.k,
            max_num_seqs=len(self.hidden) - 1,
        )
        steps.feed_head = self.graphs.feed

    def _ready(self, buffers: InputBuffers, slot: int) -> bool:
        """Whether the head has seen all that is committed. Depends on the committed past alone."""
        return buffers.num_draft_computed[slot] == buffers.num_tokens[slot] - 1 > 0
