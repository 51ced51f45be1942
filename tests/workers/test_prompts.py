"""Prompts come from files in several forms; a line that has none is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from spectrue.workers.errors import ConfigError
from spectrue.workers.prompts import read_prompts
from spectrue.workers.tokenizer import load_tokenizer


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (None, "cannot read"),
        ("", "is empty"),
        ("\n\n", "is empty"),
        ('{"prompt": "a"}\nhello\n', ", line 2: "),
        ('{"question": "a"}\n', ", line 1: "),
        ('{"turns": []}\n', ", line 1: "),
        ('{"text": 5}\n', ", line 1: "),
        ('["a"]\n', ", line 1: "),
        ('{"messages": []}\n', ", line 1: "),
        ('{"messages": "hello"}\n', ", line 1: "),
        ('{"prompt": "a"}\n{"messages": [{"content": "no role"}]}\n', ", line 2: "),
    ],
)
def test_bad_prompts_files(tmp_path: Path, text: str | None, where: str) -> None:
    file = tmp_path / "p.jsonl"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as e:
        read_prompts(file)
    assert str(file) in str(e.value)
    assert where in str(e.value)
    if text is not None:
        assert "turns (a list of strings, of which the first is asked)" in str(e.value)


def test_good_prompts_files(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(
        '{"turns": ["a", "b"], "category": "math"}\n{"prompt": "c"}\n\n{"text": "d\\u2028"}\n'
        '{"messages": [{"role": "system", "content": "e"}, {"role": "user", "content": "f"}]}\n'
    )
    found = read_prompts(file)
    assert [p.messages[-1]["content"] for p in found] == ["a", "c", "d\u2028", "f"]
    assert [p.messages[0]["role"] for p in found] == ["user", "user", "user", "system"]
    assert [p.category for p in found] == ["math", "", "", ""]
    assert [p.where for p in found] == [f"{file}, line {n}" for n in (1, 2, 4, 5)]


def test_what_the_template_refuses_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n{"messages": [{"role": "robot", "content": "a"}]}\n')
    fine, bad = read_prompts(file)
    tokenizer = load_tokenizer(tiny_llama)
    assert fine.token_ids(tokenizer) == tuple(tokenizer.apply_chat_template(fine.messages))
    with pytest.raises(ConfigError, match=r"p\.jsonl, line 2: messages"):
        bad.token_ids(tokenizer)
