"""Any decoder that transformers knows, by its own code and with our attention."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from spectrue.workers.errors import ModelLoadError
from spectrue.workers.forward_batch import ForwardBatch, ForwardOutput
from spectrue.workers.kv_cache import KVCachePool, KVScales
from spectrue.workers.models.generic_attention import PAGED, register, running
from spectrue.workers.models.generic_check import check_pieces, probe_attention
from spectrue.workers.models.generic_config import model_config
from spectrue.workers.parallel import TPGroup


class _Output(SimpleNamespace):
    """What a head reads of a decoder's output besides hidden states is absent."""

    def __getattr__(self, name: str) -> None:
        return None


class _Given(nn.Module):
    """In place of the decoder: hands hidden states to the head that follows it."""

    hidden: Tensor  # [1, rows, hidden]

    def forward(self, *_: Any, **__: Any) -> Any:
        return _Output(last_hidden_state=self.hidden)


class GenericModel:
    """A transformers model, inference only.

    A batch is one row of tokens with explicit positions; who sees whom is decided by the paged
    attention alone. Keys and values lie in one pool of the largest of all head sizes, shorter ones
    padded with zeros (DeepSeek-V3's keys have 192 dimensions and its values 128), so that every
    attention backend serves them; latent attention is expanded to heads before it is cached.

    Raises ModelLoadError if the model's attention is more than a causal sliding window.
    """

    def __init__(
        self, path: Path, hf: Any, device: torch.device, group: TPGroup, vocab_size: int
    ) -> None:
        register()
        self.hf = hf.eval().requires_grad_(False)
        self.dtype: torch.dtype = hf.dtype
        self.device = device
        self._group = group
        self.kv_scales: KVScales = ()
        self.aux_layers: tuple[int, ...] = ()
        self._base = hf.base_model
        self._head, self._given = _head(path, hf)
        self.layers = probe_attention(path, hf, device)
        self.num_kv_heads = self.layers[0].num_kv_heads
        self.config = model_config(
            path,
            hf.config,
            vocab_size=vocab_size,
            num_heads=hf.config.num_attention_heads,
            num_kv_heads=self.num_kv_heads
            * (hf.config.num_attention_heads // self.layers[0].num_heads),
            head_dim=max(max(layer.key_dim, layer.value_dim) for layer in self.layers),
            windows=tuple(layer.window for layer in self.layers),
        )
        self._aux: dict[int, Tensor] = {}
        for i, block in enumerate(_blocks(path, self._base, len(self.layers))):
            block.register_forward_hook(_keep(self, i))
        hf.set_attn_implementation(PAGED)
        check_pieces(path, self)

    @torch.no_grad()
    def forward(self, batch: ForwardBatch, kv_cache: KVCachePool) -> ForwardOutput:
        """Write the KV of the batch; hidden states of each token."""
        with running(self.layers, batch, kv_cache, self.dtype):
            hidden = self._base(
                input_ids=batch.input_ids[None], position_ids=batch.positions[None], use_cache=False
            ).last_hidden_state[0]
        aux = [self._aux.pop(i) for i in self.aux_layers]
        return ForwardOutput(
            hidden_states=hidden, aux_hidden_states=torch.cat(aux, -1) if aux else None
        )

    @torch.no_grad()
    def embed(self, input_ids: Tensor) -> Tensor:
        """Embeddings [num_tokens, hidden], as the first layer gets them."""
        embedded: Tensor = self.hf.get_input_embeddings()(input_ids)
        return embedded

    @torch.no_grad()
    def compute_logits(
        self,
        hidden: Tensor,  # [rows, hidden]
    ) -> Tensor | None:  # [rows, vocab_size] float32 on rank 0, None on the others
        # By the model's own head, which may scale and cap them.
        self._given.hidden = hidden[None]
        logits: Tensor = self._head(
            input_ids=torch.zeros(1, 1, dtype=torch.int64, device=hidden.device), use_cache=False
        ).logits
        del self._given.hidden
        return logits[0].float() if self._group.rank == 0 else None

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


def _keep(model: GenericModel, layer: int) -> Any:
    def hook(_: nn.Module, __: Any, output: Any) -> None:
        if layer in model.aux_layers:
            model._aux[layer] = (output[0] if isinstance(output, tuple) else output)[0]

    return hook


def _head(path: Path, hf: Any) -> tuple[nn.Module, _Given]:
    """The model without its decoder, sharing the weights of what comes after it."""
    name = hf.base_model_prefix
    if hf.get_output_embeddings() is None or name not in hf._modules:
        raise ModelLoadError(f"{path}: {type(hf).__name__} has no decoder with a head after it")
    given = _Given()
    head: nn.Module = copy.copy(hf)
    head._modules = {**hf._modules, name: given}
    return head, given


def _blocks(path: Path, base: nn.Module, num_layers: int) -> Sequence[nn.Module]:
    for module in base.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return list(module)
    raise ModelLoadError(f"{path}: {type(base).__name__} has no list of {num_layers} layers")
