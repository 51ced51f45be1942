"""Loading: GGUF and safetensors, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spectrue.workers.errors import ConfigError, ModelLoadError
from spectrue.workers.gguf_file import CHUNK_ROWS, GGUFFile
from spectrue.workers.models.config import ModelConfig, config_from_hf
from spectrue.workers.weights import load_model, resolve_dtype
from spectrue.workers.weights_gguf import BLOCK, TOP

from ..conftest import make_tiny_model
from .test_models import Runner, assert_same, reference_logits, tokens_of


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    for own, hf in TOP.items():
        if stem == hf:
            return f"{own}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{next(own for own, hf in BLOCK.items() if hf == part)}.{kind}"


def permute(weight: Tensor, heads: int) -> Tensor:
    """What llama.cpp's converter does to Q and K of Llama."""
    rows, columns = weight.shape
    return weight.view(heads, 2, -1, columns).transpose(1, 2).reshape(rows, columns)


def write_gguf(hf: Path, target: Path, kind: str = "F32", **extra: Any) -> Path:
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    config = config_from_hf(hf)
    writer = GGUFWriter(target, config.family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_eos_token_id(0)
    writer.add_array("a.list", [1, 2, 3])  # types that the reader must step over
    writer.add_array("a.list.of.words", ["ä", "b"])
    for key, value in extra.items():
        writer.add_string(key, value)
    for name, tensor in load_file(hf / "model.safetensors").items():
        if config.family == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_heads if "q_proj" in name else config.num_kv_heads
            tensor = permute(tensor, heads)
        data, raw = tensor.numpy(), None
        if tensor.ndim == 2 and kind != "F32":
            raw = GGMLQuantizationType[kind]
            data = quantize(data, raw)
        writer.add_tensor(gguf_name(name), data, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_gguf_equals_its_source(
    family: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    hf: Path = request.getfixturevalue(f"tiny_{family}")
    tokens = tokens_of(40)
    model = load_model(write_gguf(hf, tmp_path / "m.gguf"), "float32")
    (logits,) = Runner(model, 1)({0: (0, tokens)})
    assert_same(logits, reference_logits(hf, tokens))
    assert model.config.eos_token_ids == (0,)


def test_quantized_gguf_in_chunks(tiny_llama: Path, tmp_path: Path) -> None:
    big = make_tiny_model(tmp_path / "hf", vocab_size=2 * CHUNK_ROWS + 3, layers=1)
    file = GGUFFile(write_gguf(big, tmp_path / "q.gguf", "Q8_0"))
    exact = load_file(big / "model.safetensors")["model.embed_tokens.weight"].numpy()
    read = np.concatenate(list(file.read_rows("token_embd.weight", 5, 2 * CHUNK_ROWS + 1)))
    assert np.abs(read - exact[5 : 2 * CHUNK_ROWS + 1]).max() < np.abs(exact).max() / 100
    assert np.abs(read - exact[5 : 2 * CHUNK_ROWS + 1]).max() > 0


def test_llama3_frequencies_of_gguf(tiny_llama: Path, tmp_path: Path) -> None:
    from gguf import GGUFWriter

    from spectrue.workers.models.rope import inverse_frequencies
    from spectrue.workers.weights_gguf import GGUFSource

    writer = GGUFWriter(tmp_path / "r.gguf", "llama")
    for key, value in {"embedding_length": 64, "attention.head_count": 4}.items():
        writer.add_uint32(f"llama.{key}", value)
    for key in ("feed_forward_length", "block_count", "context_length"):
        writer.add_uint32(f"llama.{key}", 8)
    writer.add_layer_norm_rms_eps(1e-5)
    factors = np.linspace(1, 8, 8).astype(np.float32)
    writer.add_tensor("rope_freqs.weight", factors)
    writer.add_tensor("token_embd.weight", np.zeros((4, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    inv_freq, scale = inverse_frequencies(GGUFSource(tmp_path / "r.gguf").config)
    plain = 1e4 ** -(torch.arange(8) / 8)
    torch.testing.assert_close(inv_freq, plain / torch.from_numpy(factors))
    assert scale == 1


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("general.architecture", "gpt2", "'gpt2' is not supported; supported: llama, qwen2, qwen3"),
        ("llama.rope.scaling.type", "longrope", "rope scaling 'longrope'"),
        ("llama.expert_count", 8, "mixture-of-experts"),
        ("llama.rope.dimension_count", 8, "rope.dimension_count 8 of 16"),
        ("llama.block_count", None, "no llama.block_count"),
    ],
)
def test_gguf_metadata_that_is_refused(
    tiny_llama: Path, tmp_path: Path, key: str, value: Any, message: str
) -> None:
    from spectrue.workers.models.config import config_from_gguf

    file = GGUFFile(write_gguf(tiny_llama, tmp_path / "m.gguf"))
    shapes = {name: info.shape for name, info in file.tensors.items()}
    with pytest.raises(ModelLoadError, match=message):
        config_from_gguf(file.path, {**file.metadata, key: value}, shapes)


def test_broken_gguf_files(tiny_llama: Path, tmp_path: Path) -> None:
    whole = write_gguf(tiny_llama, tmp_path / "m.gguf").read_bytes()
    for content, message in [
        (b"not a gguf file at all", "is not a GGUF file"),
        (whole[:200], "not a complete GGUF file"),
        (whole[:-50], "cut short: tensor"),
    ]:
        broken = tmp_path / "broken.gguf"
        broken.write_bytes(content)
        with pytest.raises(ModelLoadError, match=message):
            load_model(broken)


def test_sharded_safetensors(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    tokens = tokens_of(20)
    (logits,) = Runner(load_model(tmp_path, "float32"), 1)({0: (0, tokens)})
    assert_same(logits, reference_logits(tmp_path, tokens))


def _rewrite(path: Path, change: Any) -> None:
    file = path / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


Q, NEW = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.bias"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop(Q), f"lacks weights of its model: {Q}"),
        (lambda w: w.update({NEW: torch.ones(64)}), f"would ignore: {NEW}"),
        (lambda w: w.update({Q: torch.ones(32, 64)}), rf"{Q} has shape \(32, 64\), expected"),
    ],
)
def test_missing_unused_and_misshapen_weights(tmp_path: Path, change: Any, message: str) -> None:
    make_tiny_model(tmp_path)
    _rewrite(tmp_path, change)
    with pytest.raises(ModelLoadError, match=message):
        load_model(tmp_path, "float32")


def test_what_may_be_left_over(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, tie_word_embeddings=True)
    _rewrite(
        tmp_path,
        lambda w: w.update(
            {
                "lm_head.weight": w["model.embed_tokens.weight"].clone(),
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
            }
        ),
    )
    seen: list[tuple[int, int]] = []
    load_model(tmp_path, "float32", progress=lambda done, total: seen.append((done, total)))
    assert seen[0][0] == 1
    assert seen[-1] == (20, 20)


def test_paths_that_are_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        load_model(tmp_path)
    with pytest.raises(ModelLoadError, match="neither a checkpoint directory nor"):
        load_model(tmp_path / "nothing")


def test_resolve_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_dtype("float32") == torch.float32
    for flags, expected in [
        ((0, 0), torch.float32),
        ((1, 0), torch.bfloat16),
        ((0, 1), torch.bfloat16),
    ]:
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda f=flags: f[0])
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda f=flags: f[1])
        assert resolve_dtype("auto") == expected
    with pytest.raises(ConfigError, match="dtype must be one of auto"):
        resolve_dtype("int8")


def test_config_is_frozen(tiny_llama: Path) -> None:
    config = config_from_hf(tiny_llama)
    assert isinstance(config, ModelConfig)
    with pytest.raises(AttributeError):
        config.vocab_size = 1  # type: ignore[misc]


@pytest.mark.slow
def test_default_model_equals_transformers() -> None:
    """Needs the default model: SPECTRUE_TEST_MODEL, SPECTRUE_CACHE or the network."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    from spectrue.workers.model_store import DEFAULT_MODEL, resolve_model

    path = resolve_model(os.environ.get("SPECTRUE_TEST_MODEL", DEFAULT_MODEL))
    config = LlamaConfig(**load_gguf_checkpoint(str(path))["config"])
    theirs = LlamaForCausalLM(config)
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=theirs)
    theirs.load_state_dict(read["tensors"], strict=False)
    theirs.tie_weights()
    tokens = tokens_of(64, vocab_size=49152)
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0]
    (logits,) = Runner(load_model(path, "float32"), 1)({0: (0, tokens)})
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=2e-3)
