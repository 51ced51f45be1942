"""`spectrue serve` refuses a checkpoint that cannot work before it starts Ray."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from spectrue.deploy import serve_local
from spectrue.deploy.config import load_config
from spectrue.workers.errors import ConfigError, ModelLoadError, SpectrueError


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(config: object) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr("signal.signal", lambda *args: None)
    monkeypatch.setattr(serve_local, "_check_port", lambda *args: None)
    monkeypatch.setattr(serve_local, "_start_ray", start)


def refusal(model: Path, **settings: Any) -> SpectrueError:
    flags = {"engine.model": str(model), "engine.device": "cpu"}
    flags |= {f"engine.{name.replace('__', '.')}": value for name, value in settings.items()}
    with pytest.raises(SpectrueError) as e:
        serve_local.serve_local(load_config(flags=flags, environ={}), Console(quiet=True))
    return e.value


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 513}, "max_model_len = 513 .*max_position_embeddings = 512"),
        ({"tp_size": 3}, "tp_size = 3 must divide the model's num_attention_heads = 4"),
        ({"tp_size": 4}, "tp_size = 4 must divide the model's num_key_value_heads = 2"),
    ],
)
@pytest.mark.usefixtures("no_ray")
def test_a_setting_that_does_not_fit(
    tiny_llama: Path, settings: dict[str, Any], message: str
) -> None:
    error = refusal(tiny_llama, **settings)
    assert isinstance(error, ConfigError)
    assert error.args[0]
    with pytest.raises(ConfigError, match=message):
        raise error


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ("config.json", "no config.json in it"),
        ("{", "is not JSON"),
        ("model.safetensors", "no .safetensors file with weights"),
        ("tokenizer*", "its tokenizer cannot be loaded: none of tokenizer.json"),
    ],
)
@pytest.mark.usefixtures("no_ray")
def test_a_broken_folder(tiny_llama: Path, tmp_path: Path, edit: str, message: str) -> None:
    path = tmp_path / "m"
    shutil.copytree(tiny_llama, path)
    if edit == "{":
        (path / "config.json").write_text(edit)
    for file in list(path.glob(edit)):
        file.unlink()
    error = refusal(path)
    assert isinstance(error, ModelLoadError)
    assert str(path) in str(error)
    assert message in str(error)
    if "tokenizer" not in edit:  # a drafter has the target's
        assert message in str(refusal(tiny_llama, speculative__draft_model=str(path)))


@pytest.mark.usefixtures("no_ray")
def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"PK\3\4")
    assert "is not a GGUF file" in str(refusal(file))
    error = refusal(file, load_format="dummy")
    assert "load_format = dummy needs a directory" in str(error)


def test_what_fits_is_let_through(tiny_llama: Path, tmp_path: Path) -> None:
    """Up to Ray: two ranks, the whole context; with dummy weights config.json is enough."""

    def passes(model: Path, **settings: Any) -> None:
        flags = {"engine.model": str(model), "engine.device": "cpu"}
        flags |= {f"engine.{name}": value for name, value in settings.items()}
        config = load_config(flags=flags, environ={})
        assert serve_local._with_local_model(config, Console(quiet=True)).engine.model == str(model)

    passes(tiny_llama, max_model_len=512, tp_size=2)
    config = json.loads((tiny_llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    passes(tmp_path, load_format="dummy")
