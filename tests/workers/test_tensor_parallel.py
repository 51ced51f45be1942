"""Two ranks of one engine over gloo: rank 0 decides, the other follows, whatever it computes."""

from __future__ import annotations

import multiprocessing
import traceback
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pytest
import torch

from spectrue.workers import worker as worker_module
from spectrue.workers.async_engine import load_engine
from spectrue.workers.config import HAS_CHECKPOINT, EngineConfig, SpeculativeConfig
from spectrue.workers.parallel import TPGroup
from spectrue.workers.worker import Worker

from ..conftest import make_tiny_model
from .harness import complete, make_request
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


def _run_rank(
    rank: int, size: int, port_file: str, config: EngineConfig, noisy: bool, results: Queue[Any]
) -> None:
    try:
        torch.set_num_threads(1)
        group = TPGroup.init(rank, size, f"file://{port_file}", timeout=60.0)
        if rank == 0:
            engine = load_engine(config, group)
            done = complete(engine, *_requests())
            buffers = engine.executor.worker.buffers  # type: ignore[attr-defined]
            again = [c.token_ids for c in complete(engine, *_requests()[:2])]
            if (
                not noisy
            ):  # its noise is another at every forward, and near ties may fall another way
                assert again == [c.token_ids for c in done[:2]]
            engine.executor.shutdown()
            tokens = [c.token_ids for c in done]
        else:
            made: list[Worker] = []

            class Recorded(Worker):
                def __init__(self, *args: Any) -> None:
                    super().__init__(*args)
                    made.append(self)
                    if noisy:
                        _noisy(self)

            worker_module.Worker = Recorded  # type: ignore[misc, assignment]
            worker_module.follow(config, group)
            buffers = made[0].buffers
            tokens = None
        results.put((rank, tokens, buffers.token_ids.tolist(), buffers.num_tokens, None))
        group.destroy()
    except BaseException:
        results.put((rank, None, None, None, traceback.format_exc()))


def run_ranks(config: EngineConfig, tmp_path: Path, noisy: bool = False) -> tuple[Any, Any]:
    """(tokens of all requests, the final buffers of every rank)."""
    context = multiprocessing.get_context("spawn")
    results: Queue[Any] = context.Queue()
    size = config.tp_size
    processes = [
        context.Process(
            target=_run_rank, args=(r, size, str(tmp_path / "rendezvous"), config, noisy, results)
        )
        for r in range(size)
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
    return got[0][1], [(tokens, lengths) for _, _, tokens, lengths, _ in got]


def make_config(model: Path, draft: Path, drafter: str, tp_size: int) -> EngineConfig:
    return EngineConfig(
        model=str(model),
        dtype="float32",
        tp_size=tp_size,
        cpu_threads=1,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        block_size=4,
        num_kv_blocks=64,
        max_model_len=128,
        speculative=SpeculativeConfig(
            drafter=drafter,  # type: ignore[arg-type]
            draft_model=str(draft) if drafter in HAS_CHECKPOINT else None,
        ),
    )


@pytest.mark.parametrize(
    ("drafter", "noisy"),
    [
        ("ngram", False),
        ("draft_model", False),
        ("draft_model", True),
        ("eagle3", False),
        ("eagle3", True),
    ],
)
def test_two_ranks_decide_as_one(
    tiny_llama: Path, tmp_path: Path, drafter: str, noisy: bool
) -> None:
    """sglang#28815: ranks that decided for themselves disagreed and hung."""
    target = tiny_llama
    if drafter == "eagle3":  # a head whose drafts are accepted: else nobody reads them again
        target = second_order_target(tmp_path / "target", only=draft_table(128, 47)[0])
        draft = copying_eagle3(tmp_path / "draft", target, draft_size=47)
    else:
        draft = make_tiny_model(tmp_path / "draft", seed=7, layers=1)
    config = make_config(target, draft, drafter, 2)
    tokens, buffers = run_ranks(config, tmp_path, noisy)
    assert buffers[0] == buffers[1], "the ranks hold different texts"
    if noisy:
        assert all(tokens)
        return
    one, _ = run_ranks(config.replace(tp_size=1), tmp_path)
    for i, request in enumerate(_requests()):
        if request.params.temperature == 0 or request.params.seed is not None:
            assert tokens[i] == one[i]
