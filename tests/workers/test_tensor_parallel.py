"""Two ranks of one engine: rank 0 decides, the other follows, whatever it computes.

Over gloo, with faked graphs; with two GPUs (SPECTRUE_TEST_DEVICE=cuda) over NCCL, with real ones.
"""

from __future__ import annotations

import multiprocessing
import traceback
from contextlib import nullcontext
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pytest
import torch

from spectrue.workers import executor
from spectrue.workers.async_engine import load_engine
from spectrue.workers.config import HAS_CHECKPOINT, EngineConfig, SpeculativeConfig
from spectrue.workers.core import SchedulerOutput
from spectrue.workers.device import rank_device
from spectrue.workers.graphs import StepGraphs
from spectrue.workers.parallel import TPGroup
from spectrue.workers.worker import Worker

from ..conftest import make_tiny_model
from .fake_graphs import fake_graphs, use_graphs
from .harness import DEVICE, complete, make_request
from .heads import copying_eagle3, draft_table, second_order_target

LOOP = [5, 9, 12, 7] * 4
PROMPTS = [LOOP, [3, 4, 5], [88, 17, 23, 56, 91, 33, 2, 17, 23], [40] * 9, list(range(20, 45))]
TIMEOUT = 120  # seconds


def _requests() -> list[Any]:
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"seed": 3}, {"temperature": 1.0}]
    return [
        make_request(f"r{i}-{j}", prompt, **kind)
        for i, prompt in enumerate(PROMPTS)
        for j, kind in enumerate(kinds)
    ]


def _noisy(worker: Worker) -> None:
    """Perturb this rank's share of target and draft logits: near ties fall another way here."""
    target: Any = worker.target.model
    runner: Any = getattr(worker.drafter, "runner", worker.target)
    draft = runner.head.head if hasattr(runner, "head") else runner.model.vocab.logits
    for head in {id(h): h for h in (target.vocab.logits, draft)}.values():
        linear = head._linear
        head._linear = lambda x, linear=linear: linear(x) + 1e-2 * torch.randn(1)


def _num_graphs(worker: Worker) -> tuple[int, int]:
    """(of steps, of chains of drafts)"""
    steps, chains = worker.graphs, getattr(worker.drafter, "graphs", None)
    return steps.num_captured if steps else 0, len(chains.captured_chains) if chains else 0


def _steps_ahead(patch: pytest.MonkeyPatch) -> list[bool]:
    """By launch of a graph, whether the step before it had not ended."""
    launch, ahead = StepGraphs.launch, []

    def watched(self: StepGraphs, plan: SchedulerOutput, *rest: Any) -> Any:
        ahead.append(any(s.ahead for s in plan.scheduled))
        return launch(self, plan, *rest)

    patch.setattr(StepGraphs, "launch", watched)
    return ahead


def _lead(config: EngineConfig, group: TPGroup, noisy: bool) -> tuple[Worker, Any]:
    engine = load_engine(config, group)
    worker = engine.executor.worker  # type: ignore[attr-defined]
    if config.enable_graphs:
        use_graphs(worker)
    done = complete(engine, *_requests())
    again = [c.token_ids for c in complete(engine, *_requests()[:2])]
    if not noisy:  # its noise is another at every forward, and near ties may fall another way
        assert again == [c.token_ids for c in done[:2]]
    engine.executor.shutdown()
    return worker, [c.token_ids for c in done]


def _follow(config: EngineConfig, group: TPGroup, noisy: bool) -> Worker:
    class Altered(Worker):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            if config.enable_graphs:
                use_graphs(self)
            if noisy:
                _noisy(self)

    pytest.MonkeyPatch().setattr(executor, "Worker", Altered)  # of this process, to its end
    return executor.follow(config, group)


def _run_rank(
    rank: int, port_file: str, config: EngineConfig, noisy: bool, results: Queue[Any]
) -> None:
    try:
        torch.set_num_threads(1)
        device = rank_device(config, rank)
        group = TPGroup.init(
            rank, config.tp_size, f"file://{port_file}", timeout=60.0, device=device
        )
        fakes = nullcontext()
        with pytest.MonkeyPatch.context() as patch:
            ahead = _steps_ahead(patch)
            if config.enable_graphs:
                fakes = fake_graphs(patch, config.device)  # type: ignore[assignment]
            with fakes:
                worker, tokens = (
                    _lead(config, group, noisy)
                    if rank == 0
                    else (_follow(config, group, noisy), None)
                )
        buffers = worker.buffers
        state = buffers.token_ids.tolist(), buffers.num_tokens, _num_graphs(worker), sum(ahead)
        results.put((rank, tokens, state, None))
        del worker
        group.destroy()
    except BaseException:
        results.put((rank, None, None, traceback.format_exc()))


def run_ranks(config: EngineConfig, tmp_path: Path, noisy: bool = False) -> tuple[Any, Any]:
    """(tokens of all requests, (texts, their lengths, graphs, steps ahead) of every rank)."""
    context = multiprocessing.get_context("spawn")
    results: Queue[Any] = context.Queue()
    processes = [
        context.Process(
            target=_run_rank, args=(r, str(tmp_path / "rendezvous"), config, noisy, results)
        )
        for r in range(config.tp_size)
    ]
    for process in processes:
        process.start()
    try:
        got = sorted(results.get(timeout=TIMEOUT) for _ in processes)
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    for rank, *_, error in got:
        assert error is None, f"rank {rank}: {error}"
    return got[0][1], [state for _, _, state, _ in got]


def make_config(
    model: Path, draft: Path, drafter: str, graphs: bool, tree_topk: int = 1
) -> EngineConfig:
    on_gpus = DEVICE == "cuda" and torch.cuda.device_count() > 1
    return EngineConfig(
        model=str(model),
        dtype="float32",
        device="cuda" if on_gpus else "cpu",
        tp_size=2,
        enable_graphs=graphs,
        cpu_threads=1,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        block_size=4,
        num_kv_blocks=64,
        max_model_len=128,
        speculative=SpeculativeConfig(
            drafter=drafter,  # type: ignore[arg-type]
            draft_model=str(draft) if drafter in HAS_CHECKPOINT else None,
            tree_topk=tree_topk,
        ),
    )


@pytest.mark.parametrize(
    ("drafter", "graphs", "noisy"),
    [
        ("none", True, False),  # steps are launched ahead
        ("ngram", True, False),
        ("draft_model", False, False),
        ("draft_model", False, True),
        ("eagle3", False, False),
        ("eagle3", True, False),
        ("eagle3", True, True),
        ("trees of eagle3", False, False),
    ],
)
def test_two_ranks_decide_as_one(
    tiny_llama: Path, tmp_path: Path, drafter: str, graphs: bool, noisy: bool
) -> None:
    """sglang#28815: ranks that decided for themselves disagreed and hung."""
    target = tiny_llama
    topk = 3 if drafter.startswith("trees") else 1
    drafter = drafter.removeprefix("trees of ")
    if drafter == "eagle3":  # a head whose drafts are accepted: else nobody reads them again
        target = second_order_target(tmp_path / "target", only=draft_table(128, 47)[0])
        draft = copying_eagle3(tmp_path / "draft", target, draft_size=47)
    else:
        draft = make_tiny_model(tmp_path / "draft", seed=7, layers=1)
    config = make_config(target, draft, drafter, graphs, topk)
    tokens, ranks = run_ranks(config, tmp_path, noisy)
    assert ranks[0] == ranks[1], "the ranks hold different texts, or graphs"
    steps, chains = ranks[0][2]
    assert bool(steps) == graphs
    assert bool(chains) == (graphs and drafter == "eagle3")
    if noisy:
        assert all(tokens)
        return
    if graphs and drafter in ("none", "eagle3"):
        assert ranks[0][3] > 10, "no step was launched ahead"
    alone = load_engine(config.replace(tp_size=1, enable_graphs=False))
    one = [done.token_ids for done in complete(alone, *_requests())]
    for i, request in enumerate(_requests()):
        if request.params.temperature == 0 or request.params.seed is not None:
            assert tokens[i] == one[i]
