"""Flags reach the settings; commands that need no Ray work where there is none."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spectrue.deploy import cli, serve_local
from spectrue.deploy.config import ServerConfig, load_config
from spectrue.workers.errors import ConfigError

BLOCKED = """
import sys
OURS = {{"spectrue.deploy.config", "spectrue.deploy.protocol"}}  # they need pydantic
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked} or name in OURS:
            raise ModuleNotFoundError(name + " is blocked", name=name)
sys.meta_path.insert(0, Block())
from spectrue.deploy import cli
sys.argv = ["spectrue", *sys.argv[1:]]
cli.main()
"""


def run_without(blocked: Collection[str], *args: str) -> subprocess.CompletedProcess[str]:
    code = BLOCKED.format(blocked=blocked)
    return subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=120
    )


def test_serve_flags_reach_the_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[ServerConfig] = []
    monkeypatch.setattr(serve_local, "serve_local", lambda config, console: seen.append(config))
    args = (
        "serve --model /m --served-model-name x --host 0.0.0.0 --port 81 --drafter draft_model "
        "--num-speculative-tokens 2 --draft-model /d --verify-method match --draft-sampling "
        "coupled --reproducible --dtype float32 --tp-size 2 --max-model-len 99 --max-num-seqs 3 "
        "--cpu-threads 1"
    )
    result = CliRunner().invoke(cli.app, args.split())
    assert result.exit_code == 0, result.output
    flags = {
        "engine.model": "/m",
        "engine.served_model_name": "x",
        "serve.host": "0.0.0.0",
        "serve.port": 81,
        "engine.speculative.drafter": "draft_model",
        "engine.speculative.num_speculative_tokens": 2,
        "engine.speculative.draft_model": "/d",
        "engine.speculative.verify_method": "match",
        "engine.speculative.draft_sampling": "coupled",
        "engine.speculative.reproducible": True,
        "engine.dtype": "float32",
        "engine.tp_size": 2,
        "engine.max_model_len": 99,
        "engine.max_num_seqs": 3,
        "engine.cpu_threads": 1,
    }
    assert seen == [load_config(flags=flags, environ={})]


def test_errors_are_one_line_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["spectrue", "serve", "--dtype", "fp8"])
    with pytest.raises(SystemExit) as e:
        cli.main()
    assert e.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "engine.dtype" in error
    assert error.count("\n") == 1


def test_a_taken_port_is_an_error_before_loading() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*--port"):
            serve_local._check_port("127.0.0.1", port)
    serve_local._check_port("127.0.0.1", port)


def test_help_loads_nothing_heavy() -> None:
    everything = {"ray", "fastapi", "torch", "transformers", "yaml"}
    for args in (["--help"], ["serve", "--help"], ["generate", "--help"], ["bench", "--help"]):
        done = run_without(everything, *args)
        assert done.returncode == 0, done.stderr
        assert "Usage: spectrue" in done.stdout


# Not pydantic: typer 0.29 needs it itself. `deploy.config` and `deploy.protocol` are what use it.
NO_SERVING = {"ray", "fastapi", "starlette"}


def test_bench_engine_without_ray_and_fastapi(tiny_llama: Path) -> None:
    args = ["bench", "engine", "--model", str(tiny_llama), "--max-tokens", "4", "--json"]
    done = run_without(NO_SERVING, *args)
    assert done.returncode == 0, done.stderr
    assert '"tokens_per_second"' in done.stdout


def test_generate_without_ray_and_fastapi(tiny_llama: Path) -> None:
    args = ["generate", "abc", "--model", str(tiny_llama), "--max-tokens", "5", "--seed", "1"]
    first, second = (run_without(NO_SERVING, *args, mode) for mode in ("--chat", "--raw"))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert first.stdout.strip()
    assert first.stdout != second.stdout
    assert "tokens, length" in first.stderr
