"""A server with simulated acceptance starts only when told twice, and says so in every answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from spectrue.deploy import cli, serve_local
from spectrue.deploy.config import ServerConfig, load_config
from spectrue.deploy.responses import _spec_decode
from spectrue.workers.config import SpeculativeConfig
from spectrue.workers.core import SpecDecodeStats
from spectrue.workers.errors import ConfigError


@pytest.mark.parametrize(
    "setting", ["simulated_acceptance: [0.8, 0.5, 0.1]", "simulated_accept_length: 2.5"]
)
def test_serve_refuses_it_unless_allowed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, setting: str
) -> None:
    seen: list[ServerConfig] = []
    monkeypatch.setattr(serve_local, "serve_local", lambda config, console: seen.append(config))
    file = tmp_path / "c.yaml"
    file.write_text(f"engine: {{speculative: {{{setting}}}}}")
    runner, args = CliRunner(), ["serve", "--config", str(file)]
    refused = runner.invoke(cli.app, args)
    assert isinstance(refused.exception, ConfigError)
    assert "--allow-simulated-acceptance" in str(refused.exception)
    assert not seen
    allowed = runner.invoke(cli.app, [*args, "--allow-simulated-acceptance"])
    assert allowed.exit_code == 0, allowed.output
    assert seen[0].engine.speculative.simulates


def test_lists_in_the_file_reach_the_engine(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "engine: {speculative: {depth_schedule: [[1, 4, 3], [5, 40, 0]], "
        "simulated_acceptance: [1, 0.5, 0.25]}}"
    )
    assert load_config(file, environ={}).engine.speculative == SpeculativeConfig(
        depth_schedule=((1, 4, 3), (5, 40, 0)), simulated_acceptance=(1.0, 0.5, 0.25)
    )
    environ = {"SPECTRUE_SPECULATIVE_DEPTH_SCHEDULE": "[[1, 32, 2]]"}
    assert load_config(environ=environ).engine.speculative.depth_schedule == ((1, 32, 2),)


def test_usage_says_so() -> None:
    real, made_up = SpecDecodeStats(), SpecDecodeStats(simulated=True)
    assert "simulated" not in _spec_decode([real])
    assert _spec_decode([real, made_up])["simulated"] is True


def test_bench_flags_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    from spectrue.deploy import bench_engine

    seen: list[SpeculativeConfig] = []
    monkeypatch.setattr(bench_engine, "run", lambda config, **_: seen.append(config.speculative))
    base = ["bench", "engine", "--model", "/m", "--depth", "adaptive"]
    for more in ("--simulated-acceptance", "0.8,0.5,0.1"), ("--simulated-accept-length", "2.5"):
        result = CliRunner().invoke(cli.app, [*base, *more])
        assert result.exit_code == 0, result.output
    assert seen == [
        SpeculativeConfig(depth="adaptive", simulated_acceptance=(0.8, 0.5, 0.1)),
        SpeculativeConfig(depth="adaptive", simulated_accept_length=2.5),
    ]
    for text in ("0.8,x", ""):
        bad = CliRunner().invoke(cli.app, [*base, "--simulated-acceptance", text])
        assert "--simulated-acceptance must be numbers" in str(bad.exception)
