"""What the engine asks of a draft head, and what all heads are made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from spectrue.workers.attention import AttentionMetadata
from spectrue.workers.forward_batch import ForwardBatch, ForwardOutput
from spectrue.workers.kv_cache import KVCachePool
from spectrue.workers.models.base import Model
from spectrue.workers.models.head_config import HeadConfig
from spectrue.workers.models.layers import ParallelEmbedding, ParallelHead
from spectrue.workers.models.rope import RotaryEmbedding
from spectrue.workers.parallel import TPGroup
from spectrue.workers.proposal import DraftVocab
from spectrue.workers.weights import WeightReader


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadParts:
    """What a head's file needs to build it."""

    config: HeadConfig
    read: WeightReader  # canonical names, see head_weights.py
    names: frozenset[str]  # of the weights that the checkpoint has
    target: Model
    vocab: DraftVocab | None
    group: TPGroup


class DraftHead(ABC):
    """A few layers that draft from the target's hidden states, one rank's shard.

    At position i it reads the embedding of token i + 1 and the hidden states at i, the target's or
    recycled ones of its own, and what it computes predicts token i + 2. Embedding and output head
    are its own where it has them, else the target's.
    """

    def __init__(self, parts: HeadParts) -> None:
        config, read = parts.config.model, parts.read
        self.config = config  # of its decoder layers
        self.dtype = read.dtype
        self.device = read.device
        self.num_kv_heads = config.num_kv_heads // parts.group.size
        self.aux_layers = parts.config.aux_layers  # of the target, that `combine` needs
        self.draft_vocab_size = parts.config.draft_vocab_size
        # None: it drafts the target's tokens under the same ids.
        self.vocab = None if parts.vocab is None else parts.vocab.to(read.device)
        self.rope = RotaryEmbedding(config, read.device)
        self.embed = parts.target.embed
        if "embed_tokens.weight" in parts.names:
            self.embed = ParallelEmbedding(
                read, "embed_tokens.weight", config.vocab_size, parts.group
            )
        self.head = parts.target.compute_logits
        if "lm_head.weight" in parts.names:
            self.head = ParallelHead(read, "lm_head.weight", self.draft_vocab_size, parts.group)

    @abstractmethod
    def combine(self, output: ForwardOutput) -> Tensor:
        """What the head reads of the target, [num_tokens, hidden]."""

    @abstractmethod
    def forward(self, batch: ForwardBatch, hidden: Tensor, kv_cache: KVCachePool) -> Tensor:
        """Write the KV of the batch; the hidden states to recycle, [num_tokens, hidden].

        `batch.input_ids` are the tokens after those positions, `hidden` [num_tokens, hidden].
        """

    @abstractmethod
    def compute_logits(self, hidden: Tensor) -> Tensor | None:
        """Of recycled hidden states: [rows, draft_vocab_size] float32 on rank 0, else None."""

    def metadata(self, batch: ForwardBatch, kv_cache: KVCachePool) -> AttentionMetadata:
        queries_per_kv = self.config.num_heads // self.config.num_kv_heads
        return AttentionMetadata.build(batch, kv_cache.block_size, queries_per_kv, self.dtype)

    def new_kv_cache(
        self, num_blocks: int, block_size: int, dtype: torch.dtype | None = None
    ) -> KVCachePool:
        return KVCachePool(
            self.config.num_layers,
            num_blocks,
            block_size,
            self.num_kv_heads,
            self.config.head_dim,
            dtype or self.dtype,
            self.device,
        )
