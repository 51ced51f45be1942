"""Drawing a chain of drafts and recording its law: shared by the drafters that have one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from spectrue.workers.core import SchedulerOutput
from spectrue.workers.drafters.base import DraftLaw, DraftProposal
from spectrue.workers.input_buffers import InputBuffers
from spectrue.workers.proposal import DraftRows, DraftVocab, sample_draft_proposal


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCuts:
    """Cuts of the draft law on top of a request's own. The law recorded has them: still exact."""

    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0


class ChainDraws:
    """Draws draft tokens and keeps their laws in the engine's own memory.

    What a later forward overwrites must not be what verification reads (sglang#37134).
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        k: int,
        draft_vocab_size: int,
        vocab: DraftVocab | None = None,
        cuts: DraftCuts | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        rows = max_num_seqs * k + 1  # one that nobody reads, for what graphs write of nobody
        self.device = torch.device(device)
        self.vocab = vocab
        self.cuts = cuts or DraftCuts()
        self.law = DraftLaw(
            logits=torch.zeros(rows, draft_vocab_size, device=device),
            inv_temperature=torch.ones(rows, device=device),
            log_normalizer=torch.zeros(rows, device=device),
            token_probs=torch.zeros(rows, device=device),
            draft_index=vocab.draft_index if vocab is not None else None,
        )

    def begin(
        self, plan: SchedulerOutput, buffers: InputBuffers, ks: Sequence[int]
    ) -> ChainProposal:
        """A step in which scheduled request i drafts `ks[i]` tokens."""
        slots = [s.slot for s in plan.scheduled]
        return ChainProposal(self, buffers, slots, list(ks))


class ChainProposal:
    """The drafts of one step, drawn depth by depth."""

    def __init__(
        self, draws: ChainDraws, buffers: InputBuffers, slots: list[int], ks: list[int]
    ) -> None:
        self.slots = slots
        self.ks = ks
        self.committed = [buffers.num_tokens[slot] for slot in slots]
        self.token_ids = torch.zeros(len(slots), max(ks), dtype=torch.int64)
        self._draws = draws
        self._buffers = buffers
        self._has_law = [buffers.methods[slot] == "rejection" for slot in slots]
        self._law_ends = list(accumulate(k * law for k, law in zip(ks, self._has_law, strict=True)))

    def active(self, depth: int) -> list[int]:
        """The requests that draft a token at `depth`, indices into the plan."""
        return [i for i, k in enumerate(self.ks) if k > depth]

    def draw(
        self,
        logits: Tensor,  # [len(active(depth)), draft_vocab] float32
        depth: int,
    ) -> None:
        """Draw the drafts of one depth; record the law of those that `rejection` will judge."""
        active, buffers, draws = self.active(depth), self._buffers, self._draws
        slots = [self.slots[i] for i in active]
        modes = [buffers.draft_modes[slot] for slot in slots]
        top_k, top_p = buffers.top_k[slots], buffers.top_p[slots]
        cut = draws.cuts.top_k
        if cut:
            top_k = torch.where((top_k <= 0) | (top_k > cut), cut, top_k)
        draw = sample_draft_proposal(
            logits,
            DraftRows(
                temperature=buffers.temperature[slots],
                top_k=top_k,
                top_p=top_p.clamp(max=draws.cuts.top_p),
                min_p=buffers.min_p[slots],
                seed=buffers.seed[slots],
                choice=buffers.choice[slots],
                position=torch.tensor([self.committed[i] + depth for i in active]),
                sampled=torch.tensor([m == "sampled" for m in modes]),
                coupled=torch.tensor([m == "coupled" for m in modes]),
            ).to(draws.device),
            draws.vocab.target_ids if draws.vocab is not None else None,
        )
        self.token_ids[active, depth] = draw.token_ids.cpu()
        rows = [row for row, i in enumerate(active) if self._has_law[i]]
        if rows:
            at = [self._law_ends[active[row]] - self.ks[active[row]] + depth for row in rows]
            draws.law.logits[at] = draw.logits[rows]
            draws.law.log_normalizer[at] = draw.log_normalizer[rows]
            draws.law.token_probs[at] = draw.token_probs[rows]

    def finish(self) -> DraftProposal:
        n, draws = self._law_ends[-1], self._draws
        return DraftProposal(
            num_draft_tokens=tuple(self.ks),
            token_ids=torch.cat([self.token_ids[i, :k] for i, k in enumerate(self.ks)]),
            law=draws.law.first(n),
        )
