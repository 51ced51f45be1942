"""Flags reach the settings; commands that need no Ray work where there is none."""

from __future__ import annotations

import io
import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Collection
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
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
        "--num-speculative-tokens 2 --depth adaptive --draft-model /d --verify-method match "
        "--draft-sampling coupled --reproducible --strict-draft --dtype float32 --tp-size 2 "
        "--max-model-len 99 --max-num-seqs 3 --cpu-threads 1"
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
        "engine.speculative.depth": "adaptive",
        "engine.speculative.draft_model": "/d",
        "engine.speculative.verify_method": "match",
        "engine.speculative.draft_sampling": "coupled",
        "engine.speculative.reproducible": True,
        "engine.speculative.strict_draft": True,
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
        if args == ["--help"]:
            assert "Exact speculative decoding on Ray Serve." in done.stdout


def test_version() -> None:
    result = CliRunner().invoke(cli.app, ["--version"])
    assert result.exit_code == 0
    assert result.output.startswith("spectrue")


def main_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str
) -> str:
    monkeypatch.setattr(sys, "argv", ["spectrue", *args])
    with pytest.raises(SystemExit) as e:
        cli.main()
    assert e.value.code == 1
    return capsys.readouterr().err


@pytest.mark.parametrize("flag", ["verify-method", "drafter", "draft-sampling", "dtype"])
@pytest.mark.parametrize("command", [["generate", "hi"], ["bench", "engine"]])
def test_unknown_choices_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    flag: str,
) -> None:
    error = main_error(monkeypatch, capsys, *command, f"--{flag}", "foo")
    assert re.search(rf"{flag.replace('-', '_')} must be one of .*, got 'foo'", error)


@pytest.mark.parametrize("command", [["generate", "hi"], ["bench", "engine"]])
def test_an_empty_model_directory(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    command: list[str],
) -> None:
    error = main_error(monkeypatch, capsys, *command, "--model", str(tmp_path))
    assert "config.json" in error
    assert "tokenizer" not in error


def test_generate_refuses_more_than_the_context_leaves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_llama: Path
) -> None:
    args = ["generate", "abc", "--raw", "--model", str(tiny_llama), "--max-model-len", "20"]
    error = main_error(monkeypatch, capsys, *args, "--max-tokens", "20")
    assert "max_tokens = 20" in error
    assert "20 tokens" in error
    monkeypatch.setattr(sys, "argv", ["spectrue", *args])  # the default takes what is left
    with pytest.raises(SystemExit) as e:
        cli.main()
    assert e.value.code == 0


@pytest.mark.parametrize("patience", [None, 7.0])
def test_only_a_server_that_was_ready_says_that_requests_may_finish(
    monkeypatch: pytest.MonkeyPatch, patience: float | None
) -> None:
    applications = iter([[serve_local.APP], []])
    serve = SimpleNamespace(
        status=lambda: SimpleNamespace(applications=next(applications, [])),
        delete=lambda name, _blocking: None,
    )
    ray = SimpleNamespace(is_initialized=lambda: True, serve=serve)
    monkeypatch.setitem(sys.modules, "ray", ray)
    console = Console(file=io.StringIO(), width=200)
    serve_local._drain(console, patience)
    assert isinstance(console.file, io.StringIO)
    said = console.file.getvalue()
    assert ("may finish (up to 7 s)" in said) == (patience is not None)
    assert bool(said) == (patience is not None)


def output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str
) -> tuple[str, str]:
    """(stdout, stderr) of a command that succeeds, run in this process."""
    monkeypatch.setattr(sys, "argv", ["spectrue", *args])
    with pytest.raises(SystemExit) as e:
        cli.main()
    assert e.value.code == 0
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_bench_engine_says_what_it_ran(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_llama: Path
) -> None:
    args = [
        "bench",
        "engine",
        "--model",
        str(tiny_llama),
        "--max-tokens",
        "4",
        "--cpu-threads",
        "1",
    ]
    result = json.loads(output(monkeypatch, capsys, *args, "--json")[0])
    assert result["tokens_per_second"] > 0
    assert result["num_output_tokens"] == 4
    assert result["num_cut_short"] == 0
    assert result["num_speculative_tokens"] == 3
    assert result["verify_method"] == "match"
    assert result["threads"] == 1


def test_bench_engine_says_where_the_context_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_llama: Path
) -> None:
    args = ["bench", "engine", "--model", str(tiny_llama), "--max-model-len", "130"]
    args += ["--batch-size", "2", "--max-tokens", "70"]
    table, _ = output(monkeypatch, capsys, *args)
    assert re.search(r"cut short .*1 of 2 by the context of 130, not by --max-tokens 70", table)


# Not pydantic: typer 0.29 needs it itself. `deploy.config` and `deploy.protocol` are what use it.
NO_SERVING = {"ray", "fastapi", "starlette"}


def test_generate_without_ray_and_fastapi(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_llama: Path
) -> None:
    args = ["generate", "abc", "--model", str(tiny_llama), "--max-tokens", "5", "--seed", "1"]
    args += ["--dtype", "float32"]
    alone = run_without(NO_SERVING, *args)
    assert alone.returncode == 0, alone.stderr
    assert "tokens, length" in alone.stderr
    chat, raw = (output(monkeypatch, capsys, *args, mode)[0] for mode in ("--chat", "--raw"))
    assert alone.stdout == chat != raw
    assert raw.strip()


@pytest.mark.parametrize("command", [cli.serve, cli.generate, cli.bench_engine])
def test_commands_share_the_flags_of_an_engine(command: Callable[..., None]) -> None:
    assert signature(command).parameters.keys() >= cli.ENGINE_FLAGS.keys()
    assert "engine" not in signature(command).parameters


@pytest.mark.parametrize("flag", cli.ENGINE_FLAGS)
def test_a_flag_reaches_the_setting_of_its_name(flag: str) -> None:
    value = {"drafter": "none", "depth": "adaptive", "dtype": "float16"}.get(flag, flag)
    numbers = {"num_speculative_tokens", "tree_topk", "tree_size", "max_model_len", "cpu_threads"}
    names = {"verify_method": "match", "draft_sampling": "greedy", "tree_kind": "static"}
    given: Any = names.get(flag, value)
    others = {"tree_topk": 2} if flag == "tree_size" else {}  # the one needs the other
    config = cli._engine_config({**others, flag: 7 if flag in numbers else given, "tp_size": None})
    section = config.speculative if flag in cli.SPECULATIVE else config
    assert getattr(section, flag) == (7 if flag in numbers else given)
    assert config.tp_size == 1


@pytest.mark.parametrize("failing", ["_start_ray", "_deploy", "_print_ready"])
def test_a_failed_start_is_not_ready(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    def fail(*args: object) -> None:
        raise ConfigError("no")

    stopped: list[float | None] = []
    monkeypatch.setattr("signal.signal", lambda *args: None)
    monkeypatch.setattr(serve_local, "_check_port", lambda *args: None)
    monkeypatch.setattr(serve_local, "_with_local_model", lambda config, console: config)
    monkeypatch.setattr(serve_local, "_stop", lambda *args: stopped.append(args[-1]))
    for name in ("_start_ray", "_deploy", "_print_ready"):
        monkeypatch.setattr(serve_local, name, fail if name == failing else lambda *args: None)
    with pytest.raises(ConfigError, match="no"):
        serve_local.serve_local(load_config(environ={}), Console(file=io.StringIO()))
    assert stopped == [60.0 if failing == "_print_ready" else None]
