"""Which head checkpoints load, as what, and what is refused with which words."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spectrue.workers.config import AuxLayerConvention
from spectrue.workers.errors import ConfigError, ModelLoadError
from spectrue.workers.forward_batch import ForwardBatch
from spectrue.workers.models.base import Model
from spectrue.workers.models.config import config_from_hf
from spectrue.workers.models.head import DraftHead
from spectrue.workers.models.head_config import HeadConfig, head_config
from spectrue.workers.parallel import TPGroup
from spectrue.workers.weights import load_model
from spectrue.workers.weights_head import load_head
from spectrue.workers.weights_mtp import load_mtp

from ..conftest import make_tiny_model
from .harness import make_engine
from .heads import draft_table, eagle3_head, eagle_head, layer_config, second_order_target, with_mtp

Change = dict[str, Any]


def load(
    path: Path, target: Path, method: str = "eagle3", convention: AuxLayerConvention = "auto"
) -> tuple[DraftHead, HeadConfig]:
    model = load_model(target, "float32")
    return load_head(
        path, method, model, convention=convention, dtype=torch.float32, group=TPGroup()
    )


def edit(path: Path, weights: dict[str, Tensor | None] | None = None, **config: Any) -> Path:
    """Change weights (None drops one) and keys of config.json."""
    file = path / "model.safetensors"
    changed = load_file(file) | (weights or {})
    save_file({n: w for n, w in changed.items() if w is not None}, file)
    raw = json.loads((path / "config.json").read_text()) | config
    (path / "config.json").write_text(json.dumps(raw))
    return path


# -- the wrong method -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "method", "fits"),
    [
        ("eagle3", "eagle", "eagle3"),
        ("eagle", "eagle3", "eagle"),
        ("eagle3", "draft_model", "eagle3"),
        ("eagle", "draft_model", "eagle"),
        ("draft_model", "eagle3", "draft_model"),
        ("draft_model", "eagle", "draft_model"),
    ],
)
def test_the_wrong_method_names_the_right_one(
    made: str, method: str, fits: str, tiny_llama: Path, tmp_path: Path
) -> None:
    """sglang#21272: an EAGLE flag with an EAGLE3 head ran, and accepted nothing."""
    heads = {"eagle3": eagle3_head, "eagle": eagle_head}
    path = heads[made](tmp_path / "head") if made in heads else tiny_llama
    with pytest.raises(
        ConfigError, match=rf"{method} does not fit .* speculative\.drafter: {fits}$"
    ):
        make_engine(tiny_llama, method, draft=path)


# -- weights --------------------------------------------------------------------------------------


def test_weights_that_would_be_ignored(tiny_llama: Path, tmp_path: Path) -> None:
    for i, extra in enumerate(("norm_2.weight", "fc.bias", "layers.1.mlp.up_proj.weight")):
        head = edit(eagle3_head(tmp_path / str(i)), {extra: torch.ones(64)})
        with pytest.raises(ModelLoadError, match=rf"would ignore: {re.escape(extra)}"):
            load(head, tiny_llama)


@pytest.mark.parametrize(
    "name", ["norm.weight", "fc.weight", "lm_head.weight", "midlayer.mlp.up_proj.weight"]
)
def test_weights_that_are_missing(name: str, tiny_llama: Path, tmp_path: Path) -> None:
    ours = name.replace("midlayer", "layers.0")
    with pytest.raises(ModelLoadError, match=f"lacks weights of its model: {re.escape(ours)}"):
        load(edit(eagle3_head(tmp_path / "head"), {name: None}), tiny_llama)


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        ({"norm_before_fc": True}, "input_norm.weight"),
        ({"eagle_config": {"fc_norm": True}}, "fc_norm.0.weight"),
        ({"attention_bias": True}, "layers.0.self_attn.k_proj.bias"),
    ],
)
def test_weights_that_the_configuration_promises(
    config: Change, missing: str, tiny_llama: Path, tmp_path: Path
) -> None:
    aux = {"eagle_aux_hidden_state_layer_ids": [0, 1]}
    config = {**config, "eagle_config": {**aux, **config.get("eagle_config", {})}}
    with pytest.raises(ModelLoadError, match=f"lacks .*{re.escape(missing)}"):
        load(edit(eagle3_head(tmp_path / "head"), **config), tiny_llama)


def test_shapes_are_checked(tiny_llama: Path, tmp_path: Path) -> None:
    head = edit(eagle3_head(tmp_path / "head"), {"fc.weight": torch.ones(64, 192)})
    with pytest.raises(ModelLoadError, match=r"fc\.weight has shape \(64, 192\), expected"):
        load(head, tiny_llama)


def test_a_head_of_another_target(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"vocabulary of 128 tokens, .* is of one of 96"):
        load(edit(eagle3_head(tmp_path / "a"), vocab_size=96), tiny_llama)
    with pytest.raises(ConfigError, match=r"hidden_size 64, .* is of one with 128"):
        load(edit(eagle3_head(tmp_path / "b"), target_hidden_size=128), tiny_llama)
    with pytest.raises(ModelLoadError, match="no embed_tokens"):
        load(eagle3_head(tmp_path / "c", hidden=32), tiny_llama)


# -- the draft vocabulary -------------------------------------------------------------------------


def test_the_table_is_read_in_both_directions(tiny_llama: Path, tmp_path: Path) -> None:
    head, _ = load(eagle3_head(tmp_path / "head"), tiny_llama)
    ids, _ = draft_table(128, 48)
    assert head.vocab is not None
    assert head.vocab.target_ids.tolist() == ids.tolist()
    assert head.vocab.draft_index.dtype == torch.int32
    for token, index in enumerate(head.vocab.draft_index.tolist()):
        assert (index == -1) == (token not in ids.tolist())
        assert index == -1 or ids[index] == token


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d2t, t2d: {"d2t": None}, "no d2t"),
        (lambda d2t, t2d: {"d2t": d2t + 128}, "out of the vocabulary"),
        (lambda d2t, t2d: {"d2t": d2t - 128}, "out of the vocabulary"),
        (lambda d2t, t2d: {"d2t": -torch.arange(48)}, "two draft tokens"),
        (lambda d2t, t2d: {"d2t": d2t[:-1]}, r"d2t has shape \(47,\)"),
        (lambda d2t, t2d: {"t2d": ~t2d}, "different tokens"),
        (lambda d2t, t2d: {"t2d": t2d | True}, "different tokens"),
        (lambda d2t, t2d: {"t2d": t2d.roll(1)}, "different tokens"),
        (lambda d2t, t2d: {"t2d": t2d[1:]}, "t2d has shape"),
    ],
)
def test_an_unsound_table(change: Any, message: str, tiny_llama: Path, tmp_path: Path) -> None:
    _, tables = draft_table(128, 48)
    head = eagle3_head(tmp_path / "head")
    with pytest.raises(ModelLoadError, match=message):
        load(edit(head, change(tables["d2t"], tables["t2d"])), tiny_llama)


# -- auxiliary layers -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 layers; layer i adds i to its input, so the output of layer i is 0 + 1 + .. + i."""
    path = make_tiny_model(tmp_path_factory.mktemp("counting"), layers=8, mlp_bias=True)
    weights = load_file(path / "model.safetensors")
    for name, weight in weights.items():
        if not name.startswith("model.norm"):
            weight.zero_()
        if name.endswith("down_proj.bias"):
            weight.fill_(float(name.split(".")[2]))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def read_layers(
    target: Path, head: Path, convention: AuxLayerConvention
) -> tuple[list[float], str]:
    """What the head is given of each auxiliary layer."""
    model: Model = load_model(target, "float32")
    loaded, config = load_head(
        head, "eagle3", model, convention=convention, dtype=torch.float32, group=TPGroup()
    )
    model.aux_layers = loaded.aux_layers
    batch = ForwardBatch.build(
        token_ids=[torch.tensor([1, 2, 3])],
        starts=[0],
        block_tables=torch.tensor([[0]], dtype=torch.int32),
        block_size=4,
    )
    output = model.forward(batch, model.new_kv_cache(1, 4))
    assert output.aux_hidden_states is not None
    return output.aux_hidden_states[-1].view(-1, 64).mean(1).tolist(), config.aux_reason


def outputs(*layers: int) -> list[float]:
    return [float(sum(range(layer + 1))) for layer in layers]


@pytest.mark.parametrize("form", ["nested", "top level", "speculators"])
@pytest.mark.parametrize("convention", ["auto", "layer_output", "layers_run"])
def test_the_convention_of_layer_ids(
    form: str, convention: AuxLayerConvention, counting: Path, tmp_path: Path
) -> None:
    """SGLang's id is the layer whose output is read, vLLM's the number of layers that have run."""
    head = eagle3_head(tmp_path / "head", aux=(2, 4, 7))
    if form != "nested":
        edit(head, eagle_config=None, eagle_aux_hidden_state_layer_ids=[2, 4, 7])
    if form == "speculators":
        layers = layer_config()
        raw = json.loads((head / "config.json").read_text())
        kept = {k: v for k, v in raw.items() if k not in layers}
        kept |= {"speculators_model_type": "eagle3", "transformer_layer_config": layers}
        (head / "config.json").write_text(json.dumps(kept))
    sglang = convention == "layer_output" or (convention == "auto" and form == "nested")
    got, reason = read_layers(counting, head, convention)
    assert got == pytest.approx(outputs(2, 4, 7) if sglang else outputs(1, 3, 6))
    assert ("layer_output" if sglang else "layers_run") in reason


def test_the_default_layers(counting: Path, tmp_path: Path) -> None:
    """What enters layers 2, N/2 and N-3: the outputs of the layers before them."""
    head = edit(eagle3_head(tmp_path / "head", aux=(0, 1, 2)), eagle_config={})
    got, reason = read_layers(counting, head, "auto")
    assert got == pytest.approx(outputs(1, 3, 4))
    assert "default" in reason


def test_layers_are_read_in_their_order(counting: Path, tmp_path: Path) -> None:
    got, _ = read_layers(counting, eagle3_head(tmp_path / "head", aux=(6, 2)), "auto")
    assert got == pytest.approx(outputs(2, 6))


@pytest.mark.parametrize("ids", [[-1, 2], [2, 8], [3, 3]])
def test_layers_that_the_target_lacks(ids: list[int], counting: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"aux_layer_convention"):
        load(eagle3_head(tmp_path / "head", aux=tuple(ids)), counting)


# -- speculators ----------------------------------------------------------------------------------


def speculators(**changes: Any) -> dict[str, Any]:
    return {
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3",
        "architectures": ["Eagle3Speculator"],
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [
                {"proposal_type": "greedy", "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
        },
        "transformer_layer_config": layer_config(),
        "draft_vocab_size": 48,
        "target_hidden_size": 64,
        "eagle_aux_hidden_state_layer_ids": [1, 2],
        **changes,
    }


def test_the_speculators_format(tiny_llama: Path) -> None:
    target = config_from_hf(tiny_llama)
    config = head_config(speculators(norm_output=True), Path("x"), "eagle3", target)
    assert config.aux_layers == (0, 1)
    assert config.draft_vocab_size == 48
    assert config.norm_output
    assert not config.norm_before_residual  # where the key is missing
    config = head_config(speculators(norm_before_residual=True), Path("x"), "eagle3", target)
    assert config.norm_before_residual


@pytest.mark.parametrize("lossy", [{"verifier_accept_k": 2}, {"accept_tolerance": 0.1}])
def test_lossy_proposals_are_refused(lossy: Change, tiny_llama: Path) -> None:
    raw = speculators(speculators_config={"proposal_methods": [lossy]})
    with pytest.raises(ModelLoadError, match="lossy"):
        head_config(raw, Path("x"), "eagle3", config_from_hf(tiny_llama))


@pytest.mark.parametrize("kind", ["peagle", "dflash", "mtp"])
def test_other_heads_of_speculators_are_refused(
    kind: str, tiny_llama: Path, tmp_path: Path
) -> None:
    head = edit(eagle3_head(tmp_path / "head"), speculators_model_type=kind)
    with pytest.raises(ModelLoadError, match=f"{kind} head of speculators"):
        load(head, tiny_llama)


def test_a_parallel_head_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    head = edit(eagle3_head(tmp_path / "head"), mask_hidden=True)
    with pytest.raises(ModelLoadError, match="P-EAGLE"):
        load(head, tiny_llama)


# -- multi-token prediction -----------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["deepseek", "qwen"])
def test_a_target_does_not_mind_its_mtp_layer(layout: str, tmp_path: Path) -> None:
    target = second_order_target(tmp_path / "a")
    both = with_mtp(target, tmp_path / "b", layout)
    assert load_model(both, "float32").config.num_layers == 3
    undeclared = edit(both, num_nextn_predict_layers=0, mtp_num_hidden_layers=0)
    with pytest.raises(ModelLoadError, match="would ignore"):
        load_model(undeclared, "float32")


def test_a_target_without_an_mtp_layer(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"drafter: mtp needs a target with"):
        make_engine(tiny_llama, "mtp")
    dropped = make_tiny_model(tmp_path / "m", num_nextn_predict_layers=1)
    with pytest.raises(ConfigError, match="their weights are not in it"):
        make_engine(dropped, "mtp")


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("self_attn.kv_a_proj_with_mqa.weight", (8, 64), "latent attention"),
        ("mlp.experts.0.up_proj.weight", (8, 64), "mixture of experts"),
        ("mlp.gate.weight", (8, 64), "mixture of experts"),
        ("self_attn.q_proj.weight", (128, 64), "output gate"),
    ],
)
def test_mtp_layers_that_are_not_llamas(
    name: str, shape: tuple[int, ...], words: str, tmp_path: Path
) -> None:
    path = with_mtp(second_order_target(tmp_path / "a"), tmp_path / "b", "deepseek")
    edit(path, {f"model.layers.3.{name}": torch.zeros(shape)})
    with pytest.raises(ConfigError, match=rf"mtp: .*{words}.*Use ngram"):
        load_mtp(path, load_model(path, "float32"), dtype=torch.float32, group=TPGroup())
