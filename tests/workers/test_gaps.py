"""What mutation testing found unwatched, and corners: each test has seen its fault."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spectrue.workers.block_manager import BlockManager, BlockTable
from spectrue.workers.config import SpeculativeConfig
from spectrue.workers.core import (
    MIN_TEMPERATURE,
    NewRequest,
    Request,
    SamplingParams,
    ScheduledRequest,
    SchedulerOutput,
    SlotOutput,
)
from spectrue.workers.drafters.base import Drafter, DraftProposal
from spectrue.workers.drafters.draft_model import DraftModelDrafter
from spectrue.workers.drafters.ngram import NgramDrafter
from spectrue.workers.engine import Engine
from spectrue.workers.errors import InvalidRequestError
from spectrue.workers.executor import GroupExecutor
from spectrue.workers.forward_batch import ForwardOutput
from spectrue.workers.input_buffers import InputBuffers
from spectrue.workers.output import OutputProcessor
from spectrue.workers.parallel import TPGroup
from spectrue.workers.policy import resolve_speculative
from spectrue.workers.scheduler import RequestStatus
from spectrue.workers.speculative import speculative_step

from ..conftest import make_tiny_model
from . import toy
from .harness import Completion, complete, make_engine, make_request
from .test_output import Letters, ids, run
from .test_scheduler import make_scheduler, make_state, run_step

LOOP = [5, 9, 12, 7] * 4
PROMPTS = [LOOP, [3, 4, 5], [88, 17, 23, 56, 91, 33, 2, 17, 23], [40] * 9, list(range(20, 45))]


@pytest.fixture(scope="module")
def other_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("other"), seed=7, layers=1)


# -- scheduler ----------------------------------------------------------------------------------


def test_drafts_leave_a_prompt_its_turn() -> None:
    """Decoding requests with drafts may fill a step's budget, but drafts are optional."""
    scheduler = make_scheduler(num_blocks=512, max_num_seqs=8, budget=16)
    for i in range(4):
        scheduler.add(make_state([i], max_tokens=400, request_id=f"d{i}"))
    run_step(scheduler, scheduler.schedule())
    full = scheduler.schedule()
    assert [s.num_draft_tokens for s in full.scheduled] == [3] * 4  # nobody waits
    run_step(scheduler, full, accept=3)
    prompt = make_state(list(range(30)), max_tokens=2, request_id="p")
    scheduler.add(prompt)
    for _ in range(20):
        plan = scheduler.schedule()
        assert sum(s.num_draft_tokens for s in plan.scheduled) > 0
        run_step(scheduler, plan, accept=3)
    assert prompt.status is RequestStatus.FINISHED


def test_the_preempted_are_the_next_to_run() -> None:
    """In front of those who wait, in the order in which they came."""
    scheduler = make_scheduler(num_blocks=6, block_size=4, budget=32)
    states = [make_state([ord(n)] * 7, max_tokens=16, request_id=n) for n in "abc"]
    late = make_state([9], request_id="late")
    for state in states:
        scheduler.add(state)
    run_step(scheduler, scheduler.schedule())
    scheduler.add(late)
    for _ in range(8):  # all three are at the end of their blocks and none is left
        plan = scheduler.schedule()
        if scheduler.num_preemptions:
            break
        run_step(scheduler, plan)
    names = [s.request.request_id for s in scheduler.waiting]
    assert names == [*"bc", "late"][-len(names) :]
    assert len(names) >= 2
    for _ in range(60):
        run_step(scheduler, plan)
        if not (scheduler.running or scheduler.waiting):
            break
        plan = scheduler.schedule()
    assert all(s.status is RequestStatus.FINISHED for s in states)
    assert late.status is RequestStatus.FINISHED


def test_what_a_resumed_request_finds_of_itself_is_no_cached_prompt() -> None:
    scheduler = make_scheduler(num_blocks=5, block_size=4)
    states = [make_state([ord(n)] * 7, max_tokens=6, request_id=n) for n in "ab"]
    for state in states:
        scheduler.add(state)
    for _ in range(40):
        if not (scheduler.running or scheduler.waiting):
            break
        run_step(scheduler, scheduler.schedule())
    assert states[1].num_preemptions == 1
    assert scheduler.blocks.prefix_hits > 0  # its own blocks
    assert [s.num_cached_tokens for s in states] == [0, 0]


def test_the_start_of_a_prefix_outlives_its_end() -> None:
    blocks = BlockManager(3, 4)
    table, token_ids = BlockTable(), list(range(12))
    assert blocks.grow(table, 12)
    blocks.publish(table, token_ids, 12, 0)
    blocks.free(table)
    assert blocks.grow(BlockTable(), 1)
    assert blocks.match_prefix(BlockTable(), [*token_ids, 99]) == (8, 0)


def test_draft_kv_of_a_prefix_ends_at_its_first_gap() -> None:
    blocks = BlockManager(8, 4)
    table, token_ids = BlockTable(), list(range(12))
    assert blocks.grow(table, 12)
    blocks.publish(table, token_ids, 12, 12)
    blocks.blocks[table.block_ids[1]].has_draft_kv = False  # it was evicted and made again
    hit = BlockTable()
    assert blocks.match_prefix(hit, [*token_ids, 99]) == (12, 4)
    assert hit.num_drafted == 1


def test_accepted_drafts_are_not_computed_again(tiny_llama: Path) -> None:
    """A drafter equal to the target: k + 1 tokens a step, each step one decode of k drafts."""
    engine = make_engine(tiny_llama, "draft_model", 3, tiny_llama)
    (done,) = complete(engine, make_request("r", LOOP, temperature=0.0, ignore_eos=True))
    assert len(done.token_ids) == 24
    assert engine.stats.num_steps == 1 + 6  # the prompt and its token, then 23 by fours
    assert done.last is not None
    assert done.last.spec_decode.num_drafts == 6


def count_tokens(engine: Engine) -> list[int]:
    """The sizes of the draft model's forwards from now on."""
    assert isinstance(engine.executor, GroupExecutor)
    runner = engine.executor.worker.drafter.runner  # type: ignore[attr-defined]
    forward, sizes = runner.forward, []

    def count(batch: Any) -> Any:
        sizes.append(len(batch.input_ids))
        return forward(batch)

    runner.forward = count
    return sizes


def test_the_drafter_is_fed_each_token_once(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, "draft_model", 3, tiny_llama)
    sizes = count_tokens(engine)
    (done,) = complete(engine, make_request("r", LOOP, temperature=0.0, ignore_eos=True))
    assert sum(sizes) < len(LOOP) + len(done.token_ids)


def test_catching_up_keeps_to_the_budget(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, "draft_model", 3, tiny_llama, max_num_batched_tokens=16)
    prompt = list(range(10, 60))
    complete(engine, make_request("off", prompt, temperature=0.0, num_speculative_tokens=0))
    sizes = count_tokens(engine)
    complete(engine, make_request("on", prompt, temperature=0.0, ignore_eos=True))
    assert sum(sizes) > 48
    assert max(sizes) <= 16


def test_coupled_drafts_know_the_choice(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, "draft_model", 3, tiny_llama)
    requests = [make_request(f"r{c}", LOOP, choice=c, seed=1, ignore_eos=True) for c in range(3)]
    complete(engine, *requests)
    assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens > 0


def test_an_id_in_use_is_refused(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    engine.add_request(make_request("r", LOOP))
    with pytest.raises(InvalidRequestError):
        engine.add_request(make_request("r", LOOP))
    assert engine.num_unfinished == 1


@pytest.mark.parametrize("k", [0, 3])
def test_steps_without_drafts_are_no_drafts(tiny_llama: Path, k: int) -> None:
    engine = make_engine(tiny_llama, "draft_model", 3, tiny_llama)
    (done,) = complete(engine, make_request("r", LOOP, num_speculative_tokens=k, ignore_eos=True))
    assert done.last is not None
    stats = done.last.spec_decode
    assert (stats.num_drafts == 0) == (k == 0)
    assert stats.num_drafts == stats.num_verify_steps - 1 or k == 0


def test_a_bad_draft_id_is_counted_under_match_too(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, "ngram")
    assert isinstance(engine.executor, GroupExecutor)
    drafter = engine.executor.worker.drafter
    propose = drafter.propose

    def spoil(plan: SchedulerOutput, buffers: InputBuffers) -> DraftProposal:
        proposal = propose(plan, buffers)
        return replace(proposal, token_ids=torch.full_like(proposal.token_ids, 128))

    drafter.propose = spoil  # type: ignore[method-assign]
    complete(engine, make_request("r", LOOP, temperature=0.0, ignore_eos=True))
    assert engine.guards["draft_id_out_of_range"] == engine.stats.num_drafts > 0


def test_blocks_forget_the_draft_kv_of_their_former_owner() -> None:
    blocks = BlockManager(1, 4)
    for num_draft_computed in (4, 0):
        table, token_ids = BlockTable(), [num_draft_computed] * 4
        assert blocks.grow(table, 4)
        blocks.publish(table, token_ids, 4, num_draft_computed)
        blocks.free(table)
        hit = BlockTable()
        assert blocks.match_prefix(hit, [*token_ids, 9]) == (4, num_draft_computed)
        blocks.free(hit)


def test_freed_empty_blocks_are_taken_before_cached_ones() -> None:
    blocks = BlockManager(2, 4)
    cached, empty = BlockTable(), BlockTable()
    assert blocks.grow(cached, 4)
    assert blocks.grow(empty, 4)
    blocks.publish(cached, [1] * 4, 4, 0)
    blocks.free(cached)
    blocks.free(empty)
    assert blocks.grow(BlockTable(), 1)
    assert blocks.match_prefix(BlockTable(), [1] * 5) == (4, 0)


def test_a_prefix_hit_spares_the_drafter_too(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, "draft_model", 3, tiny_llama)
    assert isinstance(engine.executor, GroupExecutor)
    sizes = count_tokens(engine)
    request = make_request("r", list(range(20, 55)), temperature=0.0, max_tokens=2)
    complete(engine, request)
    first = sum(sizes)
    complete(engine, request)
    assert first - (sum(sizes) - first) == 32  # tokens, of 8 blocks


# -- corners of one request ---------------------------------------------------------------------


SMALL = [
    make_request(f"{i}-{t}", p, temperature=t, seed=i, max_tokens=12)
    for (i, p), t in itertools.product(enumerate([[7], *PROMPTS[:3]]), (0.0, 1.0))
]


@pytest.fixture(scope="module")
def small_texts(tiny_llama: Path) -> list[list[int]]:
    return [c.token_ids for c in complete(make_engine(tiny_llama, max_model_len=60), *SMALL)]


@pytest.mark.parametrize("drafter", ["ngram", "draft_model"])
@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 1, "num_kv_blocks": 80, "max_model_len": 60},
        {"max_num_seqs": 1},
        {"max_num_seqs": 1, "max_num_batched_tokens": 1},
        {"block_size": 64, "num_kv_blocks": 4, "max_model_len": 60},
        {"max_num_seqs": 3, "max_num_batched_tokens": 3, "block_size": 1},
    ],
)
def test_the_smallest_sizes_change_no_text(
    tiny_llama: Path,
    other_llama: Path,
    small_texts: list[list[int]],
    drafter: str,
    options: dict[str, Any],
) -> None:
    engine = make_engine(tiny_llama, drafter, 3, other_llama, **options)
    for _ in range(2):  # the second time from the prefix cache
        assert [c.token_ids for c in complete(engine, *SMALL)] == small_texts


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"seed": 1}, {}])
@pytest.mark.parametrize("drafter", ["ngram", "draft_model"])
def test_a_request_may_end_at_its_first_token(
    tiny_llama: Path, drafter: str, params: dict[str, Any]
) -> None:
    engine = make_engine(tiny_llama, drafter, 3, tiny_llama, max_model_len=17)
    eos, cap, full = complete(
        engine,
        make_request("eos", [7], logit_bias=((0, 100.0),), **params),
        make_request("cap", [7], max_tokens=1, ignore_eos=True, **params),
        make_request("full", LOOP, max_tokens=9, ignore_eos=True, **params),
    )
    assert (eos.token_ids, eos.finish_reason, eos.text) == ([0], "stop", "")
    assert (len(cap.token_ids), cap.finish_reason) == (1, "length")
    assert (len(full.token_ids), full.finish_reason) == (1, "length")  # the context has 17


def test_a_cold_row_is_greedy_in_all_but_name(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, "draft_model", 3, tiny_llama)
    options: dict[str, Any] = {"ignore_eos": True}
    greedy = [make_request(f"g{i}", p, temperature=0.0, **options) for i, p in enumerate(PROMPTS)]
    want = [c.token_ids for c in complete(engine, *greedy)]
    engine.stats.num_draft_tokens = engine.stats.num_accepted_tokens = 0
    cold = [
        make_request(f"c{i}", p, temperature=MIN_TEMPERATURE, **options)
        for i, p in enumerate(PROMPTS)
    ]
    assert [c.token_ids for c in complete(engine, *cold)] == want
    assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens > 0
    assert not engine.guards


def test_strengths_that_cancel_are_still_penalties() -> None:
    """presence_penalty + frequency_penalty == 0 is no reason to skip them: counts differ."""
    for strength in (0.9, -0.9):
        setup = toy.Setup(
            config=SpeculativeConfig(drafter="ngram", ngram_min=1),
            params=SamplingParams(presence_penalty=strength, frequency_penalty=-strength),
            prompt=(1, 2, 3, 1, 2),
        )
        assert toy.total_variation(toy.output_law(setup), toy.joint_law(setup)) < 1e-5


def test_an_ignored_eos_is_not_masked(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    options: dict[str, Any] = {"min_tokens": 4, "max_tokens": 6, "logit_bias": ((0, 100.0),)}
    (done,) = complete(engine, make_request("r", LOOP, ignore_eos=True, **options))
    assert done.token_ids == [0] * 6


# -- stops --------------------------------------------------------------------------------------


def test_a_stop_string_may_end_at_min_tokens() -> None:
    text, outputs, _ = run(["abcstop"], stop=("c",), min_tokens=3)
    assert (text, outputs[-1].stop_reason) == ("ab", "c")
    text, outputs, _ = run(["abcstop"], stop=("c",), min_tokens=4)
    assert (text, outputs[-1].finish_reason) == ("abcstop", None)


def test_of_two_stops_at_one_place_the_longest_counts() -> None:
    class Words(Letters):
        def push(self, token_ids: Any) -> str:
            return "".join({1: "a", 2: "stop"}[t] for t in token_ids)

    for stops in (("op", "st", "stop"), ("stop", "st")):
        params = SamplingParams(stop=stops, include_stop_str_in_output=True)
        state = make_state([1])
        state.request = replace(state.request, params=params)
        processor = OutputProcessor(state, Words(), [])  # type: ignore[arg-type]
        _, output = processor.process(SlotOutput(slot=0, token_ids=(1, 2)))
        assert (output.text, output.stop_reason) == ("astop", "stop")


@pytest.mark.parametrize("how", ["abort", "error"])
def test_held_text_is_sent_when_nothing_follows(how: str) -> None:
    state = make_state([1], max_tokens=20)
    state.request = replace(state.request, params=SamplingParams(stop=("stop",)))
    processor = OutputProcessor(state, Letters(), [])  # type: ignore[arg-type]
    kept, output = processor.process(SlotOutput(slot=0, token_ids=tuple(ids("ast"))))
    assert output.text == "a"
    state.token_ids += kept
    if how == "abort":
        output = processor.end("abort")
    else:
        _, output = processor.process(SlotOutput(slot=0, token_ids=tuple(ids("o")), error="NaN"))
    assert (output.text, output.finish_reason) == ("st" if how == "abort" else "sto", how)


# -- requests together --------------------------------------------------------------------------


def run_joining(engine: Any, requests: list[Request], seed: list[int], every: int) -> list[Any]:
    """Each request joins `every` steps after the one before; `seed` is what entropy gives next."""
    done = {r.request_id: Completion(r.request_id) for r in requests}
    todo = list(requests)
    for step in itertools.count():
        if not (todo or engine.num_unfinished):
            return list(done.values())
        while todo and (every == 0 or step % every == 0):
            request = todo.pop(0)
            seed[0] = 1000 + int(request.request_id)
            engine.add_request(request)
            if every:
                break
        for output in engine.step():
            done[output.request_id].add(output)
        engine.check_integrity()
    raise AssertionError


def test_mixed_rows_do_not_meet(
    tiny_llama: Path, other_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, match and rejection rows of different k, joining and leaving: each gets the text
    that it gets alone. Rows, laws and noise of one read for another would show."""
    seed = [0]
    monkeypatch.setattr("secrets.randbits", lambda bits: seed[0])
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.5},
        {"seed": 5},
        {"temperature": 1.5, "top_k": 40, "logit_bias": ((9, 3.0),)},
    ]
    requests = [
        make_request(
            str(i),
            PROMPTS[i % len(PROMPTS)],
            num_speculative_tokens=[3, 1, 2, 0, None][(i // 2) % 5],
            max_tokens=6 + 3 * (i % 5),
            logprobs=2,
            **kinds[i % len(kinds)] if i % 7 else kinds[0],
        )
        for i in range(20)
    ]
    big: dict[str, Any] = {"max_num_batched_tokens": 512, "enable_prefix_caching": False}
    engine = make_engine(tiny_llama, "draft_model", 3, other_llama, **big)
    alone = [run_joining(engine, [r], seed, 0)[0] for r in requests]
    assert engine.stats.num_accepted_tokens > 20
    for every in (0, 1, 2):
        together = run_joining(engine, requests, seed, every)
        assert [c.token_ids for c in together] == [c.token_ids for c in alone]
        for a, b in zip(together, alone, strict=True):
            for x, y in zip(a.logprobs, b.logprobs, strict=True):
                assert x.logprob == pytest.approx(y.logprob, abs=1e-4)
    assert not engine.guards


@pytest.mark.parametrize("drafter", ["none", "ngram", "draft_model"])
@pytest.mark.parametrize("seeded", [False, True])
def test_sampled_rows_beside_greedy_ones_are_sampled(
    tiny_llama: Path, drafter: str, seeded: bool
) -> None:
    engine = make_engine(tiny_llama, drafter, 3, tiny_llama)
    greedy, *sampled = complete(
        engine,
        make_request("g", LOOP, temperature=0.0, ignore_eos=True, max_tokens=12),
        *[
            make_request(
                f"s{i}",
                LOOP,
                temperature=2.0,
                seed=i if seeded else None,
                ignore_eos=True,
                max_tokens=12,
            )
            for i in range(7)
        ],
    )
    assert len({tuple(c.token_ids) for c in sampled}) == 7
    assert greedy.token_ids not in [c.token_ids for c in sampled]


@pytest.mark.parametrize("bad", range(3))
def test_a_bad_row_is_its_owners_in_a_mixed_batch(tiny_llama: Path, bad: int) -> None:
    """Greedy, match and rejection rows are walked apart: validity must go with its row."""
    for kinds in itertools.permutations(({"temperature": 0.0}, {"seed": 3}, {})):
        engine = make_engine(tiny_llama, "draft_model", 3, tiny_llama, enable_graphs=False)
        assert isinstance(engine.executor, GroupExecutor)
        target = engine.executor.worker.target
        logits, steps = target.logits, itertools.count(1)

        def spoil(hidden: Tensor, logits: Any = logits, steps: Any = steps) -> Tensor | None:
            rows: Tensor = logits(hidden)
            if next(steps) == 3:  # each has 3 drafts and 4 rows
                assert len(rows) == 12
                rows[4 * bad] = torch.nan
            return rows

        target.logits = spoil  # type: ignore[method-assign,assignment]
        requests = [
            make_request(str(i), PROMPTS[i], ignore_eos=True, **kind)  # type: ignore[arg-type]
            for i, kind in enumerate(kinds)
        ]
        reasons = [c.finish_reason for c in complete(engine, *requests)]
        assert reasons == ["error" if i == bad else "length" for i in range(3)]


@pytest.mark.parametrize("drafter", ["none", "draft_model"])
def test_raw_logprobs_are_of_the_model_alone(tiny_llama: Path, drafter: str) -> None:
    """Temperature, cuts, penalties and bias change what is drawn, not the raw law."""
    engine = make_engine(tiny_llama, drafter, 3, tiny_llama)
    tops = []
    for params in (
        {"temperature": 0.0},
        {"temperature": 0.5, "top_k": 3},
        {"temperature": 2.0, "top_p": 0.5, "repetition_penalty": 1.5},
        {"temperature": 1.0, "logit_bias": ((7, 50.0),)},
    ):
        request = make_request("r", LOOP, max_tokens=1, logprobs=20, **params)
        (done,) = complete(engine, request)
        tops.append(done.logprobs[0])
    law = dict(tops[0].top)
    for entry in tops:
        assert dict(entry.top) == pytest.approx(law, abs=1e-5)
        assert entry.logprob == pytest.approx(law.get(entry.token_id, entry.logprob), abs=1e-5)
    assert tops[-1].token_id == 7
    assert tops[-1].logprob < -0.1  # the bias made it certain, the model did not


# -- faults do not stay -------------------------------------------------------------------------


def test_a_fault_does_not_stay_in_the_prefix_cache(tiny_llama: Path) -> None:
    """The KV of a request that met NaN is in doubt: nobody else may be given it."""
    engine = make_engine(tiny_llama)
    assert isinstance(engine.executor, GroupExecutor)
    target = engine.executor.worker.target
    request = make_request("r", list(range(20, 45)), temperature=0.0)
    (want,) = complete(make_engine(tiny_llama), request)
    forward = target.forward

    def fault(batch: Any) -> ForwardOutput:
        hidden = forward(batch).hidden_states
        for layer in target.kv_cache.layers:
            layer[batch.slot_mapping] = torch.nan
        return ForwardOutput(hidden_states=torch.full_like(hidden, torch.nan))

    target.forward = fault  # type: ignore[method-assign]
    (done,) = complete(engine, request)
    assert done.finish_reason == "error"
    target.forward = forward  # type: ignore[method-assign]
    (done,) = complete(engine, request)
    assert done.finish_reason == want.finish_reason
    assert done.token_ids == want.token_ids


# -- one decision -------------------------------------------------------------------------------


class ThreadGroup(TPGroup):
    """Ranks that are threads: a broadcast hands rank 0's value over a barrier."""

    def __init__(self, rank: int, barrier: threading.Barrier, mail: list[Any]) -> None:
        super().__init__(rank, 2)
        self.meeting = barrier
        self.mail = mail

    def broadcast_object(self, obj: Any) -> Any:
        if self.rank == 0:
            self.mail[0] = obj
        self.meeting.wait(10)
        got = self.mail[0]
        self.meeting.wait(10)
        return got

    def broadcast_(self, x: Tensor) -> Tensor:
        return x.copy_(self.broadcast_object(x.clone()))


class Follower(toy.ToyRunner):
    def logits(self, hidden_states: Tensor) -> Tensor:
        return None  # type: ignore[return-value]  # logits are gathered to rank 0


def rank_steps(
    config: SpeculativeConfig, group: TPGroup, steps: int
) -> Iterator[tuple[InputBuffers, Tensor, Tensor]]:
    """A rank's buffers, target KV and draft KV after each step of three requests over toys."""
    runner = toy.ToyRunner if group.rank == 0 else Follower
    target: Any = runner(4, seed=1)
    draft: Any = runner(4, seed=2)
    buffers = InputBuffers(
        max_num_seqs=3,
        max_model_len=40,
        block_size=toy.BLOCK_SIZE,
        resolved=resolve_speculative(config),
        eos_token_ids=(),
    )
    drafter: Drafter = NgramDrafter(1, 3, group)
    if config.drafter == "draft_model":
        drafter = DraftModelDrafter(draft, group, max_num_seqs=3, k=2, max_num_tokens=64)
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"seed": 3}, {}]
    prompt = (1, 2, 3, 1, 2)
    new = tuple(
        NewRequest(
            slot=i,
            request=Request(
                request_id=str(i),
                prompt_token_ids=prompt,
                params=SamplingParams(**kinds[i]),
            ),
            seed=i,
        )
        for i in range(3)
    )
    for step in range(steps):
        done = [0 if step == 0 else n - 1 for n in buffers.num_tokens]
        plan = SchedulerOutput(
            scheduled=tuple(
                ScheduledRequest(
                    slot=i,
                    num_computed_tokens=done[i],
                    num_scheduled_tokens=1 if step else len(prompt),
                    num_draft_tokens=2 if step else 0,
                    samples=True,
                    new_block_ids=() if step else tuple(range(20 * i, 20 * i + 20)),
                )
                for i in range(3)
            ),
            new_requests=() if step else new,
        )
        speculative_step(plan, buffers, target, drafter, group)
        yield buffers, target.kv, draft.kv


@pytest.mark.parametrize(
    "config",
    [
        SpeculativeConfig(drafter="ngram", ngram_min=1),
        SpeculativeConfig(drafter="draft_model", draft_model="-"),
    ],
    ids=["ngram", "draft_model"],
)
def test_a_follower_holds_what_rank_0_decided(config: SpeculativeConfig) -> None:
    """sglang#28815: drafts and decision come from rank 0 alone; the others have no logits."""
    barrier, mail = threading.Barrier(2), [None]
    results: dict[int, Any] = {}

    def run(rank: int) -> None:
        try:
            *_, (buffers, *kv) = rank_steps(config, ThreadGroup(rank, barrier, mail), 6)
            results[rank] = (
                [buffers.token_ids[i, :n].tolist() for i, n in enumerate(buffers.num_tokens)],
                list(buffers.num_draft_computed),
                [pool.tolist() for pool in kv],  # both were fed the same tokens
            )
        except BaseException as e:
            results[rank] = e
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert isinstance(results[0], tuple), results
    assert results[0] == results[1]
    assert max(len(tokens) for tokens in results[0][0]) > 5 + 6  # some drafts were accepted
