"""Draft trees served by a real engine: they change no text, and leave what a prefill makes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spectrue.workers.block_manager import BlockManager
from spectrue.workers.core import SchedulerOutput
from spectrue.workers.drafters.base import DraftProposal
from spectrue.workers.engine import Engine
from spectrue.workers.errors import ConfigError
from spectrue.workers.forward_batch import ForwardBatch, ForwardOutput
from spectrue.workers.input_buffers import InputBuffers
from spectrue.workers.scheduler import Scheduler
from spectrue.workers.tree import TreeShape

from ..conftest import make_tiny_model
from .generic_models import make_generic
from .harness import Completion, assert_same_tokens, complete, make_engine, make_request
from .heads import (
    copying_eagle,
    copying_eagle3,
    draft_table,
    eagle3_head,
    eagle_head,
    second_order_target,
    with_mtp,
)
from .test_bug_cases import worker_of
from .test_scheduler import make_state, run_step

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 60}
PROMPTS = [[5, 9, 12, 7] * 4, [3], [88, 17, 23, 56, 91, 33, 2, 17, 23], list(range(20, 45))]


def run(engine: Engine, **params: Any) -> list[Completion]:
    params = {"temperature": 0.0, "ignore_eos": True, "logprobs": 2, **params}
    return complete(engine, *[make_request(f"r{i}", p, **params) for i, p in enumerate(PROMPTS)])


@pytest.fixture(scope="module")
def second_order(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return second_order_target(tmp_path_factory.mktemp("second_order"))


def test_a_tree_changes_no_text(tiny_llama: Path, tmp_path: Path) -> None:
    """Greedy and seeded, with a random head of a reduced vocabulary, and blocks found again."""
    head = eagle3_head(tmp_path / "head")
    engine = make_engine(tiny_llama, "eagle3", draft=head, tree_topk=3, tree_size=8)
    plain = make_engine(tiny_llama)
    for params in ({}, {"temperature": 0.9, "seed": 3, "top_p": 0.9}, {"frequency_penalty": 0.5}):
        for a, b in zip(run(engine, **params), run(plain, **params), strict=True):
            assert_same_tokens(a, b)
            got = [lp.logprob for lp in a.logprobs]
            want = [lp.logprob for lp in b.logprobs]
            if a.token_ids == b.token_ids:
                assert torch.allclose(torch.tensor(got), torch.tensor(want), atol=1e-4)
    stats = engine.stats
    assert stats.num_draft_tokens > 3 * stats.num_drafts
    assert stats.num_accepted_tokens > 0
    assert not engine.guards
    # A prompt that continues a text of before: blocks whose tokens came through trees.
    (first,) = complete(engine, make_request("a", PROMPTS[0], temperature=0.0, max_tokens=40))
    hits = engine.blocks.prefix_hits
    prompt = [*PROMPTS[0], *first.token_ids[:30]]
    request = make_request("b", prompt, temperature=0.0, logprobs=2)
    (a,), (b,) = complete(engine, request), complete(plain, request)
    assert engine.blocks.prefix_hits > hits + 20
    assert_same_tokens(a, b)


@pytest.mark.parametrize("head", ["eagle", "eagle3", "eagle3 of 48 tokens", "mtp"])
def test_a_head_that_copies_its_target_fills_every_step(
    head: str, second_order: Path, tmp_path: Path
) -> None:
    """The likeliest branch is always drafted, and always right."""
    model, draft = second_order, None
    if head == "eagle":
        draft = copying_eagle(tmp_path / "head")
    elif head == "eagle3":
        draft = copying_eagle3(tmp_path / "head", second_order)
    elif head == "eagle3 of 48 tokens":
        head, only = "eagle3", draft_table(128, 48)[0]
        model = second_order = second_order_target(tmp_path / "target", only=only)
        draft = copying_eagle3(tmp_path / "head", model, draft_size=48)
    else:
        model = with_mtp(second_order, tmp_path / "target", "deepseek")
    engine = make_engine(model, head, draft=draft, tree_topk=2, tree_kind="static")
    got = run(engine, max_tokens=25)
    for a, b in zip(got, run(make_engine(second_order), max_tokens=25), strict=True):
        assert_same_tokens(a, b)
    # The first token comes of the prompt, the others by four in a step.
    assert [c.last.spec_decode.num_accepted_tokens for c in got if c.last] == [18] * 4
    assert engine.stats.num_verify_steps == 4 * 7


def noisy(head: Path, scale: float) -> Path:
    weights = load_file(head / "model.safetensors")
    noise = torch.randn(weights["fc.weight"].shape, generator=torch.Generator().manual_seed(1))
    weights["fc.weight"] += scale * noise
    save_file(weights, head / "model.safetensors")
    return head


def test_a_tree_accepts_more_than_a_chain(second_order: Path, tmp_path: Path) -> None:
    head = noisy(copying_eagle(tmp_path / "head"), 0.06)
    lengths = {}
    trees: dict[str, dict[str, Any]] = {
        "chain": {},
        "static": {"tree_topk": 3, "tree_size": 12, "tree_kind": "static"},
        "dynamic": {"tree_topk": 3, "tree_size": 12},
    }
    for name, tree in trees.items():
        engine = make_engine(second_order, "eagle", draft=head, **tree)
        run(engine)
        lengths[name] = engine.stats.accept_length
    assert 1.3 < lengths["chain"] < 3
    assert lengths["static"] > lengths["chain"] + 0.1
    assert lengths["dynamic"] > lengths["chain"] + 0.1


def kept(engine: Engine) -> list[Tensor]:
    """Of the request in slot 0: KV of target and head, [layers, tokens, ...], and hidden states."""
    worker: Any = worker_of(engine)
    buffers, drafter = worker.buffers, worker.drafter
    index = torch.arange(buffers.num_tokens[0] - 1)
    blocks = buffers.block_tables[0, index // buffers.block_size].long()
    slots = blocks * buffers.block_size + index % buffers.block_size
    pools = worker.target.kv_cache, drafter.runner.kv_cache
    kv = [torch.stack([layer[slots.to(layer.device)] for layer in pool.layers]) for pool in pools]
    return [*kv, drafter.hidden[0]]


def oracle(text: list[int]) -> Callable[..., DraftProposal]:
    """Trees of the text to come, each of its tokens after a wrong sibling."""

    def propose(plan: SchedulerOutput, buffers: InputBuffers, ks: list[int]) -> DraftProposal:
        tokens, parents = [], []
        (depth,) = (s.tree_depth for s in plan.scheduled)
        for level, token in enumerate(text[buffers.num_tokens[0] :][:depth]):
            tokens += [(token + 1) % 128, token]
            parents += [2 * level, 2 * level]
        return DraftProposal(
            num_draft_tokens=(len(tokens),),
            token_ids=torch.tensor(tokens),
            parents=torch.tensor(parents),
        )

    return propose


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])  # ours, and transformers' code
def test_what_a_tree_leaves_is_what_a_prefill_makes(family: str, tmp_path: Path) -> None:
    target = make_generic(tmp_path / "target", family)
    options: dict[str, Any] = {"draft": eagle3_head(tmp_path / "head"), "tree_topk": 2}
    (plain,) = complete(make_engine(target), make_request("r", PROMPTS[0], **GREEDY))
    text = [*PROMPTS[0], *plain.token_ids]
    engine = make_engine(target, "eagle3", **options)
    worker: Any = worker_of(engine)
    worker.drafter.tree.propose = oracle(text)
    engine.add_request(make_request("r", PROMPTS[0], **GREEDY))
    for _ in range(8):
        engine.step()
    num_tokens = worker.buffers.num_tokens[0]
    assert num_tokens == len(PROMPTS[0]) + 1 + 7 * 4  # rows 2, 4 and 6 of each step
    assert worker.buffers.token_ids[0, :num_tokens].tolist() == text[:num_tokens]
    fresh = make_engine(target, "eagle3", **options)
    fresh.add_request(make_request("r", text[: num_tokens - 1], **GREEDY))
    fresh.step()
    for got, want in zip(kept(engine), kept(fresh), strict=True):
        assert torch.allclose(got, want, atol=1e-4)


def test_the_context_ends_with_trees(tiny_llama: Path, tmp_path: Path) -> None:
    """Nodes have slots beyond the last position, and no position beyond it. Little memory: trees
    are given up before a request is."""
    head = eagle3_head(tmp_path / "head")
    options: dict[str, Any] = {"max_model_len": 40, "num_kv_blocks": 24}
    engine = make_engine(tiny_llama, "eagle3", draft=head, tree_topk=4, tree_size=16, **options)
    farthest = 0
    worker: Any = worker_of(engine)
    forward: Callable[[ForwardBatch], ForwardOutput] = worker.target.forward

    def watching(batch: ForwardBatch) -> ForwardOutput:
        nonlocal farthest
        farthest = max(farthest, int(batch.positions.max()))
        return forward(batch)

    worker.target.forward = watching
    got = run(engine, max_tokens=100)
    for a, b in zip(got, run(make_engine(tiny_llama, **options), max_tokens=100), strict=True):
        assert a.finish_reason == b.finish_reason == "length"
        assert_same_tokens(a, b)
    assert farthest == 38  # the last token is never fed
    assert engine.stats.num_draft_tokens > 0


def test_the_scheduler_plans_trees() -> None:
    tree = TreeShape(topk=2, size=5)
    scheduler = Scheduler(BlockManager(16, 4), max_num_seqs=4, max_num_batched_tokens=16, tree=tree)

    def plan_of(num_requests: int, tokens_left: int = 8) -> list[tuple[int, int, int]]:
        while len(scheduler.running) < num_requests:
            scheduler.add(make_state([1, 2, 3], max_tokens=1 + tokens_left))
            run_step(scheduler, scheduler.schedule())
        plan = scheduler.schedule()
        blocks = [len(state.table.block_ids) for state in scheduler.running]
        return [
            (s.num_draft_tokens, s.tree_depth, n)
            for s, n in zip(plan.scheduled, blocks, strict=True)
        ]

    assert plan_of(1) == [(5, 3, 3)]  # tokens 3 to 8 of a table of blocks of 4
    assert plan_of(4)[0] == (3, 3, 3)  # the step's budget is shared
    scheduler.running[0].max_len = len(scheduler.running[0].token_ids) + 2
    assert plan_of(4)[0] == (2, 1, 3)  # one draft may be accepted: no second level
    assert tree.num_slots(5, 3) == 5
    assert TreeShape(topk=4, size=5).num_slots(5, 3) == 7  # of eight expanded nodes


def test_simulated_acceptance_takes_the_deepest_branch(tiny_llama: Path, tmp_path: Path) -> None:
    head = eagle3_head(tmp_path / "head")
    options: dict[str, Any] = {"tree_kind": "static", "simulated_acceptance": (1.0, 1.0, 0.0)}
    engine = make_engine(tiny_llama, "eagle3", draft=head, tree_topk=2, **options)
    run(engine, max_tokens=25, logprobs=None)
    # The first token comes of the prompt, the others by three in a step.
    assert engine.stats.num_accepted_tokens == 4 * 16
    assert engine.stats.num_verify_steps == 4 * 9


def test_adaptive_depth_counts_levels(tiny_llama: Path, tmp_path: Path) -> None:
    """Not nodes: there would be no time and no rate of so many."""
    head = eagle3_head(tmp_path / "head")
    engine = make_engine(tiny_llama, "eagle3", draft=head, tree_topk=3, depth="adaptive")
    for a, b in zip(
        run(engine, max_tokens=60), run(make_engine(tiny_llama), max_tokens=60), strict=True
    ):
        assert_same_tokens(a, b)
    assert max(engine.scheduler.depths) <= 3


def test_a_model_with_windows_has_no_trees(tmp_path: Path) -> None:
    target = make_tiny_model(tmp_path / "target", "mistral", sliding_window=7)
    with pytest.raises(ConfigError, match=r"speculative.tree_topk.*sliding-window"):
        make_engine(target, "eagle", draft=eagle_head(tmp_path / "head"), tree_topk=2)
