"""GGUF weights under Hugging Face's names, dequantized."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from spectrue.workers.gguf_file import GGUFFile
from spectrue.workers.models.config import config_from_gguf

TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"


def hf_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor; an unknown one keeps its own, to be reported."""
    stem, _, kind = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    prefix, _, rest = stem.partition(".")
    block, _, part = rest.partition(".")
    if prefix == "blk" and part in BLOCK:
        return f"model.layers.{block}.{BLOCK[part]}.{kind}"
    return name


class GGUFSource:
    def __init__(self, path: Path) -> None:
        self._file = GGUFFile(path)
        tensors = self._file.tensors
        factors: tuple[float, ...] = ()
        if ROPE_FACTORS in tensors:
            size = tensors[ROPE_FACTORS].shape[0]
            factors = tuple(next(self._file.read_rows(ROPE_FACTORS, 0, size)).tolist())
        shapes = {name: info.shape for name, info in tensors.items()}
        self.config = config_from_gguf(path, self._file.metadata, shapes, factors)
        self._names = {hf_name(name): name for name in tensors if name != ROPE_FACTORS}
        # llama.cpp's converter stores Q and K of this architecture for interleaved rotary.
        self._permuted = self._file.metadata["general.architecture"] == "llama"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self._file.tensors[own].shape for name, own in self._names.items()}

    def read(self, name: str, dim: int, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        own = self._names[name]
        shape = self._file.tensors[own].shape
        first, last = (start, stop) if dim == 0 else (0, shape[0])
        parts = []
        for chunk in self._file.read_rows(own, first, last):
            part = torch.from_numpy(chunk if chunk.flags.writeable else chunk.copy())
            parts.append((part[:, start:stop] if dim == 1 else part).to(dtype))
        tensor = torch.cat(parts) if len(parts) != 1 else parts[0]
        if self._permuted and (".q_proj." in name or ".k_proj." in name):
            # [heads, dim / 2, 2] -> [heads, 2, dim / 2]: a part is made of whole heads.
            pairs = tensor.unflatten(0, (-1, self.config.head_dim // 2, 2))
            tensor = pairs.transpose(1, 2).flatten(0, 2)
        return tensor
