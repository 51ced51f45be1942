"""File, environment, flags: who wins, and what a mistake says."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from spectrue.deploy.config import (
    DEFAULT_FILE,
    EngineSection,
    ServerConfig,
    ServeSection,
    SpeculativeSection,
    load_config,
    settings,
)
from spectrue.workers.config import EngineConfig, SpeculativeConfig
from spectrue.workers.errors import ConfigError
from spectrue.workers.model_store import DEFAULT_MODEL


def load(
    tmp_path: Path,
    text: str = "",
    flags: dict[str, Any] | None = None,
    environ: dict[str, str] | None = None,
) -> ServerConfig:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    return load_config(file, flags, environ or {})


def test_defaults() -> None:
    config = load_config(environ={})
    assert config.engine == EngineConfig(model=DEFAULT_MODEL)
    assert config.serve == ServeSection()


@pytest.mark.parametrize(
    ("section", "target"), [(EngineSection, EngineConfig), (SpeculativeSection, SpeculativeConfig)]
)
def test_sections_mirror_the_engine(section: type[BaseModel], target: type[Any]) -> None:
    assert list(section.model_fields) == [f.name for f in dataclasses.fields(target)]


def test_default_yaml_shows_every_setting_with_its_default(tmp_path: Path) -> None:
    text = DEFAULT_FILE.read_text()
    _, body = text.split("\n\nengine:")
    body = "engine:" + re.sub(r"(?m)^( +)# ", r"\1", body)
    assert set(re.findall(r"(?m)^ +(\w+):", body)) == {
        part for name in settings() for part in name.split(".")[1:]
    }
    assert load(tmp_path, body) == load(tmp_path)


def test_later_sources_win(tmp_path: Path) -> None:
    text = "engine: {max_num_seqs: 5, speculative: {num_speculative_tokens: 1}}\nserve: {port: 1}"
    environ = {"SPECTRUE_PORT": "2", "SPECTRUE_SPECULATIVE_NUM_SPECULATIVE_TOKENS": "2"}
    flags = {"serve.port": 3, "serve.host": None, "engine.speculative.drafter": None}
    config = load(tmp_path, text, flags, environ)
    assert config.engine.max_num_seqs == 5
    assert config.engine.speculative.num_speculative_tokens == 2
    assert config.serve.port == 3
    assert config.serve.host == "127.0.0.1"


def test_empty_sections(tmp_path: Path) -> None:
    assert load(tmp_path, "engine:\n  speculative:\nserve:\n") == load(tmp_path)


def test_a_draft_model_chooses_its_drafter(tmp_path: Path) -> None:
    config = load(tmp_path, flags={"engine.speculative.draft_model": "/m"})
    assert config.engine.speculative.drafter == "draft_model"
    with pytest.raises(ConfigError, match=r"speculative\.draft_model"):
        load(
            tmp_path,
            flags={"engine.speculative.draft_model": "/m", "engine.speculative.drafter": "ngram"},
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engin: {}", r"setting engin \(did you mean engine\?\); valid under the top level are "),
        ("engine: {modle: x}", r"engine\.modle \(did you mean model\?\); valid under engine are "),
        (
            "engine: {speculative: {k: 1}}",
            r"engine\.speculative\.k; valid under engine\.speculative are drafter, ",
        ),
        ("serve: {port: '80'}", r"serve\.port: .*integer, got '80'"),
        ("serve: {port: 0}", r"serve\.port"),
        ("serve: {port: true}", r"serve\.port"),
        ("engine: {dtype: fp8}", r"engine\.dtype: .*'bfloat16'.*, got 'fp8'"),
        ("engine: {speculative: {drafter: eagel}}", r"engine\.speculative\.drafter"),
        ("engine: {tp_size: 0}", r"tp_size must be at least 1"),
        ("engine: {speculative: {num_speculative_tokens: 17}}", r"num_speculative_tokens"),
        ("engine: [", r"not valid YAML"),
        ("engine: {tp_size: 1, tp_size: 2}", r"c\.yaml: the key tp_size is there twice"),
        ("serve: {}\nengine: {}\nserve:\n", r"the key serve is there twice, in lines 1 and 3"),
        ("- 1", r"must hold a mapping"),
    ],
)
def test_mistakes_name_the_setting(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text)


def test_mistakes_name_their_source(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        load(tmp_path, "serve: {port: x}", {"serve.port": 5})
    with pytest.raises(ConfigError, match=r"SPECTRUE_PORT"):
        load(tmp_path, environ={"SPECTRUE_PORT": "x"})
    with pytest.raises(ConfigError, match=r"SPECTRUE_PROT \(did you mean SPECTRUE_PORT\?\); valid"):
        load(tmp_path, environ={"SPECTRUE_PROT": "1"})
    with pytest.raises(ConfigError, match=r"unknown environment variable SPECTRUE_XYZ; valid are"):
        load(tmp_path, environ={"SPECTRUE_XYZ": "1"})
    with pytest.raises(ConfigError, match=r"SPECTRUE_PORT is not valid YAML"):
        load(tmp_path, environ={"SPECTRUE_PORT": "["})
    with pytest.raises(ConfigError, match=r"the command line"):
        load(tmp_path, flags={"engine.dtype": "int8"})
    with pytest.raises(ConfigError, match=r"cannot read the config file"):
        load_config(tmp_path / "none.yaml", environ={})
