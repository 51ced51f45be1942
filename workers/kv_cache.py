"""The paged KV memory of one rank."""

from __future__ import annotations

import torch
from torch import Tensor

from spectrue.kernels.dispatch import FP8_DTYPES, quantize_fp8

# (key's, value's) of each layer: a value is what is stored * scale. (): 1 everywhere.
KVScales = tuple[tuple[float, float], ...]


class KVCachePool:
    """Keys and values of all layers in one tensor [layers, num_slots, 2, num_kv_heads, head_dim].

    A slot is one token: `block_id * block_size + offset`. Key and value of a token are adjacent, so
    that one copy writes both and one gather reads both. Zeroed lazily: memory is used as it is
    written. Slots outside a request may hold anything, NaN included.

    A pool of fp8 holds values divided by their scale, saturated; who reads `layers` needs `scales`.
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
        scales: KVScales = (),  # for OCP's e4m3; see `stored_scale`
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
        self.scales = tuple(
            (stored_scale(k, dtype), stored_scale(v, dtype))
            for k, v in scales or ((1.0, 1.0),) * num_layers
        )
        inverse = 1 / torch.tensor(self.scales, dtype=torch.float64)
        self._inverse = inverse.float().view(-1, 2, 1, 1).to(device)

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
        data = self.layers[layer]
        if data.dtype in FP8_DTYPES:
            kv = quantize_fp8(kv, data.dtype, self._inverse[layer]).view(torch.uint8)
            data = data.view(torch.uint8)  # torch copies no fp8 by index
        data.index_copy_(0, slot_mapping, kv.to(data.dtype))

    def move(self, source: Tensor, to: Tensor) -> None:
        """Copy the KV of the slots `source` [n] to `to` [n], in every layer; all is read first."""
        data = self._data.view(torch.uint8)  # torch copies no fp8 by index
        data.index_copy_(1, to, data.index_select(1, source))

    @property
    def bytes(self) -> int:
        return self._data.nbytes

    @staticmethod
    def bytes_per_block(
        num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        return num_layers * block_size * 2 * num_kv_heads * head_dim * dtype.itemsize


def stored_scale(scale: float, dtype: torch.dtype) -> float:
    """Of a pool of this dtype, for a scale that is meant for OCP's e4m3.

    Twice that for fnuz: its codes are worth half. So both cover the same range with the same steps,
    whatever the scale, and a text does not change with the encoding. 1 where nothing is scaled.
    """
    if dtype not in FP8_DTYPES:
        return 1.0
    return 2 * scale if dtype is torch.float8_e4m3fnuz else scale
