"""MTP layers that transformers' code runs: latent attention (MLA) and experts."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spectrue.workers.errors import ModelLoadError
from spectrue.workers.models import generic_load, generic_mtp
from spectrue.workers.models.head import DraftHead
from spectrue.workers.parallel import TPGroup
from spectrue.workers.weights import load_model
from spectrue.workers.weights_mtp import load_mtp, mtp_names

from .generic_models import MTP, make_with_mtp
from .harness import assert_same_tokens, complete, make_engine, make_request
from .test_generic_load import write_config
from .test_generic_parallel import Shared, ThreadGroup
from .test_head_models import LENGTH, fed, target_output

PROMPTS = [[5, 9, 12, 7] * 4, [3], list(range(20, 45))]


def load(path: Path, group: TPGroup | None = None) -> DraftHead:
    group = group or TPGroup()
    target = load_model(path, "float32", group=group)
    head, _ = load_mtp(path, target, dtype=torch.float32, group=group)
    return head


def hidden_states_and_logits(head: DraftHead, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    """In pieces, as prefill, decode and verify feed them."""
    kv_cache = head.new_kv_cache(6, 4)
    for layer in kv_cache.layers:
        layer.fill_(float("nan"))
    got = torch.cat(
        [head.forward(batch, hidden[rows], kv_cache) for batch, rows in fed([12, 1, 1, 4, 3])]
    )
    return got, head.compute_logits(got)


@torch.no_grad()
def expected(path: Path, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """By a model of transformers that has the layer as its last one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = json.loads((path / "config.json").read_text())
    config = AutoConfig.for_model(**raw | {"num_hidden_layers": 3, "mlp_layer_types": None})
    hf: Any = AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=torch.float32, attn_implementation="eager"
    )
    weights = load_file(path / "model.safetensors")
    name = "model.layers.2."

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, config.rms_norm_eps)

    token = hf.model.embed_tokens(torch.arange(3, 3 + LENGTH))
    x = torch.cat(
        (
            norm(token, weights[f"{name}enorm.weight"]),
            norm(hidden, weights[f"{name}hnorm.weight"]),
        ),
        -1,
    )
    hf.model.layers = hf.model.layers[2:]
    hf.config.num_hidden_layers = 1
    hf.model.norm.weight.copy_(weights[f"{name}shared_head.norm.weight"])
    out = hf.model(inputs_embeds=(x @ weights[f"{name}eh_proj.weight"].T)[None], use_cache=False)
    states = out.last_hidden_state[0]
    return states, hf.lm_head(states)


@pytest.mark.parametrize("family", MTP)
def test_the_layer_is_the_checkpoints(family: str, tmp_path: Path) -> None:
    path = make_with_mtp(tmp_path, family)
    assert any(".experts.7." in n for n in load_file(path / "model.safetensors"))  # as published
    hidden = target_output(0).hidden_states
    got, logits = hidden_states_and_logits(load(path), hidden)
    want = expected(path, hidden)
    torch.testing.assert_close(got, want[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, want[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", MTP)
def test_two_ranks_share_it(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_with_mtp(tmp_path, family)
    hidden = target_output(0).hidden_states
    want = hidden_states_and_logits(load(path), hidden)
    lock = threading.Lock()
    for module in (generic_load, generic_mtp):
        read = module._read

        def alone(*args: Any, read: Any = read) -> Any:
            with lock:  # transformers sets defaults of the whole process while it loads
                return read(*args)

        monkeypatch.setattr(module, "_read", alone)
    shared = Shared(2)

    def run(rank: int) -> tuple[Tensor, Tensor | None]:
        with torch.inference_mode():
            return hidden_states_and_logits(load(path, ThreadGroup(rank, shared)), hidden)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, range(2))
    torch.testing.assert_close(first, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(second[0], want[0], rtol=1e-4, atol=1e-4)
    assert second[1] is None


@pytest.mark.parametrize("family", MTP)
def test_it_changes_no_text(family: str, tmp_path: Path) -> None:
    path = make_with_mtp(tmp_path, family)
    requests = [
        make_request(f"r{i}", p, temperature=0.0, logprobs=2) for i, p in enumerate(PROMPTS)
    ]
    want = complete(make_engine(path), *requests)
    engine = make_engine(path, "mtp")
    for a, b in zip(complete(engine, *requests), want, strict=True):
        assert_same_tokens(a, b)
    assert engine.stats.num_draft_tokens > 0
    complete(engine, *[make_request(f"s{i}", p) for i, p in enumerate(PROMPTS)])
    assert engine.info.resolved.verify_method == "rejection"
    assert not engine.guards  # the law drawn from is the law handed over


@pytest.mark.parametrize("family", MTP)
def test_one_that_copies_its_target_is_always_right(family: str, tmp_path: Path) -> None:
    engine = make_engine(make_with_mtp(tmp_path, family, copying=True), "mtp")
    greedy: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 40}
    complete(engine, *[make_request(f"r{i}", p, **greedy) for i, p in enumerate(PROMPTS)])
    assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens > 50
    check = {d.setting: d for d in engine.info.decisions}["speculative.self_check"]
    assert check.value == "1.000"
    accepted, drafted = engine.stats.num_accepted_tokens, engine.stats.num_draft_tokens
    complete(engine, *[make_request(f"s{i}", p, max_tokens=60) for i, p in enumerate(PROMPTS)])
    accepted = engine.stats.num_accepted_tokens - accepted
    assert (
        accepted > 0.98 * (engine.stats.num_draft_tokens - drafted) > 50
    )  # min(1, target / draft)


@pytest.mark.parametrize(
    ("name", "weight", "message"),
    [
        ("self_attn.o_proj.weight", None, "lacks weights of its multi-token.*o_proj"),
        ("self_attn.extra.weight", torch.zeros(3), "would be ignored in its multi.*extra"),
        ("post_attention_layernorm.weight", torch.zeros(3), "other shapes in its multi"),
        ("hnorm.weight", None, "lacks weights of its model: hnorm"),
        ("shared_head.head.weight", torch.zeros(3, 64), "lm_head.weight has shape"),
    ],
)
def test_unsound_weights_are_refused(
    name: str, weight: Tensor | None, message: str, tmp_path: Path
) -> None:
    path = make_with_mtp(tmp_path, "glm4_moe")
    weights = load_file(path / "model.safetensors")
    weights.pop(f"model.layers.2.{name}", None)
    if weight is not None:
        weights[f"model.layers.2.{name}"] = weight
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=message):
        load(path)


def test_names_of_qwen3_next_and_its_refusal(tmp_path: Path) -> None:
    """Its MTP layer is found by name; the target is recurrent, which no drafter can serve."""
    names, qwen = mtp_names(
        ["mtp.fc.weight", "mtp.norm.weight", "mtp.pre_fc_norm_hidden.weight"]
        + [f"mtp.layers.{i}.mlp.experts.3.up_proj.weight" for i in range(2)]
        + ["mtp.pre_fc_norm_embedding.weight", "model.layers.2.input_layernorm.weight"],
        num_layers=4,
    )
    assert qwen
    assert set(names) == {
        "eh_proj.weight",
        "norm.weight",
        "hnorm.weight",
        "enorm.weight",
        "layers.0.mlp.experts.3.up_proj.weight",
    }
    path = write_config(tmp_path, "qwen3_next", num_nextn_predict_layers=1)
    with pytest.raises(ModelLoadError, match=r"qwen3_next.*linear_attention.*taken back"):
        make_engine(path, "mtp")
