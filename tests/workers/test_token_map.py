"""A draft vocabulary from a file: what an EAGLE head without a d2t may draft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from spectrue.workers.engine import Engine
from spectrue.workers.errors import ConfigError
from spectrue.workers.weights_token_map import read_token_map

from ..conftest import make_tiny_model
from .harness import assert_same_tokens, complete, make_engine, make_request
from .heads import copying_eagle, draft_table, eagle_head, second_order_target
from .test_bug_cases import worker_of
from .test_head_loading import edit

PROMPTS = [[5, 9, 12, 7] * 4, [3], list(range(20, 45))]


def map_file(path: Path, ids: Any) -> str:
    if path.suffix == ".json":
        path.write_text(json.dumps(list(ids)))
    else:
        torch.save(ids, path)
    return str(path)


def head_of(engine: Engine) -> Any:
    drafter: Any = worker_of(engine).drafter
    return drafter.runner.head


def test_drafts_are_the_tokens_of_the_map(tmp_path: Path) -> None:
    """A target of 48 likely tokens, a head that copies it: always right, in any order of ids."""
    ids, _ = draft_table(128, 48)
    target = second_order_target(tmp_path / "target", only=ids)
    shuffled = ids[torch.randperm(48, generator=torch.Generator().manual_seed(0))]
    engine = make_engine(
        target,
        "eagle",
        draft=copying_eagle(tmp_path / "head"),
        token_map=map_file(tmp_path / "map.pt", shuffled.tolist()),
    )
    assert head_of(engine).draft_vocab_size == 48
    requests = [
        make_request(f"r{i}", p, temperature=0.0, ignore_eos=True, logprobs=2)
        for i, p in enumerate(PROMPTS)
    ]
    want = complete(make_engine(target), *requests)
    for got, alone in zip(complete(engine, *requests), want, strict=True):
        assert_same_tokens(got, alone)
    assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens > 50
    complete(engine, *[make_request(f"s{i}", p) for i, p in enumerate(PROMPTS)])
    assert not engine.guards


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_is_rows_of_the_targets(tied: bool, tmp_path: Path) -> None:
    target = make_tiny_model(tmp_path / "target", tie_word_embeddings=tied)
    ids = [100, 3, 50]
    head = edit(eagle_head(tmp_path / "head", bias=False), hot_vocab_size=3)
    with pytest.raises(ConfigError, match=r"drafts 3 tokens.*no speculative\.token_map is set"):
        make_engine(target, "eagle", draft=head)
    with pytest.raises(ConfigError, match=r"drafts 3 tokens.*the map has 2"):
        make_engine(target, "eagle", draft=head, token_map=map_file(tmp_path / "2.json", ids[:2]))
    engine = make_engine(target, "eagle", draft=head, token_map=map_file(tmp_path / "3.json", ids))
    weights = load_file(target / "model.safetensors")
    rows = weights["model.embed_tokens.weight" if tied else "lm_head.weight"][sorted(ids)]
    hidden = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(head_of(engine).compute_logits(hidden), hidden @ rows.T)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([3, 128], "leads out of the target's vocabulary of 128"),
        ([-1, 3], "leads out"),
        ([3, 5, 3], "a token id twice"),
        ([], "a list of token ids"),
        ([[1, 2]], "a list of token ids"),
        ([0.5], "a list of token ids"),
        (["a"], "cannot be read"),
    ],
)
@pytest.mark.parametrize("suffix", ["pt", "json"])
def test_unsound_maps_are_refused(
    ids: list[Any], message: str, suffix: str, tmp_path: Path
) -> None:
    file = map_file(tmp_path / f"map.{suffix}", ids)
    with pytest.raises(ConfigError, match=rf"speculative\.token_map: .*{message}"):
        read_token_map(Path(file), 128)


def test_maps_that_do_not_belong(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"token_map is for speculative\.drafter: eagle "):
        make_engine(tiny_llama, "ngram", token_map="x")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token_map(tmp_path / "absent.pt", 128)
    own = eagle_head(tmp_path / "head", extra={"lm_head.weight": (128, 64)})
    with pytest.raises(ConfigError, match="has its own"):
        make_engine(
            tiny_llama, "eagle", draft=own, token_map=map_file(tmp_path / "map.json", [1, 2])
        )
