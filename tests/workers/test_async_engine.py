"""The engine's thread: whatever is called from wherever, every request ends exactly once."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from spectrue.workers.async_engine import AsyncEngine
from spectrue.workers.config import EngineConfig, SpeculativeConfig
from spectrue.workers.core import Request, RequestOutput, SchedulerOutput, SlotOutput, StepOutput
from spectrue.workers.engine import Engine
from spectrue.workers.errors import (
    ConfigError,
    EngineDeadError,
    EngineOverloadedError,
    InvalidRequestError,
)
from spectrue.workers.policy import resolve_speculative
from spectrue.workers.scheduler import RequestState
from spectrue.workers.worker import ModelInfo

from .harness import Completion, complete, make_engine, make_request

DEADLINE = 20.0  # seconds; nothing here takes one
VOCAB = 1000


class CountingExecutor:
    """The token of every position is the position, so that a lost or doubled one shows.

    `permits` steps may run; a step beyond them waits. The step after `fault` is set raises it.
    """

    def __init__(self, permits: int | None = None) -> None:
        self.permits = threading.Semaphore(permits) if permits is not None else None
        self.fault: Exception | None = None
        self.loses_an_output = False
        self.num_shutdowns = 0
        self.follows = False  # a second step may be launched before the first has ended
        self.num_in_flight = self.most_in_flight = 0
        self.lengths: dict[int, int] = {}  # by slot, which a step ahead goes on from
        self.waiting = threading.Event()  # a step has begun

    def can_follow(self, plan: SchedulerOutput) -> bool:
        return self.follows and all(
            s.samples and s.num_scheduled_tokens == 1 and not s.num_draft_tokens
            for s in plan.scheduled
        )

    def launch(self, plan: SchedulerOutput) -> Callable[[], StepOutput]:
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        return lambda: self._finish(plan)

    def _finish(self, plan: SchedulerOutput) -> StepOutput:
        self.num_in_flight -= 1
        self.waiting.set()
        if self.permits is not None:
            assert self.permits.acquire(timeout=DEADLINE)
        if self.fault is not None:
            raise self.fault
        outputs = []
        for s in plan.scheduled:
            first = s.num_computed_tokens + s.num_scheduled_tokens
            if s.ahead:
                first = self.lengths[s.slot]
            tokens = range(first, first + s.num_draft_tokens + 1) if s.samples else ()
            self.lengths[s.slot] = first + len(tokens)
            outputs.append(
                SlotOutput(
                    slot=s.slot,
                    token_ids=tuple(t % VOCAB for t in tokens),
                    num_draft_tokens=s.num_draft_tokens,
                    num_accepted_tokens=s.num_draft_tokens,
                )
            )
        return StepOutput(outputs=tuple(outputs[: len(outputs) - self.loses_an_output]))

    def shutdown(self) -> None:
        self.num_shutdowns += 1

    def open(self) -> None:
        """Let every step run from now on."""
        assert self.permits is not None
        for _ in range(10_000):
            self.permits.release()


def make(executor: CountingExecutor, **options: Any) -> AsyncEngine:
    settings: dict[str, Any] = {
        "model": "-",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "block_size": 4,
        **options,
    }
    config = EngineConfig(**settings)
    info = ModelInfo(
        model_path=Path("-"),
        max_model_len=256,
        vocab_size=VOCAB,
        num_kv_blocks=96,
        eos_token_ids=(),
        dtype="float32",
        device="cpu",
        resolved=resolve_speculative(SpeculativeConfig(drafter="ngram")),
        decisions=(),
        needs_hidden_states=False,
    )
    return AsyncEngine(
        config, engine_factory=lambda config, *_: Engine(config, info, executor, None)
    )


def serve(engine: Engine) -> AsyncEngine:
    return AsyncEngine(engine.config, engine_factory=lambda *_: engine)


def collect(engine: AsyncEngine, requests: Sequence[Request]) -> dict[str, Completion]:
    """Poll until all of `requests` have ended. `Completion.add` refuses a second end."""
    done = {r.request_id: Completion(r.request_id) for r in requests}
    deadline = time.monotonic() + DEADLINE
    while any(c.finish_reason is None for c in done.values()):
        assert time.monotonic() < deadline, f"lost: {[n for n, c in done.items() if not c.last]}"
        for output in engine.poll(0.2):
            done[output.request_id].add(output)
    return done


def drain(engine: AsyncEngine, requests: Sequence[Request]) -> dict[str, Completion]:
    """After the engine's end: what is left to hand out, then EngineDeadError."""
    done = {r.request_id: Completion(r.request_id) for r in requests}
    try:
        while True:
            for output in engine.poll(DEADLINE):
                done[output.request_id].add(output)
    except EngineDeadError:
        return done


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def positions(request: Request) -> list[int]:
    first = len(request.prompt_token_ids)
    return [t % VOCAB for t in range(first, first + request.params.max_tokens)]


def test_texts_are_those_of_the_engine_alone(tiny_llama: Path) -> None:
    requests = [
        make_request(f"r{i}", [3 + i, 4, 5] * (i + 1), seed=i, temperature=i % 2) for i in range(6)
    ]
    want = complete(make_engine(tiny_llama, "ngram"), *requests)
    engine = serve(make_engine(tiny_llama, "ngram"))
    for request in requests:
        engine.submit([request])
    done = collect(engine, requests)
    engine.shutdown()
    for completion in want:
        assert done[completion.request_id].token_ids == completion.token_ids
        assert done[completion.request_id].text == completion.text


def test_one_bad_request_refuses_all(tiny_llama: Path) -> None:
    engine = serve(make_engine(tiny_llama))
    requests = [make_request("a", [1]), make_request("b", [128]), make_request("c", [1])]
    with pytest.raises(InvalidRequestError) as e:
        engine.submit(requests)
    assert e.value.param == "prompt"
    assert engine.poll(0.05) == []
    assert engine.status()["waiting"] == engine.status()["running"] == 0
    engine.submit(requests[::2])  # their ids were not taken
    collect(engine, requests[::2])
    engine.shutdown()


def test_a_full_queue_refuses_all() -> None:
    executor = CountingExecutor(permits=0)
    engine = make(executor, max_queue_len=3)
    requests = [make_request(f"r{i}", [1, 2]) for i in range(6)]
    engine.submit(requests[:1])
    assert executor.waiting.wait(DEADLINE)  # admitted: it waits no longer
    engine.submit(requests[1:3])
    with pytest.raises(EngineOverloadedError):
        engine.submit(requests[3:5])
    engine.submit(requests[3:4])  # there is room for one
    with pytest.raises(EngineOverloadedError):
        engine.submit(requests[5:])
    assert engine.status()["waiting"] == 3
    executor.open()
    done = collect(engine, requests[:4])
    assert all(done[r.request_id].token_ids == positions(r) for r in requests[:4])
    assert engine.poll(0.05) == []
    engine.shutdown()


@pytest.mark.parametrize("num_requests", [3, 12])  # as many as there are slots, and more
def test_a_step_launched_ahead_loses_and_repeats_nothing(num_requests: int) -> None:
    """Requests end by length, by a stop that the step ahead did not foresee, and by an abort."""
    executor = CountingExecutor()
    executor.follows = True
    engine = make(executor)
    rng = random.Random(num_requests)
    requests = [
        make_request(
            f"r{i}",
            [1] * rng.randrange(1, 9),
            max_tokens=rng.randrange(1, 60),
            num_speculative_tokens=0,
            stop_token_ids=(rng.randrange(5, 60),),
        )
        for i in range(num_requests)
    ]
    engine.submit(requests)
    aborted = requests[1::4]
    eventually(lambda: engine.engine.stats.num_steps > 5)
    engine.abort([r.request_id for r in aborted])
    done = collect(engine, requests)
    for request in requests:
        end, want = done[request.request_id], positions(request)
        stop = request.params.stop_token_ids[0]
        if stop in want:
            want = want[: want.index(stop) + 1]
        if request in aborted and end.finish_reason == "abort":
            want = want[: len(end.token_ids)]
        else:
            assert end.finish_reason == ("stop" if stop in want else "length")
        assert end.token_ids == want
    assert executor.most_in_flight == 2
    assert engine.engine.blocks.num_used == 0
    # The step ahead of the last request's end was in vain; the next request does not see it.
    late = make_request("late", [1, 2], num_speculative_tokens=0)
    engine.submit([late])
    assert collect(engine, [late])["late"].token_ids == positions(late)
    assert executor.num_in_flight <= 1
    engine.engine.check_integrity()
    engine.shutdown()


def test_an_id_in_use_is_refused() -> None:
    executor = CountingExecutor(permits=0)
    engine = make(executor)
    a, b, c = (make_request(n, [1, 2]) for n in "abc")
    with pytest.raises(InvalidRequestError):
        engine.submit([a, b, a])
    engine.submit([a])
    assert executor.waiting.wait(DEADLINE)
    with pytest.raises(InvalidRequestError):  # running
        engine.submit([b, a])
    engine.submit([b])
    with pytest.raises(InvalidRequestError):  # in the mailbox
        engine.submit([c, b])
    executor.open()
    collect(engine, [a, b])
    engine.submit([a, b, c])  # ended: free again
    collect(engine, [a, b, c])
    engine.shutdown()


def test_an_id_let_in_while_it_is_checked_is_refused() -> None:
    """Between the check of a request and its entry into the mailbox its twin may have moved on."""
    executor = CountingExecutor(permits=0)
    engine = make(executor)
    first, twin = make_request("a", [1]), make_request("b", [1, 2], max_tokens=100)
    engine.submit([first])
    assert executor.waiting.wait(DEADLINE)
    engine.submit([twin])
    check = engine.engine.check

    def slow(request: Request) -> None:
        check(request)
        assert executor.permits is not None
        executor.permits.release()
        eventually(lambda: "b" in engine.engine.processors)

    engine.engine.check = slow  # type: ignore[method-assign]
    with pytest.raises(InvalidRequestError):
        engine.submit([twin])
    executor.open()
    done = collect(engine, [first, twin])
    assert done["b"].token_ids == positions(twin)
    engine.shutdown()


def test_aborts() -> None:
    executor = CountingExecutor(permits=0)
    engine = make(executor)
    a, b, c = (make_request(n, [1, 2], max_tokens=200) for n in "abc")
    engine.submit([a])
    assert executor.waiting.wait(DEADLINE)
    engine.submit([b, c])
    engine.abort(["b", "nobody"])  # before it was let in
    engine.abort(["b", "a"])  # twice, and one that runs
    executor.open()
    done = collect(engine, [a, b, c])
    assert [done[n].finish_reason for n in "abc"] == ["abort", "abort", "length"]
    assert done["a"].token_ids == positions(a)[:1]  # of the step that was in flight
    assert done["b"].token_ids == []
    assert done["c"].token_ids == positions(c)
    assert all(d.last is not None and d.last.error is None for d in done.values())
    engine.abort(["a", "c"])  # ended already
    assert engine.poll(0.05) == []
    assert engine.status()["kv_blocks_used"] == 0
    engine.shutdown()


def test_poll_waits_for_outputs_and_no_longer() -> None:
    executor = CountingExecutor(permits=0)
    engine = make(executor)
    start = time.monotonic()
    assert engine.poll(0.1) == []
    assert 0.1 <= time.monotonic() - start < 5
    assert engine.poll(0) == []
    request = make_request("r", [1, 2], max_tokens=1)
    timer = threading.Timer(0.1, executor.open)
    engine.submit([request])
    timer.start()
    start = time.monotonic()
    (output,) = engine.poll(DEADLINE)
    assert output.finish_reason == "length"
    assert time.monotonic() - start < DEADLINE / 2
    engine.shutdown()


def test_outputs_wait_for_a_slow_client() -> None:
    engine = make(CountingExecutor())
    request = make_request("r", [1, 2], max_tokens=50)
    engine.submit([request])
    eventually(lambda: engine.status()["committed_tokens"] == 50)
    done = Completion("r")
    for output in engine.poll(DEADLINE):
        done.add(output)
    assert done.token_ids == positions(request)
    assert done.finish_reason == "length"
    engine.shutdown()


def die(engine: AsyncEngine, executor: CountingExecutor) -> list[Request]:
    """Kill the loop while a request runs, others wait for a slot and one is in the mailbox."""
    requests = [make_request(f"r{i}", [1, 2], max_tokens=100) for i in range(8)]
    engine.submit(requests[:7])
    assert executor.waiting.wait(DEADLINE)
    engine.submit(requests[7:])
    return requests


def test_death_ends_every_request_once() -> None:
    executor = CountingExecutor(permits=1)
    engine = make(executor, max_num_seqs=2)
    requests = die(engine, executor)
    eventually(lambda: engine.status()["steps"] == 1)  # the first two have a token or more
    executor.fault = RuntimeError("the device is gone")
    executor.open()
    done = drain(engine, requests)
    for request in requests:
        completion = done[request.request_id]
        assert completion.finish_reason == "abort"
        assert completion.last is not None
        assert "the device is gone" in (completion.last.error or "")
        assert completion.token_ids == positions(request)[: len(completion.token_ids)]
    assert [bool(done[r.request_id].token_ids) for r in requests] == [True] * 2 + [False] * 6
    with pytest.raises(EngineDeadError, match="the device is gone"):
        engine.submit([make_request("late", [1])])
    with pytest.raises(EngineDeadError, match="the device is gone"):
        engine.poll(DEADLINE)
    assert "the device is gone" in str(engine.status()["error"])
    engine.abort(["r0"])
    engine.shutdown()
    assert executor.num_shutdowns == 0  # its followers may be inside a step
    assert engine.engine.num_unfinished == engine.engine.blocks.num_used == 0
    engine.engine.check_integrity()


def test_a_waiting_poll_hears_of_the_death() -> None:
    executor = CountingExecutor(permits=0)
    engine = make(executor)
    got: list[list[RequestOutput]] = []
    poller = threading.Thread(target=lambda: got.append(engine.poll(DEADLINE)))
    poller.start()
    engine.submit([make_request("r", [1])])
    executor.fault = RuntimeError("gone")
    executor.open()
    poller.join(DEADLINE / 2)
    assert [o.finish_reason for o in got[0]] == ["abort"]
    engine.shutdown()


def test_what_half_a_step_produced_is_handed_out() -> None:
    executor = CountingExecutor(permits=0)
    engine = make(executor)
    requests = [make_request(n, [1, 2]) for n in "ab"]
    engine.submit(requests)
    assert executor.waiting.wait(DEADLINE)
    executor.loses_an_output = True  # the second request's: the step fails behind the first
    executor.open()
    done = drain(engine, requests)
    assert done["a"].token_ids == positions(requests[0])[:1]
    assert [c.finish_reason for c in done.values()] == ["abort", "abort"]
    engine.shutdown()


@pytest.mark.parametrize("broken", ["enqueue", "abort", "schedule", "finish"])
def test_whatever_breaks_nobody_waits(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault outside the step, of one request, ends all of them: none is lost."""
    executor = CountingExecutor(permits=0)
    engine = make(executor)
    requests = [make_request(f"r{i}", [1, 2], max_tokens=100) for i in range(4)]
    engine.submit(requests[:2])
    assert executor.waiting.wait(DEADLINE)

    def fail(thing: Any) -> Any:
        if thing in (requests[3], "r1"):
            raise RuntimeError("broken")
        return original(thing)

    if broken == "schedule":
        monkeypatch.setattr(
            engine.engine.scheduler, "_schedule_chunk", lambda *_: 1 / 0, raising=True
        )
    elif broken == "finish":  # the queues or blocks of one do not add up
        release = engine.engine.scheduler._release

        def fail_release(state: RequestState) -> None:
            assert state.request.request_id != "r1", "broken"
            release(state)

        monkeypatch.setattr(engine.engine.scheduler, "_release", fail_release)
    else:
        original = getattr(engine.engine, broken)
        monkeypatch.setattr(engine.engine, broken, fail)
    engine.submit(requests[2:])
    engine.abort(["r0", "r1"])
    executor.open()
    done = drain(engine, requests)
    assert [c.finish_reason for c in done.values()] == ["abort"] * 4
    engine.shutdown()


def test_broken_text_ends_its_request_and_loses_none(tiny_llama: Path) -> None:
    inner = make_engine(tiny_llama)
    assert inner.tokenizer is not None
    decode = inner.tokenizer.decode

    def broken(token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if 77 in token_ids:
            raise ValueError("no such token")
        return decode(token_ids, skip_special_tokens)

    inner.tokenizer.decode = broken  # type: ignore[method-assign]
    engine = serve(inner)
    requests = [
        make_request("bad", [1, 2], logit_bias=((77, 100.0),)),
        *(make_request(f"r{i}", [3, i], seed=i, logit_bias=((77, -100.0),)) for i in range(3)),
    ]
    engine.submit(requests)
    done = collect(engine, requests)
    assert done["bad"].finish_reason == "error"
    assert done["bad"].last is not None
    assert "no such token" in (done["bad"].last.error or "")
    assert all(done[f"r{i}"].finish_reason in ("length", "stop") for i in range(3))
    engine.shutdown()


def test_shutdown_ends_what_is_open() -> None:
    executor = CountingExecutor(permits=3)
    engine = make(executor, max_num_seqs=2)
    requests = die(engine, executor)
    eventually(lambda: engine.status()["steps"] == 3)
    closers = [threading.Thread(target=engine.shutdown) for _ in range(3)]
    for closer in closers:
        closer.start()
    eventually(lambda: engine._closing)
    with pytest.raises(EngineDeadError):
        engine.submit([make_request("late", [1])])
    executor.open()
    for closer in closers:
        closer.join(DEADLINE)
    done = drain(engine, requests)
    assert all(c.finish_reason == "abort" for c in done.values())
    assert all(c.last is not None and "shut down" in (c.last.error or "") for c in done.values())
    assert executor.num_shutdowns == 1
    engine.shutdown()


def test_an_idle_engine_shuts_down() -> None:
    executor = CountingExecutor()
    engine = make(executor)
    engine.shutdown()
    assert executor.num_shutdowns == 1
    with pytest.raises(EngineDeadError):
        engine.poll(DEADLINE)


def test_a_failing_load_is_the_callers() -> None:
    def load(*_: object) -> Engine:
        raise ConfigError("block_size must be at least 1, got 0")

    with pytest.raises(ConfigError):
        AsyncEngine(EngineConfig(model="-"), engine_factory=load)


def test_the_heartbeat_ages_only_while_there_is_work() -> None:
    executor = CountingExecutor(permits=0)
    engine = make(executor)
    time.sleep(0.1)
    assert engine.status()["loop_heartbeat_age"] == 0.0
    request = make_request("r", [1])
    engine.submit([request])
    assert executor.waiting.wait(DEADLINE)
    time.sleep(0.2)
    age = engine.status()["loop_heartbeat_age"]
    assert isinstance(age, float)
    assert 0.2 <= age < 5
    executor.open()
    collect(engine, [request])
    eventually(lambda: engine.status()["loop_heartbeat_age"] == 0.0)
    engine.shutdown()


def test_a_long_idle_engine_is_not_late_at_once() -> None:
    """Asked between a submit and the loop's waking, its age is that of the work, not of the nap."""
    engine = make(CountingExecutor())
    eventually(engine._thread.is_alive)
    time.sleep(0.05)
    calls: list[Callable[[], None]] = [
        lambda: engine.submit([make_request("r", [1])]),
        lambda: engine.abort(["r"]),
    ]
    for call in calls:
        with engine._lock:  # the loop cannot wake
            engine._heartbeat -= 1000
            call()
            age = engine.status()["loop_heartbeat_age"]
            assert isinstance(age, float)
            assert age < 5
        eventually(lambda: not engine._busy())
    engine.shutdown()


@pytest.mark.parametrize("seed", range(3))
def test_many_threads_lose_and_double_nothing(seed: int) -> None:
    engine = make(CountingExecutor(), max_queue_len=16)
    accepted: dict[str, Request] = {}
    aborted: set[str] = set()
    done: dict[str, Completion] = {}
    errors: list[BaseException] = []
    closing = threading.Event()

    def client(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        try:
            for i in range(40):
                requests = [
                    make_request(
                        f"{number}-{i}-{j}",
                        [number] * rng.randint(1, 60),
                        max_tokens=rng.randint(1, 40),
                    )
                    for j in range(rng.randint(1, 4))
                ]
                try:
                    engine.submit(requests)
                except EngineOverloadedError:
                    time.sleep(0.001)
                    continue
                accepted.update((r.request_id, r) for r in requests)
                if rng.random() < 0.4:
                    time.sleep(rng.random() * 0.003)
                    names = [r.request_id for r in requests if rng.random() < 0.6]
                    aborted.update(names)
                    engine.abort([*names, "nobody"])
        except BaseException as e:
            errors.append(e)

    def poller() -> None:
        try:
            while True:
                for output in engine.poll(0.05):
                    completion = done.setdefault(output.request_id, Completion(output.request_id))
                    completion.add(output)
        except EngineDeadError:
            closing.set()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=client, args=(i,)) for i in range(8)]
    reader = threading.Thread(target=poller)
    reader.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    eventually(lambda: not engine._busy())
    engine.engine.check_integrity()
    engine.shutdown()
    reader.join(DEADLINE)
    assert closing.is_set()
    assert not errors, errors
    assert done.keys() == accepted.keys()
    assert len(accepted) > 100
    reasons = set()
    for name, request in accepted.items():
        completion = done[name]
        reasons.add(completion.finish_reason)
        want = positions(request)
        if name not in aborted:
            assert completion.finish_reason == "length"
        if completion.finish_reason == "length":
            assert completion.token_ids == want
        else:
            assert completion.token_ids == want[: len(completion.token_ids)]
    assert reasons == {"length", "abort"}
    assert engine.engine.blocks.num_used == 0
