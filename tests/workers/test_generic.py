"""Models that run by transformers with our attention, against transformers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from spectrue.workers.forward_batch import ForwardBatch
from spectrue.workers.models.generic import GenericModel
from spectrue.workers.models.generic_attention import LayerAttention
from spectrue.workers.weights import load_model

from .generic_models import OPTIONS, WINDOW, make_generic
from .harness import Completion, assert_same_tokens, complete, make_engine, make_request
from .test_models import Runner, assert_same, reference, reference_logits, tokens_of


@pytest.fixture(scope="module", params=OPTIONS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_generic(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("length", [1, 5, 17, 45])
def test_whole_prefill(path: Path, length: int) -> None:
    tokens = tokens_of(length)
    (logits,) = Runner(load_model(path, "float32"), 1)({0: (0, tokens)})
    assert_same(logits, reference_logits(path, tokens))


@pytest.mark.parametrize("chunk", [1, 3, 20])
def test_chunked_prefill_and_token_by_token(path: Path, chunk: int) -> None:
    tokens = tokens_of(45)
    run = Runner(load_model(path, "float32"), 1)
    parts = [run({0: (at, tokens[at : at + chunk])})[0] for at in range(0, len(tokens), chunk)]
    assert_same(torch.cat(parts), reference_logits(path, tokens))


def test_ragged_batch_of_prefill_decode_and_verify(path: Path) -> None:
    lengths = [44, 10, 37, 9, 40, 44]
    tokens = [tokens_of(n, seed=i) for i, n in enumerate(lengths)]
    run = Runner(load_model(path, "float32"), len(lengths))
    cuts = [0, 9, 33, 5, 20, 43]  # what is already computed: prefill, decode, verify, ...
    for i, cut in enumerate(cuts):
        if cut:
            run({i: (0, tokens[i][:cut])})
    order = [4, 1, 3, 0, 5, 2]
    logits = run({i: (cuts[i], tokens[i][cuts[i] :]) for i in order})
    for i, rows in zip(order, logits, strict=True):
        assert_same(rows, reference_logits(path, tokens[i])[cuts[i] :])


def test_rejected_drafts_are_overwritten(path: Path) -> None:
    tokens = tokens_of(20)
    run = Runner(load_model(path, "float32"), 1)
    run({0: (0, tokens[:10])})
    run({0: (10, torch.cat((tokens[10:11], tokens_of(3, seed=9))))})  # three wrong drafts
    (logits,) = run({0: (11, tokens[11:])})
    assert_same(logits, reference_logits(path, tokens)[11:])


def test_outputs_of_decoder_layers(path: Path) -> None:
    tokens = tokens_of(9)
    model: Any = load_model(path, "float32")
    run = Runner(model, 1)
    batch = ForwardBatch.build(
        token_ids=[tokens], starts=[0], block_tables=run.tables, block_size=run.kv.block_size
    )
    assert model.forward(batch, run.kv).aux_hidden_states is None
    model.aux_layers = (0, 1)
    output = model.forward(batch, run.kv)
    with torch.no_grad():
        hf = reference(path)
        found = hf(tokens[None], output_hidden_states=True).hidden_states
        assert_same(model.embed(tokens), found[0][0])
        assert output.aux_hidden_states is not None
        first, last = output.aux_hidden_states.chunk(2, -1)
        assert_same(first, found[1][0])  # 0 is the embeddings
        assert_same(hf.base_model.norm(last), output.hidden_states)
        assert_same(output.hidden_states, found[2][0])


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_greedy_through_the_engine_is_transformers_generate(path: Path, drafter: str) -> None:
    engine = make_engine(path, drafter)
    prompts = [tokens_of(n, seed=n).tolist() for n in (7, 30)]
    prompts.append([5, 9, 12, 7] * 6)
    requests = [
        make_request(f"r{i}", p, temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2)
        for i, p in enumerate(prompts)
    ]
    for prompt, got in zip(prompts, complete(engine, *requests), strict=True):
        with torch.no_grad():
            text = reference(path).generate(
                torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None
            )
        theirs = Completion(got.request_id, token_ids=text[0, len(prompt) :].tolist())
        assert_same_tokens(theirs, got)
    assert (engine.stats.num_accepted_tokens > 0) == (drafter == "ngram")


def attention_of(path: Path) -> tuple[LayerAttention, ...]:
    model: Any = load_model(path, "float32")
    assert isinstance(model, GenericModel)
    return model.layers


def test_what_the_layers_ask_for(tmp_path: Path) -> None:
    first, second = attention_of(make_generic(tmp_path / "g", "gemma3_text"))
    assert (first.window, second.window) == (WINDOW, 0)
    assert first.scale == pytest.approx(24**-0.5)
    assert attention_of(make_generic(tmp_path / "c", "gemma2"))[0].softcap == 2.0
    latent = attention_of(make_generic(tmp_path / "d", "deepseek_v3"))[0]
    assert (latent.key_dim, latent.value_dim) == (24, 12)
    model = load_model(tmp_path / "d", "float32")
    assert model.new_kv_cache(2, 4).layers[0].shape == (8, 2, 4, 24)  # values padded
    assert model.config.layer_windows == (0, 0)


def test_bf16(path: Path) -> None:
    tokens = tokens_of(30)
    (logits,) = Runner(load_model(path, "bfloat16"), 1)({0: (0, tokens)})
    difference = (logits - reference_logits(path, tokens)).abs().mean()
    assert 0 < difference < 0.1
