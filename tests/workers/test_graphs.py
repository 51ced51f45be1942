"""Steps in graphs: the texts of eager steps, whatever their memory is used for in between.

Without a GPU (SPECTRUE_TEST_DEVICE) they are faked (`fake_graphs.py`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats

from spectrue.workers.core import SchedulerOutput
from spectrue.workers.drafters.base import DraftProposal
from spectrue.workers.drafters.eagle import EagleDrafter
from spectrue.workers.engine import Engine
from spectrue.workers.executor import GroupExecutor
from spectrue.workers.graphs import StepGraphs
from spectrue.workers.packed import PackedTensors
from spectrue.workers.warm_up import warm_up
from spectrue.workers.worker import Worker

from .fake_graphs import fake_graphs, use_graphs
from .harness import DEVICE, complete, make_engine, make_request
from .heads import copying_eagle3, draft_table, second_order_target

KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 1.5, "seed": 4, "top_k": 20, "top_p": 0.95},
    {"temperature": 0.7, "seed": 5, "min_p": 0.05},
    {"temperature": 0.0, "num_speculative_tokens": 1},
    {"temperature": 1.0, "num_speculative_tokens": 0, "seed": 6},
)


@pytest.fixture(autouse=True)
def _graphs_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with fake_graphs(monkeypatch, late=True):
        yield


def worker_of(engine: Engine) -> Worker:
    assert isinstance(engine.executor, GroupExecutor)
    return engine.executor.worker


def graphed(engine: Engine) -> Engine:
    use_graphs(worker_of(engine))
    return engine


def engine_of(folder: Path, drafter: str, draft_size: int | None = None, **options: Any) -> Engine:
    only = None if draft_size is None else draft_table(128, draft_size)[0]
    target = second_order_target(folder / "target", only=only)
    draft = target
    if drafter == "eagle3":
        draft = copying_eagle3(folder / "head", target, draft_size=draft_size)
    return make_engine(target, drafter, draft=draft, **{"max_model_len": 64, **options})


def texts(engine: Engine, kinds: tuple[dict[str, Any], ...] = KINDS) -> list[list[int]]:
    if not engine.info.resolved.num_speculative_tokens:
        kinds = tuple({**kind, "num_speculative_tokens": None} for kind in kinds)
    requests = [
        make_request(f"r{i}", [3 + i, 9, 4 + i, 9], ignore_eos=True, **kinds[i % len(kinds)])
        for i in range(7)
    ]
    return [done.token_ids for done in complete(engine, *requests)]


@pytest.mark.parametrize(
    ("drafter", "draft_size"),
    [("none", None), ("ngram", None), ("draft_model", None), ("eagle3", None), ("eagle3", 48)],
)
def test_graphs_change_no_text(tmp_path: Path, drafter: str, draft_size: int | None) -> None:
    want = texts(engine_of(tmp_path / "eager", drafter, draft_size, enable_graphs=False))
    engine = graphed(engine_of(tmp_path / "graphs", drafter, draft_size))
    assert texts(engine) == want
    graphs = worker_of(engine).graphs
    assert graphs is not None
    assert graphs.num_captured > 0
    assert set(graphs.fallbacks) <= {"prefill"}


@pytest.mark.parametrize("drafter", ["none", "eagle3"])
def test_steps_are_launched_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    """Tokens, lengths and drafts are on the device: the host has not seen them when it launches."""
    engine = graphed(engine_of(tmp_path, drafter))
    launch, ahead = StepGraphs.launch, 0

    def counted(self: StepGraphs, plan: SchedulerOutput, *rest: Any) -> Any:
        nonlocal ahead
        ahead += any(s.ahead for s in plan.scheduled)
        return launch(self, plan, *rest)

    monkeypatch.setattr(StepGraphs, "launch", counted)
    want = texts(engine_of(tmp_path / "eager", "none", enable_graphs=False))
    start = time.perf_counter()
    assert texts(engine) == want
    seconds = time.perf_counter() - start
    assert ahead > 8
    of = engine.stats
    # Time that two steps share is not counted twice: shares of the wall clock are reported.
    assert of.model_time + of.verify_time + of.draft_time < seconds
    assert engine.stats.num_committed_tokens == sum(map(len, want))


def test_the_law_of_steps_ahead(tmp_path: Path) -> None:
    """Rejection with a head that is right now and then, against plain decoding. A position that is
    not the slot's own draws with the noise of another."""
    target = second_order_target(tmp_path / "target")
    head = copying_eagle3(tmp_path / "head", target, draft_size=64)
    sizes: dict[str, Any] = {"max_num_seqs": 64, "num_kv_blocks": 1024, "max_queue_len": 999}
    counts = []
    for drafter in ("none", "eagle3"):
        engine = make_engine(target, drafter, draft=head, max_model_len=64, **sizes)
        kind: dict[str, Any] = {"temperature": 4.0, "top_k": 2, "max_tokens": 8}
        requests = [make_request(f"r{i}", [3, 9, 4], ignore_eos=True, **kind) for i in range(900)]
        done = complete(graphed(engine), *requests)
        counts.append(Counter(tuple(c.token_ids[:6]) for c in done))
    plain, drafted = counts
    assert 0.2 < engine.stats.num_accepted_tokens / engine.stats.num_draft_tokens < 0.9
    cells = [key for key in {*plain, *drafted} if plain[key] + drafted[key] >= 10]
    statistic = sum((plain[k] - drafted[k]) ** 2 / (plain[k] + drafted[k]) for k in cells)
    assert 10 < len(cells) <= 64
    assert stats.chi2.sf(statistic, len(cells) - 1) > 1e-4


@pytest.mark.parametrize("drafter", ["none", "eagle3"])
def test_the_contexts_end_with_steps_ahead(tmp_path: Path, drafter: str) -> None:
    """Blocks and positions of what is in flight end with it, whatever is accepted."""
    options: dict[str, Any] = {"max_model_len": 24, "block_size": 4}
    kinds = (
        {"temperature": 0.0, "max_tokens": 99},
        {"temperature": 1.0, "seed": 3, "max_tokens": 99},
    )
    want = texts(engine_of(tmp_path / "eager", "none", enable_graphs=False, **options), kinds)
    engine = graphed(engine_of(tmp_path / "graphs", drafter, **options))
    assert texts(engine, kinds) == want
    assert {len(text) for text in want} == {20}


def test_a_drafter_without_drafts_is_launched_ahead_too(tmp_path: Path) -> None:
    """`rejection` is what such a deployment would resolve to; its rows leave no token behind."""
    kinds = ({"temperature": 0.0}, {"temperature": 1.0})

    def greedy(engine: Engine) -> list[list[int]]:
        return texts(engine, kinds)[::2]  # the others are not seeded

    want = greedy(engine_of(tmp_path / "eager", "none", enable_graphs=False))
    options: dict[str, Any] = {"k": 0, "verify_method": "rejection", "draft_sampling": "sampled"}
    assert greedy(graphed(engine_of(tmp_path / "graphs", "draft_model", **options))) == want


@pytest.mark.parametrize("draft_size", [None, 48])
def test_a_copy_is_accepted_in_graphs_too(tmp_path: Path, draft_size: int | None) -> None:
    """Laws recorded, hidden states carried and KV kept as in eager steps: else it would not be."""
    engine = graphed(engine_of(tmp_path, "eagle3", draft_size))
    for kind in ({"temperature": 0.0}, {"temperature": 1.3, "seed": 7}, {"temperature": 1.3}):
        before = engine.stats.num_draft_tokens - engine.stats.num_accepted_tokens
        texts(engine, (kind,))
        rejected = engine.stats.num_draft_tokens - engine.stats.num_accepted_tokens - before
        assert rejected <= 0.02 * engine.stats.num_draft_tokens, kind
    assert engine.stats.num_draft_tokens > 200
    assert not engine.guards


@pytest.mark.parametrize(
    ("draft_size", "cuts"), [(64, {}), (None, {"draft_top_k": 4, "draft_top_p": 0.9})]
)
def test_graphs_draft_and_accept_as_eager_steps_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draft_size: int | None, cuts: dict[str, Any]
) -> None:
    """Of a head that is right now and then: its law, cuts and noise, and what it is fed, decide
    how much is accepted. Each graph is replayed with other parameters in its rows."""
    sampled: tuple[dict[str, Any], ...] = (
        {"temperature": 1.2},
        {"temperature": 4.0, "top_k": 2},
        {"temperature": 4.0, "top_p": 0.6, "choice": 1},
        {"temperature": 4.0, "min_p": 0.2},
    )
    found = []
    for way in ("eager", "graphs"):
        target = second_order_target(tmp_path / way / "target")
        head = copying_eagle3(tmp_path / way / "head", target, draft_size=draft_size)
        engine = make_engine(
            target,
            "eagle3",
            draft=head,
            enable_graphs=way == "graphs",
            max_model_len=64,
            max_num_seqs=4,  # fewer than there are requests: some join later
            **cuts,
        )
        if way == "graphs":
            graphed(engine)
            # A step that is launched ahead drafts less near a request's end.
            monkeypatch.setattr(GroupExecutor, "can_follow", lambda *_: False)
        seeds = count()
        monkeypatch.setattr("secrets.randbits", lambda bits, seeds=seeds: next(seeds))
        waves = sampled, sampled[::-1], (*KINDS[:3], *sampled)
        for kinds in waves:
            done = texts(engine, tuple({**kind, "max_tokens": 12} for kind in kinds))
            drafts, accepted = engine.stats.num_draft_tokens, engine.stats.num_accepted_tokens
            found.append((done, drafts, accepted))
    assert found[: len(waves)] == found[len(waves) :]
    assert 0.2 * drafts < accepted < 0.95 * drafts


def test_what_needs_more_than_a_graph_runs_eagerly_and_is_counted(tmp_path: Path) -> None:
    engine = graphed(engine_of(tmp_path, "ngram"))
    complete(engine, make_request("a", [3, 9, 4], logprobs=2))
    complete(engine, make_request("b", [3, 9, 4], repetition_penalty=1.5))
    graphs = worker_of(engine).graphs
    assert graphs is not None
    assert {"prefill", "logprobs", "logit edits"} <= set(graphs.fallbacks)
    assert graphs.num_captured == 0


def test_trees_run_eagerly_between_graphs(tmp_path: Path) -> None:
    engine = graphed(engine_of(tmp_path / "trees", "eagle3", tree_topk=2))
    assert texts(engine) == texts(engine_of(tmp_path / "plain", "none"))
    complete(engine, make_request("plain", [3, 9, 4], num_speculative_tokens=0))
    graphs = worker_of(engine).graphs
    assert graphs is not None
    assert graphs.num_captured > 0  # of steps without drafts
    assert set(graphs.fallbacks) == {"prefill", "draft tree"}


@pytest.mark.parametrize("value", [0.0, float("nan"), "another row"])
def test_memory_of_other_graphs_changes_nothing(
    tmp_path: Path, value: float | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sglang#37134: draft probabilities were read from a pool that another graph had reused.

    Between draft and verification every chain of drafts is replayed on other rows, which writes
    over what the pool holds, and what is free of it is filled.
    """
    kinds = (*KINDS, {"temperature": 1.2})
    want = engine_of(tmp_path / "clean", "eagle3")
    engine = graphed(engine_of(tmp_path / "poisoned", "eagle3"))
    drafter, steps, launch = worker_of(engine).drafter, 0, StepGraphs.launch

    def poisoned(
        self: StepGraphs, plan: SchedulerOutput, drafts: list[list[int]], proposal: DraftProposal
    ) -> Any:
        nonlocal steps
        steps += 1
        torch.cuda.current_stream(self.device).synchronize()
        assert isinstance(drafter, EagleDrafter)
        assert drafter.graphs is not None
        for chain in drafter.graphs.captured_chains:
            chain.inputs.device["law_row"].fill_(len(drafter.draws.law.logits) - 1)
            chain.inputs.device["request"].fill_(-1)
            # What it leaves is the engine's: there it goes to the row of nobody.
            chain.inputs.device["slots"].fill_(self.lengths.nobody)
            if value == "another row":
                drafter.hidden[self.lengths.nobody] = drafter.hidden[0]
            chain.graph.replay()
        if not isinstance(value, str):
            junk = [torch.full((n,), value, device=DEVICE) for n in (64, 1024, 65536, 1 << 20)]
            del junk
        return launch(self, plan, drafts, proposal)

    monkeypatch.setattr(StepGraphs, "launch", poisoned)
    assert texts(engine) == texts(want)
    texts(engine, kinds)  # rejection: unseeded
    assert steps > 5
    assert not engine.guards


def test_joins_and_leaves_between_replays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a request that left are padding in the next replay, and write their KV nowhere."""
    upload, uploads = PackedTensors.upload, 0

    def checked(self: PackedTensors) -> None:
        nonlocal uploads
        if {"request", "cu_query_lens"} <= self.host.keys() and "law_row" not in self.host:
            uploads += 1
            num_tokens = int(self.host["cu_query_lens"][-1])
            assert (self.host["request"][num_tokens:] == -1).all()
            assert (self.host["request"][:num_tokens] >= 0).all()  # type: ignore[operator]
        upload(self)

    monkeypatch.setattr(PackedTensors, "upload", checked)
    engine = graphed(engine_of(tmp_path, "eagle3"))
    requests = [
        make_request(f"r{i}", [5 + i, 9, 6], temperature=0.0, max_tokens=20 - 3 * i)
        for i in range(5)
    ]
    alone = [complete(engine, request)[0].token_ids for request in requests]
    assert [done.token_ids for done in complete(engine, *requests)] == alone
    assert uploads > 20


@pytest.mark.parametrize("drafter", ["none", "eagle3"])
def test_usual_batches_are_captured_before_the_first_request(tmp_path: Path, drafter: str) -> None:
    """And nobody can tell, except by the time."""
    want = texts(engine_of(tmp_path / "cold", drafter, enable_graphs=False))
    engine = graphed(engine_of(tmp_path / "warm", drafter, max_num_seqs=4))
    reports: list[tuple[int, int]] = []

    def first() -> Engine:
        config = engine.config.replace(enable_prefix_caching=False)
        return Engine(config, engine.info, engine.executor, None)

    assert warm_up(first(), 0.0, lambda *report: reports.append(report)) == (0, 9)
    assert warm_up(first(), 60.0, lambda *report: reports.append(report)) == (9, 9)
    assert reports == [(0, 9), *[(i, 9) for i in range(10)]]  # sizes 1, 2, 4 and three kinds
    graphs = worker_of(engine).graphs
    assert graphs is not None
    captured = graphs.num_captured
    assert captured >= 9
    requests = [make_request(f"r{i}", [3, 9, 4 + i], ignore_eos=True, **KINDS[0]) for i in range(4)]
    for number in (1, 2, 4):
        for request in requests[:number]:
            engine.add_request(request)
        for _ in range(2):
            engine.step()
        for request in requests[:number]:
            engine.abort(request.request_id)
        engine.drain()
    assert graphs.num_captured == captured
    assert engine.stats.num_steps == 6
    assert texts(engine) == want
