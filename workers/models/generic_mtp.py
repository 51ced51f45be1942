"""A multi-token-prediction layer by transformers' code: latent attention, experts and the like.

The layer is one more decoder layer of its target, so it is run as a model of the target's class
with that layer alone, whose final norm is the layer's own. transformers' loader then maps its names
(one tensor an expert, say) and its tensor-parallel plan cuts it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spectrue.workers.errors import ModelLoadError
from spectrue.workers.forward_batch import ForwardBatch, ForwardOutput
from spectrue.workers.kv_cache import KVCachePool
from spectrue.workers.models.generic import GenericModel
from spectrue.workers.models.generic_attention import PAGED, running
from spectrue.workers.models.generic_check import probe_attention
from spectrue.workers.models.generic_parallel import shard
from spectrue.workers.models.head import DraftHead, HeadParts
from spectrue.workers.models.layers import RMSNorm
from spectrue.workers.models.linear import Linear
from spectrue.workers.weights import TensorFiles, named

VOCAB = 8  # of the lone layer's model: nobody asks for its embeddings or logits
LAYER, NORM = "layers.0.", "norm.weight"  # our names of what transformers runs


class GenericMTPHead(DraftHead):
    """As `MTPHead`, with the target's own decoder layer. What it recycles is normalised already."""

    def __init__(self, parts: HeadParts, path: Path, hf: Any) -> None:
        super().__init__(parts)
        read, eps = parts.read, self.config.rms_norm_eps
        self.token_norm = RMSNorm(read, "enorm", eps)
        self.hidden_norm = RMSNorm(read, "hnorm", eps)
        self.project = Linear(read("eh_proj.weight"))
        self._base = hf.base_model
        self._layers = probe_attention(path, hf, self.device)
        hf.set_attn_implementation(PAGED)
        # Not every plan cuts attention: DeepSeek's leaves all heads to each rank.
        self.num_kv_heads = self._layers[0].num_kv_heads

    def combine(self, output: ForwardOutput) -> Tensor:
        return output.hidden_states

    @torch.no_grad()
    def forward(self, batch: ForwardBatch, hidden: Tensor, kv_cache: KVCachePool) -> Tensor:
        token = self.token_norm(self.embed(batch.input_ids))
        x = self.project(torch.cat((token, self.hidden_norm(hidden)), -1))
        with running(self._layers, batch, kv_cache, self.dtype):
            out: Tensor = self._base(
                inputs_embeds=x[None], position_ids=batch.positions[None], use_cache=False
            ).last_hidden_state[0]
        return out

    @torch.no_grad()
    def compute_logits(self, hidden: Tensor) -> Tensor | None:
        return self.head(hidden)


def load_mtp_layer(
    path: Path,
    files: TensorFiles,  # under our names
    target: GenericModel,
    parts: HeadParts,
) -> GenericMTPHead:
    """This rank's shard. Raises ModelLoadError for weights that are missing or not used."""
    shapes = {n: s for n, s in files.shapes().items() if n.startswith(LAYER) or n == NORM}
    hf = _read(path, files, shapes, _config(target.hf.config), type(target.hf), target.dtype)
    if parts.group.size > 1:
        shard(hf, parts.group)
    hf = hf.to(target.device).eval().requires_grad_(False)
    return GenericMTPHead(parts, path, hf)


def _config(of_target: Any) -> Any:
    """A model of one layer, of the kind that the target's last one is."""
    config = copy.deepcopy(of_target)
    config.num_hidden_layers = 1
    for kinds in ("layer_types", "mlp_layer_types"):
        if getattr(config, kinds, None):
            setattr(config, kinds, getattr(config, kinds)[-1:])
    if hasattr(config, "first_k_dense_replace"):  # DeepSeek, GLM: experts from this layer on
        last_is_dense = of_target.first_k_dense_replace >= of_target.num_hidden_layers
        config.first_k_dense_replace = int(last_is_dense)
    config.vocab_size, config.tie_word_embeddings = VOCAB, False
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    return config


def _read(
    path: Path,
    files: TensorFiles,
    shapes: Mapping[str, tuple[int, ...]],
    config: Any,
    kind: Any,  # the class of the target
    dtype: torch.dtype,
) -> Any:
    prefix = kind.base_model_prefix
    weights = {
        f"{prefix}.{name}": files.read(name, 0, 0, shape[0], dtype)
        for name, shape in shapes.items()
        if not name.endswith(".rotary_emb.inv_freq")
    }
    from transformers.utils import logging as hf_logging

    unread = torch.zeros(VOCAB, config.hidden_size, dtype=dtype)
    weights |= {f"{prefix}.embed_tokens.weight": unread, "lm_head.weight": unread.clone()}
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        hf, info = kind.from_pretrained(
            None,
            config=config,
            state_dict=weights,
            dtype=dtype,
            attn_implementation=PAGED,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # named below
        )
    finally:
        if bars:
            hf_logging.enable_progress_bar()
    for what, names in (
        ("lacks weights of", {str(n) for n in info["missing_keys"]}),
        ("has weights that would be ignored in", {str(n) for n in info["unexpected_keys"]}),
        ("has weights of other shapes in", {str(n) for n, *_ in info["mismatched_keys"]}),
    ):
        if names:
            raise ModelLoadError(f"{path} {what} its multi-token-prediction layer: {named(names)}")
    return hf
