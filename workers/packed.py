"""Many small tensors of a step in one buffer, so that one copy takes all of them to a GPU."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGN = 16  # bytes; kernels are built for pointers to this


class PackedTensors:
    """Named one-dimensional tensors, filled on the host through NumPy and uploaded together.

    On a CPU the host's memory is the device's, and `upload` does nothing. A captured graph keeps
    `device` and sees what each upload brings.
    """

    def __init__(
        self,
        fields: Mapping[str, tuple[torch.dtype, int]],  # name -> dtype, length
        device: torch.device,
    ) -> None:
        offsets, end = {}, 0
        for name, (dtype, size) in fields.items():
            offsets[name] = end
            end += -(-size * dtype.itemsize // _ALIGN) * _ALIGN
        on_gpu = device.type != "cpu"
        self._host = torch.zeros(end, dtype=torch.uint8, pin_memory=on_gpu)
        self._device = torch.zeros(end, dtype=torch.uint8, device=device) if on_gpu else self._host
        self.host: dict[str, NDArray[np.generic]] = {}
        self.device: dict[str, Tensor] = {}
        for name, (dtype, size) in fields.items():
            start, stop = offsets[name], offsets[name] + size * dtype.itemsize
            self.host[name] = self._host[start:stop].view(dtype).numpy()
            self.device[name] = self._device[start:stop].view(dtype)

    def upload(self) -> None:
        """Enqueue the copy. The host's side must stay as it is until the device has read it."""
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)
