"""What Ray is asked for: a GPU for each rank of a group that computes on GPUs, none elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from spectrue.deploy import serve_local
from spectrue.deploy.app import REPLICA_CPUS, deployment_options
from spectrue.deploy.config import ServerConfig, ServeSection
from spectrue.workers.config import EngineConfig
from spectrue.workers.ray_actor import RANK_CPUS


def bundles(**engine: Any) -> list[dict[str, float]]:
    config = ServerConfig(engine=EngineConfig(model="m", **engine), serve=ServeSection())
    found: list[dict[str, float]] = deployment_options(config)["placement_group_bundles"]
    return found


def test_bundles() -> None:
    assert bundles(device="cuda") == [{"CPU": REPLICA_CPUS + RANK_CPUS, "GPU": 1}]
    assert [bundle["GPU"] for bundle in bundles(device="cuda", tp_size=2)] == [1, 1]
    for device in ("cpu", "auto"):
        assert bundles(device=device, tp_size=2) == [
            {"CPU": REPLICA_CPUS + RANK_CPUS},
            {"CPU": RANK_CPUS},
        ]


@pytest.mark.parametrize(
    ("driver", "gpus", "device", "tp_size", "expected"),
    [
        (True, 1, "auto", 1, "cuda"),
        (True, 0, "auto", 1, "auto"),  # a driver that torch cannot use
        (False, 1, "auto", 1, "auto"),
        (True, 1, "cpu", 1, "cpu"),
        (True, 1, "auto", 2, "auto"),
        (True, 2, "auto", 2, "cuda"),
    ],
)
def test_serve_takes_the_gpu_of_this_machine(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    driver: bool,
    gpus: int,
    device: Any,
    tp_size: int,
    expected: str,
) -> None:
    file = tmp_path / "kfd"
    if driver:
        file.touch()
    monkeypatch.setattr(serve_local, "GPU_DEVICES", (str(file),))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(serve_local, "resolve_model", lambda model, progress: tmp_path)
    monkeypatch.setattr(serve_local, "check_checkpoints", lambda engine: None)  # none is there
    engine = EngineConfig(model="m", device=device, tp_size=tp_size)
    config = ServerConfig(engine=engine, serve=ServeSection())
    resolved = serve_local._with_local_model(config, Console())
    assert resolved.engine.device == expected
    assert ("this machine has" in capsys.readouterr().out) == (expected == "cuda")
