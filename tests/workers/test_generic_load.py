"""What is refused before or while a transformers model is loaded, and random weights."""

from __future__ import annotations

import functools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spectrue.workers import worker
from spectrue.workers.config import EngineConfig
from spectrue.workers.errors import ConfigError, ModelLoadError
from spectrue.workers.kv_cache import KVCachePool
from spectrue.workers.models import generic_attention, generic_config
from spectrue.workers.models.generic import GenericModel
from spectrue.workers.parallel import TPGroup
from spectrue.workers.weights import load_model

from .generic_models import OPTIONS, make_generic
from .harness import complete, make_engine, make_request
from .test_models import Runner, tokens_of

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
}


def write_config(path: Path, family: str, **changes: Any) -> Path:
    """A directory with a config.json and nothing else."""
    from transformers import AutoConfig

    if "kv_heads" in changes:
        changes["num_key_value_heads"] = changes.pop("kv_heads")
    config = AutoConfig.for_model(family, **{**SMALL, **changes})
    (path / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    return path


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("mamba", {}, "layers of type linear_attention; a rejected draft is taken back"),
        ("qwen3_next", {}, "layers of type linear_attention; a rejected draft is taken back"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "layers of type conv"),
        ("falcon_mamba", {}, "linear_attention|recurrent"),
        ("jamba", {}, "recurrent|layers of type"),
        ("llama4_text", {}, "layers of type chunked_attention"),
        ("t5", {}, "encoder-decoder"),
        ("gemma3", {"text_config": SMALL}, "multi-modal; only text models"),
        ("vit", {}, "multi-modal|no causal language model"),
        (
            "qwen3_moe",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope type dynamic depends on the batch",
        ),
    ],
)
def test_refused_by_configuration(
    tmp_path: Path, family: str, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(ModelLoadError, match=f"model type '{family}' is not supported.*({why})"):
        load_model(write_config(tmp_path, family, **changes), "float32")


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("bert", {}, "attention is not causal"),
        ("bloom", {}, "does not use transformers' AttentionInterface"),
        ("gpt_oss", {"num_local_experts": 4, "head_dim": 16}, "takes s_aux, which ours does not"),
        ("opt", {"ffn_dim": 128, "word_embed_proj_dim": 64}, "needs more than we give it"),
    ],
)
def test_refused_by_the_model_itself(
    tmp_path: Path, family: str, changes: dict[str, Any], why: str
) -> None:
    path = write_config(tmp_path, family, **changes)
    with pytest.raises(ModelLoadError, match=f"model type '{family}' is not supported: .*{why}"):
        load_model(path, "float32", load_format="dummy")


def test_an_unknown_type_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "abacus"}')
    with pytest.raises(ModelLoadError, match="'abacus' is unknown to the installed transformers"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen3_moe", "quantization_config": {"quant_method": "awq"}}'
    )
    with pytest.raises(ModelLoadError, match="quantized"):
        load_model(tmp_path)


def test_longrope_is_served_while_it_is_short(tmp_path: Path) -> None:
    """Beyond that the rotation of every token follows the longest request of the batch."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
    }
    path = write_config(tmp_path, "phi3", rope_parameters=rope, original_max_position_embeddings=64)
    config = load_model(path, "float32", load_format="dummy").config
    assert config.max_context == 64
    with pytest.raises(ConfigError, match="max_model_len = 65"):
        config.check_context(65)


def test_only_causal_windows_pass_for_masks() -> None:
    def window(sees: Any) -> int:
        return generic_attention._MaskRule(sees).window(512)

    assert window(lambda b, h, q, k: k <= q) == 0
    assert window(lambda b, h, q, k: (k <= q) & (k > q - 8)) == 8
    assert window(lambda b, h, q, k: (k <= q) & (k > q - 4096)) == 0
    for other in (
        lambda b, h, q, k: torch.tensor(True),  # not causal
        lambda b, h, q, k: (k <= q) & (k // 64 == q // 64),  # chunks
        lambda b, h, q, k: (k <= q) & ((k > q - 8) | (k == 0)),  # a sink
        lambda b, h, q, k: k < q,
    ):
        with pytest.raises(ModelLoadError, match="other than a causal sliding window"):
            window(other)


def test_an_mtp_layer_is_left_to_its_drafter(tmp_path: Path) -> None:
    path = make_generic(tmp_path, "deepseek_v3", num_nextn_predict_layers=1)
    file = path / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, "model.layers.2.enorm.weight": torch.ones(64)}, file, {"format": "pt"})
    load_model(path, "float32")
    save_file({**weights, "model.layers.3.enorm.weight": torch.ones(64)}, file, {"format": "pt"})
    config = tmp_path / "config.json"
    count = '"num_nextn_predict_layers": '
    config.write_text(config.read_text().replace(count + "1", count + "0"))
    with pytest.raises(ModelLoadError, match=r"would ignore: model\.layers\.3\.enorm"):
        load_model(path, "float32")


def test_a_layer_without_attention_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the configuration does not say so."""
    path = write_config(tmp_path, "lfm2", layer_types=["conv", "full_attention"])
    monkeypatch.setattr(
        generic_config, "ATTENTION_LAYERS", {*generic_config.ATTENTION_LAYERS, "conv"}
    )
    with pytest.raises(ModelLoadError, match="layers 0 have no attention; a rejected draft"):
        load_model(path, "float32", load_format="dummy")


def test_state_outside_the_kv_cache_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that forgets what an earlier piece computed, here because nothing is written."""
    path = write_config(tmp_path, "olmo2")
    load_model(path, "bfloat16", load_format="dummy")
    monkeypatch.setattr(KVCachePool, "write", lambda *_: None)
    with pytest.raises(ModelLoadError, match="gives other logits than the whole"):
        load_model(path, "bfloat16", load_format="dummy")


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_weights_are_checked(tmp_path: Path, family: str) -> None:
    path = make_generic(tmp_path, family)
    file = path / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.1.self_attn.o_proj.weight"

    def refused(changed: dict[str, torch.Tensor], message: str) -> None:
        save_file(changed, file, {"format": "pt"})
        with pytest.raises(ModelLoadError, match=message):
            load_model(path, "float32")

    refused({n: w for n, w in weights.items() if n != name}, f"lacks .*{name}")
    refused({**weights, "model.other.weight": torch.ones(3)}, "would ignore: model.other.weight")
    refused({**weights, name: torch.ones(3, 3)}, f"other shapes than its model's: {name}")
    expert = next(n for n in weights if "experts" in n)
    refused({n: w for n, w in weights.items() if n != expert}, "experts|cannot be read")
    save_file(weights, file, {"format": "pt"})
    load_model(path, "float32")
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelLoadError, match="cannot be read"):
        load_model(path, "float32")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", *OPTIONS])
def test_dummy_weights(tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture) -> None:
    path = write_config(tmp_path, family, **OPTIONS.get(family, {}))
    model = load_model(path, "float32", load_format="dummy")
    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert any("load_format = dummy" in message for message in warnings)
    assert isinstance(model, GenericModel) == (family in OPTIONS)
    tokens = tokens_of(20)
    (logits,) = Runner(model, 1)({0: (0, tokens)})
    (again,) = Runner(load_model(path, "float32", load_format="dummy"), 1)({0: (0, tokens)})
    assert torch.equal(logits, again)
    assert bool(logits.isfinite().all())
    assert 0.1 < logits.std() < 10


def test_dummy_weights_of_ranks_are_parts_of_the_whole(tmp_path: Path) -> None:
    path = write_config(tmp_path, "llama")
    whole: Any = load_model(path, "float16", load_format="dummy")
    parts: list[Any] = [
        load_model(path, "float16", load_format="dummy", group=TPGroup(rank, 2))
        for rank in range(2)
    ]
    first, second = (layer.mlp.down._linear._weight for layer in whole.layers)
    assert not torch.equal(first, second)
    for name in ("gate_up", "down"):
        expected = getattr(whole.layers[1].mlp, name)
        pieces = [getattr(part.layers[1].mlp, name) for part in parts]
        if name == "gate_up":
            gates, ups = zip(*(p._weight.chunk(2) for p in pieces), strict=True)
            assert torch.equal(torch.cat((*gates, *ups)), expected._weight)
        else:
            joined = torch.cat([p._linear._weight for p in pieces], 1)
            assert torch.equal(joined, expected._linear._weight)


def test_dummy_needs_a_directory(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="load_format = dummy needs a directory"):
        load_model(file, load_format="dummy")
    with pytest.raises(ConfigError, match="load_format must be one of auto, dummy, got 'none'"):
        EngineConfig(model="x", load_format="none")  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_the_engine_runs_with_dummy_weights_and_no_tokenizer(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_config(tmp_path, family, **OPTIONS.get(family, {}))
    monkeypatch.setattr(worker, "load_model", functools.partial(load_model, load_format="dummy"))
    engine = make_engine(path, "ngram", load_format="dummy")
    assert engine.tokenizer is None
    (done,) = complete(engine, make_request("r", [5, 9, 12, 7] * 3, ignore_eos=True))
    assert len(done.token_ids) == 24
    assert done.text == ""
