"""Authors in processes of their own: one Python feeds a GPU too slowly for a small model."""

from __future__ import annotations

import multiprocessing
import os
import queue
import re
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch

from spectrue.workers.config import EngineConfig
from spectrue.workers.errors import EngineDeadError
from spectrue.workers.training.author import Author, AuthorConfig, write_corpus
from spectrue.workers.training.corpus import Corpus, shards

GIB = 2**30
OWN = 3 * GIB  # of a process on a GPU: context, graphs, activations
LARGE = 2 * GIB  # weights of a model whose steps keep a GPU busy by themselves
REPORT_EVERY = 0.5  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationJob:
    engine: EngineConfig  # of each process
    author: AuthorConfig
    folder: Path
    prompts: tuple[tuple[int, ...], ...] | None = None


def num_answer_tokens(folder: Path) -> int:
    return Corpus.open(folder).num_answer_tokens if shards(folder) else 0


def plan_processes(device: torch.device, weight_bytes: int) -> tuple[int, int | None]:
    """(processes, bytes of KV cache of each), by what is free. One where more would not help."""
    if device.type != "cuda" or weight_bytes > LARGE:
        return 1, None
    free = int(0.9 * torch.cuda.mem_get_info(device)[0])
    cores = os.cpu_count() or 1
    number = max(1, min(8, cores // 2, free // (weight_bytes + OWN + 2 * GIB)))
    return number, max(free // number - weight_bytes - OWN, GIB)


def generate(
    job: GenerationJob,
    num_tokens: int,
    number: int,
    report: Callable[[int], None],  # answer tokens in the folder so far
    stopped: Callable[[], bool] = lambda: False,
) -> int:
    """Write shards until the folder has `num_tokens` or `stopped`; answer tokens there.

    What the folder has already is kept and counted. Raises EngineDeadError with the traceback of a
    process that failed; what was complete by then is in the folder.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    total = num_answer_tokens(job.folder)
    if total >= num_tokens:
        return total
    attempt = _next_attempt(job.folder)
    context = multiprocessing.get_context("spawn")
    messages: Any = context.Queue()
    stop = context.Event()
    processes = [
        context.Process(target=_write, args=(job, attempt, i, stop, messages), daemon=True)
        for i in range(number)
    ]
    for process in processes:
        process.start()
    failed = ""
    try:
        while any(process.is_alive() for process in processes) or not messages.empty():
            try:
                message = messages.get(timeout=0.2)
            except queue.Empty:
                message = 0
            if isinstance(message, str):
                failed = failed or message
            else:
                total += message
                report(total)
            dead = [p for p in processes if p.exitcode]
            if dead and not failed:
                failed = f"a process of the corpus ended with exit code {dead[0].exitcode}"
            if failed or stopped() or total >= num_tokens:
                stop.set()
    finally:
        stop.set()
        for process in processes:
            process.join()
    if failed:
        raise EngineDeadError(f"the corpus is not complete, --resume goes on with it: {failed}")
    return num_answer_tokens(job.folder)


def _next_attempt(folder: Path) -> int:
    found = [re.match(r"shard-(\d+)-", path.name) for path in shards(folder)]
    return max((int(match[1]) + 1 for match in found if match), default=0)


def _write(job: GenerationJob, attempt: int, index: int, stop: Event, messages: Any) -> None:
    """One process: an engine, an author, and shards of its own names."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the parent's to handle
    parent = os.getppid()
    reported, last = 0, time.monotonic()

    def go_on(num_tokens: int) -> bool:
        nonlocal reported, last
        if time.monotonic() - last > REPORT_EVERY:
            messages.put(num_tokens - reported)
            reported, last = num_tokens, time.monotonic()
        return not stop.is_set() and os.getppid() == parent

    try:
        from spectrue.workers.async_engine import load_engine

        engine = load_engine(job.engine)
        tokenizer, engine.tokenizer = engine.tokenizer, None  # no text is needed
        seed = job.author.seed * 1_000_003 + attempt * 1009 + index
        config = replace(job.author, seed=seed, num_tokens=2**62)
        author = Author(engine, config, tokenizer, job.prompts)
        done = write_corpus(author, job.folder, name=f"{attempt:03}-{index:02}-", go_on=go_on)
        messages.put(done - reported)
    except BaseException:
        messages.put(traceback.format_exc())
