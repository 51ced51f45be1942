"""What a checkpoint's config.json and file names refuse, in milliseconds: before ranks are started.

The ranks check the same when they load, and all else. No torch and no transformers here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spectrue.workers.config import EngineConfig
from spectrue.workers.errors import ConfigError, ModelLoadError
from spectrue.workers.models.config import read_json
from spectrue.workers.tokenizer import FILES, has_tokenizer


def check_checkpoints(config: EngineConfig) -> None:
    """`config.model` and `draft_model` are paths. Raises ModelLoadError, which names the path, or
    ConfigError, which names the setting."""
    dummy = config.load_format == "dummy"
    path = Path(config.model)
    if dummy and not path.is_dir():
        raise ConfigError(f"load_format = dummy needs a directory with a config.json, not {path}")
    raw = _read(path, weights=not dummy)
    if not dummy and not has_tokenizer(path):
        raise ModelLoadError(f"{path}: its tokenizer cannot be loaded: none of {', '.join(FILES)}")
    _check_context(config, raw)
    _check_parts(config, raw)
    if config.speculative.draft_model is not None:
        _read(Path(config.speculative.draft_model), weights=not dummy)


def _read(path: Path, weights: bool) -> dict[str, Any]:
    """config.json; of a .gguf file nothing, after a look at what it begins with."""
    if not path.is_dir():
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelLoadError(f"{path} is not a GGUF file")
        return {}
    raw = read_json(path / "config.json")
    if weights and not (any(path.glob("*.safetensors*")) or any(path.glob("*.bin"))):
        raise ModelLoadError(f"{path} has no .safetensors file with weights")
    return raw


def _check_context(config: EngineConfig, raw: dict[str, Any]) -> None:
    positions = raw.get("max_position_embeddings")
    if config.max_model_len and isinstance(positions, int) and config.max_model_len > positions:
        raise ConfigError(
            f"max_model_len = {config.max_model_len} is more than the model's "
            f"max_position_embeddings = {positions}"
        )


def _check_parts(config: EngineConfig, raw: dict[str, Any]) -> None:
    for name in ("num_attention_heads", "num_key_value_heads"):
        size = raw.get(name)
        if isinstance(size, int) and size % config.tp_size:
            raise ConfigError(f"tp_size = {config.tp_size} must divide the model's {name} = {size}")
