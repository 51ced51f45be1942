"""Safetensors of a Hugging Face directory, one file or sharded, read by slices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spectrue.workers.errors import ModelLoadError
from spectrue.workers.models.config import config_from_hf

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class SafetensorsFiles:
    """The weights of a directory, whatever model or head they are of."""

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        if (path / INDEX).is_file():
            weight_map: dict[str, str] = json.loads((path / INDEX).read_text())["weight_map"]
            files = sorted(set(weight_map.values()))
        elif (path / SINGLE).is_file():
            files = [SINGLE]
        else:
            raise ModelLoadError(f"{path} has neither {SINGLE} nor {INDEX}")
        self._slices: dict[str, Any] = {}
        for file in files:
            try:
                opened = safe_open(path / file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelLoadError(f"{path / file} cannot be read: {error}") from error
            for name in opened.keys():  # noqa: SIM118 (a safetensors handle is not a dict)
                self._slices[name] = opened.get_slice(name)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(part.get_shape()) for name, part in self._slices.items()}

    def read(self, name: str, dim: int, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        part = self._slices[name]
        tensor: Tensor
        if not part.get_shape():
            tensor = part[...][None]  # one number, as a vector of one
        else:
            tensor = part[start:stop] if dim == 0 else part[:, start:stop]
        return tensor.to(dtype)


class SafetensorsSource(SafetensorsFiles):
    """A whole model's."""

    def __init__(self, path: Path) -> None:
        self.config = config_from_hf(path)
        super().__init__(path)
