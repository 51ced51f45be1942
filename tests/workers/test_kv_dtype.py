"""`kv_cache_dtype`: which encoding, what is lost, and that nothing else changes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spectrue.workers.attention import AttentionMetadata, paged_attention
from spectrue.workers.engine import Engine
from spectrue.workers.errors import ConfigError, ModelLoadError
from spectrue.workers.executor import GroupExecutor
from spectrue.workers.kv_cache import KVCachePool
from spectrue.workers.kv_dtype import resolve_kv_dtype
from spectrue.workers.policy import Decision
from spectrue.workers.weights import load_model

from ..conftest import make_tiny_model
from .generic_models import make_generic
from .harness import assert_same_tokens, complete, make_engine, make_request
from .test_attention import batch_of
from .test_models import Runner, reference_logits, tokens_of

OCP, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
FP32, BF16 = torch.float32, torch.bfloat16
LOOP = [5, 9, 12, 7] * 4
PROMPTS = [LOOP, [3, 4, 5], [40] * 9, list(range(20, 45))]


@pytest.mark.parametrize(
    ("name", "arch", "expected"),
    [
        ("fp8", "gfx942", FNUZ),
        *(("fp8", arch, OCP) for arch in ("cpu", "gfx90a", "gfx950", "gfx1201", "sm_89", "sm_90")),
        *(("fp8", arch, None) for arch in ("sm_80", "sm_86")),
        ("auto", "gfx942", BF16),
        ("float32", "gfx942", FP32),
    ],
)
def test_the_architecture_chooses(name: str, arch: str, expected: torch.dtype | None) -> None:
    decisions: list[Decision] = []
    if expected is None:
        with pytest.raises(ConfigError, match=rf"kv_cache_dtype.*{arch}"):
            resolve_kv_dtype(name, BF16, arch, decisions)
        return
    assert resolve_kv_dtype(name, BF16, arch, decisions) is expected
    assert [d.setting for d in decisions] == ["kv_cache_dtype"] * (name in ("auto", "fp8"))


def pool_of(engine: Engine) -> KVCachePool:
    assert isinstance(engine.executor, GroupExecutor)
    return engine.executor.worker.target.kv_cache


# -- the pool ----------------------------------------------------------------------------------


def attended(pool: KVCachePool, kv: Tensor, query: Tensor, start: int) -> Tensor:
    """Queries from `start` on over all of kv, written to the pool's first slots."""
    pool.write(0, torch.arange(len(kv)), kv)
    tables = torch.arange(pool.num_blocks, dtype=torch.int32)[None]
    batch = batch_of([(len(kv) - start, len(kv))], tables, pool.block_size)
    metadata = AttentionMetadata.build(batch, pool.block_size, 2, query.dtype)
    return paged_attention(query[start:], pool.layers[0], metadata, scales=pool.scales[0])


@pytest.mark.parametrize("start", [0, 37, 39])  # prefill, verify, decode
def test_both_encodings_are_the_same_numbers(start: int) -> None:
    """Same steps over the same range: fnuz takes twice the scale. And both are near float32."""
    generator = torch.Generator().manual_seed(0)
    kv = 3 * torch.randn(40, 2, 2, 16, generator=generator)
    query = torch.randn(40, 4, 16, generator=generator)
    scales = ((0.7, 2.5),)
    outs = {
        dtype: attended(KVCachePool(1, 3, 16, 2, 16, dtype, scales=scales), kv, query, start)
        for dtype in (FP32, OCP, FNUZ)
    }
    torch.testing.assert_close(outs[OCP], outs[FNUZ], rtol=1e-5, atol=1e-5)
    error = (outs[OCP] - outs[FP32]).norm() / outs[FP32].norm()
    assert 1e-3 < error < 0.1


@pytest.mark.parametrize("dtype", [OCP, FNUZ])
def test_what_is_written_saturates_and_what_is_broken_shows(dtype: torch.dtype) -> None:
    pool = KVCachePool(1, 1, 4, 1, 4, dtype, scales=((2.0, 0.5),))
    nan, inf = torch.nan, torch.inf
    rows = torch.tensor([[1e9, -1e9, 3.0, 0.0], [nan, inf, -inf, -1e-9]])
    pool.write(0, torch.tensor([2, 1]), rows[:, None, None].expand(2, 2, 1, 4))
    got = pool.layers[0][:, :, 0].float() * torch.tensor(pool.scales[0])[None, :, None]
    most = torch.finfo(dtype).max * torch.tensor(pool.scales[0])
    assert got[2, :, 0].equal(most)
    assert got[2, :, 1].equal(-most)
    assert got[2, :, 2:].tolist() == [[3.0, 0.0], [3.0, 0.0]]
    assert got[1].isnan().tolist() == [[True, True, True, False]] * 2
    assert not bool(got[[0, 3]].any())


# -- models ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "dtype", "least", "most"),
    [
        ("llama", OCP, 1e-3, 0.1),
        ("llama", BF16, 1e-4, 0.01),
        ("deepseek_v3", OCP, 1e-3, 0.1),
        ("gemma3_text", OCP, 1e-3, 0.1),
    ],
)
def test_logits_are_near_those_of_a_float32_cache(
    family: str, dtype: torch.dtype, least: float, most: float, tmp_path: Path
) -> None:
    """In pieces, so that later ones read what earlier ones have stored."""
    path = make_generic(tmp_path, family)
    tokens = tokens_of(45)
    run = Runner(load_model(path, "float32"), 1)
    pool = run.kv = run.model.new_kv_cache(run.kv.num_blocks, run.kv.block_size, dtype)
    assert pool.layers[0].dtype is dtype
    logits = torch.cat([run({0: (a, tokens[a:b])})[0] for a, b in ((0, 20), (20, 41), (41, 45))])
    expected = reference_logits(path, tokens)
    error = (logits - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert least < error.median() < most


def test_the_gpus_write_is_the_cpus(tiny_qwen3: Path) -> None:
    """The op that a GPU runs, by its reference, against rotation and `KVCachePool.write`."""
    model: Any = load_model(tiny_qwen3, "float32")
    model.kv_scales = ((0.5, 0.125), (1.0, 1.0))
    tokens = tokens_of(9)
    tables = torch.arange(3, dtype=torch.int32)[None]
    batch = batch_of([(9, 9)], tables, 4)
    pools = [model.new_kv_cache(3, 4, FNUZ) for _ in range(2)]
    rope, x = model.rope.tables(batch.positions), model.vocab.embed(tokens)
    normed, attention = model.layers[0].attention_norm(x), model.layers[0].attention
    metadata = AttentionMetadata.build(batch, 4, 2, FP32)
    attention(normed, x, rope, batch, pools[0], metadata)
    qkv = attention.qkv(normed).view(9, -1, attention.head_dim)
    attention._rotate_and_write(qkv, rope, batch, pools[1])
    want, got = (pool.layers[0].float() for pool in pools)
    assert float(want.abs().max()) > 1
    assert float((want - got).ne(0).float().mean()) < 0.01  # a rounding that went the other way
    torch.testing.assert_close(got, want, rtol=0.13, atol=2**-9)


def test_speculation_changes_no_text(tiny_llama: Path, tmp_path: Path) -> None:
    """The law is that of this engine's own logits, whatever its cache has lost."""
    other = make_tiny_model(tmp_path, seed=7, layers=1)
    greedy = [make_request(f"g{i}", p, temperature=0.0, logprobs=2) for i, p in enumerate(PROMPTS)]
    seeded = [make_request(f"s{i}", p, seed=i) for i, p in enumerate(PROMPTS)]
    want = complete(make_engine(tiny_llama, kv_cache_dtype="fp8"), *greedy, *seeded)
    for drafter, draft in (("ngram", None), ("draft_model", other), ("draft_model", tiny_llama)):
        engine = make_engine(tiny_llama, drafter, 3, draft, kv_cache_dtype="fp8")
        got = complete(engine, *greedy, *seeded)
        for a, b in zip(got[: len(greedy)], want, strict=False):
            assert_same_tokens(a, b)
        assert [c.token_ids for c in got[4:]] == [c.token_ids for c in want[4:]]
        if draft is tiny_llama:  # its cache is fp8 too: the same numbers
            accepted = [c.last.spec_decode for c in got[:4] if c.last is not None]
            assert all(s.num_accepted_tokens == s.num_draft_tokens > 0 for s in accepted)


def test_a_cached_prefix_gives_the_same_bits(tiny_llama: Path) -> None:
    request = make_request("r", list(range(20, 60)), temperature=0.0, logprobs=5)
    engine = make_engine(tiny_llama, kv_cache_dtype="fp8", max_num_batched_tokens=16)
    cold, warm = (complete(engine, request)[0] for _ in range(2))
    assert cold.last is not None
    assert warm.last is not None
    assert warm.last.num_cached_tokens >= 36 > cold.last.num_cached_tokens
    assert warm.logprobs == cold.logprobs
    assert warm.token_ids == cold.token_ids


def test_blocks_are_as_small_as_the_cache(tiny_llama: Path) -> None:
    sizes = {}
    for name in ("auto", "bfloat16", "fp8"):
        engine = make_engine(
            tiny_llama,
            "draft_model",
            draft=tiny_llama,
            num_kv_blocks=None,
            kv_cache_bytes=1 << 20,
            kv_cache_dtype=name,
        )
        sizes[name] = engine.info.num_kv_blocks
        assert pool_of(engine).bytes * 2 == 1 << 20  # half of it the drafter's
    assert sizes["fp8"] == 2 * sizes["bfloat16"] == 4 * sizes["auto"]
    settings = {d.setting: d.value for d in engine.info.decisions}
    assert settings["kv_cache_dtype"] == "float8_e4m3fn"
    assert settings["kv_cache_scales"] == "1.0"


# -- scales of a checkpoint --------------------------------------------------------------------

NAMES = ("self_attn.{}_scale", "self_attn.{}_proj.{}_scale", "self_attn.{}_proj.output_scale")


def with_scales(source: Path, path: Path, scales: Mapping[str, Tensor], **config: Any) -> Path:
    path.mkdir()
    for file in source.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    weights = load_file(source / "model.safetensors") | dict(scales)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    raw = json.loads((path / "config.json").read_text()) | config
    (path / "config.json").write_text(json.dumps(raw))
    return path


def both_layers(name: str = NAMES[0]) -> dict[str, Tensor]:
    return {
        f"model.layers.{i}.{name.format(kind, kind)}": torch.tensor(value)
        for i in range(2)
        for kind, value in (("k", 0.5 + i), ("v", 0.25))
    }


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("name", NAMES)
def test_scales_of_the_checkpoint(family: str, name: str, tmp_path: Path) -> None:
    plain = make_generic(tmp_path / "plain", family)
    path = with_scales(plain, tmp_path / "scaled", both_layers(name))
    model = load_model(path, "float32")
    assert model.kv_scales == ((0.5, 0.25), (1.5, 0.25))
    assert model.new_kv_cache(1, 4, OCP).scales == model.kv_scales
    assert model.new_kv_cache(1, 4, FNUZ).scales == ((1.0, 0.5), (3.0, 0.5))
    assert model.new_kv_cache(1, 4).scales == ((1.0, 1.0),) * 2  # only fp8 is scaled


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_scales_are_used(family: str, tmp_path: Path) -> None:
    """Ones that suit leave the logits near; ones far too small make everything saturate."""
    source, config = make_generic(tmp_path / "plain", family), {}
    if family == "llama":
        scheme = {"type": "float", "num_bits": 8, "strategy": "tensor"}
        quantization = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
        config = {"quantization_config": quantization}
    tokens = tokens_of(30)
    errors = []
    for i, factor in enumerate((1.0, 2.0**-9)):
        scales = {n: (s * factor)[None] for n, s in both_layers().items()}
        path = with_scales(source, tmp_path / f"{i}", scales, **config)
        run = Runner(load_model(path, "float32"), 1)
        run.kv = run.model.new_kv_cache(run.kv.num_blocks, run.kv.block_size, FNUZ)
        expected = reference_logits(source, tokens)
        errors.append(float((run({0: (0, tokens)})[0] - expected).norm() / expected.norm()))
    assert errors[0] < 0.1
    assert errors[1] > 0.3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.1.self_attn.v_scale": None}, "lacks v_scale of layer 1"),
        ({"model.layers.0.self_attn.k_scale": torch.tensor(-1.0)}, "k_scale is -1.0"),
        ({"model.layers.0.self_attn.k_scale": torch.ones(2)}, "k_scale has shape"),
    ],
)
def test_unsound_scales_are_refused(
    tiny_llama: Path, tmp_path: Path, change: dict[str, Tensor | None], message: str
) -> None:
    scales = {n: s for n, s in (both_layers() | change).items() if s is not None}
    with pytest.raises(ModelLoadError, match=message):
        load_model(with_scales(tiny_llama, tmp_path / "m", scales), "float32")


def test_quantised_weights_are_still_refused(tiny_llama: Path, tmp_path: Path) -> None:
    quantization = {
        "quant_method": "compressed-tensors",
        "kv_cache_scheme": {"type": "float", "num_bits": 8},
        "config_groups": {"group_0": {"weights": {"num_bits": 8}}},
    }
    path = with_scales(tiny_llama, tmp_path / "m", {}, quantization_config=quantization)
    with pytest.raises(ModelLoadError, match="quantized"):
        load_model(path, "float32")
