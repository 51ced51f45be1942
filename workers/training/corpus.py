"""Conversations as tokens, in shards: what a head is trained on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from spectrue.workers.errors import ModelLoadError

FIELDS = "tokens", "lengths", "loss_from"


@dataclass(frozen=True, slots=True)
class Conversation:
    token_ids: tuple[int, ...]
    loss_from: int  # index of the first token that the model wrote as an answer


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.safetensors"))


def write_shard(
    folder: Path, conversations: Sequence[Conversation], made: dict[str, Any], name: str
) -> Path:
    """One more file, whole or not at all. `made` says how, for whoever finds it."""
    path = folder / f"shard-{name}.safetensors"
    tensors = {
        "tokens": torch.tensor([t for c in conversations for t in c.token_ids], dtype=torch.int32),
        "lengths": torch.tensor([len(c.token_ids) for c in conversations], dtype=torch.int32),
        "loss_from": torch.tensor([c.loss_from for c in conversations], dtype=torch.int32),
    }
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata={"made": json.dumps(made)})
    os.replace(partial, path)
    return path


@dataclass(frozen=True, slots=True)
class Corpus:
    tokens: Tensor  # [tokens] int32, one conversation after the other
    starts: Tensor  # [conversations + 1] int64
    loss_from: Tensor  # [conversations] int64

    def __len__(self) -> int:
        return len(self.loss_from)

    @property
    def num_answer_tokens(self) -> int:
        return int((self.starts.diff() - self.loss_from).sum())

    def num_tokens(self, max_length: int) -> int:
        """Of all conversations, prompts included, each cut to `max_length`."""
        return int(self.starts.diff().clamp(max=max_length).sum())

    @staticmethod
    def open(folder: Path) -> Corpus:
        """All shards of a folder. Raises ModelLoadError for one that is none."""
        found: dict[str, list[Tensor]] = {name: [] for name in FIELDS}
        for path in shards(folder):
            with safe_open(path, "pt") as file:
                if set(FIELDS) - set(file.keys()):
                    raise ModelLoadError(f"{path} is no shard of a corpus: it has {file.keys()}")
                for name in FIELDS:
                    found[name].append(file.get_tensor(name))
        if not found["tokens"]:
            raise ModelLoadError(f"{folder} has no shard-*.safetensors")
        tokens, lengths, loss_from = (torch.cat(found[name]) for name in FIELDS)
        ends = lengths.long().cumsum(0)
        starts = torch.cat((torch.zeros(1, dtype=torch.int64), ends))
        return Corpus(tokens, starts, loss_from.long())

    def conversation(self, i: int) -> Tensor:
        return self.tokens[self.starts[i] : self.starts[i + 1]].long()

    def answers(self) -> Iterator[Tensor]:
        """The tokens that the model wrote, one tensor a conversation."""
        for i in range(len(self)):
            yield self.conversation(i)[self.loss_from[i] :]
