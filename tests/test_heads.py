"""The heads that come with the checkout: whole, small, in the published layout."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from spectrue.workers.model_store import DEFAULT_MODEL
from spectrue.workers.models.config import ModelConfig
from spectrue.workers.training.eagle3 import HeadShape, choose_aux_layers

ROOT = Path(__file__).parents[1]
HEAD = ROOT / "heads" / f"{DEFAULT_MODEL.removesuffix('-instruct')}-eagle3"
TARGET = ModelConfig(
    family="llama",
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49152,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_theta=100000.0,
    tie_word_embeddings=True,
)


def test_the_head_is_whole_and_in_the_published_layout() -> None:
    index = json.loads((HEAD / "model.safetensors.index.json").read_text())["weight_map"]
    files = sorted(HEAD.glob("*.safetensors"))
    assert {path.name for path in files} == set(index.values())
    assert sum(path.stat().st_size for path in files) <= 20_000_000
    found = {}
    for path in files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                assert index[name] == path.name
                found[name] = file.get_tensor(name)
    d2t, t2d = found.pop("d2t"), found.pop("t2d")
    shape = HeadShape(
        target=TARGET,
        aux_layers=choose_aux_layers(TARGET.num_layers),
        draft_vocab_size=8192,
        intermediate_size=1536,
    )
    assert {name: tuple(weight.shape) for name, weight in found.items()} == shape.weights()
    assert all(weight.dtype == torch.bfloat16 for weight in found.values())
    assert all(weight.isfinite().all() for weight in found.values())
    assert (torch.arange(8192) + d2t).tolist() == t2d.nonzero().flatten().tolist()
    config = json.loads((HEAD / "config.json").read_text())
    assert config == shape.as_config()


def make_serve(*variables: str) -> str:
    command = ["make", "-n", "--no-print-directory", "serve", *variables]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_make_serve_takes_it_for_the_default_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MODEL", "SPECULATIVE_DRAFTER", "SPECULATIVE_DRAFT_MODEL"):
        monkeypatch.delenv(f"SPECTRUE_{name}", raising=False)
    wanted = f"--drafter eagle3 --draft-model {HEAD.relative_to(ROOT)}"
    for variables in ((), ("PORT=9000",), ("ARGS=--num-speculative-tokens 4",)):
        assert wanted in make_serve(*variables)
    for variables in (
        ("MODEL=/m",),
        ("CONFIG=c.yaml",),
        ("ARGS=--drafter ngram",),
        ("ARGS=--port 1 --draft-model /d",),
        ("ARGS=--model /m",),
        ("ARGS=--config=c.yaml",),
        ("HEAD=heads/none",),
    ):
        assert "--draft-model heads" not in make_serve(*variables)
    for name, value in {"SPECTRUE_MODEL": "/m", "SPECTRUE_SPECULATIVE_DRAFTER": "ngram"}.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert wanted not in make_serve()
