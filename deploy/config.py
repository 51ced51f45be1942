"""The operator's settings: YAML file, then SPECTRUE_* variables, then flags; later ones win.

The only place that reads the environment. `load_config` gives the frozen `EngineConfig`, checked.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spectrue.workers.config import (
    AuxLayerConvention,
    Depth,
    DrafterName,
    DraftSampling,
    DType,
    EngineConfig,
    KVCacheDType,
    LoadFormat,
    SpeculativeConfig,
    TreeKind,
    VerifyMethod,
)
from spectrue.workers.core import shown
from spectrue.workers.errors import ConfigError

ENV_PREFIX = "SPECTRUE_"
DEFAULT_FILE = Path(__file__).with_name("default.yaml")


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class SpeculativeSection(Section):
    """Mirrors SpeculativeConfig; a test compares the fields. Left out: the engine's default."""

    drafter: DrafterName | None = None
    num_speculative_tokens: int | None = None
    tree_topk: int | None = None
    tree_size: int | None = None
    tree_kind: TreeKind | None = None
    depth: Depth | None = None
    depth_schedule: list[list[int]] | None = None
    simulated_acceptance: list[float] | None = None
    simulated_accept_length: float | None = None
    draft_model: str | None = None
    token_map: str | None = None
    aux_layer_convention: AuxLayerConvention | None = None
    strict_draft: bool | None = None
    draft_top_k: int | None = None
    draft_top_p: float | None = None
    verify_method: VerifyMethod | None = None
    draft_sampling: DraftSampling | None = None
    reproducible: bool | None = None
    ngram_min: int | None = None
    ngram_max: int | None = None


class EngineSection(Section):
    """Mirrors EngineConfig."""

    model: str | None = None
    served_model_name: str | None = None
    dtype: DType | None = None
    kv_cache_dtype: KVCacheDType | None = None
    load_format: LoadFormat | None = None
    device: Literal["auto", "cpu", "cuda"] | None = None
    tp_size: int | None = None
    cpu_threads: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_queue_len: int | None = None
    block_size: int | None = None
    num_kv_blocks: int | None = None
    kv_cache_bytes: int | None = None
    enable_prefix_caching: bool | None = None
    enable_graphs: bool | None = None
    warm_up_seconds: float | None = None
    enable_p2p_all_reduce: bool | None = None
    speculative: SpeculativeSection = SpeculativeSection()


class ServeSection(Section):
    """How Ray Serve runs the replicas. Times in seconds unless the name says otherwise."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    route_prefix: str = Field(default="/", pattern="^/")
    num_replicas: int = Field(default=1, ge=1)
    max_queued_requests: int = Field(default=1024, ge=-1)  # per proxy; -1 is no limit
    stream_interval_ms: float = Field(default=0.0, ge=0)  # 0: one event a step
    health_check_period: float = Field(default=2.0, gt=0)
    heartbeat_timeout: float = Field(default=60.0, gt=0)  # one step may not take longer
    graceful_shutdown_timeout: float = Field(default=60.0, ge=0)


class Config(Section):
    engine: EngineSection = EngineSection()
    serve: ServeSection = ServeSection()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Everything that a deployment needs, checked."""

    engine: EngineConfig
    serve: ServeSection


def load_config(
    file: str | Path | None = None,
    flags: Mapping[str, Any] | None = None,  # dotted, "engine.speculative.drafter"; None: not given
    environ: Mapping[str, str] = os.environ,
) -> ServerConfig:
    """Raises ConfigError, which names the setting and where it came from."""
    path = Path(file) if file is not None else DEFAULT_FILE
    tree = _read_yaml(path)
    _validate(tree, str(path))  # blames the file for what is in the file
    for name, text in _environment(environ).items():
        try:
            _set(tree, name, yaml.safe_load(text))
        except yaml.YAMLError:
            raise ConfigError(f"{_env_name(name)} is not valid YAML: {shown(text)}") from None
        _validate(tree, f"the environment ({_env_name(name)})")
    for name, value in (flags or {}).items():
        if value is not None:
            _set(tree, name, value)
    config = _validate(tree, "the command line")
    return ServerConfig(engine=engine_config(config.engine), serve=config.serve)


def engine_config(section: EngineSection) -> EngineConfig:
    values = section.model_dump(exclude_none=True)
    speculative = values.pop("speculative")
    if "depth_schedule" in speculative:
        speculative["depth_schedule"] = tuple(tuple(e) for e in speculative["depth_schedule"])
    if "simulated_acceptance" in speculative:
        speculative["simulated_acceptance"] = tuple(speculative["simulated_acceptance"])
    if speculative.get("draft_model") is not None:
        speculative.setdefault("drafter", "draft_model")
    if "model" not in values:
        from spectrue.workers.model_store import DEFAULT_MODEL

        values["model"] = DEFAULT_MODEL
    return EngineConfig(**values, speculative=SpeculativeConfig(**speculative))


def settings(section: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Every setting's dotted name."""
    names: list[str] = []
    for key, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            names += settings(kind, f"{prefix}{key}.")
        else:
            names.append(prefix + key)
    return names


def _env_name(setting: str) -> str:
    """engine.speculative.drafter -> SPECTRUE_SPECULATIVE_DRAFTER, serve.port -> SPECTRUE_PORT."""
    return ENV_PREFIX + setting.split(".", 1)[1].replace(".", "_").upper()


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    names = {_env_name(setting): setting for setting in settings()}
    found = {}
    for key, value in environ.items():
        if key.startswith(ENV_PREFIX) and key not in NOT_SETTINGS:
            if key not in names:
                raise ConfigError(
                    f"unknown environment variable {key}{_did_you_mean(key, names)}; "
                    f"valid are {', '.join(sorted(names))}"
                )
            found[names[key]] = value
    return found


# Read elsewhere: where models are cached, and the checkpoint that slow tests run on.
NOT_SETTINGS = frozenset({"SPECTRUE_CACHE", "SPECTRUE_TEST_MODEL"})


class _TwiceError(Exception):
    """A key that a mapping has twice."""


class _Loader(yaml.SafeLoader):
    """PyYAML's own would take the last of two equal keys and say nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode):
                if key.value in lines:
                    where = f"lines {lines[key.value]} and {line}"
                    raise _TwiceError(f"the key {key.value} is there twice, in {where}")
                lines[key.value] = line
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as e:
        raise ConfigError(f"cannot read the config file {path}: {e.strerror or e}") from None
    except _TwiceError as e:
        raise ConfigError(f"{path}: {e}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path} is not valid YAML: {e}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping with the keys engine and serve")
    return tree


def _set(tree: dict[str, Any], name: str, value: Any) -> None:
    *parents, last = name.split(".")
    for key in parents:
        if tree.get(key) is None:
            tree[key] = {}
        tree = tree[key]
    tree[last] = value


def _validate(tree: dict[str, Any], source: str) -> Config:
    # A section with all its lines commented out reads as null.
    tree = {k: {} if v is None and k in Config.model_fields else v for k, v in tree.items()}
    engine = tree.get("engine")
    if isinstance(engine, dict) and engine.get("speculative", ...) is None:
        tree["engine"] = {**engine, "speculative": {}}
    try:
        return Config.model_validate(tree)
    except ValidationError as e:
        error = e.errors(include_url=False)[0]
        loc = [str(part) for part in error["loc"]]
        if error["type"] == "extra_forbidden":
            section, valid = ".".join(loc[:-1]), _keys(loc[:-1])
            raise ConfigError(
                f"{source}: unknown setting {'.'.join(loc)}{_did_you_mean(loc[-1], valid)}; "
                f"valid under {section or 'the top level'} are {', '.join(valid)}"
            ) from None
        raise ConfigError(
            f"{source}: {'.'.join(loc)}: {error['msg']}, got {shown(error['input'])}"
        ) from None


def _did_you_mean(name: str, valid: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.8)
    return f" (did you mean {close[0]}?)" if close else ""


def _keys(path: list[str]) -> list[str]:
    section: type[BaseModel] = Config
    for key in path:
        kind = section.model_fields[key].annotation
        assert isinstance(kind, type)
        section = kind
    return list(section.model_fields)
