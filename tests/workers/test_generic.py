"""Models that run by transformers with our attention, against transformers alone.

Their logits, however a batch is cut, are compared in `test_models.py` with those of our own code.
"""

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
from .test_models import Runner, assert_same, reference, tokens_of


@pytest.fixture(scope="module", params=OPTIONS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_generic(tmp_path_factory.mktemp(request.param), request.param)


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
