"""Draft trees of a head: at each level the expanded nodes of all levels are one small forward."""

from __future__ import annotations

import torch
from torch import Tensor

from spectrue.workers.core import SchedulerOutput
from spectrue.workers.drafters.base import DraftProposal
from spectrue.workers.drafters.tree import TreeGrowth, likeliest
from spectrue.workers.forward_batch import ForwardBatch
from spectrue.workers.input_buffers import InputBuffers
from spectrue.workers.model_runner import HeadRunner
from spectrue.workers.parallel import TPGroup
from spectrue.workers.tree import TreeShape


class EagleTree:
    """Proposes trees where the plan asks for them.

    A tree mask speaks of the tokens of one forward. So each level feeds those before it again: a
    head has one layer, its forward of so few tokens costs what reading its weights costs. Their KV
    lies after that of the committed text and is never counted, as with a chain.
    """

    def __init__(
        self,
        runner: HeadRunner,
        group: TPGroup,
        shape: TreeShape,
        hidden: Tensor,  # [slots, hidden], of each slot's last committed position
    ) -> None:
        self.runner, self.group, self.shape, self.hidden = runner, group, shape, hidden

    def propose(
        self,
        plan: SchedulerOutput,
        buffers: InputBuffers,
        ks: list[int],  # drafts of each scheduled request; 0 where the head is not ready
    ) -> DraftProposal:
        drafting = [i for i, k in enumerate(ks) if k]
        slots = [plan.scheduled[i].slot for i in drafting]
        depths = [plan.scheduled[i].tree_depth for i in drafting]
        sizes = [min(ks[i], self.shape.num_nodes(d)) for i, d in zip(drafting, depths, strict=True)]
        growth = TreeGrowth(self.shape, sizes, depths)
        committed = self.hidden[slots]
        fed = len(slots), growth.fed_ids.shape[1], committed.shape[1]
        read, out = committed.new_zeros(fed), committed.new_zeros(fed)
        hidden = committed  # of the nodes whose children come next
        for level in range(max(depths)):
            if level:
                active = growth.active(level)
                self._read(growth, level, active, committed, read, out)
                hidden = self._feed(growth, level, active, buffers, slots, read, out)
            logits = self.runner.logits(hidden)
            if logits is not None:
                columns, log_probs = likeliest(logits, self.shape.topk)
                vocab = self.runner.vocab
                token_ids = columns if vocab is None else vocab.target_ids[columns]
                growth.grow(level, token_ids.cpu(), log_probs.cpu())
                if level + 1 == max(depths):
                    growth.choose()
            self.group.broadcast_(growth.shared)
        counts = [0] * len(ks)
        for i, size in zip(drafting, sizes, strict=True):
            counts[i] = size
        return DraftProposal(
            num_draft_tokens=tuple(counts),
            token_ids=torch.cat([growth.token_ids[i, :n] for i, n in enumerate(sizes)]),
            parents=torch.cat([growth.parents[i, :n] for i, n in enumerate(sizes)]),
        )

    def _read(
        self,
        growth: TreeGrowth,
        level: int,
        active: list[int],
        committed: Tensor,  # [requests, hidden]
        read: Tensor,  # [requests, fed, hidden], what each node reads
        out: Tensor,  # the same, what the head made of it
    ) -> None:
        """A node reads its parent's hidden states, the first ones those of the committed text."""
        topk = self.shape.topk
        new = slice((level - 1) * topk, level * topk)
        rows = torch.tensor(active)[:, None]
        if level == 1:
            read[active, new] = committed[active][:, None]
        else:
            parents = growth.fed_parents[active, new]
            read[active, new] = out[rows.to(out.device), parents.to(out.device)]

    def _feed(
        self,
        growth: TreeGrowth,
        level: int,
        active: list[int],
        buffers: InputBuffers,
        slots: list[int],
        read: Tensor,
        out: Tensor,
    ) -> Tensor:  # [len(active) * topk, hidden], of the nodes expanded last
        count, topk = level * self.shape.topk, self.shape.topk
        of = [slots[i] for i in active]
        batch = ForwardBatch.build(
            token_ids=[growth.fed_ids[i, :count] for i in active],
            # As in a chain: position n - 1 holds the first draft, which is token n.
            starts=[buffers.num_tokens[slot] - 1 for slot in of],
            block_tables=buffers.block_tables[of],
            block_size=buffers.block_size,
            device=self.runner.device,
            parents=growth.fed_parents[active, :count].tolist(),
        )
        made = self.runner.forward(batch, read[active, :count].flatten(0, 1))
        out[active, count - topk : count] = made.unflatten(0, (-1, count))[:, -topk:]
        return out[active, count - topk : count].flatten(0, 1)
