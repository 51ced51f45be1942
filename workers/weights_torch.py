"""`pytorch_model.bin`: how older EAGLE heads are published."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch import Tensor

from spectrue.workers.errors import ModelLoadError

FILE = "pytorch_model.bin"


class TorchFile:
    """Tensors only: nothing in the file is executed. Mapped, so a slice reads a slice."""

    def __init__(self, path: Path) -> None:
        try:
            self._tensors: dict[str, Tensor] = torch.load(
                path / FILE, map_location="cpu", weights_only=True, mmap=True
            )
        except (OSError, RuntimeError, pickle.UnpicklingError) as error:
            raise ModelLoadError(f"{path / FILE} cannot be read: {error}") from error

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str, dim: int, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        return self._tensors[name].narrow(dim, start, stop - start).to(dtype)
