"""The EAGLE head (Li et al., arXiv 2401.15077; EAGLE-2, arXiv 2406.16858, has the same one)."""

from __future__ import annotations

import torch
from torch import Tensor

from spectrue.workers.forward_batch import ForwardBatch, ForwardOutput
from spectrue.workers.kv_cache import KVCachePool
from spectrue.workers.models.head import DraftHead, HeadParts
from spectrue.workers.models.linear import Linear
from spectrue.workers.models.llama import DecoderLayer


class EagleHead(DraftHead):
    """fc joins token and hidden states, then come decoder layers, the first without input norm.

    No final norm: the target's output head reads what the last layer leaves.
    """

    def __init__(self, parts: HeadParts) -> None:
        super().__init__(parts)
        read = parts.read
        bias = read("fc.bias") if "fc.bias" in parts.names else None
        self.fc = Linear(read("fc.weight"), bias)
        self.layers = [
            DecoderLayer(self.config, read, f"layers.{i}", i, parts.group, attention_norm=i > 0)
            for i in range(self.config.num_layers)
        ]

    def combine(self, output: ForwardOutput) -> Tensor:
        return output.hidden_states

    @torch.no_grad()
    def forward(self, batch: ForwardBatch, hidden: Tensor, kv_cache: KVCachePool) -> Tensor:
        metadata, rope = self.metadata(batch, kv_cache), self.rope.tables(batch.positions)
        x = self.fc(torch.cat((self.embed(batch.input_ids), hidden), -1))
        for layer in self.layers:
            x = layer(x, rope, batch, kv_cache, metadata)
        return x

    @torch.no_grad()
    def compute_logits(self, hidden: Tensor) -> Tensor | None:
        return self.head(hidden)
