"""Nothing that was started stays, not even what its parent left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from spectrue.deploy.processes import Descendants

ORPHAN_MAKER = """
import subprocess, sys
p = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(p.pid, flush=True)
sys.stdin.read()
"""


def gone(pid: int) -> bool:
    for _ in range(100):
        try:
            os.kill(pid, 0)
            with open(f"/proc/{pid}/stat") as f:
                if f.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


def test_orphans_are_ended_and_others_are_not() -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    other = subprocess.Popen(sleep)
    try:
        watched = Descendants()
        parent = subprocess.Popen(
            [sys.executable, "-c", ORPHAN_MAKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert parent.stdin is not None
        assert parent.stdout is not None
        orphan = int(parent.stdout.readline())
        watched.note()
        parent.stdin.close()
        parent.wait()
        assert watched.alive() == [orphan]
        assert watched.end(patience=0.1) == [orphan]
        assert gone(orphan)
        assert other.poll() is None
        assert watched.end() == []
    finally:
        other.kill()
        other.wait()
