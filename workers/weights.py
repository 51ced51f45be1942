"""Checkpoints -> a model: each rank reads its own shard, one weight at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from spectrue.workers.config import LoadFormat
from spectrue.workers.errors import ConfigError, ModelLoadError
from spectrue.workers.parallel import TPGroup

if TYPE_CHECKING:
    from spectrue.workers.models.base import Model
    from spectrue.workers.models.config import ModelConfig

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # (weights read, weights in all)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MAX_NAMED = 8  # weights named in an error


class TensorFiles(Protocol):
    """Named tensors on disk."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str, dim: int, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """The part [start, stop) of one dimension, reading no more than that where it can."""
        ...


class WeightSource(TensorFiles, Protocol):
    """A checkpoint of a whole model under Hugging Face's names."""

    config: ModelConfig


class WeightReader:
    """Reads shards of this rank's weights in the model's dtype, on its device."""

    def __init__(
        self,
        source: TensorFiles,
        shapes: Mapping[str, tuple[int, ...]],  # of the weights that will be read
        dtype: torch.dtype,
        device: torch.device,
        group: TPGroup,
        progress: Progress | None = None,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self._source = source
        self._shapes = shapes
        self._group = group
        self._progress = progress
        self._done: set[str] = set()

    def __call__(self, name: str) -> Tensor:
        """The whole weight."""
        return self.range(name, 0, self._shapes[name][0])

    def rows(self, name: str) -> Tensor:
        """This rank's equal part of dimension 0."""
        return self.range(name, *self._part(name, 0))

    def columns(self, name: str) -> Tensor:
        """This rank's equal part of dimension 1."""
        return self.range(name, *self._part(name, 1), dim=1)

    def range(self, name: str, start: int, stop: int, dim: int = 0) -> Tensor:
        tensor = self._source.read(name, dim, start, stop, self.dtype).to(self.device)
        self._done.add(name)
        if self._progress is not None:
            self._progress(len(self._done), len(self._shapes))
        return tensor.contiguous()

    def _part(self, name: str, dim: int) -> tuple[int, int]:
        part = self._shapes[name][dim] // self._group.size
        return part * self._group.rank, part * (self._group.rank + 1)


def resolve_dtype(name: str, device: torch.device | str = "cpu") -> torch.dtype:
    """`auto`: bfloat16 where the hardware multiplies it, else float32."""
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise ConfigError(f"dtype must be one of auto, {', '.join(DTYPES)}, got {name!r}")
    if torch.device(device).type != "cpu":
        return torch.bfloat16
    flags = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    fast = any(getattr(torch.cpu, flag, lambda: False)() for flag in flags)
    return torch.bfloat16 if fast else torch.float32


def named(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:MAX_NAMED])
    return shown + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")


def check_weights(
    path: Path,
    found: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    tied: bool,
) -> None:
    """Every weight of the model is there with its shape, and nothing is left over."""
    missing = expected.keys() - found.keys()
    if missing:
        raise ModelLoadError(f"{path} lacks weights of its model: {named(missing)}")
    unused = {
        name
        for name in found.keys() - expected.keys()
        if not name.endswith(".rotary_emb.inv_freq") and not (tied and name == "lm_head.weight")
    }
    if unused:
        raise ModelLoadError(f"{path} has weights that its model would ignore: {named(unused)}")
    for name, shape in expected.items():
        if found[name] != shape:
            raise ModelLoadError(f"{path}: {name} has shape {found[name]}, expected {shape}")


def open_source(path: Path) -> WeightSource:
    if path.is_dir():
        from spectrue.workers.weights_safetensors import SafetensorsSource

        return SafetensorsSource(path)
    if path.suffix == ".gguf" and path.is_file():
        from spectrue.workers.weights_gguf import GGUFSource

        return GGUFSource(path)
    raise ModelLoadError(f"{path} is neither a checkpoint directory nor a .gguf file")


def _own_weights(path: Path, source: WeightSource) -> Mapping[str, tuple[int, ...]]:
    """Without the scales of the KV cache, and what drafter `mtp` reads (`weights_mtp.py`)."""
    from spectrue.workers.models.config import read_json
    from spectrue.workers.weights_kv_scales import is_kv_scale
    from spectrue.workers.weights_mtp import is_mtp_weight, num_mtp_layers

    shapes = {n: shape for n, shape in source.shapes().items() if not is_kv_scale(n)}
    if not path.is_dir() or not num_mtp_layers(read_json(path / "config.json")):
        return shapes
    num_layers = source.config.num_layers
    return {n: shape for n, shape in shapes.items() if not is_mtp_weight(n, num_layers)}


def load_model(
    path: Path | str,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    group: TPGroup | None = None,
    progress: Progress | None = None,
    load_format: LoadFormat = "auto",
) -> Model:
    """Load this rank's shard of a checkpoint: a Hugging Face directory or a .gguf file.

    What no model file of ours serves runs by transformers (`models/generic.py`).
    """
    from spectrue.workers.models.layers import check_shards
    from spectrue.workers.models.registry import MODELS, expected_weights, is_generic
    from spectrue.workers.weights_dummy import DummySource, check_dummy
    from spectrue.workers.weights_kv_scales import read_kv_scales

    path, device, group = Path(path), torch.device(device), group or TPGroup()
    if isinstance(dtype, str):
        dtype = resolve_dtype(dtype, device)
    dummy = load_format == "dummy"
    if dummy:
        check_dummy(path)
        logger.warning("load_format = dummy: %s gets random weights, its texts are noise", path)
    if is_generic(path):
        from spectrue.workers.models.generic_load import load_generic

        return load_generic(path, dtype, device, group, progress, dummy=dummy)
    source = DummySource.of_directory(path, device) if dummy else open_source(path)
    config = source.config
    check_shards(config, group.size)
    expected = expected_weights(config)
    check_weights(path, _own_weights(path, source), expected, config.tie_word_embeddings)
    reader = WeightReader(source, expected, dtype, device, group, progress)
    with torch.no_grad():
        model = MODELS[config.family](config, reader, group)
    model.kv_scales = read_kv_scales(path, source, config.num_layers)
    return model
