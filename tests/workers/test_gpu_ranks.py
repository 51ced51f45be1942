"""Which GPU a rank takes, how its sums travel, and what is decided and said where they cannot."""

from __future__ import annotations

import multiprocessing
import traceback
from multiprocessing.queues import Queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from spectrue.workers import worker as worker_module
from spectrue.workers.config import EngineConfig
from spectrue.workers.device import rank_device
from spectrue.workers.errors import ConfigError
from spectrue.workers.one_shot_reduce import MAX_BYTES
from spectrue.workers.parallel import TPGroup
from spectrue.workers.policy import Decision

NUM_GPUS = torch.cuda.device_count()


def show_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.mark.parametrize(
    ("device", "visible", "rank", "own_gpu", "expected"),
    [
        ("cuda", 2, 1, False, "cuda:1"),
        ("cuda", 1, 1, True, "cuda:0"),  # as Ray shows it
        ("auto", 2, 1, False, "cuda:1"),
        ("auto", 1, 1, False, "cpu"),
        ("cpu", 2, 1, False, "cpu"),
        ("cuda", 1, 0, False, r"tp_size = 2 needs as many GPUs, but 1 can be seen"),
        ("cuda", 0, 0, True, "torch finds no GPU"),
    ],
)
def test_device_of_a_rank(
    monkeypatch: pytest.MonkeyPatch,
    device: Any,
    visible: int,
    rank: int,
    own_gpu: bool,
    expected: str,
) -> None:
    show_gpus(monkeypatch, visible)
    config = EngineConfig(model="m", device=device, tp_size=2)
    if ":" in expected or expected == "cpu":
        assert str(rank_device(config, rank, own_gpu=own_gpu)) == expected
    else:
        with pytest.raises(ConfigError, match=expected):
            rank_device(config, rank, own_gpu=own_gpu)


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Another rank in torch's place: it adds `part` to what is summed over the two."""
    peer = SimpleNamespace(part=lambda x: x + 1, sums=[])

    def one_shot(part: Tensor, op: str, group_name: str, out: Tensor) -> None:
        peer.sums.append("one shot")
        out.copy_(part + peer.part(part))

    def all_reduce(x: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        if op == dist.ReduceOp.SUM:
            peer.sums.append("NCCL")
            x.copy_(x + peer.part(x))

    world = SimpleNamespace(WORLD=SimpleNamespace(group_name="0"))
    monkeypatch.setattr(dist, "group", world)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(symm_mem, "empty", lambda n, dtype, device: torch.empty(n, dtype=dtype))
    monkeypatch.setattr(symm_mem, "rendezvous", lambda buffer, group_name: None)
    monkeypatch.setattr(torch.ops.symm_mem, "one_shot_all_reduce_out", one_shot, raising=False)
    return peer


def test_small_sums_go_peer_to_peer(peer: SimpleNamespace) -> None:
    group = TPGroup(0, 2)
    assert group.use_one_shot() is None
    for dtype, length, expected in (
        (torch.bfloat16, MAX_BYTES // 2, "one shot"),
        (torch.bfloat16, MAX_BYTES // 2 + 8, "NCCL"),
        (torch.float32, 4, "one shot"),
        (torch.float32, 3, "NCCL"),  # 12 bytes
        (torch.float16, 64, "NCCL"),  # the kernel has no float16
        (torch.int64, 64, "NCCL"),
    ):
        peer.sums.clear()
        x = torch.ones(1, length, dtype=dtype)
        assert group.all_reduce_(x) is x
        assert (x == 3).all()
        assert peer.sums == [expected], (dtype, length)


def test_wrong_sums_go_by_nccl(peer: SimpleNamespace) -> None:
    peer.part = torch.zeros_like
    group = TPGroup(0, 2)
    assert group.use_one_shot() == "its trial sums were wrong"
    peer.sums.clear()
    group.all_reduce_(torch.ones(4))
    assert peer.sums == ["NCCL"]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("here", "the GPUs are not linked"), ("there", "another rank's GPU cannot: see its log")],
)
def test_no_peer_access_is_said(
    peer: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, fault: str, reason: str
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("the GPUs are not linked\nC++ stack")

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    show_gpus(monkeypatch, 2)
    if fault == "here":
        monkeypatch.setattr(symm_mem, "rendezvous", fail)
        monkeypatch.setattr(TPGroup, "least", lambda self, value: value)
    else:
        monkeypatch.setattr(TPGroup, "least", lambda self, value: 0)
    group = TPGroup(0, 2, torch.device("cuda", 0))
    decisions: list[Decision] = []
    config = EngineConfig(model="m", device="cuda", tp_size=2)
    assert worker_module._device(config, group, decisions) == torch.device("cuda", 0)
    (decision,) = decisions
    assert (decision.setting, decision.value) == ("enable_p2p_all_reduce", "false")
    assert decision.reason == f"all sums over the ranks go by NCCL: {reason}"
    decisions.clear()
    worker_module._device(config.replace(enable_p2p_all_reduce=False), group, decisions)
    assert decisions == []  # as written, and nothing tried


def test_ranks_that_met_elsewhere_are_refused() -> None:
    config = EngineConfig(model="m", device="cuda", tp_size=2)
    with pytest.raises(ConfigError, match="the ranks have met on cpu"):
        worker_module._device(config, TPGroup(0, 2), [])


def test_the_least_free_gpu_sizes_every_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (44 * gib, 80 * gib))
    monkeypatch.setattr(TPGroup, "least", lambda self, value: min(value, 18 * gib))
    shape = SimpleNamespace(num_layers=1, head_dim=64)
    model: Any = SimpleNamespace(
        device=torch.device("cuda"), config=shape, num_kv_heads=1, dtype=torch.float16
    )
    config = EngineConfig(model="m", max_model_len=64)
    num_blocks, _ = worker_module._size_pool(config, 64, model, None, torch.float16, TPGroup(), [])
    assert num_blocks == 18 * gib // (16 * 2 * 64 * 2)


# -- on a GPU -----------------------------------------------------------------------------------


def _sums(rank: int, port_file: str, results: Queue[Any]) -> None:
    """One-shot sums, on one GPU over gloo; on two beside NCCL's and in a graph."""
    try:
        two = NUM_GPUS > 1
        device = torch.device("cuda", rank if two else 0)
        torch.cuda.set_device(device)
        group = TPGroup.init(
            rank, 2, f"file://{port_file}", timeout=60.0, device=device if two else None
        )
        group.device = device
        assert group.use_one_shot() is None
        one_shot = group._one_shot
        assert one_shot is not None
        found: list[Any] = []
        for dtype in (torch.float32, torch.bfloat16):
            for length in (8, 4096, 5 * 4096, MAX_BYTES // 4):
                torch.manual_seed(length)
                parts = torch.randn(2, length).to(dtype)
                want = parts.double().sum(0).to(dtype)  # of two: rounded once
                x = parts[rank].to(device)
                assert one_shot.takes(x)
                assert torch.equal(one_shot(x.clone()).cpu(), want)
                found.append(want.sum().item())
                if not two:
                    continue
                ring = x.clone()
                dist.all_reduce(ring)
                assert torch.equal(ring.cpu(), want)
        if two:
            found.append(_in_a_graph(group))
        results.put((rank, found, None))
        torch.cuda.synchronize()
        group.barrier()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))


def _in_a_graph(group: TPGroup) -> list[list[float]]:
    """What a step has: a small and a large sum, a gather to rank 0, a broadcast of the result."""
    small = torch.zeros(4096, device=group.device)
    large = torch.zeros(MAX_BYTES, device=group.device)
    decided = torch.zeros(1, device=group.device)

    def step() -> None:
        group.all_reduce_(small)
        group.all_reduce_(large)
        logits = group.gather_vocab(small[None, :8] + group.rank)
        if logits is not None:
            decided.copy_(logits.sum() + large[0])
        group.broadcast_(decided)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    seen = []
    for turn in range(3):
        small.fill_(turn + group.rank)
        large.fill_(10.0 * group.rank)
        graph.replay()
        # Each rank's sum is 2 turn + 1; rank 0 gathers 8 of its own and 8 of the other's, plus 1.
        assert decided.item() == 16 * (2 * turn + 1) + 8 + 10
        seen.append([small[0].item(), large[-1].item(), decided.item()])
    del graph
    return seen


@pytest.mark.skipif(NUM_GPUS < 1, reason="needs a GPU; with two, NCCL and graphs are tried as well")
def test_one_shot_sums_are_those_of_nccl(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results: Queue[Any] = context.Queue()
    processes = [
        context.Process(target=_sums, args=(rank, str(tmp_path / "meet"), results))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    try:
        answers = sorted(results.get(timeout=120) for _ in processes)
    finally:
        for process in processes:
            process.join(20)
            process.kill()
    for rank, _, error in answers:
        assert error is None, f"rank {rank}: {error}"
    assert answers[0][1] == answers[1][1]
