"""Layers of Llama-like models, each rank with its own shard. Sharding knowledge lives here only."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrue.workers.errors import ConfigError
from spectrue.workers.models.config import ModelConfig
from spectrue.workers.models.linear import Linear
from spectrue.workers.parallel import TPGroup
from spectrue.workers.weights import WeightReader


def check_shards(config: ModelConfig, tp_size: int) -> None:
    if config.num_heads % tp_size or config.num_kv_heads % tp_size:
        raise ConfigError(
            f"tp_size = {tp_size} must divide the model's num_heads = {config.num_heads} "
            f"and num_kv_heads = {config.num_kv_heads}"
        )
    if config.intermediate_size % tp_size:
        raise ConfigError(
            f"tp_size = {tp_size} must divide the model's intermediate_size = "
            f"{config.intermediate_size}"
        )


class RMSNorm:
    __slots__ = ("eps", "shape", "weight")

    def __init__(self, read: WeightReader, name: str, eps: float) -> None:
        self.weight = read(name + ".weight")
        self.shape = self.weight.shape
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.shape, self.weight, self.eps)


def column_parallel(read: WeightReader, names: list[str], bias: bool) -> Linear:
    """The named linears side by side in one, the outputs of each cut over the ranks."""
    weights = [read.rows(f"{name}.weight") for name in names]
    biases = [read.rows(f"{name}.bias") for name in names] if bias else None
    return Linear(torch.cat(weights), torch.cat(biases) if biases else None)


class RowParallel:
    """A linear whose inputs are cut over the ranks, plus the residual: summed over the ranks."""

    __slots__ = ("_group", "_linear")

    def __init__(self, read: WeightReader, name: str, bias: bool, group: TPGroup) -> None:
        # The sum must have the bias once.
        own_bias = read(f"{name}.bias") if bias and group.rank == 0 else None
        self._linear = Linear(read.columns(f"{name}.weight"), own_bias)
        self._group = group

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        if self._group.rank == 0:  # ... and the residual once
            return self._group.all_reduce_(self._linear.plus(x, residual))
        return self._group.all_reduce_(self._linear(x))


class VocabParallel:
    """Embedding and output head over this rank's part of the vocabulary, padded to equal parts."""

    __slots__ = ("_embedding", "_group", "_head", "_start", "vocab_size")

    def __init__(self, config: ModelConfig, read: WeightReader, group: TPGroup) -> None:
        self.vocab_size = config.vocab_size
        self._group = group
        part = -(-config.vocab_size // group.size)
        self._start = group.rank * part
        self._embedding = self._read(read, "model.embed_tokens.weight", part)
        if config.tie_word_embeddings:
            self._head = Linear(self._embedding)
        else:
            self._head = Linear(self._read(read, "lm_head.weight", part))

    def _read(self, read: WeightReader, name: str, part: int) -> Tensor:
        start = min(self._start, self.vocab_size)
        rows = read.range(name, start, min(start + part, self.vocab_size))
        return F.pad(rows, (0, 0, 0, part - len(rows))) if len(rows) < part else rows

    def embed(self, input_ids: Tensor) -> Tensor:
        if self._group.size == 1:
            return self._embedding.index_select(0, input_ids)
        local = input_ids - self._start
        other = (local < 0) | (local >= len(self._embedding))
        x = self._embedding.index_select(0, local.masked_fill_(other, 0))
        return self._group.all_reduce_(x.masked_fill_(other[:, None], 0))

    def logits(self, hidden: Tensor) -> Tensor | None:
        """[rows, vocab_size] float32 on rank 0, None on the others."""
        full = self._group.gather_vocab(self._head(hidden))
        return None if full is None else full[:, : self.vocab_size].float()
