"""Draft trees: exact, what the head is surest of, and no trace left of what is not accepted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from spectrue.workers import forward_batch, rows, speculative
from spectrue.workers.compaction import compact
from spectrue.workers.config import SpeculativeConfig
from spectrue.workers.core import SamplingParams, SchedulerOutput
from spectrue.workers.drafters.base import Drafter, DraftLaw, DraftProposal
from spectrue.workers.drafters.tree import TreeGrowth, likeliest
from spectrue.workers.forward_batch import ForwardBatch, ForwardOutput
from spectrue.workers.input_buffers import InputBuffers
from spectrue.workers.kv_cache import KVCachePool
from spectrue.workers.parallel import TPGroup
from spectrue.workers.speculative import speculative_step
from spectrue.workers.tree import TreeShape
from spectrue.workers.tree_mask import depths_of, tree_mask

from .test_exactness import FAULT, PARAMS, TOLERANCE
from .test_head_exactness import plans
from .toy import BLOCK_SIZE, EOS, Tokens, joint_law, output_law, total_variation
from .toy_tree import TreeSetup


def make(params: dict[str, Any], **options: Any) -> TreeSetup:
    tree = {n: options.pop(n) for n in list(options) if n.startswith("tree_")}
    changes: dict[str, Any] = {"prompt": (1, 2, 3), "draft_ids": (0, 2, 3), "k": 2, **options}
    config = SpeculativeConfig(
        drafter="eagle3",
        draft_model="-",
        num_speculative_tokens=changes["k"],
        **{"tree_topk": 2, **tree},
    )
    return TreeSetup(config=config, params=SamplingParams(max_tokens=8, **params), **changes)


# -- the law ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "tree"),
    [
        ("plain", {}),
        ("cuts", {"tree_topk": 3, "tree_size": 9}),
        ("all", {"tree_size": 6}),  # penalties and bad words follow each branch
        ("repetition", {"tree_kind": "static"}),
    ],
)
def test_output_law_is_the_targets(params: str, tree: dict[str, Any]) -> None:
    setup = make(PARAMS[params], **tree)
    assert total_variation(output_law(setup), joint_law(setup)) < TOLERANCE


def test_greedy_is_the_argmax_chain() -> None:
    setup = make({"temperature": 0.0, "repetition_penalty": 1.7, "bad_words": ((2,), (1, 0))})
    assert total_variation(output_law(setup), joint_law(setup)) < TOLERANCE


def test_fault_penalties_of_the_row_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the drafts of a tree were a chain: a sibling's token counts."""
    monkeypatch.setattr(
        rows.Rows,
        "prefixes",
        lambda self, b: [self.drafts[b][:j] for j in range(len(self.drafts[b]) + 1)],
    )
    setup = make({"frequency_penalty": 2.0})
    assert total_variation(output_law(setup), joint_law(setup)) > FAULT


# -- step after step ----------------------------------------------------------------------------


class Spy:
    """Compares every draft tree with what it must be for the committed text."""

    needs_hidden_states = True
    law: DraftLaw | None = None

    def __init__(self, drafter: Drafter, setup: TreeSetup) -> None:
        self.drafter, self.setup = drafter, setup
        self.num_checked = 0

    def propose(self, plan: SchedulerOutput, buffers: InputBuffers) -> DraftProposal:
        proposal = self.drafter.propose(plan, buffers)
        if proposal.parents is None:
            return proposal
        drafts = proposal.of_requests(proposal.token_ids)
        parents = proposal.of_requests(proposal.parents)
        for s, tokens, parent in zip(plan.scheduled, drafts, parents, strict=True):
            if tokens:
                branches: list[Tokens] = [()]
                for token, p in zip(tokens, parent, strict=True):
                    branches.append((*branches[p], token))
                assert len(set(branches)) == len(branches), "equal siblings"
                prefix = tuple(buffers.token_ids[s.slot, : buffers.num_tokens[s.slot]].tolist())
                want = self.setup.tree(prefix, s.tree_depth)
                assert branches[1:] == want, "another tree"
                self.num_checked += 1
        return proposal

    def extend(
        self,
        plan: SchedulerOutput,
        buffers: InputBuffers,
        batch: ForwardBatch,
        output: ForwardOutput,
    ) -> None:
        self.drafter.extend(plan, buffers, batch, output)


def watch(setup: TreeSetup) -> tuple[int, int]:
    """Run some steps, joins and chunks of prompts among them: trees compared, drafts accepted.

    After each the target's slots must hold the committed text, one token after another.
    """
    prompts = [(1, 2, 3, 4, 1, 2, 0), (3,), (4, 4, 2, 1)]
    buffers = InputBuffers(
        max_num_seqs=3,
        max_model_len=160,
        block_size=BLOCK_SIZE,
        resolved=setup.resolved,
        eos_token_ids=(EOS,),
    )
    spy, accepted = Spy(setup.drafter(3), setup), 0
    target: Any = setup.target
    for plan in plans(buffers, prompts):
        scheduled = tuple(
            replace(s, num_draft_tokens=setup.shape.num_nodes(k), tree_depth=k)
            for s in plan.scheduled
            for k in [s.num_draft_tokens]
        )
        step = speculative_step(replace(plan, scheduled=scheduled), buffers, target, spy, TPGroup())
        for s, output in zip(scheduled, step.outputs, strict=True):
            accepted += output.num_accepted_tokens
            assert output.num_accepted_tokens <= s.tree_depth
            n = s.num_computed_tokens + s.num_scheduled_tokens + output.num_accepted_tokens
            index = torch.arange(n)
            blocks = buffers.block_tables[s.slot, index // BLOCK_SIZE].long()
            held = target.kv[blocks * BLOCK_SIZE + index % BLOCK_SIZE]
            assert held.tolist() == buffers.token_ids[s.slot, :n].tolist(), "KV of another text"
    return spy.num_checked, accepted


@pytest.mark.parametrize(
    "tree", [{"tree_size": 5}, {"tree_topk": 3, "tree_size": 12}, {"tree_kind": "static"}]
)
def test_trees_follow_the_committed_text(tree: dict[str, Any]) -> None:
    checked, accepted = watch(make({}, k=3, vocab_size=5, **tree))
    assert checked > 20
    assert accepted > 10


def nothing_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculative, "compact", lambda plan, target, batch, output, rows: output)


def hidden_states_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    def kv_only(plan: Any, target: Any, batch: Any, output: Any, rows: Any) -> Any:
        compact(plan, target, batch, output, rows)
        return output

    monkeypatch.setattr(speculative, "compact", kv_only)


def siblings_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    chains = lambda parents: tree_mask([range(-1, len(p) - 1) for p in parents])  # noqa: E731
    monkeypatch.setattr(forward_batch, "tree_mask", chains)


def positions_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_batch, "depths_of", lambda parents: list(range(len(parents))))


@pytest.mark.parametrize(
    "fault", [nothing_moved, hidden_states_not_moved, siblings_seen, positions_of_rows]
)
def test_faults_are_seen(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        watch(make({}, k=3, vocab_size=5, tree_size=5))


# -- the parts ----------------------------------------------------------------------------------


def test_mask_and_depths() -> None:
    parents = [[-1, 0, 0, 1, 3], [-1, 0, 1], list(range(-1, 39))]
    mask = tree_mask(parents)
    assert mask.dtype == torch.int32
    assert mask.shape == (48, 2)
    assert mask[:8, 0].tolist() == [0b1, 0b11, 0b101, 0b1011, 0b11011, 0b1, 0b11, 0b111]
    assert mask[:8, 1].tolist() == [0] * 8
    assert mask[-1].tolist() == [-1, 0b1111_1111]
    assert depths_of(parents[0]) == [0, 1, 1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_kv_moves_in_every_layer_and_is_read_first(dtype: torch.dtype) -> None:
    pool = KVCachePool(2, 3, 2, 2, 16, dtype)
    slots = torch.arange(6)
    for layer in range(2):
        pool.write(layer, slots, torch.randn(6, 2, 2, 16))
    before = [layer.float() for layer in pool.layers]
    pool.move(torch.tensor([2, 4, 5]), torch.tensor([1, 2, 4]))
    for after, was in zip(pool.layers, before, strict=True):
        assert torch.equal(after.float(), was[[0, 2, 4, 3, 5, 5]])


def test_rows_that_are_no_law_grow_a_tree_all_the_same() -> None:
    """Of a head gone wrong: still a tree of tokens, and `match` turns them down."""
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[nan, 0.0, 1.0, 0.0], [-inf, -inf, -inf, -inf], [inf, 0.0, 0.0, 0.0]])
    shape = TreeShape(topk=2, size=6)
    growth = TreeGrowth(shape, [6, 6, 2], [2, 2, 1])
    growth.grow(0, *likeliest(logits, 2))
    growth.grow(1, *likeliest(logits[[0, 0, 1, 1]], 2))
    growth.choose()
    for i, size in enumerate((6, 6, 2)):
        tokens, parents = growth.token_ids[i, :size].tolist(), growth.parents[i, :size].tolist()
        assert all(0 <= token < 4 for token in tokens)
        assert all(0 <= parent <= j for j, parent in enumerate(parents))
        assert len(set(zip(tokens, parents, strict=True))) == size
