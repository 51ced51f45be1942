"""How a draft head is trained."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from spectrue.workers.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Raises ConfigError, naming the field, for a value that cannot be used."""

    seed: int = 0
    draft_vocab_size: int = 8192  # tokens that the head can draft, the most frequent ones
    intermediate_size: int | None = None  # of the head's MLP; None: the target's
    num_unrolled: int = 3  # draft steps that are trained, EAGLE-3's training-time test
    unroll_decay: float = 0.8  # weight of each step's loss, relative to the step before
    overlap_share: float = 1.0  # of the loss, from half the training on; before it rises to that
    max_length: int = 512  # tokens of a conversation; what is longer is cut
    tokens_per_step: int = 16384  # of one optimizer step
    accumulate: int = 1  # parts in which a step's tokens are computed, for less memory
    steps: int = 4000
    time_limit: float | None = None  # seconds; the schedule then ends with it, not with `steps`
    learning_rate: float = 2e-3
    warm_up_steps: int = 100
    weight_decay: float = 0.02
    clip_norm: float = 1.0
    optimizer: Literal["adamw", "muon"] = "muon"
    held_out: int = 64  # conversations that are not trained on
    checkpoint_every: int = 500  # steps
    report_every: int = 50
    compile: bool = False  # the loss by torch.compile; a GPU's passes over the logits become fewer

    def __post_init__(self) -> None:
        for name in (
            "draft_vocab_size",
            "num_unrolled",
            "max_length",
            "tokens_per_step",
            "accumulate",
            "steps",
            "checkpoint_every",
            "report_every",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.overlap_share <= 1:
            raise ConfigError(f"overlap_share must be in [0, 1], got {self.overlap_share}")
        if self.optimizer not in ("adamw", "muon"):
            raise ConfigError(f"optimizer must be adamw or muon, got {self.optimizer!r}")
        if self.tokens_per_step // self.accumulate < self.max_length:
            raise ConfigError(
                f"tokens_per_step / accumulate = {self.tokens_per_step // self.accumulate} must "
                f"hold a conversation of max_length = {self.max_length} tokens"
            )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
