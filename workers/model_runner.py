"""A model, or a draft head, and its KV cache on one rank."""

from __future__ import annotations

from torch import Tensor

from spectrue.workers.forward_batch import ForwardBatch, ForwardOutput
from spectrue.workers.kv_cache import KVCachePool
from spectrue.workers.models.base import Model
from spectrue.workers.models.head import DraftHead


class ModelRunner:
    """Runs one forward at a time; writes the KV of every token that it is fed."""

    def __init__(self, model: Model, kv_cache: KVCachePool) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.vocab_size = model.config.vocab_size
        self.device = model.device

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Hidden states of each token; writes its KV."""
        return self.model.forward(batch, self.kv_cache)

    def logits(self, hidden_states: Tensor) -> Tensor | None:
        """[rows, vocab] floating on rank 0, None on the others."""
        return self.model.compute_logits(hidden_states)

    def move_kv(self, source: Tensor, to: Tensor) -> None:
        """Copy the KV of the slots `source` [n] int64 to the slots `to` [n]."""
        self.kv_cache.move(source, to)


class HeadRunner:
    """The same for a draft head, whose forward needs hidden states as well."""

    def __init__(self, head: DraftHead, kv_cache: KVCachePool) -> None:
        self.head = head
        self.kv_cache = kv_cache
        self.hidden_size = head.config.hidden_size
        self.dtype = head.dtype
        self.device = head.device
        self.draft_vocab_size = head.draft_vocab_size
        self.vocab = head.vocab

    def combine(self, output: ForwardOutput) -> Tensor:
        """What the head reads of the target, [num_tokens, hidden]."""
        return self.head.combine(output)

    def forward(self, batch: ForwardBatch, hidden: Tensor) -> Tensor:
        """The hidden states to recycle, [num_tokens, hidden]; writes the KV of the batch."""
        return self.head.forward(batch, hidden, self.kv_cache)

    def logits(self, hidden: Tensor) -> Tensor | None:
        """[rows, draft_vocab] floating on rank 0, None on the others."""
        return self.head.compute_logits(hidden)
