"""A model and its KV cache on one rank: target and draft model alike."""

from __future__ import annotations

from torch import Tensor

from spectrue.workers.forward_batch import ForwardBatch
from spectrue.workers.kv_cache import KVCachePool
from spectrue.workers.models.llama import LlamaModel


class ModelRunner:
    """Runs one forward at a time; writes the KV of every token that it is fed."""

    def __init__(self, model: LlamaModel, kv_cache: KVCachePool) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.vocab_size = model.config.vocab_size

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states after the final norm, [num_tokens, hidden]."""
        return self.model.forward(batch, self.kv_cache)

    def logits(self, hidden_states: Tensor) -> Tensor | None:
        """[rows, vocab] float32 on rank 0, None on the others."""
        return self.model.compute_logits(hidden_states)
