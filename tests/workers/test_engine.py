"""The engine on tiny models: speculation, batching, caching and preemption change no text."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from spectrue.workers.engine import Engine
from spectrue.workers.errors import EngineOverloadedError, InvalidRequestError

from ..conftest import make_tiny_model
from .harness import Completion, assert_same_tokens, complete, make_engine, make_request

LOOP = [5, 9, 12, 7] * 4  # the n-gram drafter has something to find
PROMPTS = [LOOP, [3, 4, 5], [88, 17, 23, 56, 91, 33, 2, 17, 23], [40] * 9, list(range(20, 45))]


@pytest.fixture(scope="module")
def other_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("other"), seed=7, layers=1)


@pytest.fixture(scope="module")
def plain_greedy(tiny_llama: Path) -> list[Completion]:
    engine = make_engine(tiny_llama)
    return [complete(engine, make_request("r", p, temperature=0.0, logprobs=2))[0] for p in PROMPTS]


@pytest.mark.parametrize(
    ("drafter", "k"),
    [*itertools.product(("ngram", "draft_model"), (1, 3)), ("copy", 5), ("copy", 2), ("ngram", 0)],
)
def test_greedy_speculative_is_plain_greedy(
    tiny_llama: Path, other_llama: Path, plain_greedy: list[Completion], drafter: str, k: int
) -> None:
    draft = tiny_llama if drafter == "copy" else other_llama
    engine = make_engine(tiny_llama, "ngram" if drafter == "ngram" else "draft_model", k, draft)
    requests = [
        make_request(f"r{i}", p, temperature=0.0, logprobs=2) for i, p in enumerate(PROMPTS)
    ]
    alone = [complete(engine, r)[0] for r in requests]
    # Among sampled rows, greedy rows stay greedy.
    neighbours = [make_request(f"n{i}", p, temperature=1.5) for i, p in enumerate(PROMPTS[:3])]
    mixed = complete(engine, *requests, *neighbours)
    for want, a, m in zip(plain_greedy, alone, mixed, strict=False):
        assert_same_tokens(a, want)
        assert_same_tokens(m, want)


@pytest.mark.parametrize("drafter", ["ngram", "draft_model"])
@pytest.mark.parametrize("params", [{}, {"top_p": 0.8, "top_k": 20}, {"repetition_penalty": 1.3}])
def test_seeded_text_depends_on_the_seed_alone(
    tiny_llama: Path, other_llama: Path, drafter: str, params: dict[str, Any]
) -> None:
    """Not on the drafter, k, or who else is in the batch (sglang#33395, vllm#52522)."""
    plain = make_engine(tiny_llama)
    requests = [
        make_request(f"r{i}", p, seed=11 + i, choice=i % 2, **params) for i, p in enumerate(PROMPTS)
    ]
    want = [complete(plain, r)[0].token_ids for r in requests]
    assert len({tuple(w) for w in want}) == len(want)
    crowd = [make_request(f"n{i}", LOOP, temperature=1.2) for i in range(3)]
    for k in (3, 1, 5) if not params else (3,):
        engine = make_engine(tiny_llama, drafter, k, other_llama)
        together = complete(engine, *requests, *crowd)
        assert [c.token_ids for c in together[: len(want)]] == want
    if not params:
        assert [complete(engine, r)[0].token_ids for r in requests] == want
    one = make_request("own-k", PROMPTS[0], seed=11, num_speculative_tokens=1, **params)
    assert complete(engine, one)[0].token_ids == want[0]


def test_reproducible_seeds_nothing_but_depends_on_it(tiny_llama: Path, other_llama: Path) -> None:
    engine = make_engine(tiny_llama, "draft_model", 3, other_llama, reproducible=True)
    assert engine.info.resolved.verify_method == "match"
    unseeded = {tuple(complete(engine, make_request("r", LOOP))[0].token_ids) for _ in range(5)}
    assert len(unseeded) > 1


def test_seeds_differ_and_repeat(tiny_llama: Path) -> None:
    """vllm#6038, vllm#13196."""
    engine = make_engine(tiny_llama, "ngram")
    requests = [make_request(f"r{s}", LOOP, temperature=2.0, seed=s) for s in range(20)]
    first, again = (
        [tuple(c.token_ids) for c in complete(engine, *order)]
        for order in (requests, requests[::-1])
    )
    assert first == again[::-1]
    assert len(set(first)) > 10


def test_choices_of_one_seed_differ(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    requests = [make_request(f"r-{c}", LOOP, choice=c, seed=3) for c in range(4)]
    assert len({tuple(c.token_ids) for c in complete(engine, *requests)}) == 4


def test_unseeded_requests_differ(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    requests = [make_request(f"r{i}", LOOP) for i in range(4)]
    assert len({tuple(c.token_ids) for c in complete(engine, *requests)}) == 4


@pytest.mark.parametrize(
    ("params", "least"),
    [
        ({"temperature": 0.0}, 1.0),
        ({"seed": 5}, 1.0),
        ({"seed": 5, "top_p": 0.7, "top_k": 30}, 1.0),
        ({"temperature": 1.0}, 0.999),
        ({"temperature": 0.7, "top_p": 0.9, "min_p": 0.02}, 0.999),
    ],
)
def test_a_drafter_equal_to_the_target_is_always_accepted(
    tiny_llama: Path, params: dict[str, Any], least: float
) -> None:
    """Greedy, coupled and rejection (sglang#9877, vllm#47854): a stale KV or law shows here."""
    engine = make_engine(tiny_llama, "draft_model", 3, tiny_llama)
    for i in range(4):
        complete(
            engine,
            *[
                make_request(f"{i}-{j}", p, ignore_eos=True, **params)
                for j, p in enumerate(PROMPTS)
            ],
        )
    stats = engine.stats
    assert stats.num_draft_tokens > 100
    assert stats.num_accepted_tokens / stats.num_draft_tokens >= least
    assert not engine.guards


def run_all(engine: Any, seed: int | None = 1) -> list[list[int]]:
    requests = [
        make_request(f"r{i}", p, temperature=t, seed=seed)
        for i, (p, t) in enumerate(itertools.product(PROMPTS, (0.0, 1.0)))
    ]
    return [c.token_ids for c in complete(engine, *requests)]


@pytest.mark.parametrize("drafter", ["none", "ngram", "draft_model"])
def test_memory_and_budget_change_no_text(
    tiny_llama: Path, other_llama: Path, drafter: str
) -> None:
    """Preemption, chunked prefill and prefix caching are invisible."""

    def make(**options: Any) -> Engine:
        return make_engine(tiny_llama, drafter, 3, other_llama, **options)

    want = run_all(make(enable_prefix_caching=False, max_num_batched_tokens=512))
    chunked = make(max_num_batched_tokens=8)
    assert run_all(chunked) == want
    cached = make()
    assert [run_all(cached) for _ in range(2)] == [want, want]
    assert cached.blocks.prefix_hits > 0
    short = make(num_kv_blocks=24, max_model_len=80)
    assert run_all(short) == want
    assert short.scheduler.num_preemptions > 0


def test_draft_kv_follows_the_prefix_cache(tiny_llama: Path) -> None:
    """Blocks made without drafting have no draft KV: the drafter catches up and accepts all."""
    engine = make_engine(tiny_llama, "draft_model", 3, tiny_llama, max_num_batched_tokens=16)
    prompt = list(range(10, 50))
    complete(engine, make_request("off", prompt, temperature=0.0, num_speculative_tokens=0))
    assert engine.stats.num_draft_tokens == 0
    (done,) = complete(engine, make_request("on", prompt, temperature=0.0, ignore_eos=True))
    assert done.last is not None
    assert done.last.num_cached_tokens >= 36
    stats = done.last.spec_decode
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0


def test_random_aborts_lose_nothing(tiny_llama: Path, other_llama: Path) -> None:
    """Joins, leaves and reorders between steps: who stays gets the text it would get alone."""
    rng = random.Random(0)
    engine = make_engine(
        tiny_llama, "draft_model", 3, other_llama, num_kv_blocks=40, max_model_len=80
    )
    plain = make_engine(tiny_llama)
    requests = {
        f"r{i}": make_request(
            f"r{i}", rng.choice(PROMPTS), temperature=rng.choice([0.0, 1.0]), seed=i
        )
        for i in range(30)
    }
    done = {name: Completion(name) for name in requests}
    todo = list(requests)
    while todo or engine.num_unfinished:
        for _ in range(rng.randint(0, 2)):
            if todo:
                engine.add_request(requests[todo.pop()])
        if rng.random() < 0.15 and engine.processors:
            output = engine.abort(rng.choice(list(engine.processors)))
            assert output is not None
            done[output.request_id].add(output)
        for output in engine.step():
            done[output.request_id].add(output)
        engine.check_integrity()
    assert engine.blocks.num_used == 0
    reasons = [c.finish_reason for c in done.values()]
    assert None not in reasons
    assert 3 < reasons.count("abort") < 27
    for want in complete(plain, *requests.values()):
        got = done[want.request_id]
        assert got.token_ids == want.token_ids[: len(got.token_ids)]
        assert got.finish_reason == "abort" or len(got.token_ids) == len(want.token_ids)


def test_the_queue_is_bounded(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, max_queue_len=2)
    for i in range(2):
        engine.add_request(make_request(f"r{i}", LOOP))
    with pytest.raises(EngineOverloadedError):
        engine.add_request(make_request("r2", LOOP))


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ([], {}, "prompt"),
        ([1] * 512, {}, "prompt"),
        ([128], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([1], {"logit_bias": ((128, 1.0),)}, "logit_bias"),
        ([1], {"stop_token_ids": (-1,)}, "stop_token_ids"),
        ([1], {"bad_words": ((1, 999),)}, "bad_words"),
        ([1], {"num_speculative_tokens": 4}, "speculative.num_speculative_tokens"),
    ],
)
def test_what_the_model_cannot_do_is_refused(
    tiny_llama: Path, prompt: list[int], params: dict[str, Any], param: str
) -> None:
    engine = make_engine(tiny_llama, "ngram", 3)
    with pytest.raises(InvalidRequestError) as e:
        engine.add_request(make_request("r", prompt, **params))
    assert e.value.param == param
    assert engine.num_unfinished == 0


def test_the_context_ends_a_request_with_length(tiny_llama: Path) -> None:
    for drafter in ("none", "ngram", "draft_model"):
        engine = make_engine(tiny_llama, drafter, 3, max_model_len=40)
        request = make_request("r", LOOP, max_tokens=500, ignore_eos=True, temperature=0.0)
        (done,) = complete(engine, request)
        assert (done.finish_reason, len(done.token_ids)) == ("length", 40 - len(LOOP))
