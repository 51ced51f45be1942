"""The EAGLE3 head (Li et al., arXiv 2503.01840) with the variants of SpecForge and speculators."""

from __future__ import annotations

import torch
from torch import Tensor

from spectrue.workers.attention import AttentionMetadata
from spectrue.workers.forward_batch import ForwardBatch, ForwardOutput
from spectrue.workers.kv_cache import KVCachePool
from spectrue.workers.models.head import DraftHead, HeadParts
from spectrue.workers.models.layers import RMSNorm
from spectrue.workers.models.linear import Linear
from spectrue.workers.models.llama import MLP, Attention, DecoderLayer


class FirstLayer:
    """Its attention reads token and hidden states side by side, each normalised."""

    def __init__(self, parts: HeadParts) -> None:
        config, read, group = parts.config.model, parts.read, parts.group
        eps = config.rms_norm_eps
        self.norm_before_residual = parts.config.norm_before_residual
        self.input_norm = RMSNorm(read, "layers.0.input_layernorm", eps)
        self.hidden_norm = RMSNorm(read, "layers.0.hidden_norm", eps)
        self.attention = Attention(config, read, "layers.0.self_attn", 0, group)
        self.mlp_norm = RMSNorm(read, "layers.0.post_attention_layernorm", eps)
        self.mlp = MLP(config, read, "layers.0.mlp", group)

    def __call__(
        self,
        embedded: Tensor,  # [num_tokens, hidden]
        hidden: Tensor,  # [num_tokens, hidden]
        rope: tuple[Tensor, Tensor],
        batch: ForwardBatch,
        kv_cache: KVCachePool,
        metadata: AttentionMetadata,
    ) -> Tensor:
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        x = torch.cat((self.input_norm(embedded), normed), -1)
        x = self.attention(x, residual, rope, batch, kv_cache, metadata)
        return self.mlp(self.mlp_norm(x), x)


class Eagle3Head(DraftHead):
    """fc mixes the outputs of some of the target's layers; later depths recycle its own."""

    def __init__(self, parts: HeadParts) -> None:
        super().__init__(parts)
        config, read, eps = parts.config, parts.read, self.config.rms_norm_eps
        self.norm_output = config.norm_output
        self.before_fc: list[RMSNorm] = []  # one over all, or one for each auxiliary layer
        if config.norm_before_fc:
            self.before_fc = [RMSNorm(read, "input_norm", eps)]
        elif config.fc_norm:
            self.before_fc = [
                RMSNorm(read, f"fc_norm.{j}", eps) for j in range(max(1, len(self.aux_layers)))
            ]
        self.fc = Linear(read("fc.weight")) if "fc.weight" in parts.names else None
        self.first = FirstLayer(parts)
        self.layers = [
            DecoderLayer(self.config, read, f"layers.{i}", i, parts.group)
            for i in range(1, self.config.num_layers)
        ]
        self.norm = RMSNorm(read, "norm", eps)

    @torch.no_grad()
    def combine(self, output: ForwardOutput) -> Tensor:
        hidden = output.aux_hidden_states if self.aux_layers else output.hidden_states
        assert hidden is not None, "the target was not told of aux_layers"
        if self.before_fc:
            chunks = hidden.chunk(len(self.before_fc), -1)
            hidden = torch.cat(
                [norm(x) for norm, x in zip(self.before_fc, chunks, strict=True)], -1
            )
        return hidden if self.fc is None else self.fc(hidden)

    @torch.no_grad()
    def forward(self, batch: ForwardBatch, hidden: Tensor, kv_cache: KVCachePool) -> Tensor:
        metadata, rope = self.metadata(batch, kv_cache), self.rope.tables(batch.positions)
        x = self.first(self.embed(batch.input_ids), hidden, rope, batch, kv_cache, metadata)
        for layer in self.layers:
            x = layer(x, rope, batch, kv_cache, metadata)
        return self.norm(x) if self.norm_output else x

    @torch.no_grad()
    def compute_logits(self, hidden: Tensor) -> Tensor | None:
        return self.head(hidden if self.norm_output else self.norm(hidden))
