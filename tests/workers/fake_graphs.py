"""Graphs without a GPU: a graph is faked by the function that it would have captured, with the same
padded inputs and the same buffers, and replayed by calling it again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from spectrue.kernels import dispatch
from spectrue.workers import graphs
from spectrue.workers.drafters import eagle_graphs
from spectrue.workers.drafters.eagle import EagleDrafter
from spectrue.workers.graphs import StepGraphs
from spectrue.workers.kv_cache import KVCachePool
from spectrue.workers.worker import Worker

from .harness import DEVICE


class FakeGraph:
    def __init__(self, step: Callable[[], object]) -> None:
        self.replay = step


@contextmanager
def fake_graphs(monkeypatch: pytest.MonkeyPatch, device: str = DEVICE) -> Iterator[None]:
    """Of engines on `device`; on a GPU the real ones are left alone."""
    if device == "cuda":
        yield
        return
    write = KVCachePool.write

    def write_kept(self: KVCachePool, layer: int, slot_mapping: Tensor, kv: Tensor) -> None:
        kept = slot_mapping >= 0  # as the GPU's kernel does
        write(self, layer, slot_mapping[kept], kv[kept])

    for module in (graphs, eagle_graphs):
        monkeypatch.setattr(module, "warm_up", lambda step, device: step())
        monkeypatch.setattr(module, "record", lambda step, pool: FakeGraph(step))
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
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
        keep_hidden_states=worker.drafter.needs_hidden_states,
    )
    if isinstance(worker.drafter, EagleDrafter):
        worker.drafter.use_graphs(worker.graphs)
