"""How the engine reaches the workers. An engine under test drives a fake one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from spectrue.workers.config import EngineConfig
from spectrue.workers.core import SchedulerOutput, StepOutput
from spectrue.workers.parallel import TPGroup
from spectrue.workers.worker import Progress, Worker


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
    """Rank 0 of a TP group, of one rank or more: tells the plan to the followers and takes part.

    A plan travels with the number of steps that were ended since the last one, so that a follower
    knows in which order steps were launched and ended here.
    """

    def __init__(self, worker: Worker, group: TPGroup) -> None:
        self.worker = worker
        self.group = group
        self._num_ended = 0  # steps that the followers have not heard of

    def launch(self, plan: SchedulerOutput) -> Callable[[], StepOutput]:
        self._tell(plan)
        finish = self.worker.launch(plan)

        def finish_counted() -> StepOutput:
            self._num_ended += 1
            return finish()

        return finish_counted

    def can_follow(self, plan: SchedulerOutput) -> bool:
        return self.worker.can_follow(plan)

    def shutdown(self) -> None:
        self._tell(None)  # followers leave their loop

    def _tell(self, plan: SchedulerOutput | None) -> None:
        self.group.broadcast_object((self._num_ended, plan))
        self._num_ended = 0


def follow(config: EngineConfig, group: TPGroup, progress: Progress | None = None) -> Worker:
    """The life of a rank other than 0: run rank 0's plans until it says None."""
    worker = Worker(config, group, progress)
    in_flight: deque[Callable[[], StepOutput] | None] = deque()  # None: it was ended at once
    while True:
        num_ended, plan = group.broadcast_object(None)
        for _ in range(num_ended):
            finish = in_flight.popleft()
            if finish is not None:
                finish()
        if plan is None:
            return worker
        finish = worker.launch(plan)
        # What rank 0 may launch a step ahead of, it ends without the others. What it may not, all
        # ranks end now: that can take collectives.
        if not worker.can_follow(plan):
            finish()
            finish = None
        in_flight.append(finish)
