"""Times of passes over rotating inputs: graphs and events on a GPU, a clock on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Pass = Callable[[], object]

_ROUNDS = 4  # in which the methods take turns
# Passes of one graph, each over another set of inputs. A verify step is a part of a graph that is
# launched once for all of it, so a pass must not pay for a launch of its own.
PASSES = 8
# Keeps the device busy while a round is enqueued: else short passes would be timed with the host's
# own delays between them. Some milliseconds.
_SLEEP_CYCLES = 4_000_000


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds a pass, over graphs of PASSES passes (single passes on a CPU)."""

    median: float
    p10: float
    p90: float

    @staticmethod
    def of(values: Sequence[float]) -> Times:
        tenths = statistics.quantiles(values, n=10, method="inclusive")
        return Times(statistics.median(values), tenths[0], tenths[-1])


def time_passes(
    methods: Mapping[str, Sequence[Pass]],  # a pass for every set of inputs
    replays: int,
    device: torch.device,
) -> dict[str, Times | str]:
    """The times of each method, or why it has none. The first must run: its errors are raised."""
    ready: dict[str, Sequence[Pass]] = {}
    result: dict[str, Times | str] = {}
    for i, (name, passes) in enumerate(methods.items()):
        try:
            passes[0]()  # compiles
            ready[name] = passes if device.type == "cpu" else _graphs(passes)
        except Exception as e:  # of a peer: whatever its library raises
            if i == 0:
                raise
            result[name] = f"{type(e).__name__}: {e}".splitlines()[0]
    values: dict[str, list[float]] = {name: [] for name in ready}
    count = -(-replays // (_ROUNDS if device.type == "cpu" else _ROUNDS * PASSES // 4))
    next_set = 0  # goes on from method to method, so that none finds what another left in the L2
    for _ in range(_ROUNDS):
        for name, passes in ready.items():
            chosen = [passes[(next_set + i) % len(passes)] for i in range(count)]
            next_set += count
            if device.type == "cpu":
                values[name] += _clock(chosen)
            else:
                values[name] += [value / PASSES for value in _events(chosen)]
    return result | {name: Times.of(v) for name, v in values.items()}


def _graphs(passes: Sequence[Pass]) -> list[Pass]:
    """Graphs of PASSES passes. They share memory, so only their times mean anything."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        passes[0]()  # libraries allocate what they keep for a stream
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    pool = torch.cuda.graph_pool_handle()
    graphs = []
    for first in range(0, len(passes), PASSES):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            for i in range(first, first + PASSES):
                passes[i % len(passes)]()
        graphs.append(graph)
    for graph in graphs[:2]:
        graph.replay()
    torch.cuda.synchronize()
    return [graph.replay for graph in graphs]


def _events(passes: Sequence[Pass]) -> list[float]:
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in passes]
    torch.cuda._sleep(_SLEEP_CYCLES)
    for one, (start, end) in zip(passes, marks, strict=True):
        start.record()
        one()
        end.record()
    torch.cuda.synchronize()
    return [1e3 * start.elapsed_time(end) for start, end in marks]


def _clock(passes: Sequence[Pass]) -> list[float]:
    values = []
    for one in passes:
        start = time.perf_counter()
        one()
        values.append(1e6 * (time.perf_counter() - start))
    return values


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second of a device-to-device copy, those read and those written."""
    num_bytes = 2**30 if device.type != "cpu" else 2**25
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    passes = [lambda: target.copy_(source)] * 40
    passes[0]()
    times = _clock(passes) if device.type == "cpu" else _events(passes)
    return 2 * num_bytes / (1e-6 * statistics.median(times))


def empty_graph_time(device: torch.device) -> float | None:
    """Microseconds a kernel in a graph of such as do nothing much: what no pass goes below."""
    if device.type == "cpu":
        return None
    one = torch.zeros(1, device=device)
    times = time_passes({"": [lambda: one.add_(1)]}, 40, device)[""]
    assert isinstance(times, Times)
    return times.median
