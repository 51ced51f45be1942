"""How the engine reaches the workers. An engine under test drives a fake one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from spectrue.workers.core import SchedulerOutput, StepOutput
from spectrue.workers.parallel import TPGroup
from spectrue.workers.worker import Worker


class Executor(Protocol):
    """Runs planned steps, on one rank or many."""

    def launch(self, plan: SchedulerOutput) -> Callable[[], StepOutput]:
        """Start a step; the call that is returned waits for its end."""
        ...

    def can_follow(self, plan: SchedulerOutput) -> bool:
        """Whether a second step of these requests may be launched before the first has ended."""
        ...

    def shutdown(self) -> None: ...


class GroupExecutor:
    """Rank 0 of a TP group, of one rank or more: tells the plan to the followers and takes part."""

    def __init__(self, worker: Worker, group: TPGroup) -> None:
        self.worker = worker
        self.group = group

    def launch(self, plan: SchedulerOutput) -> Callable[[], StepOutput]:
        self.group.broadcast_object(plan)
        return self.worker.launch(plan)

    def can_follow(self, plan: SchedulerOutput) -> bool:
        return self.worker.can_follow(plan)

    def shutdown(self) -> None:
        self.group.broadcast_object(None)  # followers leave their loop
