"""A head trained on CPU: what is trained is what is served, and training helps and resumes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from spectrue.workers.errors import ConfigError
from spectrue.workers.forward_batch import ForwardBatch, ForwardOutput
from spectrue.workers.models.eagle3 import Eagle3Head
from spectrue.workers.parallel import TPGroup
from spectrue.workers.training import trainer
from spectrue.workers.training.config import TrainConfig
from spectrue.workers.training.corpus import Conversation, Corpus, write_shard
from spectrue.workers.training.eagle3 import (
    HeadShape,
    TrainableHead,
    choose_aux_layers,
    default_aux_layers,
)
from spectrue.workers.training.export import export_head
from spectrue.workers.training.trainer import Trainer, TrainProgress, TrainResult, law_loss
from spectrue.workers.training.vocabulary import HotVocab, choose_vocab
from spectrue.workers.weights import load_model
from spectrue.workers.weights_head import load_head

from ...conftest import make_tiny_model
from ..harness import complete, make_engine, make_request

VOCAB = 128


def write_corpus(folder: Path, target: Path, number: int = 120, length: int = 40) -> Corpus:
    """Texts of the target itself, greedy and sampled."""
    engine = make_engine(target, num_kv_blocks=1024, max_num_seqs=32, max_queue_len=number)
    requests = [
        make_request(
            f"r{i}",
            [1 + i % 100, 1 + i % 7, 5],
            max_tokens=length,
            ignore_eos=True,
            temperature=(0.0, 0.5)[i % 2],
        )
        for i in range(number)
    ]
    folder.mkdir()
    found = [
        Conversation((*request.prompt_token_ids, *done.token_ids), 3)
        for request, done in zip(requests, complete(engine, *requests), strict=True)
    ]
    write_shard(folder, found[: number // 2], {"by": "a test"}, "00000")
    write_shard(folder, found[number // 2 :], {"by": "a test"}, "00001")
    return Corpus.open(folder)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("target"), layers=2)


@pytest.fixture(scope="module")
def corpus(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus", target)


SMALL = TrainConfig(
    optimizer="adamw",
    draft_vocab_size=96,
    tokens_per_step=1024,
    accumulate=2,
    max_length=64,
    num_unrolled=3,
    steps=200,
    warm_up_steps=5,
    learning_rate=3e-3,
    held_out=16,
    report_every=40,
    checkpoint_every=20,
)


def train(
    target: Path, corpus: Corpus, out: Path, config: TrainConfig = SMALL, resume: bool = False
) -> tuple[TrainResult, list[TrainProgress]]:
    reports: list[TrainProgress] = []
    model = load_model(target, dtype=torch.float32)
    return Trainer(config, model, corpus, out, reports.append).run(resume), reports


def test_what_is_trained_is_what_is_served(target: Path, corpus: Corpus, tmp_path: Path) -> None:
    """Every unrolled step against the served head, fed true hidden states up to a base and its own
    beyond it."""
    model = load_model(target, dtype=torch.float32)
    model.aux_layers = (0, 1)
    shape = HeadShape(
        target=model.config, aux_layers=(0, 1), draft_vocab_size=96, intermediate_size=80
    )
    head = TrainableHead(shape, torch.device("cpu"), seed=3)
    vocab = choose_vocab(corpus, 96, VOCAB, (0,))
    export_head(head, vocab, tmp_path)
    served, _ = load_head(tmp_path, "eagle3", model, dtype=torch.float32, group=TPGroup())
    assert isinstance(served, Eagle3Head)
    rounded = {n: w.to(torch.bfloat16).float() for n, w in head.published().items()}
    head.load_published(rounded)

    tokens, steps = corpus.conversation(3), 4
    length = len(tokens) - steps - 1
    output = forward(model, tokens[:length])
    assert output.aux_hidden_states is not None
    embedded = model.embed(tokens[1 : 1 + length + steps])
    hidden = head.unroll(output.aux_hidden_states[None], embedded[None], steps)
    logits = [rows[0] @ head.weight("lm_head.weight").t() for rows in hidden]
    for base in (0, 5, length - 1):
        kv = served.new_kv_cache(16, 4)
        feed = served.combine(
            ForwardOutput(
                hidden_states=output.hidden_states[: base + 1],
                aux_hidden_states=output.aux_hidden_states[: base + 1],
            )
        )
        state = served.forward(batch_of(tokens[1 : base + 2], 0), feed, kv)[-1:]
        for step in range(steps):
            if step:
                at = base + step
                state = served.forward(batch_of(tokens[at + 1 : at + 2], at), state, kv)
            want = served.compute_logits(state)
            assert want is not None
            torch.testing.assert_close(logits[step][base], want[0], rtol=1e-4, atol=1e-4)


def batch_of(tokens: Tensor, start: int) -> ForwardBatch:
    blocks = torch.arange(16, dtype=torch.int32)[None]
    return ForwardBatch.build(token_ids=[tokens], starts=[start], block_tables=blocks, block_size=4)


def forward(model: object, tokens: Tensor) -> ForwardOutput:
    kv = model.new_kv_cache(16, 4)  # type: ignore[attr-defined]
    found: ForwardOutput = model.forward(batch_of(tokens, 0), kv)  # type: ignore[attr-defined]
    return found


def test_a_tiny_head_trains_end_to_end(target: Path, corpus: Corpus, tmp_path: Path) -> None:
    """It beats an untrained one, in training's own measures and in the engine."""
    result, reports = train(target, corpus, tmp_path / "trained")
    assert result.finished
    assert result.held_out is not None
    assert [r.step for r in reports] == [40, 80, 120, 160, 200]
    assert reports[-1].loss < reports[0].loss - 0.2
    assert result.held_out.greedy[0] > 0.15
    untrained, _ = train(target, corpus, tmp_path / "raw", SMALL_ZERO)
    lengths = []
    for name, found in (("head", result), ("none", untrained)):
        export_head(found.head, found.vocab, tmp_path / name, shard_bytes=30_000)
        assert len(list((tmp_path / name).glob("*.safetensors"))) > 1
        engine = make_engine(target, "eagle3", draft=tmp_path / name)
        requests = [
            make_request(f"r{i}", [9 + i, 2, 5], temperature=0.0, ignore_eos=True)
            for i in range(12)
        ]
        complete(engine, *requests)
        lengths.append(engine.stats.accept_length)
    assert lengths[0] > lengths[1] + 0.1


SMALL_ZERO = TrainConfig(**{**SMALL.as_dict(), "steps": 1, "learning_rate": 0.0})


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_resumes_to_the_same_weights(
    target: Path, corpus: Corpus, tmp_path: Path, optimizer: str
) -> None:
    config = TrainConfig(**{**SMALL.as_dict(), "steps": 8, "optimizer": optimizer})
    whole, _ = train(target, corpus, tmp_path / "whole", config)
    model = load_model(target, dtype=torch.float32)
    parted = Trainer(config, model, corpus, tmp_path / "parts", lambda report: None)
    first = parted.run(resume=False, stopped=lambda: parted.step == 3)
    assert not first.finished
    assert first.step == 3
    rest, _ = train(target, corpus, tmp_path / "parts", config, resume=True)
    assert rest.step == 8
    for name, weight in whole.head.published().items():
        assert weight.equal(rest.head.published()[name]), name


def test_the_loss_is_what_it_says() -> None:
    """Cross entropy at share 0, -log of the overlap at 1, in a vocabulary that is cut."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(5, 7, generator=generator, dtype=torch.float64)
    whole = torch.randn(5, 9, generator=generator, dtype=torch.float64) * 2
    target, normalizer = whole[:, :7], whole.logsumexp(-1)
    target_probs, draft_probs = whole.softmax(-1)[:, :7], logits.softmax(-1)
    entropy = -(target_probs * draft_probs.log()).sum()
    mass, overlap = target_probs.sum(-1), torch.minimum(target_probs, draft_probs).sum(-1)
    missed = -(mass * (overlap + 1e-4).log()).sum()
    for share in (0.0, 0.25, 1.0):
        loss = law_loss(logits.float(), target.float(), normalizer.float(), torch.tensor(share))
        assert float(loss) == pytest.approx(float((1 - share) * entropy + share * missed), rel=1e-5)


def test_the_overlap_comes_in_over_the_first_half(
    target: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares: list[float] = []

    def watched(logits: Tensor, law: Tensor, normalizer: Tensor, share: Tensor) -> Tensor:
        shares.append(float(share))
        return law_loss(logits, law, normalizer, share)

    monkeypatch.setattr(trainer, "law_loss", watched)
    config = {"steps": 8, "accumulate": 1, "num_unrolled": 1, "overlap_share": 0.8, "held_out": 1}
    train(target, corpus, tmp_path, TrainConfig(**{**SMALL.as_dict(), **config}))
    assert shares[:8] == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 0.8, 0.8, 0.8])


def test_auxiliary_layers_are_there() -> None:
    for layers in range(1, 40):
        chosen = choose_aux_layers(layers)
        assert chosen == tuple(sorted(set(chosen)))
        assert 0 <= chosen[0] <= chosen[-1] < layers
    assert choose_aux_layers(30) == default_aux_layers(30) == (1, 14, 26)


def test_another_training_is_not_resumed(target: Path, corpus: Corpus, tmp_path: Path) -> None:
    train(target, corpus, tmp_path, SMALL_ZERO)
    changed = TrainConfig(**{**SMALL_ZERO.as_dict(), "num_unrolled": 2})
    with pytest.raises(ConfigError, match="num_unrolled = 3, this run has 2"):
        train(target, corpus, tmp_path, changed, resume=True)


def test_the_hot_vocabulary_is_the_most_frequent_and_what_ends_a_turn(tmp_path: Path) -> None:
    write_shard(tmp_path, [Conversation((9, 9, 9, 3, 3, 5, 4, 4, 4), 3)], {}, "00000")
    vocab = choose_vocab(Corpus.open(tmp_path), 3, 12, always=(7,))
    assert vocab.target_ids.tolist() == [3, 4, 7]  # 9 is of the prompt alone
    assert vocab.coverage == pytest.approx(5 / 6)
    assert (torch.arange(3) + vocab.d2t).tolist() == [3, 4, 7]
    assert vocab.t2d(12).nonzero().flatten().tolist() == [3, 4, 7]
    assert isinstance(vocab, HotVocab)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps must be at least 1"),
        ({"optimizer": "sgd"}, "optimizer must be adamw or muon"),
        ({"overlap_share": 1.5}, "overlap_share must be in"),
        ({"tokens_per_step": 100}, "must hold a conversation of max_length = 512"),
    ],
)
def test_bad_settings_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**change)  # type: ignore[arg-type]
