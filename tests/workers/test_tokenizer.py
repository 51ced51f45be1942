from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrue.workers.errors import InvalidRequestError, ModelLoadError
from spectrue.workers.tokenizer import IncrementalDetokenizer, Tokenizer, load_tokenizer

from ..conftest import make_tiny_model

TEXTS = [
    "plain words",
    "família 😀👩‍👩‍👧 漢字かな",
    "",
    "\ufffd real replacement \ufffd\ufffd",
    "  a\n\n b  ",
    "e\u0301 \u200d مرحبا",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = make_tiny_model(tmp_path_factory.mktemp("bytes"), vocab_size=300, layers=1)
    return load_tokenizer(path)


def streamed(
    tokenizer: Tokenizer, prompt: list[int], ids: list[int], sizes: random.Random, skip: bool
) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    parts, at = [], 0
    while at < len(ids):
        size = sizes.randint(0, 5)
        parts.append(detokenizer.push(ids[at : at + size]))
        at += size
    return [*parts, detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    for seed in range(5):
        parts = streamed(tokenizer, ids, ids, random.Random(seed), True)
        assert "".join(parts) == text


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.integers(0, 299), max_size=40),
    prompt=st.lists(st.integers(0, 299), max_size=8),
    seed=st.integers(0, 2**16),
    skip=st.booleans(),
)
def test_pushes_add_up_to_the_whole_decoding(
    tokenizer: Tokenizer, ids: list[int], prompt: list[int], seed: int, skip: bool
) -> None:
    parts = streamed(tokenizer, prompt, ids, random.Random(seed), skip)
    assert "".join(parts) == tokenizer.decode(ids, skip)


def test_no_half_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a😀b")
    detokenizer = IncrementalDetokenizer(tokenizer, [])
    assert [detokenizer.push([i]) for i in ids] == ["a", "", "", "", "😀", "b"]
    assert detokenizer.finish() == ""
    assert detokenizer.push(ids[1:3]) == ""
    assert detokenizer.finish() == "\ufffd"  # cut inside a character
    assert detokenizer.finish() == ""


def test_text_before_a_held_character_is_out(tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer, [])
    assert detokenizer.push(tokenizer.encode("stop 😀")[:-1]) == "stop "


def test_special_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|end|>b")
    assert tokenizer.eos_token_ids == (0,)
    assert 0 in ids
    assert "".join(streamed(tokenizer, [], ids, random.Random(0), True)) == "ab"
    assert "".join(streamed(tokenizer, [], ids, random.Random(0), False)) == "a<|end|>b"


def test_chat_template(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.decode(tokenizer.apply_chat_template(messages), skip_special_tokens=False)
    assert text == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    closed = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    assert tokenizer.decode(closed, skip_special_tokens=False).endswith("<|end|>\n")


def test_chat_template_errors_blame_messages(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="unknown role robot") as raised:
        tokenizer.apply_chat_template([{"role": "robot", "content": "hi"}])
    assert raised.value.param == "messages"
    template, tokenizer.hf.chat_template = tokenizer.hf.chat_template, None
    try:
        with pytest.raises(InvalidRequestError, match="no chat template") as raised:
            tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
        assert raised.value.param == "messages"
    finally:
        tokenizer.hf.chat_template = template


def test_nothing_to_load(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="neither"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(ModelLoadError, match="cannot be loaded"):
        load_tokenizer(tmp_path)


def _gguf(path: Path, pre: str, **extra: Any) -> Path:
    from gguf import GGUFWriter
    from tokenizers import pre_tokenizers

    tokens = ["<|end|>", "<s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĠ", "12", "<tool>"]
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_merges(["Ġ Ġ", "1 2"])
    writer.add_token_types([3, 3, *[1] * (len(tokens) - 3), 4])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_add_bos_token(bool(extra.get("add_bos")))
    writer.add_chat_template("{{ messages[0].content }}<|end|>")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def _pieces(path: Path, text: str) -> list[str]:
    tokenizer = load_tokenizer(path)
    return [tokenizer.decode([i], skip_special_tokens=False) for i in tokenizer.encode(text)]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["a", "  ", "1", "2", "<|end|>"]),
        ("gpt-2", ["a", " ", " ", "12", "<|end|>"]),
        ("llama-bpe", ["a", " ", " ", "12", "<|end|>"]),
        ("qwen2", ["a", " ", " ", "1", "2", "<|end|>"]),
    ],
)
def test_gguf_splits_as_its_pre_tokenizer_says(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    assert _pieces(_gguf(tmp_path / "t.gguf", pre), "a  12<|end|>") == pieces


def test_gguf_special_tokens(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(_gguf(tmp_path / "t.gguf", "gpt-2", add_bos=True))
    ids = tokenizer.encode("a<tool>")
    assert ids[0] == 1
    assert tokenizer.decode(ids) == "a<tool>"  # user-defined tokens are text, control tokens not
    assert tokenizer.eos_token_ids == (0,)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
    assert tokenizer.decode(chat, skip_special_tokens=False) == "x<|end|>"


def test_gguf_of_an_unknown_pre_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="'tekken' is not supported in GGUF; supported: gpt-2"):
        load_tokenizer(_gguf(tmp_path / "t.gguf", "tekken"))
