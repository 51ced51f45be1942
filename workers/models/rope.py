"""Rotary position embedding, half-split as in Hugging Face's Llama."""

from __future__ import annotations

import torch
from torch import Tensor

from spectrue.workers.models.config import ModelConfig


def inverse_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """inv_freq [head_dim / 2] float32, and the factor that YaRN puts on cos and sin."""
    if config.rope_scaling:
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        hf = LlamaConfig(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters={"rope_theta": config.rope_theta, **config.rope_scaling},
        )
        init = ROPE_INIT_FUNCTIONS[config.rope_scaling["rope_type"]]
        inv_freq, scale = init(hf, torch.device("cpu"))
    else:
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        inv_freq, scale = 1.0 / config.rope_theta**exponents, 1.0
    if config.rope_freq_factors:
        inv_freq = inv_freq / torch.tensor(config.rope_freq_factors)
    return inv_freq.float(), float(scale)


class RotaryEmbedding:
    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        inv_freq, self.scale = inverse_frequencies(config)
        self.inv_freq = inv_freq.to(device)
        self._table: Tensor | None = None

    def reserve(self, num_positions: int) -> None:
        """Compute all rows now: on a GPU reading one is a launch, and computing it six."""
        positions = torch.arange(num_positions, device=self.inv_freq.device)
        self._table = torch.cat(self._compute(positions), -1)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [num_tokens, 1, head_dim] float32; sin's first half is negated.

        Computed once per forward; positions must be below what was reserved.
        """
        if self._table is None:
            return self._compute(positions)
        cos, sin = self._table.index_select(0, positions).chunk(2, -1)
        return cos, sin

    def _compute(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None, None] * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        if self.scale != 1.0:
            cos, sin = cos * self.scale, sin * self.scale
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotate_(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate `heads` [num_tokens, num_heads, head_dim] in place, in float32."""
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    torch.addcmul(heads * cos, swapped, sin, out=heads)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same with gradients, in the dtype of `heads`: [..., num_tokens, head_dim], with tables
    [num_tokens, head_dim]."""
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return (heads * cos + swapped * sin).to(heads.dtype)
