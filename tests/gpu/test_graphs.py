"""Graphs on a real GPU: the texts of eager steps, in fewer launches, whatever the pool holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from spectrue.workers.core import SchedulerOutput
from spectrue.workers.drafters.base import DraftProposal
from spectrue.workers.engine import Engine
from spectrue.workers.executor import GroupExecutor
from spectrue.workers.graphs import StepGraphs
from spectrue.workers.worker import Worker

from ..workers.harness import complete, make_engine, make_request
from ..workers.heads import copying_eagle3, second_order_target

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 1.5, "seed": 4, "top_k": 20, "top_p": 0.95},
    {"temperature": 0.7, "seed": 5, "min_p": 0.05},
    {"temperature": 0.0, "num_speculative_tokens": 1},
)


def engines(folder: Path, drafter: str, **options: Any) -> Engine:
    target = second_order_target(folder / "target")
    draft = target
    if drafter == "eagle3":
        draft = copying_eagle3(folder / "head", target)
    return make_engine(target, drafter, draft=draft, device="cuda", **options)


def worker_of(engine: Engine) -> Worker:
    assert isinstance(engine.executor, GroupExecutor)
    return engine.executor.worker


def texts(engine: Engine) -> list[list[int]]:
    requests = [
        make_request(f"r{i}", [3 + i, 9, 4 + i, 9], ignore_eos=True, **KINDS[i % len(KINDS)])
        for i in range(7)
    ]
    return [done.token_ids for done in complete(engine, *requests)]


@pytest.mark.parametrize("drafter", ["none", "ngram", "draft_model", "eagle3"])
def test_graphs_change_no_text(tmp_path: Path, drafter: str) -> None:
    want = texts(engines(tmp_path / "eager", drafter, enable_graphs=False))
    engine = engines(tmp_path / "graphs", drafter)
    assert texts(engine) == want
    graphs = worker_of(engine).graphs
    assert graphs is not None
    assert graphs.num_captured > 0
    assert set(graphs.fallbacks) <= {"prefill"}


def test_what_needs_more_than_a_graph_runs_eagerly_and_is_counted(tmp_path: Path) -> None:
    engine = engines(tmp_path, "ngram")
    complete(engine, make_request("a", [3, 9, 4], logprobs=2))
    complete(engine, make_request("b", [3, 9, 4], repetition_penalty=1.5))
    graphs = worker_of(engine).graphs
    assert graphs is not None
    assert {"prefill", "logprobs", "logit edits"} <= set(graphs.fallbacks)
    assert graphs.num_captured == 0


@pytest.mark.parametrize("value", [0.0, float("nan"), "another row"])
def test_poisoned_memory_changes_nothing(
    tmp_path: Path, value: float | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sglang#37134: draft probabilities were read from a pool that another graph had reused.

    Between draft and verification every free byte of the device's allocator, the graphs' pools
    among them, is written over by replays of other shapes and by tensors of the poison.
    """
    want = texts(engines(tmp_path / "clean", "eagle3"))
    engine = engines(tmp_path / "poisoned", "eagle3")
    worker, steps = worker_of(engine), 0
    run = StepGraphs.run

    def poisoned(
        self: StepGraphs, plan: SchedulerOutput, drafts: list[list[int]], proposal: DraftProposal
    ) -> Any:
        nonlocal steps
        steps += 1
        graphs = worker.drafter.graphs  # type: ignore[attr-defined]
        for chain in graphs.captured_chains:  # whose memory the law may share
            chain.inputs.device["law_row"].fill_(len(graphs.draws.law.logits) - 1)
            chain.inputs.device["slot_mapping"].fill_(-1)
            if value == "another row":
                chain.inputs.device["slots"].zero_()
            chain.graph.replay()
        if not isinstance(value, str):
            junk = [torch.full((n,), value, device="cuda") for n in (64, 1024, 65536, 1 << 20)]
            del junk
        return run(self, plan, drafts, proposal)

    monkeypatch.setattr(StepGraphs, "run", poisoned)
    assert texts(engine) == want
    assert steps > 5


def test_joins_and_leaves_between_replays(tmp_path: Path) -> None:
    """Rows of a request that left are padding in the next replay, not a request."""
    engine = engines(tmp_path, "eagle3")
    alone = [
        complete(
            engine, make_request(f"a{i}", [5 + i, 9, 6], temperature=0.0, max_tokens=20 - 3 * i)
        )
        for i in range(5)
    ]
    together = complete(
        engine,
        *[
            make_request(f"b{i}", [5 + i, 9, 6], temperature=0.0, max_tokens=20 - 3 * i)
            for i in range(5)
        ],
    )
    assert [c.token_ids for c in together] == [done[0].token_ids for done in alone]
