"""`spectrue serve` as a user runs it: two ranks, the printed curl, Ctrl-C, and nothing is left."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
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


def test_serve_until_ctrl_c(tiny_llama, tmp_path):
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

        curl = shlex.split(re.search(r"curl .*", text)[0])
        body = json.loads(curl[curl.index("-d") + 1])
        answer = httpx.post(curl[1], json={**body, "max_tokens": 5, "ignore_eos": True}, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 5, answer.text

        server.send_signal(signal.SIGINT)
        assert server.wait(40) == 0
        assert log.read_text().rstrip().endswith("Stopped.")
        assert marked(mark) == []
        assert not (tmp_path / ".ray").exists()
    finally:
        server.kill()
        server.wait()
