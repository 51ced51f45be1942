"""What `spectrue bench draft` counts: steps, positions, categories, and two engines in turns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spectrue.deploy import cli
from spectrue.deploy.bench_draft import ALL, Acceptance, Asked, measure
from spectrue.workers.core import SamplingParams

from ..workers.harness import make_engine

ASKED = [Asked(("one", "two")[i % 2], (5 + i, 9, 3)) for i in range(5)]


def test_counts_are_by_position() -> None:
    found = Acceptance()
    for step in ((1, 3, 3), (1, 3, 0), (1, 2, 1), (1, 0, 0)):
        found.add(*step)
    assert found.steps == 4
    assert found.rates == [2 / 3, 1 / 3, 1 / 2]
    assert found.accept_length == 1 + 4 / 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_copy_of_the_target_is_accepted_everywhere(tiny_llama: Path, temperature: float) -> None:
    engine = make_engine(tiny_llama, "draft_model", draft_sampling="coupled")
    plain = make_engine(tiny_llama)
    params = SamplingParams(temperature=temperature, max_tokens=12, ignore_eos=True)
    done: list[int] = []
    found = measure(engine, ASKED, params, 2, plain, done.append)
    assert list(found.by_category) == [ALL, "one", "two"]
    counts = found.by_category[ALL]
    assert counts.rates == [1.0, 1.0, 1.0]
    assert counts.steps == found.by_category["one"].steps + found.by_category["two"].steps
    assert counts.steps == engine.stats.num_verify_steps
    assert sum(counts.accepted) == engine.stats.num_accepted_tokens
    assert sum(counts.drafted) == engine.stats.num_draft_tokens
    assert engine.stats.num_committed_tokens == plain.stats.num_committed_tokens == 5 * 12
    assert found.verify_method == ("greedy" if temperature == 0 else "match")
    assert done == [2, 2, 1]
    assert len(found.speedups) == 3
    assert found.speedup is not None
    assert min(found.speedups) <= found.speedup <= max(found.speedups)


def test_the_command_writes_what_it_shows(tiny_llama: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "a b", "category": "x"}\n{"prompt": "c", "category": "y"}\n')
    args = (
        f"bench draft --model {tiny_llama} --drafter ngram --max-tokens 6 --temperature 0,0.5 "
        f"--prompts-file {prompts} --compare --json {tmp_path}/a.json --plot {tmp_path}/a.png"
    )
    result = CliRunner().invoke(cli.app, args.split())
    assert result.exit_code == 0, result.output
    assert "times no speculation" in result.output
    found = json.loads((tmp_path / "a.json").read_text())
    assert [r["temperature"] for r in found["results"]] == [0.0, 0.5]
    for entry in found["results"]:
        assert set(entry["by_category"]) == {ALL, "x", "y"}
        assert entry["speedup"] > 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--drafter none", "without a drafter"),
        ("--drafter ngram --temperature warm", "--temperature must be numbers"),
    ],
)
def test_bad_options_are_named(tiny_llama: Path, args: str, message: str) -> None:
    words = ["bench", "draft", "--model", str(tiny_llama), *args.split()]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 1
    assert message in str(result.exception)
