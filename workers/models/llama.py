"""Llama-like decoders (Llama, Mistral, SmolLM, Qwen2, Qwen3): fused projections, paged KV."""

from __future__ import annotations

import torch
from torch import Tensor

from spectrue.kernels import dispatch
from spectrue.workers.attention import AttentionMetadata, paged_attention
from spectrue.workers.forward_batch import ForwardBatch, ForwardOutput
from spectrue.workers.kv_cache import KVCachePool, KVScales
from spectrue.workers.models.config import ModelConfig
from spectrue.workers.models.layers import (
    RMSNorm,
    RowParallel,
    VocabParallel,
    check_shards,
    column_parallel,
)
from spectrue.workers.models.linear import MIN_ROWS
from spectrue.workers.models.rope import RotaryEmbedding, rotate_
from spectrue.workers.parallel import TPGroup
from spectrue.workers.weights import WeightReader


class Attention:
    def __init__(
        self, config: ModelConfig, read: WeightReader, name: str, layer: int, group: TPGroup
    ) -> None:
        self.layer = layer
        self.eps = config.rms_norm_eps
        self.window = 0  # positions that a query sees, its own included; 0: all
        self.num_heads = config.num_heads // group.size
        self.num_kv_heads = config.num_kv_heads // group.size
        self.head_dim = config.head_dim
        self.qkv = column_parallel(
            read, [f"{name}.{p}_proj" for p in ("q", "k", "v")], config.qkv_bias
        )
        self.out = RowParallel(read, f"{name}.o_proj", config.attention_output_bias, group)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(read, f"{name}.q_norm", config.rms_norm_eps)
            self.k_norm = RMSNorm(read, f"{name}.k_norm", config.rms_norm_eps)

    def __call__(
        self,
        x: Tensor,  # [num_tokens, hidden], normalised
        residual: Tensor,  # [num_tokens, hidden]
        rope: tuple[Tensor, Tensor],
        batch: ForwardBatch,
        kv_cache: KVCachePool,
        metadata: AttentionMetadata,
    ) -> Tensor:
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv = self.qkv(x).view(-1, heads + 2 * kv_heads, self.head_dim)
        qkv = qkv[: batch.input_ids.shape[0]]  # a lone token's copies stay outside
        query = qkv[:, :heads]
        if qkv.is_cuda:
            self._rotate_and_write(qkv, rope, batch, kv_cache)
            attended = paged_attention(
                query,
                kv_cache.layers[self.layer],
                metadata,
                window=self.window,
                scales=kv_cache.scales[self.layer],
            )
            return self.out(attended, residual)
        if self.q_norm is not None and self.k_norm is not None:
            query.copy_(self.q_norm(query))
            key = qkv[:, heads : heads + kv_heads]
            key.copy_(self.k_norm(key))
        rotate_(qkv[:, : heads + kv_heads], *rope)
        kv = qkv[:, heads:].view(-1, 2, kv_heads, self.head_dim)
        kv_cache.write(self.layer, batch.slot_mapping, kv)
        attended = paged_attention(
            query,
            kv_cache.layers[self.layer],
            metadata,
            window=self.window,
            scales=kv_cache.scales[self.layer],
        )
        if attended.shape[0] != x.shape[0]:
            attended = attended.repeat(x.shape[0], 1)
        return self.out(attended, residual)

    def _rotate_and_write(
        self,
        qkv: Tensor,  # [num_tokens, heads, head_dim]
        rope: tuple[Tensor, Tensor],
        batch: ForwardBatch,
        kv_cache: KVCachePool,
    ) -> None:
        k_scale, v_scale = kv_cache.scales[self.layer]
        dispatch.rope_write_kv(
            qkv,
            *rope,
            kv_cache.layers[self.layer],
            batch.slot_mapping,
            num_heads=self.num_heads,
            q_norm=None if self.q_norm is None else self.q_norm.weight,
            k_norm=None if self.k_norm is None else self.k_norm.weight,
            eps=self.eps,
            k_scale=k_scale,
            v_scale=v_scale,
        )


class MLP:
    def __init__(self, config: ModelConfig, read: WeightReader, name: str, group: TPGroup) -> None:
        self.gate_up = column_parallel(
            read, [f"{name}.gate_proj", f"{name}.up_proj"], config.mlp_bias
        )
        self.down = RowParallel(read, f"{name}.down_proj", config.mlp_bias, group)

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.down(self.gate_up.gated(x), residual)


class DecoderLayer:
    """Attention and MLP of the weights `name`.*; its KV is that of `layer` in the pool."""

    def __init__(
        self,
        config: ModelConfig,
        read: WeightReader,
        name: str,
        layer: int,
        group: TPGroup,
        attention_norm: bool = True,  # an EAGLE head's first layer has none
    ) -> None:
        self.attention_norm = None
        if attention_norm:
            self.attention_norm = RMSNorm(read, f"{name}.input_layernorm", config.rms_norm_eps)
        self.attention = Attention(config, read, f"{name}.self_attn", layer, group)
        self.mlp_norm = RMSNorm(read, f"{name}.post_attention_layernorm", config.rms_norm_eps)
        self.mlp = MLP(config, read, f"{name}.mlp", group)

    def __call__(
        self,
        x: Tensor,  # [num_tokens, hidden]
        rope: tuple[Tensor, Tensor],
        batch: ForwardBatch,
        kv_cache: KVCachePool,
        metadata: AttentionMetadata,
    ) -> Tensor:
        normed = x if self.attention_norm is None else self.attention_norm(x)
        x = self.attention(normed, x, rope, batch, kv_cache, metadata)
        return self.mlp(self.mlp_norm(x), x)


class LlamaModel:
    """One rank's shard of a model, inference only."""

    def __init__(self, config: ModelConfig, read: WeightReader, group: TPGroup) -> None:
        check_shards(config, group.size)
        self.config = config
        self.dtype = read.dtype
        self.device = read.device
        self.num_kv_heads = config.num_kv_heads // group.size  # of this rank
        self.vocab = VocabParallel(config, read, group)
        self.layers = [
            DecoderLayer(config, read, f"model.layers.{i}", i, group)
            for i in range(config.num_layers)
        ]
        for layer, window in zip(self.layers, config.layer_windows, strict=False):  # () is none
            layer.attention.window = window
        self.norm = RMSNorm(read, "model.norm", config.rms_norm_eps)
        self.rope = RotaryEmbedding(config, read.device)
        self.kv_scales: KVScales = ()  # of the checkpoint, for OCP's e4m3
        self.aux_layers: tuple[int, ...] = ()  # whose outputs a draft head reads, ascending

    @torch.no_grad()
    def forward(self, batch: ForwardBatch, kv_cache: KVCachePool) -> ForwardOutput:
        """Write the KV of the batch; hidden states of each token."""
        metadata = AttentionMetadata.build(
            batch,
            kv_cache.block_size,
            self.config.num_heads // self.config.num_kv_heads,
            self.dtype,
            windows=self.config.layer_windows,
        )
        rope = self.rope.tables(batch.positions)
        x = self.vocab.embed(batch.input_ids)
        num_tokens = x.shape[0]
        if num_tokens == 1 and not x.is_cuda:
            x = x.repeat(MIN_ROWS, 1)  # here once, and not in every layer (see Linear)
        aux = []
        for i, layer in enumerate(self.layers):
            x = layer(x, rope, batch, kv_cache, metadata)
            if i in self.aux_layers:
                aux.append(x[:num_tokens].clone())  # a GPU adds the next layers to x itself
        return ForwardOutput(
            hidden_states=self.norm(x)[:num_tokens],
            aux_hidden_states=torch.cat(aux, -1) if aux else None,
        )

    @torch.no_grad()
    def embed(self, input_ids: Tensor) -> Tensor:
        """Embeddings [num_tokens, hidden] on every rank, for a draft head that has none."""
        return self.vocab.embed(input_ids)

    @torch.no_grad()
    def compute_logits(
        self,
        hidden: Tensor,  # [rows, hidden]
    ) -> Tensor | None:  # [rows, vocab_size] on rank 0, None on the others
        return self.vocab.logits(hidden)

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
            self.kv_scales,
        )
