"""`spectrue train-draft` as an operator meets it: one command, Ctrl-C at any time, `--resume`."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from spectrue.deploy import train_draft
from spectrue.deploy.train_draft import TrainDraftConfig, settings
from spectrue.workers.core import accept_length
from spectrue.workers.errors import ConfigError, EngineDeadError
from spectrue.workers.training.author import AuthorConfig
from spectrue.workers.training.corpus import Corpus, shards
from spectrue.workers.training.generation import GenerationJob, generate, num_answer_tokens

from ..conftest import make_tiny_model
from ..workers.harness import complete, make_engine, make_request

GIVEN: dict[str, Any] = {
    "tokens": 1200,
    "draft_vocab_size": 200,
    "steps": 60,
    "tokens_per_step": 512,
    "accumulate": 2,
    "max_length": 96,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("target"), vocab_size=300, layers=1)


def flags(given: dict[str, Any]) -> list[str]:
    found = []
    for name, value in given.items():
        found += [f"--{name.replace('_', '-')}", str(value)]
    return found


def start(out: Path, *args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "spectrue.deploy.cli", "train-draft", "--out", str(out), *args]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=out.parent
    )


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 90
    while not path.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_interrupted_twice_it_ends_in_the_same_head(target: Path, tmp_path: Path) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"
    checkpoint = out / "training" / "checkpoint.pt"
    process = start(out, "--model", str(target), *flags(GIVEN))
    wait_for(checkpoint, process)  # the first of many
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)  # some terminals and supervisors send it twice
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 130, text
    assert "interrupted" in text
    assert "--resume" in text
    assert not (out / "config.json").exists()

    # The same text, trained in one go.
    (whole / "training").mkdir(parents=True)
    shutil.copytree(out / "training" / "corpus", whole / "training" / "corpus")
    shutil.copy(out / "training" / "run.json", whole / "training" / "run.json")
    assert step_of(checkpoint) < GIVEN["steps"]
    # In processes of their own, because the number of threads decides last bits.
    rest = [start(folder, "--resume") for folder in (whole, out)]
    for ended in rest:
        text = ended.communicate(timeout=120)[0]
        assert ended.returncode == 0, text
    for name in ("model.safetensors", "config.json"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()

    assert_is_served(target, out)
    card = (out / "README.md").read_text()
    assert "60 steps" in card
    assert "--steps 60" in card
    assert "`spectrue train-draft --out DIR" in card
    evaluation = json.loads((out / "evaluation.json").read_text())
    assert [r["verify_method"] for r in evaluation["results"]] == ["greedy", "rejection"]
    assert (out / "evaluation.png").read_bytes().startswith(b"\x89PNG")


def step_of(checkpoint: Path) -> int:
    return int(torch.load(checkpoint, map_location="cpu", weights_only=True)["step"])


def assert_is_served(target: Path, head: Path) -> None:
    weights = load_file(head / "model.safetensors")
    assert weights["lm_head.weight"].shape == (200, 64)
    engine = make_engine(target, "eagle3", draft=head)
    plain = make_engine(target)
    requests = [make_request(f"r{i}", [4 + i, 7, 5], temperature=0.0) for i in range(4)]
    ours = [done.token_ids for done in complete(engine, *requests)]
    assert ours == [done.token_ids for done in complete(plain, *requests)]
    stats = engine.stats
    assert stats.num_draft_tokens > 0
    assert stats.accept_length == accept_length(stats.num_accepted_tokens, stats.num_verify_steps)


def job(target: Path, folder: Path) -> GenerationJob:
    engine = make_engine(target).config.replace(
        max_num_seqs=8, num_kv_blocks=400, enable_prefix_caching=False
    )
    author = AuthorConfig(answer_tokens=12, turn_tokens=12)
    return GenerationJob(engine=engine, author=author, folder=folder)


def test_text_that_is_there_is_kept_and_counted(target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    reports: list[int] = []
    first = generate(job(target, folder), 200, 2, reports.append, lambda: bool(reports))
    assert first == num_answer_tokens(folder) > 0
    before = {path.name: path.read_bytes() for path in shards(folder)}
    assert {name[:9] for name in before} <= {"shard-000"}
    second = generate(job(target, folder), first + 200, 1, lambda done: None)
    assert second >= first + 200
    assert {p.name: p.read_bytes() for p in shards(folder) if p.name in before} == before
    assert generate(job(target, folder), second, 1, reports.append) == second  # nothing to do
    corpus = Corpus.open(folder)
    texts = [tuple(corpus.conversation(i).tolist()) for i in range(len(corpus))]
    assert len(set(texts)) > 0.9 * len(texts)  # each process and each attempt has a seed of its own


def test_a_process_that_fails_says_why(target: Path, tmp_path: Path) -> None:
    fine = job(target, tmp_path / "corpus")
    broken = replace(fine, engine=fine.engine.replace(model=str(tmp_path / "nowhere")))
    with pytest.raises(EngineDeadError, match="nowhere"):
        generate(broken, 100, 2, lambda done: None)


def test_settings_are_of_the_run_that_is_resumed(tmp_path: Path) -> None:
    (tmp_path / "training").mkdir()
    saved = tmp_path / "training" / "run.json"
    with pytest.raises(ConfigError, match=r"run\.json is not there"):
        settings(tmp_path, {}, resume=True)
    with pytest.raises(ConfigError, match="--model is needed"):
        settings(tmp_path, {}, resume=False)
    saved.write_text(json.dumps({"model": "m", "seed": 4, "tokens": 10}))
    with pytest.raises(ConfigError, match="give --resume, or another --out"):
        settings(tmp_path, {"model": "m"}, resume=False)
    found = settings(tmp_path, {"tokens": 20, "model": "m"}, resume=True)
    assert found == TrainDraftConfig(model="m", seed=4, tokens=20)
    for name, value in {"model": "other", "seed": 5, "draft_vocab_size": 9}.items():
        with pytest.raises(ConfigError, match=f"{name} was .* when this training began"):
            settings(tmp_path, {name: value}, resume=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithm": "medusa"}, "algorithm must be one of eagle3"),
        ({"tokens": 0}, "tokens must be more than 0"),
        ({"minutes": -1.0}, "minutes must be more than 0"),
        ({"processes": 0}, "processes must be more than 0"),
    ],
)
def test_bad_settings_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainDraftConfig(**{"model": "m", **change})


def test_a_bad_prompts_file_is_refused_before_anything_is_written(
    target: Path, tmp_path: Path
) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n{}\n')
    file_of_long = tmp_path / "long.jsonl"
    file_of_long.write_text(json.dumps({"prompt": "a " * 400}) + "\n")
    given = {"model": str(target), "prompts": str(file_of_long)}
    with pytest.raises(ConfigError, match="prompts: none leaves room"):
        train_draft.run(tmp_path / "out", given, False)
    for name in ("prompts", "evaluation_prompts"):
        with pytest.raises(ConfigError, match=r"p\.jsonl, line 2"):
            train_draft.run(tmp_path / "out", {"model": str(target), name: str(file)}, False)
    assert not (tmp_path / "out" / "training" / "run.json").exists()
