"""What the engine asks of a model, whichever file serves it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from spectrue.workers.forward_batch import ForwardBatch, ForwardOutput
from spectrue.workers.kv_cache import KVCachePool, KVScales
from spectrue.workers.models.config import ModelConfig


class Model(Protocol):
    """One rank's shard of a decoder, inference only."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    num_kv_heads: int  # of this rank
    kv_scales: KVScales  # of an OCP e4m3 cache, as the checkpoint says; () if it does not
    aux_layers: tuple[int, ...]  # decoder layers whose outputs a draft head reads, ascending

    def forward(self, batch: ForwardBatch, kv_cache: KVCachePool) -> ForwardOutput:
        """Write the KV of the batch; hidden states of each token."""
        ...

    def embed(self, input_ids: Tensor) -> Tensor:
        """Embeddings [num_tokens, hidden] on every rank, for a draft head that has none."""
        ...

    def compute_logits(
        self,
        hidden: Tensor,  # [rows, hidden]
    ) -> Tensor | None:  # [rows, vocab_size] float32 on rank 0, None on the others
        ...

    def new_kv_cache(
        self, num_blocks: int, block_size: int, dtype: torch.dtype | None = None
    ) -> KVCachePool:
        """A pool of `dtype`, or of the model's."""
        ...
