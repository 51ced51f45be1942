"""The paged KV memory of one rank."""

from __future__ import annotations

import torch
from torch import Tensor


class KVCachePool:
    """Keys and values of all layers in one tensor [layers, num_slots, 2, num_kv_heads, head_dim].

    A slot is one token: `block_id * block_size + offset`. Key and value of a token are adjacent, so
    that one copy writes both and one gather reads both. Zeroed lazily: memory is used as it is
    written. Slots outside a request may hold anything, NaN included.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,  # of this rank
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._data = torch.zeros(
            num_layers,
            num_blocks * block_size,
            2,
            num_kv_heads,
            head_dim,
            dtype=dtype,
            device=device,
        )
        # Views made once: indexing by layer in the forward costs microseconds each time.
        self.layers: tuple[Tensor, ...] = self._data.unbind(0)

    def key(self, layer: int) -> Tensor:
        """[num_blocks, block_size, num_kv_heads, head_dim], a strided view."""
        return self._blocks(layer)[0]

    def value(self, layer: int) -> Tensor:
        return self._blocks(layer)[1]

    def _blocks(self, layer: int) -> tuple[Tensor, ...]:
        return (
            self.layers[layer]
            .view(self.num_blocks, self.block_size, *self._data.shape[2:])
            .unbind(2)
        )

    def write(
        self,
        layer: int,
        slot_mapping: Tensor,  # [num_tokens] int64
        kv: Tensor,  # [num_tokens, 2, num_kv_heads, head_dim]
    ) -> None:
        self.layers[layer].index_copy_(0, slot_mapping, kv)

    @property
    def bytes(self) -> int:
        return self._data.nbytes

    @staticmethod
    def bytes_per_block(
        num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        return num_layers * block_size * 2 * num_kv_heads * head_dim * dtype.itemsize
