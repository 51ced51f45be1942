"""The scales of an fp8 KV cache that a checkpoint was calibrated with, if it was."""

from __future__ import annotations

import math
import re
from pathlib import Path

import torch

from spectrue.workers.errors import ModelLoadError
from spectrue.workers.kv_cache import KVScales
from spectrue.workers.weights import TensorFiles, named

# As compressed-tensors writes them; as AMD's Quark and NVIDIA's ModelOpt do.
_NAME = re.compile(
    r"model\.layers\.(\d+)\.self_attn\."
    r"(?:([kv])_scale|([kv])_proj\.(?:\3_scale|output_scale))"
)


def is_kv_scale(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def read_kv_scales(path: Path, files: TensorFiles, num_layers: int) -> KVScales:
    """Key's and value's of each layer, () if there are none. A value is what is stored * scale.

    Raises ModelLoadError for a layer without both, and for a scale that is not one positive number.
    """
    found: dict[tuple[int, str], float] = {}
    shapes = files.shapes()
    for name in shapes:
        match = _NAME.fullmatch(name)
        if match is None or int(match[1]) >= num_layers:
            continue
        if math.prod(shapes[name]) != 1:
            raise ModelLoadError(f"{path}: {name} has shape {shapes[name]}, only one number works")
        scale = float(files.read(name, 0, 0, 1, torch.float32).flatten()[0])
        if not 0 < scale < math.inf:
            raise ModelLoadError(f"{path}: {name} is {scale}, which is no scale")
        found[int(match[1]), match[2] or match[3]] = scale
    if not found:
        return ()
    layers = range(num_layers)
    missing = {f"{kind}_scale of layer {i}" for i in layers for kind in "kv"}
    missing -= {f"{kind}_scale of layer {i}" for i, kind in found}
    if missing:
        raise ModelLoadError(f"{path} has scales of an fp8 KV cache, but lacks {named(missing)}")
    return tuple((found[i, "k"], found[i, "v"]) for i in layers)
