"""Which device a rank computes on."""

from __future__ import annotations

import torch

from spectrue.workers.config import EngineConfig
from spectrue.workers.errors import ConfigError


def rank_device(config: EngineConfig, rank: int = 0, *, own_gpu: bool = False) -> torch.device:
    """GPU `rank` of those that this process sees, or the CPU. `auto`: GPUs, if every rank gets one.

    `own_gpu`: the process is shown no GPU but this rank's, as an actor of Ray is. Raises
    ConfigError for GPUs that are not there.
    """
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    needed = 1 if own_gpu else config.tp_size
    if config.device == "cpu" or (config.device == "auto" and visible < needed):
        return torch.device("cpu")
    if not visible:
        raise ConfigError("device: cuda, but torch finds no GPU (NVIDIA's or AMD's) here")
    if visible < needed:
        raise ConfigError(
            f"tp_size = {config.tp_size} needs as many GPUs, but {visible} can be seen here: "
            f"lower tp_size, or show more (CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES)"
        )
    if config.tp_size == 1:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cuda", 0 if own_gpu else rank)
