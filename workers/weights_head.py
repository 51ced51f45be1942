"""Draft heads -> memory: which kind a checkpoint is; its weights, checked, under our names."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from spectrue.workers.config import AuxLayerConvention, LoadFormat
from spectrue.workers.errors import ConfigError, ModelLoadError
from spectrue.workers.models.base import Model
from spectrue.workers.models.config import read_json
from spectrue.workers.models.eagle import EagleHead
from spectrue.workers.models.eagle3 import Eagle3Head
from spectrue.workers.models.head import DraftHead, HeadParts
from spectrue.workers.models.head_config import HeadConfig, HeadMethod, head_config
from spectrue.workers.models.head_shapes import head_weights, with_found_options
from spectrue.workers.models.layers import check_shards
from spectrue.workers.models.mtp import MTPHead
from spectrue.workers.parallel import TPGroup
from spectrue.workers.proposal import DraftVocab
from spectrue.workers.weights import (
    Progress,
    TensorFiles,
    WeightReader,
    check_weights,
    open_source,
)
from spectrue.workers.weights_dummy import DummySource
from spectrue.workers.weights_safetensors import SafetensorsFiles
from spectrue.workers.weights_token_map import WithTokenMap, read_token_map
from spectrue.workers.weights_torch import FILE as TORCH_FILE
from spectrue.workers.weights_torch import TorchFile

Shapes = Mapping[str, tuple[int, ...]]

# Other spellings of the names that we use, in order.
_RENAMES = (
    (r"^model\.", ""),
    (r"^midlayer\.", "layers.0."),
    (r"^aux_norm_low\.", "fc_norm.0."),  # legacy
    (r"^aux_norm_mid\.", "fc_norm.1."),
    (r"^aux_norm_high\.", "fc_norm.2."),
)
HEADS: dict[HeadMethod, Callable[[HeadParts], DraftHead]] = {
    "eagle": EagleHead,
    "eagle3": Eagle3Head,
    "mtp": MTPHead,
}
_MAPS = ("d2t", "t2d")  # tables between the vocabularies, not weights


def open_files(path: Path) -> TensorFiles:
    """The tensors of a directory. Raises ModelLoadError."""
    if path.is_dir() and (path / TORCH_FILE).is_file() and not any(path.glob("*.safetensors")):
        return TorchFile(path)
    return SafetensorsFiles(path)


def canonical(names: Shapes) -> dict[str, str]:
    """Our name of each weight -> the checkpoint's."""
    found: dict[str, str] = {}
    for name in names:
        ours = name
        for pattern, replacement in _RENAMES:
            ours = re.sub(pattern, replacement, ours)
        found[ours] = name
    return found


def kind_of(names: Collection[str]) -> str:
    """The drafter that a checkpoint with weights of these (canonical) names is for."""
    if "layers.0.hidden_norm.weight" in names or "d2t" in names:
        return "eagle3"
    if any(name.startswith("mtp_layers.") for name in names):
        return "mtp"
    if "fc.weight" in names:
        return "eagle"
    return "draft_model"


def check_method(path: Path, method: str) -> None:
    """Raise ConfigError if a checkpoint is for another drafter than the configured one.

    An EAGLE flag with an EAGLE3 head runs in other engines, and accepts nothing (sglang#21272).
    """
    if not path.is_dir():
        if method != "draft_model":
            raise ModelLoadError(f"{path} is no directory with a draft head")
        return
    kind = kind_of(canonical(open_files(path).shapes()))
    if kind != method:
        raise ConfigError(
            f"speculative.drafter: {method} does not fit {path}, which is for "
            f"speculative.drafter: {kind}"
        )


class Renamed:
    """A checkpoint's tensors under our names."""

    def __init__(self, files: TensorFiles, names: Mapping[str, str]) -> None:
        self._files = files
        self._names = names

    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = self._files.shapes()
        return {ours: shapes[name] for ours, name in self._names.items()}

    def read(self, name: str, dim: int, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        return self._files.read(self._names[name], dim, start, stop, dtype)


def load_head(
    path: Path,
    method: str,
    target: Model,
    *,
    convention: AuxLayerConvention = "auto",
    dtype: torch.dtype,
    group: TPGroup,
    progress: Progress | None = None,
    load_format: LoadFormat = "auto",
    token_map: str | None = None,  # a file with the draft vocabulary of an `eagle` head
    target_path: Path | None = None,  # whose output head is cut to it
) -> tuple[DraftHead, HeadConfig]:
    """Load this rank's shard of an `eagle` or `eagle3` head of `target`.

    Raises ConfigError for a head that the method or the target does not fit, ModelLoadError for
    weights that are missing, of another shape, or that would not be used.
    """
    if load_format != "dummy":
        check_method(path, method)
    raw = read_json(path / "config.json")
    if str(raw.get("speculators_model_type", method)) not in ("eagle", "eagle3"):
        kind = raw["speculators_model_type"]
        raise ModelLoadError(f"{path} is a {kind} head of speculators, which is not supported")
    config = head_config(
        raw, path, "eagle3" if method == "eagle3" else "eagle", target.config, convention
    )
    hot = None
    if token_map is not None:
        hot = read_token_map(Path(token_map), target.config.vocab_size)
        config = replace(config, draft_vocab_size=len(hot))
    _check_hot_vocab(path, raw.get("hot_vocab_size"), hot)
    files: TensorFiles
    if load_format == "dummy":
        shapes = head_weights(config, {})
        files = DummySource(config.model, shapes, target.device)
        vocab = _dummy_vocab(config)
    else:
        renamed = Renamed(found := open_files(path), canonical(found.shapes()))
        if hot is not None and target_path is not None:
            whole = open_files(target_path) if target_path.is_dir() else open_source(target_path)
            files = WithTokenMap(renamed, whole, hot, path)
            vocab = make_vocab(hot, target.config.vocab_size)
        else:
            files, vocab = renamed, read_vocab(path, renamed, config)
        shapes = dict(files.shapes())
    return build_head(path, config, files, shapes, target, vocab, dtype, group, progress), config


def _check_hot_vocab(path: Path, declared: int | None, hot: Tensor | None) -> None:
    """A head may say how many tokens it was trained to draft."""
    if declared is not None and declared != (None if hot is None else len(hot)):
        found = "no speculative.token_map is set" if hot is None else f"the map has {len(hot)}"
        raise ConfigError(
            f"{path} drafts {declared} tokens (hot_vocab_size) that a speculative.token_map of as "
            f"many ids must name; {found}"
        )


def build_head(
    path: Path,
    config: HeadConfig,
    files: TensorFiles,
    found: Shapes,  # under our names
    target: Model,
    vocab: DraftVocab | None,
    dtype: torch.dtype,
    group: TPGroup,
    progress: Progress | None = None,
) -> DraftHead:
    """Check a head's weights and make it."""
    found = {name: shape for name, shape in found.items() if name not in _MAPS}
    config = replace(
        config,
        model=with_found_options(config.model, found),
        norm_before_fc=config.norm_before_fc or "input_norm.weight" in found,
        fc_norm=config.fc_norm or "fc_norm.0.weight" in found,
    )
    if config.norm_before_fc and config.fc_norm:
        raise ModelLoadError(f"{path} has both norm_before_fc and fc_norm: a head has one of them")
    expected = head_weights(config, found)
    check_weights(path, found, expected, tied=False)
    check_shards(config.model, group.size)
    _check_shared(path, config, expected, target)
    parts = HeadParts(
        config=config,
        read=WeightReader(files, expected, dtype, target.device, group, progress),
        names=frozenset(expected),
        target=target,
        vocab=vocab,
        group=group,
    )
    return HEADS[config.method](parts)


def _check_shared(path: Path, config: HeadConfig, expected: Shapes, target: Model) -> None:
    """What the head takes from the target must fit it."""
    hidden, of_target = config.model.hidden_size, config.target_hidden_size
    if "embed_tokens.weight" not in expected and hidden != of_target:
        raise ModelLoadError(
            f"{path} has no embed_tokens.weight, and the target's has {of_target} columns where "
            f"the head's hidden_size is {hidden}"
        )
    if "lm_head.weight" not in expected and (
        hidden != of_target or config.draft_vocab_size != target.config.vocab_size
    ):
        raise ModelLoadError(
            f"{path} has no lm_head.weight, and the target's is no head of "
            f"{config.draft_vocab_size} tokens over a hidden_size of {hidden}"
        )


def read_vocab(path: Path, files: TensorFiles, config: HeadConfig) -> DraftVocab | None:
    """The draft vocabulary: `d2t` says by how much each draft id lies below its target id.

    A table that is dropped costs nearly all acceptance (vllm#18909), so it must be there when the
    vocabularies differ, and be sound. Raises ModelLoadError.
    """
    shapes, size, vocab_size = files.shapes(), config.draft_vocab_size, config.model.vocab_size
    if "d2t" not in shapes:
        if size != vocab_size:
            raise ModelLoadError(
                f"{path} has no d2t, which its draft vocabulary of {size} tokens needs"
            )
        return None
    if shapes["d2t"] != (size,):
        raise ModelLoadError(f"{path}: d2t has shape {shapes['d2t']}, expected {(size,)}")
    target_ids = torch.arange(size) + files.read("d2t", 0, 0, size, torch.int64)
    if not bool(((target_ids >= 0) & (target_ids < vocab_size)).all()):
        raise ModelLoadError(f"{path}: d2t leads out of the vocabulary of {vocab_size} tokens")
    if len(target_ids.unique()) != size:
        raise ModelLoadError(f"{path}: d2t gives two draft tokens one target token")
    if "t2d" in shapes:
        if shapes["t2d"] != (vocab_size,):
            expected = (vocab_size,)
            raise ModelLoadError(f"{path}: t2d has shape {shapes['t2d']}, expected {expected}")
        t2d = files.read("t2d", 0, 0, vocab_size, torch.int64) != 0
        if int(t2d.sum()) != size or not bool(t2d[target_ids].all()):
            raise ModelLoadError(f"{path}: d2t and t2d name different tokens")
    return make_vocab(target_ids, vocab_size)


def make_vocab(target_ids: Tensor, vocab_size: int) -> DraftVocab:
    """Both directions, from the target id of each draft token."""
    draft_index = torch.full((vocab_size,), -1, dtype=torch.int32)
    draft_index[target_ids] = torch.arange(len(target_ids), dtype=torch.int32)
    return DraftVocab(target_ids=target_ids, draft_index=draft_index)


def _dummy_vocab(config: HeadConfig) -> DraftVocab | None:
    size, vocab_size = config.draft_vocab_size, config.model.vocab_size
    if size == vocab_size:
        return None
    return make_vocab(torch.arange(size) * vocab_size // size, vocab_size)
