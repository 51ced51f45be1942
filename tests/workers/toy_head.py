"""A toy draft head: what it computes is a table over all that it was fed, hidden states included.

A pair of a token and hidden states that is stale, at a wrong slot or left over from a rejected
draft leads to another row of the table, and so to a law that the tests do not expect.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spectrue.workers.drafters.base import Drafter
from spectrue.workers.drafters.chain import DraftCuts
from spectrue.workers.drafters.eagle import EagleDrafter
from spectrue.workers.forward_batch import ForwardBatch, ForwardOutput
from spectrue.workers.parallel import TPGroup
from spectrue.workers.weights_head import make_vocab

from .toy import Law, Setup, Tokens, draft_law, seen_by_rows

Pairs = tuple[int, ...]


class ToyHead:
    """Stands in for a HeadRunner. Hidden states are as wide as the target's vocabulary."""

    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, vocab_size: int, draft_ids: tuple[int, ...] | None, seed: int) -> None:
        self.hidden_size = vocab_size
        self.draft_ids = draft_ids or tuple(range(vocab_size))
        self.draft_vocab_size = len(self.draft_ids)
        self.vocab = make_vocab(torch.tensor(draft_ids), vocab_size) if draft_ids else None
        self.seed = seed
        self.kv = torch.full((8192,), -1, dtype=torch.int64)
        self.pairs: dict[tuple[int, bytes], int] = {}
        self.table: dict[Pairs, Law] = {}

    def pair(self, token: int, hidden: Law) -> int:
        key = token, np.asarray(hidden, dtype=np.float32).tobytes()
        return self.pairs.setdefault(key, len(self.pairs))

    def row(self, pairs: Pairs) -> Law:
        if pairs not in self.table:
            rng = np.random.default_rng([self.seed, *(p + 1 for p in pairs)])
            self.table[pairs] = np.round(1.5 * rng.standard_normal(self.hidden_size), 1)
        return self.table[pairs]

    def combine(self, output: ForwardOutput) -> Tensor:
        return output.hidden_states

    def forward(self, batch: ForwardBatch, hidden: Tensor) -> Tensor:
        fed = zip(batch.input_ids.tolist(), hidden.numpy(), strict=True)
        self.kv[batch.slot_mapping] = torch.tensor([self.pair(token, row) for token, row in fed])
        rows = [self.row(seen) for seen in seen_by_rows(self.kv, batch)]
        return torch.from_numpy(np.array(rows)).float()

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden[:, : self.draft_vocab_size]


@dataclass
class HeadSetup(Setup):
    """The step with a head as its drafter."""

    draft_ids: tuple[int, ...] | None = None  # ascending; None: all tokens
    cuts: DraftCuts | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.draft = ToyHead(self.vocab_size, self.draft_ids, seed=2)

    def draft_law(self, prefix: Tokens, drafts: Tokens) -> Law:
        """As it must be: true hidden states up to the last committed token, then recycled ones."""
        head = self.draft
        pairs: Pairs = ()
        for i in range(len(prefix) - 1):
            pairs += (head.pair(prefix[i + 1], self.target.row(prefix[: i + 1])),)
        hidden = head.row(pairs)
        for token in drafts:
            pairs += (head.pair(token, hidden),)
            hidden = head.row(pairs)
        law = np.zeros(self.vocab_size)
        law[list(head.draft_ids)] = draft_law(
            hidden[: head.draft_vocab_size], self.params, self.cuts
        )
        return law

    def drafter(self, rows: int) -> Drafter:
        return self.wrap(
            EagleDrafter(self.draft, TPGroup(), max_num_seqs=rows, k=self.k, cuts=self.cuts)
        )
