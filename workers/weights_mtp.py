"""The multi-token-prediction layer inside a target's checkpoint: where it is, and loading it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spectrue.workers.errors import ConfigError
from spectrue.workers.models.base import Model
from spectrue.workers.models.config import read_json
from spectrue.workers.models.generic import GenericModel
from spectrue.workers.models.generic_mtp import LAYER, load_mtp_layer
from spectrue.workers.models.head import DraftHead, HeadParts
from spectrue.workers.models.head_config import HeadConfig
from spectrue.workers.models.head_shapes import head_weights
from spectrue.workers.parallel import TPGroup
from spectrue.workers.weights import Progress, TensorFiles, WeightReader, check_weights
from spectrue.workers.weights_head import Renamed, build_head, open_files
from spectrue.workers.weights_kv_scales import is_kv_scale

COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
# DeepSeek-V3's and GLM-4's names, below model.layers.{num_hidden_layers}; then Qwen3-Next's.
_DEEPSEEK = {"shared_head.norm.": "norm.", "shared_head.head.": "lm_head."}
_QWEN = {"fc.": "eh_proj.", "pre_fc_norm_embedding.": "enorm.", "pre_fc_norm_hidden.": "hnorm."}
_OWN = ("embed_tokens.", "enorm.", "hnorm.", "eh_proj.", "shared_head.")


def num_mtp_layers(raw: Mapping[str, Any]) -> int:
    """How many MTP layers a config.json says its checkpoint has."""
    for section in (raw, raw.get("text_config") or {}):
        for key in COUNTS:
            if section.get(key):
                return int(section[key])
    return 0


def is_mtp_weight(name: str, num_layers: int) -> bool:
    """Whether a weight of a target is its MTP layers', which the target itself does not use."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return name.startswith("mtp.") or (layer is not None and int(layer[1]) >= num_layers)


def mtp_names(names: Iterable[str], num_layers: int) -> tuple[dict[str, str], bool]:
    """Our name of each weight of the first MTP layer -> the checkpoint's; whether it is Qwen's."""
    found: dict[str, str] = {}
    prefix, qwen = f"model.layers.{num_layers}.", False
    for name in names:
        if is_kv_scale(name):
            continue
        if name.startswith(prefix):
            ours = name.removeprefix(prefix)
            if not ours.startswith(_OWN):
                ours = f"layers.0.{ours}"
            renames = _DEEPSEEK
        elif name.startswith("mtp.") and not re.match(r"mtp\.layers\.[1-9]", name):
            ours, renames, qwen = name.removeprefix("mtp."), _QWEN, True
        else:
            continue
        for old, new in renames.items():
            if ours.startswith(old):
                ours = new + ours.removeprefix(old)
        found[ours] = name
    return found, qwen


class _OnePlus:
    """Qwen3-Next's norms multiply by 1 + weight."""

    def __init__(self, files: TensorFiles) -> None:
        self._files = files

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._files.shapes()

    def read(self, name: str, dim: int, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        tensor = self._files.read(name, dim, start, stop, torch.float32)
        return (tensor + 1 if "norm" in name else tensor).to(dtype)


def load_mtp(
    path: Path,
    target: Model,
    *,
    dtype: torch.dtype,
    group: TPGroup,
    progress: Progress | None = None,
) -> tuple[DraftHead, HeadConfig]:
    """Load this rank's shard of the MTP layer in the target's checkpoint.

    A target that runs by transformers has its decoder layer run so too. Raises ConfigError where
    there is none, or where a target of our own has one that is not Llama's.
    """
    count = num_mtp_layers(read_json(path / "config.json")) if path.is_dir() else 0
    if not count:
        raise ConfigError(
            f"speculative.drafter: mtp needs a target with a multi-token-prediction layer, and "
            f"the config.json of {path} names none ({', '.join(COUNTS)})"
        )
    files = open_files(path)
    names, qwen = mtp_names(files.shapes(), target.config.num_layers)
    if not names:
        raise ConfigError(
            f"speculative.drafter: mtp: {path} says that it has {count} multi-token-prediction "
            f"layers, but their weights are not in it (some conversions drop them)"
        )
    renamed = Renamed(files, names)
    shapes = renamed.shapes()
    config = HeadConfig(
        method="mtp",
        model=replace(target.config, num_layers=1),
        draft_vocab_size=target.config.vocab_size,
        target_hidden_size=target.config.hidden_size,
    )
    source = _OnePlus(renamed) if qwen else renamed
    if isinstance(target, GenericModel):
        outer = replace(config, model=replace(config.model, num_layers=0))
        expected = head_weights(outer, shapes)
        own = {n: shape for n, shape in shapes.items() if not n.startswith(LAYER)}
        check_weights(path, own, expected, tied=False)
        parts = HeadParts(
            config=config,
            read=WeightReader(source, expected, dtype, target.device, group, progress),
            names=frozenset(expected),
            target=target,
            vocab=None,
            group=group,
        )
        return load_mtp_layer(path, renamed, target, parts), config
    _refuse(path, shapes, target)
    head = build_head(path, config, source, shapes, target, None, dtype, group, progress)
    return head, config


def _refuse(path: Path, shapes: Mapping[str, tuple[int, ...]], target: Model) -> None:
    """Decoder layers that a target of our own file could not have itself."""
    kinds = []
    query = shapes.get("layers.0.self_attn.q_proj.weight")
    if any("kv_a_proj_with_mqa" in name for name in shapes):
        kinds.append("multi-head latent attention (MLA)")
    elif query is not None and query[0] != target.config.num_heads * target.config.head_dim:
        kinds.append("attention with an output gate")
    if any(".experts." in name or ".mlp.gate.weight" in name for name in shapes):
        kinds.append("a mixture of experts")
    if kinds:
        raise ConfigError(
            f"speculative.drafter: mtp: the multi-token-prediction layer of {path} has "
            f"{' and '.join(kinds)}, which {target.config.family} models do not have. Use "
            f"ngram, or an eagle3 head of this target"
        )
