"""A trained head as others publish theirs: config.json and safetensors under EAGLE3's names."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from spectrue.workers.training.eagle3 import TrainableHead
from spectrue.workers.training.vocabulary import HotVocab

SHARD_BYTES = 9_000_000  # below what version control and mail take in one file


def export_head(
    head: TrainableHead, vocab: HotVocab, out: Path, shard_bytes: int = SHARD_BYTES
) -> list[Path]:
    """Write the head to `out` in bfloat16; the files. Embeddings stay the target's."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.to("cpu", torch.bfloat16) for name, value in head.published().items()}
    size = head.shape.target.vocab_size
    if head.shape.draft_vocab_size < size:
        tensors |= {"d2t": vocab.d2t, "t2d": vocab.t2d(size)}
    for stale in out.glob("model*.safetensors*"):
        stale.unlink()
    parts = _split(tensors, shard_bytes)
    paths = []
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05}-of-{len(parts):05}.safetensors"
        paths.append(out / ("model.safetensors" if len(parts) == 1 else name))
        save_file({n: t.contiguous() for n, t in part.items()}, paths[-1], {"format": "pt"})
        paths[-1].chmod(0o644)  # safetensors leaves files that their owner alone can read
    if len(parts) > 1:
        total = sum(t.nbytes for t in tensors.values())
        where = {n: path.name for part, path in zip(parts, paths, strict=True) for n in part}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    (out / "config.json").write_text(json.dumps(head.shape.as_config(), indent=1) + "\n")
    return paths


def _split(tensors: dict[str, Tensor], shard_bytes: int) -> list[dict[str, Tensor]]:
    parts: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in tensors.items():
        if parts[-1] and used + tensor.nbytes > shard_bytes:
            parts.append({})
            used = 0
        parts[-1][name] = tensor
        used += tensor.nbytes
    return parts
