"""Two ranks over gloo, in two processes, say what one rank says."""

from __future__ import annotations

import multiprocessing
import traceback
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spectrue.workers.errors import ConfigError
from spectrue.workers.models.config import config_from_hf
from spectrue.workers.models.layers import check_shards
from spectrue.workers.parallel import OBJECT_BUFFER, TPGroup
from spectrue.workers.weights import load_model

from ..conftest import make_tiny_model
from .test_models import Runner, assert_same, reference_logits, tokens_of

SIZE = 2
TIMEOUT = 60.0


def _forwards(group: TPGroup, paths: list[Path]) -> list[list[Any]] | None:
    """On rank 0 the logits, for each model, of a prefill, then of a decode and verify batch."""
    results: list[list[Any]] = []
    for path in paths:
        model = load_model(path, "float32", group=group)
        if group.rank == 0:
            run = Runner(model, 2)
            # Lists: a tensor in a queue is gone with the process that put it there.
            results.append([t.tolist() for t in [*run(_prefill()), *run(_verify())]])
        else:
            run = Runner(model, 2)
            for pieces in (_prefill(), _verify()):
                with pytest.raises(AssertionError):  # Runner asserts that there are logits
                    run(pieces)
    return results if group.rank == 0 else None


def _tokens(seed: int) -> Tensor:
    return tokens_of(30, seed, vocab_size=127)


def _prefill() -> dict[int, tuple[int, Tensor]]:
    return {0: (0, _tokens(0)[:25]), 1: (0, _tokens(1)[:29])}


def _verify() -> dict[int, tuple[int, Tensor]]:
    return {0: (25, _tokens(0)[25:]), 1: (29, _tokens(1)[29:])}


def _collectives(group: TPGroup) -> None:
    assert group.all_reduce_(torch.tensor([1.0 + group.rank])).item() == 3
    assert group.broadcast_(torch.tensor([7 + group.rank])).item() == 7
    assert group.least(5 - group.rank) == 4
    assert "device type cpu" in (group.use_one_shot() or "")  # refused, and sums go on
    assert group.all_reduce_(torch.ones(4)).tolist() == [2] * 4
    gathered = group.gather_vocab(torch.full((3, 2), group.rank))
    if group.rank == 0:
        assert gathered is not None
        assert gathered.tolist() == [[0, 0, 1, 1]] * 3
    else:
        assert gathered is None
    for size in (0, 10, OBJECT_BUFFER - 40, OBJECT_BUFFER, 5 * OBJECT_BUFFER):
        plan = {"tokens": b"x" * size, "k": 3}
        assert group.broadcast_object(plan if group.rank == 0 else None) == plan
    group.barrier()


def _rank(rank: int, port_file: str, paths: list[Path], results: Queue[Any]) -> None:
    try:
        torch.set_num_threads(1)
        group = TPGroup.init(rank, SIZE, f"file://{port_file}", timeout=TIMEOUT)
        _collectives(group)
        results.put((rank, _forwards(group, paths), None))
        group.destroy()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise


@pytest.fixture(scope="module")
def ranks(
    tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path, tiny_qwen3: Path
) -> tuple[list[Path], list[list[Any]]]:
    folder = tmp_path_factory.mktemp("tp")
    biased = make_tiny_model(
        folder / "biased", vocab_size=127, attention_bias=True, mlp_bias=True
    )  # an odd vocabulary is padded
    paths = [tiny_llama, tiny_qwen3, biased]
    context = multiprocessing.get_context("spawn")
    results: Queue[Any] = context.Queue()
    processes = [
        context.Process(target=_rank, args=(rank, str(folder / "meet"), paths, results))
        for rank in range(SIZE)
    ]
    for process in processes:
        process.start()
    try:
        answers = [results.get(timeout=2 * TIMEOUT) for _ in processes]
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    for rank, _, error in answers:
        assert error is None, f"rank {rank}: {error}"
    return paths, next(logits for rank, logits, _ in answers if rank == 0)


def test_two_ranks_equal_one(ranks: tuple[list[Path], list[list[Any]]]) -> None:
    for path, rows in zip(*ranks, strict=True):
        for i, length in enumerate((25, 29)):
            expected = reference_logits(path, _tokens(i))
            assert_same(torch.tensor(rows[i]), expected[:length])
            assert_same(torch.tensor(rows[2 + i]), expected[length:])


def test_one_rank_needs_no_process_group() -> None:
    group = TPGroup.init(0, 1)
    x = torch.ones(2)
    assert group.all_reduce_(x) is x
    assert group.broadcast_(x) is x
    assert group.gather_vocab(x) is x
    assert group.broadcast_object(x) is x
    group.barrier()
    group.destroy()
    assert not torch.distributed.is_initialized()


def test_heads_must_divide(tiny_llama: Path) -> None:
    config = config_from_hf(tiny_llama)
    with pytest.raises(ConfigError, match=r"tp_size = 4 .*num_heads = 4 and num_kv_heads = 2"):
        check_shards(config, 4)
    with pytest.raises(ConfigError, match="tp rank"):
        TPGroup.init(2, 2)
