"""The processes that this one has started, and theirs: noted while they are a tree, then ended."""

from __future__ import annotations

import os
import signal
import time
from collections import defaultdict
from pathlib import Path


def _stat(pid: int) -> tuple[int, str, str] | None:
    """(parent, state, start time) from /proc, None if it is gone."""
    try:
        # The name is in parentheses and may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[1]), fields[0], fields[19]


class Descendants:
    """Known by pid and start time, so that a reused pid is never taken for one."""

    def __init__(self) -> None:
        self._known: set[tuple[int, str]] = set()
        self._before = self._tree()  # not started by what we watch

    def note(self) -> None:
        """Remember those alive now; one whose parent ends first is no descendant any more."""
        self._known |= self._tree() - self._before

    def alive(self) -> list[int]:
        living = []
        for pid, started in self._known:
            stat = _stat(pid)
            if stat is not None and stat[1] != "Z" and stat[2] == started:
                living.append(pid)
        return living

    def end(self, patience: float = 5.0) -> list[int]:
        """Wait for all to go; those that do not are killed, and returned."""
        end = time.monotonic() + patience
        while self.alive() and time.monotonic() < end:
            time.sleep(0.05)
            self.note()  # those that are ending may still start others
        left = self.alive()
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        return left

    @staticmethod
    def _tree() -> set[tuple[int, str]]:
        children: dict[int, list[tuple[int, str]]] = defaultdict(list)
        for entry in os.listdir("/proc"):
            if entry.isdigit() and (stat := _stat(int(entry))) is not None:
                children[stat[0]].append((int(entry), stat[2]))
        found: set[tuple[int, str]] = set()
        stack = [os.getpid()]
        while stack:
            for child in children[stack.pop()]:
                if child not in found:
                    found.add(child)
                    stack.append(child[0])
        return found
