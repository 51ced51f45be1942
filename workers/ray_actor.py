"""The ranks of one TP group as Ray actors, and the group seen from the process that started them.

No Ray call is in the step loop: rank 0's AsyncEngine runs it in a thread of the actor's process.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Sequence
from contextvars import Context
from dataclasses import replace
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from spectrue.workers.config import EngineConfig
from spectrue.workers.core import Request, RequestOutput
from spectrue.workers.errors import EngineDeadError, SpectrueError

T = TypeVar("T")

RANK_CPUS = 0.5
NAMESPACE = "spectrue"  # rank 0 is named in it, for `spectrue serve` to ask it how loading goes
RANK0_PREFIX = "rank0-"
BLAME_TIMEOUT = 3.0  # seconds in which Ray should report the death of a rank's process

# A thread for each kind of call. Aborts share the submits' thread, which keeps their order.
CONCURRENCY_GROUPS = {"submit": 1, "poll": 1, "control": 2, "loop": 1}


class Rank:
    """One rank's process. `load` or `follow` first; nothing heavy is imported before."""

    def __init__(self, rank: int, config: EngineConfig) -> None:
        self._rank = rank
        self._config = config
        self._engine: Any = None
        self._progress: tuple[str, int, int] | None = None
        cores = len(os.sched_getaffinity(0))
        # Ray sets this to the CPUs asked for, at most 1; torch reads it when it is imported.
        threads = config.cpu_threads or max(1, cores // config.tp_size)
        os.environ["OMP_NUM_THREADS"] = str(threads)

    def address(self) -> str:
        """Where the ranks meet: a free port of this node, which STRICT_PACK gives them all.

        On loopback, since plans travel as pickles that nobody else may send.
        """
        host = "127.0.0.1"
        with socket.socket() as s:
            s.bind((host, 0))
            return f"tcp://{host}:{s.getsockname()[1]}"

    def load(self, address: str) -> None:
        from spectrue.workers.async_engine import AsyncEngine

        self._engine = AsyncEngine(self._config, self._join(address), self._report)

    def follow(self, address: str) -> None:
        """Returns when rank 0 shuts down."""
        from spectrue.workers.executor import follow

        follow(self._config, self._join(address))

    def progress(self) -> tuple[str, int, int] | None:
        """(what, done, total) of the loading step at hand."""
        return self._progress

    def submit(self, requests: Sequence[Request]) -> None:
        self._engine.submit(requests)

    def abort(self, request_ids: Sequence[str]) -> None:
        self._engine.abort(request_ids)

    def poll(self, timeout: float) -> list[RequestOutput]:
        outputs: list[RequestOutput] = self._engine.poll(timeout)
        return outputs

    def status(self) -> dict[str, object]:
        return {**self._engine.status(), "rank0_pid": os.getpid()}

    def shutdown(self) -> None:
        self._engine.shutdown()

    def _report(self, what: str, done: int, total: int) -> None:
        self._progress = (what, done, total)

    def _join(self, address: str) -> Any:
        from spectrue.workers.device import rank_device
        from spectrue.workers.parallel import TPGroup

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        config = self._config
        # Of a rank that asked for no GPU, Ray may still show it the others'.
        device = rank_device(config, self._rank, own_gpu=True) if gpus_of_rank(config) else None
        return TPGroup.init(self._rank, config.tp_size, address, device=device)


class RankDiedError(EngineDeadError):
    """Its process is gone."""


class RankGroup:
    """An EngineTransport over the ranks' handles."""

    def __init__(self, ranks: Sequence[Any], followers: dict[Any, int]) -> None:
        self._ranks = ranks
        self._followers = followers  # pending `follow` calls -> rank
        self._calls: set[asyncio.Future[None]] = set()  # the same, as the event loop waits for them

    async def submit(self, requests: Sequence[Request]) -> None:
        await _answer(_call(self._ranks[0].submit, "submit", requests), 0)

    async def abort(self, request_ids: Sequence[str]) -> None:
        await _answer(_call(self._ranks[0].abort, "submit", request_ids), 0)

    async def poll(self, timeout: float) -> list[RequestOutput]:
        call: Awaitable[list[RequestOutput]] = _call(self._ranks[0].poll, "poll", timeout)
        try:
            outputs = await _answer(call, 0)
        except EngineDeadError as e:
            raise await self._culprit(e) from None
        ended = next((o.error for o in outputs if o.finish_reason == "abort" and o.error), None)
        if ended is None:
            return outputs
        reason = str(await self._culprit(EngineDeadError(ended)))
        return [replace(o, error=reason) if o.error == ended else o for o in outputs]

    async def status(self) -> dict[str, object]:
        call: Awaitable[dict[str, object]] = _call(self._ranks[0].status, "control")
        return await _answer(call, 0)

    async def watch(self) -> None:
        """Rank 0 is watched by polling it; here the others' endless calls are."""
        pending = self._follower_calls()
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for call in done:
                if (error := call.exception()) is not None:
                    if not isinstance(error, EngineDeadError):
                        error = EngineDeadError(str(error))
                    raise await self._culprit(error)
        await asyncio.Event().wait()  # rank 0 let them go, and its poll tells why

    async def _culprit(self, error: EngineDeadError) -> EngineDeadError:
        """Which follower's death is behind `error`, if one is.

        A death breaks the collectives of the other ranks before Ray reports it.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + BLAME_TIMEOUT
        pending = self._follower_calls()
        while pending and not isinstance(error, RankDiedError) and loop.time() < end:
            done, pending = await asyncio.wait(
                pending, timeout=end - loop.time(), return_when=asyncio.FIRST_COMPLETED
            )
            for call in done:
                if isinstance(cause := call.exception(), RankDiedError):
                    error = cause
        return error

    def _follower_calls(self) -> set[asyncio.Future[None]]:
        if not self._calls:
            self._calls = {asyncio.ensure_future(_answer(c, r)) for c, r in self._followers.items()}
        return set(self._calls)

    async def shutdown(self) -> None:
        try:
            await _answer(_call(self._ranks[0].shutdown, "control"), 0)
        finally:
            self.kill()

    def kill(self) -> None:
        for rank in self._ranks:
            ray.kill(rank, no_restart=True)


def gpus_of_rank(config: EngineConfig) -> int:
    """What a rank asks Ray for. Without asking it would be shown no GPU at all."""
    return int(config.device == "cuda")


def start_ranks(config: EngineConfig, placement_group: Any = None) -> RankGroup:
    """Load the model on `tp_size` actors, rank i in bundle i. Blocks until all are ready.

    Raises what a rank raised while loading, or EngineDeadError naming the rank that died.
    """
    actor = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(Rank)
    ranks = []
    for rank in range(config.tp_size):
        options: dict[str, Any] = {
            "num_cpus": RANK_CPUS,
            "num_gpus": gpus_of_rank(config),
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        if rank == 0:
            options |= {"name": RANK0_PREFIX + os.urandom(6).hex(), "namespace": NAMESPACE}
        if placement_group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group, placement_group_bundle_index=rank
            )
        ranks.append(actor.options(**options).remote(rank, config))
    group = RankGroup(ranks, {})
    try:
        address = _get(_call(ranks[0].address, "control"), 0)
        loading = _call(ranks[0].load, "loop", address)
        for rank, handle in enumerate(ranks[1:], 1):
            group._followers[_call(handle.follow, "loop", address)] = rank
        ready, _ = ray.wait([loading, *group._followers])
        for call in ready:  # a follower's call ends here only by failing
            _get(call, group._followers.get(call, 0))
    except BaseException:
        group.kill()
        raise
    return group


def loading_progress() -> list[tuple[str, int, int]]:
    """Of every rank 0 in this cluster: what it loads, how far it is."""
    found = []
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == NAMESPACE and actor["name"].startswith(RANK0_PREFIX):
            try:
                handle = ray.get_actor(actor["name"], NAMESPACE)
                step = ray.get(_call(handle.progress, "control"), timeout=5)
            except (ValueError, RayError):  # gone meanwhile, or not there yet
                continue
            if step is not None:
                found.append(step)
    return found


def _call(method: Any, group: str, *args: object) -> Any:
    """In an empty context, where the call is nobody's child.

    NOTE: Serve cancels the request of a client that left, and with it every call made in that
    request's context: the abort too, which then never comes.
    """
    return Context().run(method.options(concurrency_group=group).remote, *args)


def _translate(error: RayError, rank: int) -> SpectrueError:
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, SpectrueError):
            return cause
        return EngineDeadError(f"rank {rank} failed: {type(cause).__name__}: {cause}")
    if isinstance(error, RayActorError):
        return RankDiedError(f"rank {rank} died: {_first_line(error)}")
    return EngineDeadError(f"rank {rank} cannot be reached: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


async def _answer(call: Awaitable[T], rank: int) -> T:
    try:
        return await call
    except RayError as e:
        raise _translate(e, rank) from None


def _get(call: Any, rank: int) -> Any:
    try:
        return ray.get(call)
    except RayError as e:
        raise _translate(e, rank) from None
