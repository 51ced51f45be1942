"""Every model against transformers alone, however the batch is cut and the KV scattered."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spectrue.workers.errors import ConfigError, ModelLoadError
from spectrue.workers.forward_batch import ForwardBatch
from spectrue.workers.kv_cache import KVCachePool
from spectrue.workers.models import linear
from spectrue.workers.models.base import Model
from spectrue.workers.models.config import config_from_hf
from spectrue.workers.weights import load_model

from ..conftest import make_tiny_model
from .generic_models import OPTIONS, make_generic

BLOCK_SIZE = 4
NUM_BLOCKS = 80


def assert_same(logits: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@cache
def reference(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def reference_logits(path: Path, tokens: Tensor) -> Tensor:
    logits: Tensor = reference(path)(tokens[None]).logits[0]
    return logits


class Runner:
    """Feeds requests to a model in any pieces, with block tables scattered over the pool."""

    def __init__(self, model: Model, num_requests: int, seed: int = 0) -> None:
        self.model = model
        generator = torch.Generator().manual_seed(seed)
        self.kv: KVCachePool = model.new_kv_cache(NUM_BLOCKS, BLOCK_SIZE)
        for layer in self.kv.layers:
            layer.fill_(float("nan"))  # stale slots may hold anything
        blocks = torch.randperm(NUM_BLOCKS, generator=generator).int()
        self.tables = blocks[: num_requests * (NUM_BLOCKS // num_requests)].view(num_requests, -1)

    def __call__(self, pieces: dict[int, tuple[int, Tensor]]) -> list[Tensor]:
        """request -> (position of its first token, tokens); the logits of every row, by request."""
        batch = ForwardBatch.build(
            token_ids=[tokens for _, tokens in pieces.values()],
            starts=[start for start, _ in pieces.values()],
            block_tables=self.tables[list(pieces)],
            block_size=BLOCK_SIZE,
        )
        logits = self.model.compute_logits(self.model.forward(batch, self.kv).hidden_states)
        assert logits is not None
        assert logits.dtype == torch.float32
        return list(logits.split(batch.query_lens))


def tokens_of(length: int, seed: int = 0, vocab_size: int = 128) -> Tensor:
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(seed))


OURS = ["llama", "qwen2", "qwen3"]


@pytest.fixture(scope="module", params=[*OURS, *OPTIONS])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Families of our own code; kinds of layers that transformers runs with our attention."""
    if request.param in OPTIONS:
        return make_generic(tmp_path_factory.mktemp(request.param), request.param)
    found: Path = request.getfixturevalue(f"tiny_{request.param}")
    return found


@pytest.mark.parametrize("family", OURS)
def test_the_tiny_models_have_clear_margins(family: str, request: pytest.FixtureRequest) -> None:
    logits = reference_logits(request.getfixturevalue(f"tiny_{family}"), tokens_of(64))
    assert 0.8 < logits.std() < 3
    top = logits.topk(2).values
    assert (top[:, 0] - top[:, 1]).median() > 0.1


@pytest.mark.parametrize("length", [1, 5, 16, 17, 45])
def test_whole_prefill(path: Path, length: int) -> None:
    tokens = tokens_of(length)
    (logits,) = Runner(load_model(path, "float32"), 1)({0: (0, tokens)})
    assert_same(logits, reference_logits(path, tokens))


@pytest.mark.parametrize("chunk", [1, 3, 4, 20])
def test_chunked_prefill_and_token_by_token(path: Path, chunk: int) -> None:
    tokens = tokens_of(45)
    run = Runner(load_model(path, "float32"), 1)
    parts = [run({0: (at, tokens[at : at + chunk])})[0] for at in range(0, len(tokens), chunk)]
    assert_same(torch.cat(parts), reference_logits(path, tokens))


def test_ragged_batch_of_prefill_decode_and_verify(path: Path) -> None:
    lengths = [44, 10, 37, 9, 40, 44]
    tokens = [tokens_of(n, seed=i) for i, n in enumerate(lengths)]
    expected = [reference_logits(path, t) for t in tokens]
    run = Runner(load_model(path, "float32"), len(lengths))
    cuts = [0, 9, 33, 5, 20, 43]  # what is already computed: prefill, decode, verify, ...
    for i, cut in enumerate(cuts):
        if cut:
            run({i: (0, tokens[i][:cut])})
    order = [4, 1, 3, 0, 5, 2]
    logits = run({i: (cuts[i], tokens[i][cuts[i] :]) for i in order})
    for i, rows in zip(order, logits, strict=True):
        assert_same(rows, expected[i][cuts[i] :])


def test_rejected_drafts_are_overwritten(path: Path) -> None:
    tokens = tokens_of(20)
    run = Runner(load_model(path, "float32"), 1)
    run({0: (0, tokens[:10])})
    run({0: (10, torch.cat((tokens[10:11], tokens_of(3, seed=9))))})  # three wrong drafts
    (logits,) = run({0: (11, tokens[11:])})
    assert_same(logits, reference_logits(path, tokens)[11:])


def test_bf16(path: Path) -> None:
    tokens = tokens_of(30)
    (logits,) = Runner(load_model(path, "bfloat16"), 1)({0: (0, tokens)})
    difference = (logits - reference_logits(path, tokens)).abs().mean()
    assert 0 < difference < 0.1


def test_no_rows(tiny_llama: Path) -> None:
    empty = load_model(tiny_llama, "bfloat16").compute_logits(torch.empty(0, 64).bfloat16())
    assert empty is not None
    assert empty.shape == (0, 128)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3", {"attention_bias": True}),
        ("mistral", {"sliding_window": 7, "tie_word_embeddings": True}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
        ("qwen2", {"sliding_window": 7}),  # not used
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 1e4,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
        ),
        (
            "qwen2",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                }
            },
        ),
    ],
)
def test_biases_and_rope_scaling(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    make_tiny_model(tmp_path, family, **options)
    tokens = tokens_of(45)
    (logits,) = Runner(load_model(tmp_path, "float32"), 1)({0: (0, tokens)})
    assert_same(logits, reference_logits(tmp_path, tokens))


def test_without_the_packing_ops(tiny_qwen2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = tokens_of(20)
    packed = load_model(tiny_qwen2, "float32")
    monkeypatch.setattr(linear, "packing_ops", lambda dtype: None)
    plain: Any = load_model(tiny_qwen2, "float32")
    assert not plain.layers[0].attention.qkv.packed
    for model in (packed, plain):
        (logits,) = Runner(model, 1)({0: (0, tokens)})
        assert_same(logits, reference_logits(tiny_qwen2, tokens))


def test_a_missing_packing_op_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = linear.packing_ops(torch.float32)
    assert real is not None, "this torch lacks oneDNN's packed linear: decode is much slower"
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    linear.packing_ops.cache_clear()
    try:
        assert linear.packing_ops(torch.float32) is None
        assert linear.packing_ops(torch.float32) is None
    finally:
        linear.packing_ops.cache_clear()
    assert [r.levelname for r in caplog.records] == ["WARNING"]


def _edited(source: Path, target: Path, **changes: Any) -> Path:
    shutil.copytree(source, target, dirs_exist_ok=True)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    return target


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "gpt2"},
            "'gpt2' is not supported; supported: llama, mistral, qwen2, qwen3",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope type 'dynamic' is not supported; supported: default, linear",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized"),
    ],
)
def test_what_is_refused(
    tiny_llama: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        config_from_hf(_edited(tiny_llama, tmp_path, **changes))


def test_an_old_rope_scaling_is_understood(tiny_llama: Path, tmp_path: Path) -> None:
    path = _edited(tiny_llama, tmp_path)
    config = json.loads((path / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    (path / "config.json").write_text(json.dumps(config))
    read = config_from_hf(path)
    assert (read.rope_theta, read.rope_scaling["factor"]) == (5000.0, 2.0)


def test_windows_by_layer(tmp_path: Path) -> None:
    config = config_from_hf(make_tiny_model(tmp_path / "m", "mistral", sliding_window=64))
    assert config.layer_windows == (64, 64)
    config.check_context(512)
    with pytest.raises(ConfigError, match="max_position_embeddings = 512"):
        config.check_context(513)
    model = make_tiny_model(
        tmp_path / "q", "qwen2", use_sliding_window=True, sliding_window=7, max_window_layers=1
    )
    config = config_from_hf(model)
    assert config.layer_windows == (0, 7)
    assert config_from_hf(make_tiny_model(tmp_path / "l")).layer_windows == ()


def test_a_window_in_gguf_limits_the_context(tmp_path: Path) -> None:
    config = replace(config_from_hf(make_tiny_model(tmp_path)), sliding_window=64)
    assert config.max_context == 64
    with pytest.raises(ConfigError, match=r"max_model_len = 65 .*sliding_window is 64"):
        config.check_context(65)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_default_model_knows_berlin(dtype: str) -> None:
    """Needs the default model: SPECTRUE_CACHE, or the network."""
    from spectrue.workers.model_store import DEFAULT_MODEL, resolve_model
    from spectrue.workers.tokenizer import load_tokenizer

    path = resolve_model(os.environ.get("SPECTRUE_TEST_MODEL", DEFAULT_MODEL))
    tokenizer, model = load_tokenizer(path), load_model(path, dtype)
    question = {"role": "user", "content": "What is the capital of Germany?"}
    fed, ids = tokenizer.apply_chat_template([question]), list[int]()
    run, at = Runner(model, 1), 0
    while len(ids) < 32 and not (ids and ids[-1] in tokenizer.eos_token_ids):
        (logits,) = run({0: (at, torch.tensor(fed))})
        at += len(fed)
        fed = [int(logits[-1].argmax())]
        ids += fed
    assert "Berlin" in tokenizer.decode(ids)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("length", [5, 30, 62])
def test_decode_and_verify_agree_to_the_bit(tiny_llama: Path, dtype: str, length: int) -> None:
    """A row's logits and KV depend on its text alone, not on how many rows are beside it.

    So a seeded text does not change with drafts or company, and a greedy tie falls one way. In bf16
    the last bit of one sum would be 0.3 of a logit thirty layers on.
    """
    if linear.packing_ops(getattr(torch, dtype)) is None:  # only packed layers promise it
        assert dtype != "float32"
        pytest.skip("this CPU's oneDNN packs no bfloat16 (no AVX-512)")
    model = load_model(tiny_llama, dtype)
    tokens = tokens_of(length + 4, seed=3)

    def batch(pieces: list[tuple[int, int]], slots: list[int]) -> ForwardBatch:
        return ForwardBatch.build(
            token_ids=[tokens[start:stop] for start, stop in pieces],
            starts=[start for start, _ in pieces],
            block_tables=torch.arange(4 * 16, dtype=torch.int32).view(4, 16)[slots],
            block_size=8,
        )

    kv_cache = model.new_kv_cache(4 * 16, 8)

    def run(pieces: list[tuple[int, int]], slots: list[int]) -> Tensor:
        return model.forward(batch(pieces, slots), kv_cache).hidden_states

    run([(0, length)], [0])
    decoded = [run([(i, i + 1)], [0]) for i in range(length, length + 4)]
    decoded_kv = [layer.clone() for layer in kv_cache.layers]
    alone = run([(length, length + 4)], [0])
    assert torch.equal(torch.cat(decoded), alone)
    assert all(torch.equal(a, b) for a, b in zip(decoded_kv, kv_cache.layers, strict=True))
    company = [(length, length + 4), (length - 1, length), (0, 3), (length - 4, length)]
    together = run(company, [0, 1, 2, 3])
    assert torch.equal(together[:4], alone)
    for rows in (1, 2, 3):
        assert torch.equal(model.compute_logits(alone[:rows]), model.compute_logits(alone)[:rows])  # type: ignore[index, arg-type]


def test_reserved_rotations_are_those_computed(tiny_llama: Path) -> None:
    """Positions that are all one off would show nowhere else: rotations are relative."""
    rope = load_model(tiny_llama, dtype=torch.float32).rope  # type: ignore[attr-defined]
    positions = torch.tensor([0, 7, 31, 7])
    computed = rope.tables(positions)
    rope.reserve(32)
    for table, want in zip(rope.tables(positions), computed, strict=True):
        assert table.shape == want.shape
        assert table.equal(want)
