"""A head's draft vocabulary from a file of its own: the target's most frequent tokens.

FR-Spec (arXiv 2502.14856) cuts the output head of an EAGLE head to these; SGLang calls the file
`--speculative-token-map`.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from spectrue.workers.errors import ConfigError, ModelLoadError
from spectrue.workers.weights import TensorFiles

HEAD = "lm_head.weight"


def read_token_map(
    file: Path,
    vocab_size: int,  # of the target
) -> Tensor:  # [draft_vocab] int64, ascending
    """The target ids in a file of torch's (.pt, a list or a tensor) or a JSON list.

    Raises ConfigError for a file that is no list of different ids of the target's vocabulary.
    """
    setting = f"speculative.token_map: {file}"
    try:
        if file.suffix == ".json":
            found = json.loads(file.read_text())
        else:
            found = torch.load(file, map_location="cpu", weights_only=True)
        ids = torch.as_tensor(found)
    except (OSError, RuntimeError, ValueError, TypeError, pickle.UnpicklingError) as error:
        raise ConfigError(f"{setting} cannot be read as a list of token ids: {error}") from error
    if ids.dim() != 1 or not len(ids) or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ConfigError(f"{setting} must be a list of token ids, not {list(ids.shape)}")
    ids = ids.to(torch.int64).sort().values
    if int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        raise ConfigError(f"{setting} leads out of the target's vocabulary of {vocab_size} tokens")
    if len(ids.unique()) != len(ids):
        raise ConfigError(f"{setting} has a token id twice")
    return ids


class WithTokenMap:
    """A head's tensors, and as its output head the rows of the target's that the map names."""

    def __init__(self, head: TensorFiles, target: TensorFiles, ids: Tensor, path: Path) -> None:
        if HEAD in head.shapes():
            raise ConfigError(
                f"speculative.token_map cuts the target's output head, but {path} has its own"
            )
        of_target = target.shapes()
        # A tied head is the embedding.
        self._name = next((n for n in (HEAD, "model.embed_tokens.weight") if n in of_target), "")
        if not self._name:
            raise ModelLoadError(f"speculative.token_map: the target has no {HEAD} to cut")
        self._head, self._target, self._ids = head, target, ids
        self._rows, self._columns = of_target[self._name]

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {**self._head.shapes(), HEAD: (len(self._ids), self._columns)}

    def read(self, name: str, dim: int, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        if name != HEAD:
            return self._head.read(name, dim, start, stop, dtype)
        whole = self._target.read(self._name, 0, 0, self._rows, dtype)
        return whole[self._ids].narrow(dim, start, stop - start)
