"""The multi-token-prediction layer that ships inside a target (DeepSeek-V3, arXiv 2412.19437, 2.2).

GLM-4 MoE has the same layout, Qwen3-Next another one with the same content. Engines use one layer
and recycle its hidden states; so do we, whatever `num_nextn_predict_layers` says.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spectrue.workers.forward_batch import ForwardBatch, ForwardOutput
from spectrue.workers.kv_cache import KVCachePool
from spectrue.workers.models.head import DraftHead, HeadParts
from spectrue.workers.models.layers import RMSNorm
from spectrue.workers.models.linear import Linear
from spectrue.workers.models.llama import DecoderLayer


class MTPHead(DraftHead):
    """A projection of the normalised embedding and hidden states, a decoder layer, a norm.

    Its decoder layer is Llama's. What it recycles is normalised already.
    """

    def __init__(self, parts: HeadParts) -> None:
        super().__init__(parts)
        read, eps = parts.read, self.config.rms_norm_eps
        self.token_norm = RMSNorm(read, "enorm", eps)
        self.hidden_norm = RMSNorm(read, "hnorm", eps)
        self.project = Linear(read("eh_proj.weight"))
        self.layers = [
            DecoderLayer(self.config, read, f"layers.{i}", i, parts.group)
            for i in range(self.config.num_layers)
        ]
        self.norm = RMSNorm(read, "norm", eps)

    def combine(self, output: ForwardOutput) -> Tensor:
        return output.hidden_states

    @torch.no_grad()
    def forward(self, batch: ForwardBatch, hidden: Tensor, kv_cache: KVCachePool) -> Tensor:
        metadata, rope = self.metadata(batch, kv_cache), self.rope.tables(batch.positions)
        token = self.token_norm(self.embed(batch.input_ids))
        x = self.project(torch.cat((token, self.hidden_norm(hidden)), -1))
        for layer in self.layers:
            x = layer(x, rope, batch, kv_cache, metadata)
        return self.norm(x)

    @torch.no_grad()
    def compute_logits(self, hidden: Tensor) -> Tensor | None:
        return self.head(hidden)
