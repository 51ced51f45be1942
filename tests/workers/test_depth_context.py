"""A request near the end of its context gets fewer drafts, and never a KV slot that is not its."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spectrue.workers.core import ScheduledRequest, SchedulerOutput, StepOutput
from spectrue.workers.engine import Engine
from spectrue.workers.executor import GroupExecutor
from spectrue.workers.forward_batch import ForwardBatch

from ..conftest import make_tiny_model
from .harness import complete, make_engine, make_request

LIMIT = 19  # tokens; blocks are of 4, the last one is not full
LOOP = [5, 9, 12, 7]


@pytest.fixture(scope="module")
def other_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("other"), seed=7, layers=1)


class KVWatch:
    """Checks every KV slot that target and drafter write against the blocks of this step."""

    def __init__(self, engine: Engine) -> None:
        assert isinstance(engine.executor, GroupExecutor)
        self.engine = engine
        self.worker = engine.executor.worker
        self.allowed: set[int] = set()
        self.forwards = 0
        self.plans: list[ScheduledRequest] = []
        runners: list[Any] = [self.worker.target]
        if (draft := getattr(self.worker.drafter, "runner", None)) is not None:
            runners.append(draft)
        for runner in runners:
            self._watch(runner)
        self.inner = engine.executor.launch
        engine.executor.launch = self.launch  # type: ignore[method-assign]

    def _watch(self, runner: Any) -> None:
        forward = runner.forward

        def spy(batch: ForwardBatch, *args: Any, **options: Any) -> Any:
            slots = batch.slot_mapping.tolist()
            assert set(slots) <= self.allowed
            assert len(set(slots)) == len(slots)
            assert max(batch.seq_lens) <= LIMIT
            self.forwards += 1
            return forward(batch, *args, **options)

        runner.forward = spy

    def launch(self, plan: SchedulerOutput) -> Callable[[], StepOutput]:
        size = self.engine.blocks.block_size
        self.allowed = {
            block * size + offset
            for state in self.engine.scheduler.running
            for block in state.table.block_ids
            for offset in range(size)
        }
        self.plans += plan.scheduled
        return self.inner(plan)


@pytest.mark.parametrize(
    ("drafter", "k", "temperature"),
    [
        ("ngram", 1, 1.0),
        ("ngram", 8, 0.0),
        ("draft_model", 1, 0.0),
        ("draft_model", 8, 1.0),
        ("copy", 3, 0.0),
        ("copy", 3, 1.0),
        ("copy", 8, 0.0),
    ],
)
def test_every_start_ends_at_the_limit(
    tiny_llama: Path, other_llama: Path, drafter: str, k: int, temperature: float
) -> None:
    """From every prompt length, alone and together: exactly max_model_len tokens, whatever is
    drafted and accepted; the last tokens have as many drafts as there is room for."""
    draft = tiny_llama if drafter == "copy" else other_llama
    name = "ngram" if drafter == "ngram" else "draft_model"
    engine = make_engine(tiny_llama, name, k, draft, max_model_len=LIMIT, num_kv_blocks=40)
    watch = KVWatch(engine)
    requests = [
        make_request(
            f"r{n}",
            (LOOP * LIMIT)[:n],
            max_tokens=500,
            ignore_eos=True,
            temperature=temperature,
        )
        for n in range(1, LIMIT)
    ]
    for together in ([r] for r in requests), [requests]:
        for group in together:
            for request, done in zip(group, complete(engine, *group), strict=True):
                assert done.finish_reason == "length"
                assert len(request.prompt_token_ids) + len(done.token_ids) == LIMIT
    for s in watch.plans:
        assert s.num_computed_tokens + s.num_scheduled_tokens + s.num_draft_tokens < LIMIT
    assert watch.forwards > 0
    # Tokens that may come after the one that every step commits; alone, all of them are drafted.
    rooms: dict[int, int] = {}
    for s in watch.plans:
        if s.samples and s.num_scheduled_tokens == 1 and s.num_computed_tokens > 0:
            room = LIMIT - s.num_computed_tokens - 2
            rooms[room] = max(rooms.get(room, 0), s.num_draft_tokens)
    assert all(drafts == min(k, room) for room, drafts in rooms.items())
    assert 0 in rooms
    assert max(rooms) > k


@pytest.mark.parametrize("drafter", ["ngram", "draft_model"])
def test_the_text_up_to_the_limit_is_that_of_plain_decoding(
    tiny_llama: Path, other_llama: Path, drafter: str
) -> None:
    plain = make_engine(tiny_llama, max_model_len=LIMIT)
    engine = make_engine(tiny_llama, drafter, 4, other_llama, max_model_len=LIMIT)
    requests = [
        make_request(
            f"r{n}", (LOOP * LIMIT)[:n], max_tokens=500, ignore_eos=True, seed=n, temperature=0.7
        )
        for n in range(1, LIMIT)
    ]
    got, want = (complete(e, *requests) for e in (engine, plain))
    assert [c.token_ids for c in got] == [c.token_ids for c in want]


@pytest.mark.parametrize("max_tokens", range(1, 7))
@pytest.mark.parametrize("drafter", ["ngram", "copy"])
def test_max_tokens_limits_drafts_as_the_context_does(
    tiny_llama: Path, drafter: str, max_tokens: int
) -> None:
    name = "ngram" if drafter == "ngram" else "draft_model"
    engine = make_engine(tiny_llama, name, 5, tiny_llama, max_model_len=LIMIT)
    KVWatch(engine)
    request = make_request("r", LOOP * 2, max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
    (done,) = complete(engine, request)
    assert len(done.token_ids) == max_tokens
    assert done.last is not None
    # One token of each step is no draft: drafts beyond the last token would be for nothing.
    assert done.last.spec_decode.num_accepted_tokens <= max(0, max_tokens - 2)
