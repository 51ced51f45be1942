"""Text <-> token ids, and text that grows token by token."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from spectrue.workers.errors import InvalidRequestError, ModelLoadError

REPLACEMENT = "\ufffd"  # what decoding shows for bytes that are not (yet) a character
CONTEXT_TOKENS = 5  # of the prompt, decoded before the first output token
FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


class Tokenizer:
    """A transformers fast tokenizer, reduced to what the engine and the server use."""

    def __init__(self, hf: Any, eos_token_ids: Iterable[int] = ()) -> None:
        self.hf = hf
        self._backend = hf.backend_tokenizer
        own = [] if hf.eos_token_id is None else [hf.eos_token_id]
        self.eos_token_ids: tuple[int, ...] = tuple(sorted({*own, *eos_token_ids}))
        self.vocab_size: int = len(hf)

    @property
    def has_chat_template(self) -> bool:
        return bool(self.hf.chat_template)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text).ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]:
        if not self.has_chat_template:
            raise InvalidRequestError(
                "messages cannot be served: the model has no chat template; use /v1/completions",
                "messages",
            )
        try:
            ids: list[int] = self.hf.apply_chat_template(
                [dict(m) for m in messages],
                add_generation_prompt=add_generation_prompt,
                tokenize=True,
                return_dict=False,
            )
        except Exception as error:  # a template raises what it likes on roles it does not know
            raise InvalidRequestError(
                f"messages do not fit the model's chat template: {error}", "messages"
            ) from error
        return list(ids)


class IncrementalDetokenizer:
    """Text of a growing token list. Pushed texts and `finish` together are the whole decoding.

    Tokens since the last position where a character ended are decoded again behind the few before
    them, as decoders may treat a first token specially. Only the last character of a decoding can
    still change, and only if it is U+FFFD: it is held back.
    """

    __slots__ = ("_decode", "_emitted", "_prefix", "_prefix_text", "_skip", "_tail")

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool = True
    ) -> None:
        self._decode = tokenizer.decode
        self._skip = skip_special_tokens
        self._tail: list[int] = []  # tokens whose text is not complete
        self._emitted = 0  # characters of their text that are out
        self._start_after(list(prompt_ids[-CONTEXT_TOKENS:]))
        if self._prefix_text.endswith(REPLACEMENT):  # the prompt ends inside a character
            self._start_after([])

    def _start_after(self, tokens: list[int]) -> None:
        self._prefix = tokens
        self._prefix_text = self._decode(tokens, self._skip) if tokens else ""

    def push(self, token_ids: Sequence[int]) -> str:
        if not token_ids:
            return ""
        self._tail.extend(token_ids)
        text = self._text()
        if text.endswith(REPLACEMENT):
            new = text[self._emitted : -1]
            self._emitted += len(new)
            return new
        new = text[self._emitted :]
        # A prefix of skipped tokens only would be no context: keep the older one.
        if text:
            self._start_after(self._tail)
            self._tail = []
            self._emitted = 0
        return new

    def finish(self) -> str:
        """What was held back; the detokenizer is done then."""
        new = self._text()[self._emitted :] if self._tail else ""
        self._emitted += len(new)
        return new

    def _text(self) -> str:
        return self._decode(self._prefix + self._tail, self._skip)[len(self._prefix_text) :]


def has_tokenizer(path: Path) -> bool:
    """Whether a directory has a tokenizer's files, or a GGUF file, which has one inside."""
    return not path.is_dir() or any((path / name).is_file() for name in FILES)


def load_tokenizer(path: Path | str) -> Tokenizer:
    """The tokenizer of a Hugging Face directory or a .gguf file."""
    path = Path(path)
    if path.suffix == ".gguf" and path.is_file():
        from spectrue.workers.tokenizer_gguf import tokenizer_from_gguf

        return Tokenizer(*tokenizer_from_gguf(path))
    if not path.is_dir():
        raise ModelLoadError(f"{path} is neither a checkpoint directory nor a .gguf file")
    if not has_tokenizer(path):  # transformers would make an empty one for some model types
        raise ModelLoadError(f"{path}: its tokenizer cannot be loaded: none of {', '.join(FILES)}")
    from transformers import AutoTokenizer

    try:
        hf = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"{path}: its tokenizer cannot be loaded: {error}") from error
    if not hf.is_fast:
        raise ModelLoadError(f"{path}: its tokenizer has no tokenizer.json (fast) form")
    generation = path / "generation_config.json"
    eos = json.loads(generation.read_text()).get("eos_token_id") if generation.is_file() else None
    return Tokenizer(hf, eos if isinstance(eos, list) else [] if eos is None else [eos])
