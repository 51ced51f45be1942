"""The text that a target writes for its head: turns as the template has them, by seed, in waves."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from spectrue.workers.core import FinishReason, RequestOutput, SchedulerOutput
from spectrue.workers.errors import ConfigError
from spectrue.workers.prompts import read_prompts
from spectrue.workers.tokenizer import Tokenizer, load_tokenizer
from spectrue.workers.training.author import (
    MAX_LOST_TURNS,
    Author,
    AuthorConfig,
    _Dialogue,
    chat_format,
    write_corpus,
)
from spectrue.workers.training.corpus import Corpus, shards

from ...conftest import make_tiny_model
from ..harness import make_engine


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("target"), vocab_size=300, layers=1)


@pytest.fixture(scope="module")
def tokenizer(target: Path) -> Tokenizer:
    return load_tokenizer(target)


CONFIG = AuthorConfig(num_tokens=300, answer_tokens=24, shard_conversations=8)


def author(
    target: Path, tokenizer: Tokenizer, seed: int = 0, prompts: list[tuple[int, ...]] | None = None
) -> Author:
    engine = make_engine(
        target,
        max_num_seqs=16,
        num_kv_blocks=1500,
        max_num_batched_tokens=4096,  # a whole wave in a step
        enable_prefix_caching=False,
    )
    config = AuthorConfig(**{**CONFIG.as_dict(), "seed": seed})
    return Author(engine, config, tokenizer, prompts)


def test_turns_are_where_the_template_has_them(
    target: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    writer = author(target, tokenizer)
    steps: list[SchedulerOutput] = []
    schedule = writer.engine.scheduler.schedule

    def watched() -> SchedulerOutput:
        steps.append(schedule())
        return steps[-1]

    writer.engine.scheduler.schedule = watched  # type: ignore[method-assign]
    assert write_corpus(writer, tmp_path / "one") >= 300
    assert writer.engine.num_unfinished == 0
    corpus = Corpus.open(tmp_path / "one")
    assert len(shards(tmp_path / "one")) > 1
    assert corpus.num_answer_tokens == writer.num_tokens
    chat, eos = chat_format(tokenizer), tokenizer.eos_token_ids[0]
    for i in range(len(corpus)):
        text, start = corpus.conversation(i).tolist(), int(corpus.loss_from[i])
        assert text[: len(chat.begin)] == chat.begin
        assert text[start - len(chat.between) : start] == chat.between
        asked = text[len(chat.begin) : start - len(chat.between)]
        assert len(asked) > 1
        assert eos not in asked  # it is in what comes between
        assert len(text) - start >= 2
    # Prompts are read in few of the steps, a quarter of the slots at once: no graph can run those.
    waves = [len(plan.new_requests) for plan in steps if plan.new_requests]
    assert waves[0] == 16
    assert min(waves) >= 4
    assert len(waves) < 0.3 * len(steps)

    write_corpus(author(target, tokenizer), tmp_path / "again")
    write_corpus(author(target, tokenizer, seed=1), tmp_path / "other")
    assert Corpus.open(tmp_path / "again").tokens.equal(corpus.tokens)
    assert not Corpus.open(tmp_path / "other").tokens.equal(corpus.tokens)


def test_a_turn_counts_when_it_was_ended_said_something_and_is_new(
    target: Path, tokenizer: Tokenizer
) -> None:
    writer = author(target, tokenizer)
    assert writer.format is not None

    def turn(words: list[int], reason: FinishReason) -> int:
        """Requests that wait after a user's turn of `words`."""
        dialogue = _Dialogue([*writer.format.begin, *words, 0], True, 0, 0, 0, random.Random(1))  # type: ignore[union-attr]
        writer._asked.clear()
        output = RequestOutput(
            request_id="0", finish_reason=reason, num_output_tokens=len(words) + 1
        )
        assert writer._turn(dialogue, output) is None
        return len(writer._asked)

    assert turn([5, 6, 7, 8], "length") == 0
    assert turn([5, 6, 7, 8], "error") == 0
    assert turn([5, 6], "stop") == 0
    assert turn([5, 6, 7, 8], "stop") == 1
    (asked, _) = writer._asked[0]
    assert asked.token_ids == [*writer.format.begin, 5, 6, 7, 8, *writer.format.between]
    assert turn([5, 6, 7, 8], "stop") == 0


def test_what_can_never_be_a_dialogue_is_refused(target: Path, tokenizer: Tokenizer) -> None:
    """Each of these would go on for ever."""
    limit = author(target, tokenizer).limit
    with pytest.raises(ConfigError, match="prompts: none leaves room"):
        author(target, tokenizer, prompts=[(5,) * (limit - 5)])
    writer = author(target, tokenizer, prompts=[(5,) * (limit - 5), (6, 7)])
    assert writer.prompts == [(6, 7)]
    engine = make_engine(target, max_model_len=64)
    with pytest.raises(ConfigError, match="a context of 64 tokens"):
        Author(engine, CONFIG, tokenizer)
    writer = author(target, tokenizer)
    dialogue = _Dialogue([5, 6], True, 0, 0, 0, random.Random(1))
    output = RequestOutput(request_id="0", finish_reason="length", num_output_tokens=1)
    for _ in range(MAX_LOST_TURNS):
        assert writer._turn(dialogue, output) is None
    with pytest.raises(ConfigError, match="give --prompts"):
        writer._turn(dialogue, output)


def test_given_prompts_are_answered(target: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    message = {"role": "user", "content": "so"}
    lines = [{"prompt": "hello there"}, {"turns": ["one", "two"]}, {"messages": [message]}]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    prompts = [prompt.token_ids(tokenizer) for prompt in read_prompts(path)]
    assert len(prompts) == 3
    write_corpus(author(target, tokenizer, prompts=prompts), tmp_path / "corpus")
    corpus = Corpus.open(tmp_path / "corpus")
    heads = {
        tuple(corpus.conversation(i).tolist()[: corpus.loss_from[i]]) for i in range(len(corpus))
    }
    assert heads == {tuple(prompt) for prompt in prompts}
