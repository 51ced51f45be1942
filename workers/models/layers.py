"""Layers of Llama-like models, each rank with its own shard. Sharding knowledge lives here only."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrue.kernels import dispatch
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
        if x.is_cuda and x.dim() == 2:
            return dispatch.rms_norm(x, self.weight, self.eps)
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


def _vocab_part(read: WeightReader, name: str, size: int, group: TPGroup) -> Tensor:
    """This rank's rows of a weight over `size` tokens, padded to equal parts.

    On a GPU to multiples of 64 as well: rows of logits that are not aligned to 16 bytes are read
    four times slower.
    """
    part = -(-size // group.size)
    if read.device.type != "cpu":
        part = -(-part // 64) * 64
    start = min(group.rank * part, size)
    rows = read.range(name, start, min(start + part, size))
    return F.pad(rows, (0, 0, 0, part - len(rows))) if len(rows) < part else rows


class ParallelEmbedding:
    """Embedding of this rank's part of the vocabulary, summed over the ranks."""

    __slots__ = ("_group", "_start", "weight")

    def __init__(self, read: WeightReader, name: str, vocab_size: int, group: TPGroup) -> None:
        self.weight = _vocab_part(read, name, vocab_size, group)
        self._group = group
        self._start = group.rank * len(self.weight)

    def __call__(self, input_ids: Tensor) -> Tensor:
        if self._group.size == 1:
            return self.weight.index_select(0, input_ids)
        local = input_ids - self._start
        other = (local < 0) | (local >= len(self.weight))
        x = self.weight.index_select(0, local.masked_fill_(other, 0))
        return self._group.all_reduce_(x.masked_fill_(other[:, None], 0))


class ParallelHead:
    """Output head of this rank's part of the vocabulary, gathered to rank 0."""

    __slots__ = ("_group", "_linear", "vocab_size")

    def __init__(
        self, read: WeightReader, source: str | Tensor, vocab_size: int, group: TPGroup
    ) -> None:
        """`source`: the weight's name, or this rank's part of it."""
        if isinstance(source, str):
            source = _vocab_part(read, source, vocab_size, group)
        self._linear = Linear(source)
        self._group = group
        self.vocab_size = vocab_size

    def __call__(self, hidden: Tensor) -> Tensor | None:
        """[rows, vocab_size] on rank 0, None on the others. float32 on a CPU; a GPU keeps the
        model's dtype, since verification reads the logits at the speed of memory."""
        full = self._group.gather_vocab(self._linear(hidden))
        if full is None:
            return None
        full = full[:, : self.vocab_size]
        return full if full.is_cuda else full.float()


class VocabParallel:
    """Embedding and output head of a model, tied or not."""

    __slots__ = ("embed", "logits")

    def __init__(self, config: ModelConfig, read: WeightReader, group: TPGroup) -> None:
        size = config.vocab_size
        self.embed = ParallelEmbedding(read, "model.embed_tokens.weight", size, group)
        tied = config.tie_word_embeddings
        self.logits = ParallelHead(
            read, self.embed.weight if tied else "lm_head.weight", size, group
        )
