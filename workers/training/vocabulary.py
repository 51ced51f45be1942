"""The hot vocabulary: which of the target's tokens a head drafts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spectrue.workers.training.corpus import Corpus


@dataclass(frozen=True, slots=True)
class HotVocab:
    target_ids: Tensor  # [size] int64, ascending
    coverage: float  # share of the corpus' answer tokens that are among them

    @property
    def d2t(self) -> Tensor:
        """[size] int64: what is added to a draft id to give the target's, as published heads do."""
        return self.target_ids - torch.arange(len(self.target_ids))

    def t2d(self, vocab_size: int) -> Tensor:
        """[vocab_size] bool: the tokens that can be drafted."""
        found = torch.zeros(vocab_size, dtype=torch.bool)
        found[self.target_ids] = True
        return found


def choose_vocab(corpus: Corpus, size: int, vocab_size: int, always: tuple[int, ...]) -> HotVocab:
    """The most frequent tokens of the answers, and `always` (ends of turn)."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for answer in corpus.answers():
        counts += torch.bincount(answer, minlength=vocab_size)
    order = counts.clone()
    order[list(always)] = order.max() + 1
    size = min(size, vocab_size)
    # Ties by the lower id, which in most vocabularies was merged earlier and is more frequent.
    chosen = order.argsort(descending=True, stable=True)[:size].sort().values
    return HotVocab(chosen, float(counts[chosen].sum() / counts.sum().clamp(min=1)))
