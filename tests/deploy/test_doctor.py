"""`spectrue doctor`: platforms that are simulated, traps that are planted, who samples where."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from spectrue.deploy import cli
from spectrue.deploy.doctor import examine
from spectrue.deploy.doctor_traps import Check, Node, check_node
from spectrue.workers.config import EngineConfig, SpeculativeConfig
from spectrue.workers.errors import ConfigError

GIB = 2**30


def doctor(*args: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(cli.app, ["doctor", "--json", *args])
    return result.exit_code, json.loads(result.output)


def test_an_eagle_head_on_a_simulated_mi300x(tmp_path: Path) -> None:
    """What an operator sees before buying: rejection, why, and where the other engine is silent."""
    file = tmp_path / "c.yaml"
    file.write_text(
        "engine:\n  model: org/target\n"
        "  speculative:\n    drafter: eagle\n    draft_model: org/head\n"
    )
    _, report = doctor("--config", str(file), "--platform", "hip", "--arch", "gfx942")
    assert (report["platform"], report["arch"]) == ("hip", "gfx942")
    assert report["backends"]["fp8"] == "float8_e4m3fnuz"
    assert report["backends"]["verify"] == "triton"
    plain, tree, reduced = report["variants"]
    assert plain["verify_method"] == "rejection"
    assert "a law it hands over" in plain["reason"]
    assert plain["reference_samples"]
    assert (tree["change"], tree["verify_method"]) == ("with tree_topk = 2", "match")
    assert not tree["reference_samples"]
    assert "trees" in tree["reference_reason"]
    assert (reduced["change"], reduced["verify_method"]) == (
        "with a reduced draft vocabulary",
        "rejection",
    )
    assert not reduced["reference_samples"]
    assert "token map" in reduced["reference_reason"]
    if not torch.cuda.is_available():
        assert report["simulated"]
        assert report["gpus"] == []


def test_people_get_the_same(tmp_path: Path) -> None:
    args = "doctor --platform hip --drafter eagle3 --draft-model org/head --model org/target"
    result = CliRunner().invoke(cli.app, args.split(), env={"COLUMNS": "200"})
    for part in ("gfx942", "rejection", "tree_topk = 2", "EAGLE3", "argmax", "amdsmi"):
        assert part in result.output


@pytest.mark.parametrize(
    ("arch", "platform", "fp8"),
    [("gfx942", "hip", "float8_e4m3fnuz"), ("gfx950", "hip", "float8_e4m3fn"),
     ("sm_90", "cuda", "float8_e4m3fn"), ("sm_80", "cuda", "none")],
)  # fmt: skip
def test_an_architecture_says_its_platform_and_fp8(arch: str, platform: str, fp8: str) -> None:
    report = examine(EngineConfig(model="m"), arch=arch)
    assert report.platform == platform
    assert report.backends["fp8"] == fp8


def test_a_head_with_fewer_ids_is_known_as_such(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 100, "draft_vocab_size": 10}')
    speculative = SpeculativeConfig(drafter="eagle3", draft_model=str(tmp_path))
    report = examine(EngineConfig(model="m", speculative=speculative), "hip")
    assert [v.change for v in report.variants] == ["as configured", "with tree_topk = 2"]
    assert "tokens outside have draft probability 0" in report.variants[0].reason


def test_what_cannot_work_is_an_error() -> None:
    code, report = doctor("--platform", "xpu", "--model", "m")
    assert code == 1
    assert not report["healthy"]
    config = EngineConfig(model="m", kv_cache_dtype="fp8")
    wrong = [c for c in examine(config, "cuda", "sm_80").checks if c.status == "error"]
    assert "kv_cache_dtype: fp8" in wrong[0].text
    with pytest.raises(ConfigError, match="--platform must be one of"):
        examine(config, "tpu")


def node(tmp_path: Path, **changes: Any) -> Node:
    """One on which nothing is wrong."""
    home = tmp_path / "home"
    home.mkdir(exist_ok=True)
    options: dict[str, Any] = {
        "environ": {"HOME": str(home)},
        "root": tmp_path / "root",
        "importable": lambda name: True,
        "shm_bytes": lambda: 64 * GIB,
        "groups": lambda: [1000],
        "torch_hip": "7.0",
    }
    return Node(**{**options, **changes})


def make_devices(tmp_path: Path, mode: int = 0o666) -> None:
    (tmp_path / "root/dev/dri").mkdir(parents=True)
    for name in ("kfd", "dri/renderD128"):
        path = tmp_path / "root/dev" / name
        path.touch()
        path.chmod(mode)


def check(found: Node, tp_size: int = 1, arch: str = "gfx942") -> list[Check]:
    return [c for c in check_node(found, "hip", arch, tp_size, False) if c.status != "ok"]


def test_a_node_without_faults_has_none(tmp_path: Path) -> None:
    make_devices(tmp_path)
    assert check(node(tmp_path)) == []


def environ(**more: str) -> Callable[[Path], dict[str, Any]]:
    return lambda tmp_path: {"environ": {"HOME": str(tmp_path / "home"), **more}}


@pytest.mark.parametrize(
    ("fault", "name", "status", "text"),
    [
        (environ(ROCR_VISIBLE_DEVICES="0"), "ROCR_VISIBLE_DEVICES", "error", "HIP_VISIBLE"),
        (
            environ(RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES="1"),
            "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES",
            "warning",
            "all GPUs",
        ),
        (
            environ(HIP_VISIBLE_DEVICES="0", CUDA_VISIBLE_DEVICES="1"),
            "CUDA_VISIBLE_DEVICES",
            "warning",
            "differ",
        ),
        (lambda p: {"importable": lambda name: name != "amdsmi"}, "amdsmi", "warning", "NVIDIA"),
        (lambda p: {"shm_bytes": lambda: 64 * 2**20}, "/dev/shm", "warning", "--shm-size"),
        (lambda p: {"shm_bytes": lambda: None}, "/dev/shm", "warning", "not there"),
        (lambda p: {"torch_hip": None}, "torch", "error", "without ROCm"),
    ],
)
def test_a_planted_fault_is_found_alone(
    tmp_path: Path,
    fault: Callable[[Path], dict[str, Any]],
    name: str,
    status: str,
    text: str,
) -> None:
    make_devices(tmp_path)
    (found,) = check(node(tmp_path, **fault(tmp_path)))
    assert (found.name, found.status) == (name, status)
    assert text in found.text


def test_a_device_that_cannot_be_opened_names_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_devices(tmp_path)
    import os

    real = os.access
    kfd = tmp_path / "root/dev/kfd"
    monkeypatch.setattr(os, "access", lambda path, mode: path != kfd and real(path, mode))
    (found,) = check(node(tmp_path))
    assert found.name == "/dev/kfd"
    assert f"--group-add {kfd.stat().st_gid}" in found.text
    assert "[1000]" in found.text


def test_an_unknown_architecture_and_a_large_group(tmp_path: Path) -> None:
    make_devices(tmp_path)
    small = node(tmp_path, shm_bytes=lambda: 4 * GIB)
    assert check(small, tp_size=4) == []
    names = [c.name for c in check(small, tp_size=8, arch="gfx1100")]
    assert names == ["architecture", "/dev/shm"]


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_devices(tmp_path)
    import os

    real, home = os.access, tmp_path / "home"
    monkeypatch.setattr(os, "access", lambda path, mode: path != home and real(path, mode))
    faults = check(node(tmp_path))
    assert [c.name for c in faults] == ["SPECTRUE_CACHE", "TRITON_CACHE_DIR", "HF_HOME"]
    assert {c.status for c in faults} == {"error"}
