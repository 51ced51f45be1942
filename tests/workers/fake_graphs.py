"""Graphs without a GPU: a graph is faked by the function that it would have captured, with the same
padded inputs and the same buffers, and replayed by calling it again."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from spectrue.kernels import dispatch
from spectrue.workers import graphs, sampler
from spectrue.workers.drafters import eagle_graphs
from spectrue.workers.drafters.eagle import EagleDrafter
from spectrue.workers.graphs import StepGraphs
from spectrue.workers.kv_cache import KVCachePool
from spectrue.workers.packed import PackedTensors
from spectrue.workers.worker import Worker

from .harness import DEVICE


class FakeStream:
    """What was enqueued runs in order. At once, or, where it may be `late`, when a coin says so or
    somebody waits for it: nothing may lean on the device being early, or on its being late."""

    def __init__(self, late: bool) -> None:
        self._queue: deque[Callable[[], object]] = deque()
        self._coin = random.Random(0)
        self._late = late
        self._num_run = 0
        self.running = False

    @property
    def num_enqueued(self) -> int:
        return self._num_run + len(self._queue)

    def enqueue(self, step: Callable[[], object], at_once: bool = True) -> None:
        self._queue.append(step)
        if at_once and (not self._late or self._coin.random() < 0.5):
            self.synchronize()

    def synchronize(self, num_steps: int | None = None) -> None:
        """Run all, or the first `num_steps` ever enqueued. Within a step there is nothing to do."""
        if self.running:
            return
        self.running = True
        while self._queue and (num_steps is None or self._num_run < num_steps):
            self._queue.popleft()()
            self._num_run += 1
        self.running = False


def check_same(host: Tensor, written: Tensor) -> None:
    assert host.equal(written), "inputs were written over before the device had read them"


class FakeEvent:
    def __init__(self, stream: FakeStream) -> None:
        self.stream = stream
        self.after = 0

    def record(self) -> None:
        self.after = self.stream.num_enqueued

    def synchronize(self) -> None:
        self.stream.synchronize(self.after)


class FakeGraph:
    def __init__(self, step: Callable[[], object], stream: FakeStream) -> None:
        self.replay = lambda: stream.enqueue(step)


@contextmanager
def fake_graphs(
    monkeypatch: pytest.MonkeyPatch, device: str = DEVICE, late: bool = False
) -> Iterator[None]:
    """Of engines on `device`; on a GPU the real ones are left alone.

    `late`: the device may lag behind the host. Not for ranks over gloo, whose collectives have one
    order for host and device.
    """
    if device == "cuda":
        yield
        return
    stream = FakeStream(late)
    write, process = KVCachePool.write, sampler.process_rows
    copy, pack, upload = Tensor.copy_, PackedTensors.__init__, PackedTensors.upload

    def write_kept(self: KVCachePool, layer: int, slot_mapping: Tensor, kv: Tensor) -> None:
        stream.synchronize()  # an eager forward comes after what was enqueued
        kept = slot_mapping >= 0  # as the GPU's kernel does
        write(self, layer, slot_mapping[kept], kv[kept])

    def process_after(*arguments: Any) -> Any:
        stream.synchronize()  # so does an eager verification
        return process(*arguments)

    def copy_later(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if not non_blocking or stream.running:
            return copy(self, source)
        stream.enqueue(lambda: copy(self, source))
        return self

    def pack_apart(self: PackedTensors, *arguments: Any) -> None:
        """Memory of the device's own."""
        pack(self, *arguments)
        self._device = self._host.clone()
        for name, tensor in self.device.items():
            start = max(tensor.data_ptr() - self._host.data_ptr(), 0)
            self.device[name] = self._device[start : start + tensor.nbytes].view(tensor.dtype)

    def upload_checked(self: PackedTensors) -> None:
        """The host's side must stay as it is until the device has read it."""
        written = self._host.clone()
        stream.enqueue(lambda: check_same(self._host, written), at_once=False)
        upload(self)

    def warm_up(step: Callable[[], object], device: torch.device) -> object:
        stream.synchronize()
        return step()

    for module in (graphs, eagle_graphs):
        monkeypatch.setattr(module, "warm_up", warm_up)
        monkeypatch.setattr(module, "record", lambda step, pool: FakeGraph(step, stream))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: FakeEvent(stream))
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(Tensor, "copy_", copy_later)
    monkeypatch.setattr(PackedTensors, "__init__", pack_apart)
    monkeypatch.setattr(PackedTensors, "upload", upload_checked)
    monkeypatch.setattr(sampler, "process_rows", process_after)
    monkeypatch.setattr(KVCachePool, "write", write_kept)
    monkeypatch.setattr(dispatch, "platform_of", lambda device: "cuda")  # the paged attention
    with dispatch.use_backend("reference"):
        yield


def use_graphs(worker: Worker) -> None:
    """What the worker does by itself on a GPU."""
    if worker.graphs is not None:
        return
    worker.graphs = StepGraphs(
        worker.target,
        worker.buffers,
        group=worker.group,
        device=torch.device("cpu"),
        max_model_len=worker.info.max_model_len,
        law=worker.drafter.law,
    )
    num_positions = worker.buffers.block_tables.shape[1] * worker.buffers.block_size
    worker.target.model.rope.reserve(num_positions)  # type: ignore[attr-defined]
    if isinstance(worker.drafter, EagleDrafter):
        worker.drafter.runner.head.rope.reserve(num_positions)
        worker.drafter.use_graphs(worker.graphs)
