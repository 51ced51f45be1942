"""A training run on disk: written whole or not at all, read back to the bit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from spectrue.workers.errors import ConfigError
from spectrue.workers.training.config import TrainConfig
from spectrue.workers.training.eagle3 import TrainableHead
from spectrue.workers.training.vocabulary import HotVocab

# May change from one run to the next of the same training.
FREE = {"report_every", "checkpoint_every", "compile", "time_limit", "steps"}


def save_checkpoint(
    path: Path,
    config: TrainConfig,
    head: TrainableHead,
    optimizers: Sequence[torch.optim.Optimizer],
    vocab: HotVocab,
    step: int,
    seconds: float,
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    state = {
        "config": config.as_dict(),
        "head": head.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "target_ids": vocab.target_ids,
        "step": step,
        "seconds": seconds,
    }
    torch.save(state, partial)
    os.replace(partial, path)


def load_checkpoint(
    path: Path,
    config: TrainConfig,
    head: TrainableHead,
    optimizers: Sequence[torch.optim.Optimizer],
    vocab: HotVocab,
) -> tuple[int, float]:
    """(steps done, seconds spent). Raises ConfigError for a checkpoint of another training."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    for name, value in config.as_dict().items():
        before = state["config"].get(name)
        if name not in FREE and before != value:
            raise ConfigError(
                f"{path} was trained with {name} = {before}, this run has {value}: resume with the "
                f"same, or take another --out"
            )
    if not torch.equal(state["target_ids"], vocab.target_ids):
        raise ConfigError(f"{path} was trained on another corpus: its hot vocabulary differs")
    head.load_state_dict(state["head"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return int(state["step"]), float(state["seconds"])
