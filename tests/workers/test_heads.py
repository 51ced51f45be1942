"""Draft heads served by a real engine: they draft what they should, and change no text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spectrue.workers import proposal
from spectrue.workers.drafters import chain
from spectrue.workers.engine import Engine
from spectrue.workers.errors import ConfigError
from spectrue.workers.forward_batch import ForwardOutput

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

PROMPTS = [[5, 9, 12, 7] * 4, [3], [88, 17, 23, 56, 91, 33, 2, 17, 23], list(range(20, 45))]


@pytest.fixture(scope="module")
def second_order(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return second_order_target(tmp_path_factory.mktemp("second_order"))


def head_engine(kind: str, target: Path, folder: Path, **options: Any) -> Engine:
    """A target and a head that copies it exactly."""
    options.setdefault("k", 3)
    if kind == "eagle":
        return make_engine(target, "eagle", draft=copying_eagle(folder / "head"), **options)
    if kind == "eagle3":
        head = copying_eagle3(folder / "head", target)
        return make_engine(target, "eagle3", draft=head, **options)
    return make_engine(with_mtp(target, folder / "target", kind), "mtp", **options)


KINDS = ["eagle", "eagle3", "deepseek", "qwen"]


def run(engine: Engine, **params: Any) -> list[Completion]:
    params = {"temperature": 0.0, "ignore_eos": True, "logprobs": 2, **params}
    return complete(engine, *[make_request(f"r{i}", p, **params) for i, p in enumerate(PROMPTS)])


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_that_copies_its_target_is_always_right(
    kind: str, second_order: Path, tmp_path: Path
) -> None:
    want = run(make_engine(second_order))
    assert len({tuple(c.token_ids) for c in want}) == len(PROMPTS)
    assert len({t for c in want for t in c.token_ids}) > 20
    engine = head_engine(kind, second_order, tmp_path)
    got = run(engine)
    for a, b in zip(got, want, strict=True):
        assert_same_tokens(a, b)
    assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens > 50
    check = {d.setting: d for d in engine.info.decisions}["speculative.self_check"]
    assert check.value == "1.000"


# -- a reduced vocabulary -----------------------------------------------------------------------


def reduced_engine(folder: Path, **options: Any) -> Engine:
    ids, _ = draft_table(128, 48)
    target = second_order_target(folder / "target", only=ids)
    head = copying_eagle3(folder / "head", target, draft_size=48)
    return make_engine(target, "eagle3", draft=head, k=3, **options)


def test_d2t_names_the_drafts(tmp_path: Path) -> None:
    """vllm#18909: a dropped d2t made the accept length 1.12 instead of 2.99."""
    engine = reduced_engine(tmp_path, enable_graphs=False)  # they would not see the change
    run(engine)
    assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens > 50
    drafter: Any = worker_of(engine).drafter
    drafter.draws.vocab = None
    accepted, drafted = engine.stats.num_accepted_tokens, engine.stats.num_draft_tokens
    run(engine)
    accepted = engine.stats.num_accepted_tokens - accepted
    assert accepted < 0.2 * (engine.stats.num_draft_tokens - drafted)


def test_coupled_noise_is_that_of_the_targets_ids(tmp_path: Path) -> None:
    engine = reduced_engine(tmp_path)
    run(engine, temperature=1.5, seed=5)  # the tokens that are never drafted have no mass here
    assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens > 50


# -- coupled, sampled, seeded -------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_is_right_under_sampling_too(kind: str, second_order: Path, tmp_path: Path) -> None:
    """Coupled drafts are the target's own draws; under rejection min(target, draft) sums to 1."""
    engine = head_engine(kind, second_order, tmp_path)
    want = run(make_engine(second_order), temperature=1.0, seed=5)
    assert [c.token_ids for c in run(engine, temperature=1.0, seed=5)] == [
        c.token_ids for c in want
    ]
    assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens > 50
    run(engine, temperature=1.0, max_tokens=100)
    stats = engine.stats
    assert stats.num_accepted_tokens >= 0.999 * stats.num_draft_tokens > 200
    assert not engine.guards


GREEDY: dict[str, Any] = {"temperature": 0.0}
SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 3, "top_p": 0.9}


def run_mixed(engine: Engine) -> list[Completion]:
    """Greedy, seeded and free rows in one batch: those of the first two kinds."""
    kinds = [GREEDY, SEEDED, {"temperature": 1.0}]
    requests = [
        make_request(
            f"{i}-{j}", prompt, **{"logprobs": 2, "ignore_eos": True, "max_tokens": 16, **params}
        )
        for i, params in enumerate(kinds)
        for j, prompt in enumerate(PROMPTS)
    ]
    return complete(engine, *requests)[: 2 * len(PROMPTS)]


@pytest.fixture(scope="module")
def plain_texts(tiny_llama: Path) -> list[Completion]:
    return run_mixed(make_engine(tiny_llama))


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "whole vocabulary": {"draft_size": 128},
    "layers.0": {"first": "layers.0", "layers": 3},
    "no aux": {"aux": None, "options": ("no_fc",)},
    "one aux": {"aux": (1,)},
    "fc on the last hidden states": {"aux": None},
    "norm_before_fc": {"options": ("norm_before_fc",), "config": {"norm_before_fc": True}},
    "fc_norm": {"options": ("fc_norm",), "config": {"fc_norm": True}},
    "aux_norm": {"options": ("aux_norm",), "config": {"use_aux_norm": True}},
    "norm_output": {"config": {"norm_output": True}},
    "norm_before_residual": {"config": {"norm_before_residual": True}},
    "attention_bias": {"options": ("attention_bias",), "config": {"attention_bias": True}},
    "own embedding, narrower": {"hidden": 32, "options": ("embed",)},
    "the target's head": {"draft_size": 128, "options": ("no_lm_head",)},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_head_changes_no_text(
    variant: str, tiny_llama: Path, plain_texts: list[Completion], tmp_path: Path
) -> None:
    """Random heads of every variant: greedy and seeded texts are those of plain decoding."""
    head = eagle3_head(tmp_path / "head", **VARIANTS[variant])
    engine = make_engine(tiny_llama, "eagle3", draft=head)
    for a, b in zip(run_mixed(engine), plain_texts, strict=True):
        assert_same_tokens(a, b)
    assert engine.stats.num_draft_tokens > 50
    assert not engine.guards


@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"layers": 2}, {"qkv_bias": True}, {"torch_file": True}],
    ids=str,
)
def test_an_eagle_head_changes_no_text(
    options: dict[str, Any],
    tiny_llama: Path,
    plain_texts: list[Completion],
    tmp_path: Path,
) -> None:
    """vllm#12831: with fc.bias and without."""
    head = eagle_head(tmp_path / "head", **options)
    engine = make_engine(tiny_llama, "eagle", draft=head)
    for a, b in zip(run_mixed(engine), plain_texts, strict=True):
        assert_same_tokens(a, b)
    assert engine.stats.num_draft_tokens > 50
    assert not engine.guards


# -- what the head knows of a text: prefix cache, preemption, requests without drafts ------------


def accepted_all(engine: Engine) -> bool:
    return engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens > 0


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_cached_prefix_has_the_heads_kv(kind: str, second_order: Path, tmp_path: Path) -> None:
    engine = head_engine(kind, second_order, tmp_path)
    prompt = list(range(20, 53))
    off = make_request("off", prompt, temperature=0.0, num_speculative_tokens=0)
    complete(engine, off)
    assert engine.stats.num_draft_tokens == 0
    for name in "ab":
        request = make_request(name, [*prompt, 7], temperature=0.0, ignore_eos=True)
        (done,) = complete(engine, request)
        assert done.last is not None
        # Of 8 full blocks the last is computed again, for its hidden states.
        assert done.last.num_cached_tokens == 28
        assert done.last.spec_decode.num_drafts > 0
    assert accepted_all(engine)


def test_preempted_requests_draft_on(second_order: Path, tmp_path: Path) -> None:
    engine = head_engine(
        "eagle3", second_order, tmp_path, num_kv_blocks=26, max_model_len=64, max_num_seqs=4
    )
    run(engine, max_tokens=36)
    assert engine.scheduler.num_preemptions > 0
    assert accepted_all(engine)


def test_long_prompts_come_in_chunks(second_order: Path, tmp_path: Path) -> None:
    engine = head_engine("eagle3", second_order, tmp_path, max_num_batched_tokens=8, max_num_seqs=4)
    run(engine)
    assert accepted_all(engine)


# -- memory that is written again ---------------------------------------------------------------


@pytest.mark.parametrize("poison", [0.0, math.nan, "another row"])
def test_law_and_hidden_states_outlive_their_memory(
    tiny_llama: Path, tmp_path: Path, poison: float | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sglang#37134: what a head's forward leaves may be written by the next forward or graph."""
    monkeypatch.setattr("secrets.randbits", lambda bits: 12345)
    head = eagle3_head(tmp_path / "head")
    want = run(make_engine(tiny_llama, "eagle3", draft=head), temperature=1.0)
    engine = make_engine(tiny_llama, "eagle3", draft=head)
    worker, seen = worker_of(engine), list[Tensor]()
    runner: Any = worker.drafter.runner  # type: ignore[attr-defined]
    logits, forward, target = runner.logits, runner.forward, worker.target.forward

    def remember(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    def recycle(batch: Any) -> ForwardOutput:
        for tensor in seen:
            tensor.copy_(tensor.roll(1, -1) if isinstance(poison, str) else torch.tensor(poison))
        seen.clear()
        return target(batch)

    def draw(*arguments: Any) -> proposal.Draw:
        drawn = proposal.sample_draft_proposal(*arguments)
        for tensor in (drawn.logits, drawn.log_normalizer, drawn.token_probs):
            remember(tensor)
        return drawn

    monkeypatch.setattr(chain, "sample_draft_proposal", draw)
    monkeypatch.setattr(runner, "logits", lambda hidden: remember(logits(hidden)))
    monkeypatch.setattr(runner, "forward", lambda b, h: remember(forward(b, h)))
    monkeypatch.setattr(worker.target, "forward", recycle)
    got = run(engine, temperature=1.0)
    assert [c.token_ids for c in got] == [c.token_ids for c in want]
    assert engine.stats.num_accepted_tokens > 0
    assert not engine.guards


@pytest.mark.parametrize("name", ["top_k", "temperature", "target_ids"])
def test_a_parameter_on_another_device_raises(name: str) -> None:
    """sglang 0.5.23 skipped a top_k that was on the CPU, and drafted from another law."""
    real, whole = torch.ones(1), torch.ones(1, dtype=torch.int64)
    flags = {
        "sampled": torch.ones(1, dtype=torch.bool),
        "coupled": torch.zeros(1, dtype=torch.bool),
    }
    parameters = dict.fromkeys(("temperature", "top_p", "min_p"), real)
    parameters |= dict.fromkeys(("top_k", "seed", "choice", "position"), whole) | flags
    target_ids = torch.arange(5)
    if name == "target_ids":
        target_ids = target_ids.to("meta")
    else:
        parameters[name] = parameters[name].to("meta")
    rows = proposal.DraftRows(**parameters)
    with pytest.raises(ValueError, match=rf"{name} (is|are) on meta"):
        proposal.sample_draft_proposal(torch.zeros(1, 5), rows, target_ids)


# -- the check at start -------------------------------------------------------------------------


def test_a_useless_head_is_noticed_at_start(
    second_order: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = eagle_head(tmp_path / "head", seed=1)
    engine = make_engine(second_order, "eagle", draft=head)
    assert "drafts next to nothing right" in caplog.text
    assert "aux_layer_convention" in caplog.text
    check = {d.setting: d for d in engine.info.decisions}["speculative.self_check"]
    assert float(check.value) < 0.05
    with pytest.raises(ConfigError, match=r"strict_draft.*next to nothing"):
        make_engine(second_order, "eagle", draft=head, strict_draft=True)


def test_a_right_head_passes_the_strict_check(second_order: Path, tmp_path: Path) -> None:
    engine = head_engine("eagle3", second_order, tmp_path, strict_draft=True)
    assert engine.stats.num_steps == 0
    engine.check_integrity()


def test_a_wrong_layer_convention_costs_acceptance(second_order: Path, tmp_path: Path) -> None:
    """Read one layer off, the ids do not fit this target; the message names the setting."""
    head = copying_eagle3(tmp_path / "head", second_order)
    with pytest.raises(ConfigError, match="aux_layer_convention"):
        make_engine(second_order, "eagle3", draft=head, aux_layer_convention="layers_run")
