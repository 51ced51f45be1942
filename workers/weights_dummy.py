"""`load_format: dummy`: random weights of a configuration's shapes, for measuring speed."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from spectrue.workers.errors import ConfigError
from spectrue.workers.models.config import ModelConfig, config_from_hf


def dummy_weight(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Made on the device, the same for a name whatever else is made and on every rank.

    Matrices keep the size of what they multiply, so that no activation overflows; what has one
    dimension is a norm (ones) or a bias (small).
    """
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    weight = torch.empty(shape, dtype=dtype, device=device)
    if len(shape) > 1:
        return weight.normal_(std=shape[-1] ** -0.5, generator=generator)
    if name.endswith("bias"):
        return weight.normal_(std=0.02, generator=generator)
    return weight.fill_(1.0)


class DummySource:
    """A WeightSource with no file but config.json."""

    def __init__(
        self, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], device: torch.device
    ) -> None:
        self.config = config
        self._shapes = shapes
        self._device = device

    @staticmethod
    def of_directory(path: Path, device: torch.device) -> DummySource:
        """A model that `models/llama.py` serves."""
        from spectrue.workers.models.registry import expected_weights

        check_dummy(path)
        config = config_from_hf(path)
        return DummySource(config, expected_weights(config), device)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str, dim: int, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        whole = dummy_weight(name, self._shapes[name], dtype, self._device)
        part = whole.narrow(dim, start, stop - start)
        return part if part.shape == whole.shape else part.clone()  # a view would keep the whole


def check_dummy(path: Path) -> None:
    if not path.is_dir():
        raise ConfigError(f"load_format = dummy needs a directory with a config.json, not {path}")
