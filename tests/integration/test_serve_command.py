"""`spectrue serve` as a user runs it: two ranks, the printed curl, Ctrl-C, and nothing is left."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx


def marked(mark: str) -> list[str]:
    """Command lines of the processes that have `mark` in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
    return found


TOOLS = Path(__file__).parents[2] / ".cache" / "tools" / "usr"


def find_tool(name: str) -> list[str]:
    """The machine's, or the one that `make tools` fetched; a missing one fails by name."""
    if (found := shutil.which(name)) is not None:
        return [found]
    fetched = shutil.which(name, path=str(TOOLS / "bin"))
    assert fetched is not None, f"{name} is missing: run `make tools`"
    libraries = ":".join(str(folder) for folder in (TOOLS / "lib").glob("*-linux-gnu"))
    return ["env", f"LD_LIBRARY_PATH={libraries}", fetched]


def check_real_curl(curl: list[str], body: dict[str, Any]) -> None:
    """The printed command as it is, and a stream of the same request."""

    def run(*more: str) -> str:
        done = subprocess.run([*curl, "-sS", *more], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert json.loads(run())["choices"][0]["message"]["role"] == "assistant"
    stream = {**body, "max_tokens": 12, "ignore_eos": True, "stream": True}
    stream["stream_options"] = {"include_usage": True}
    curl[curl.index("-d") + 1] = json.dumps(stream)
    text = run("-N", "-i")
    head, _, rest = text.replace("\r\n", "\n").partition("\n\n")
    assert head.startswith("HTTP/1.1 200")
    assert "content-type: text/event-stream" in head.lower()
    blocks = rest.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(b.removeprefix("data: ")) for b in blocks[:-2]]
    assert chunks[-1]["usage"]["completion_tokens"] == 12
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"


def test_serve_until_ctrl_c(tiny_llama: Path, tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mark = uuid4().hex
    # No RAY_AUTH_MODE: the command brings a token of its own, and leaves no file in HOME.
    environ = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    environ |= {"SPECTRUE_TP_SIZE": "2", "TEST_MARK": mark, "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "spectrue.deploy.cli", "serve", "--port", str(port)]
    command += ["--model", str(tiny_llama), "--dtype", "float32", "--max-num-seqs", "4"]
    log = tmp_path / "log"
    with log.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environ)
    try:
        end = time.monotonic() + 80
        while "Ctrl-C stops it" not in log.read_text():
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.2)
        text = log.read_text()
        assert "Starting Ray" in text
        assert "target weights" in text
        assert "verify method: match: " in text
        assert f"at http://127.0.0.1:{port} " in text
        assert len(marked(mark)) > 5
        assert sum("ray::Rank" in c for c in marked(mark)) == 2

        printed = re.search(r"curl .*", text)
        assert printed is not None
        curl = shlex.split(printed[0])
        body = json.loads(curl[curl.index("-d") + 1])
        answer = httpx.post(curl[1], json={**body, "max_tokens": 5, "ignore_eos": True}, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 5, answer.text
        check_real_curl([*find_tool("curl"), *curl[1:]], body)

        server.send_signal(signal.SIGINT)
        assert server.wait(40) == 0
        assert log.read_text().rstrip().endswith("Stopped.")
        assert marked(mark) == []
        assert not (tmp_path / ".ray").exists()
    finally:
        server.kill()
        server.wait()
