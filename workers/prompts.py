"""Files of prompts, one JSON object a line: MT-Bench, Alpaca, ShareGPT-like conversations."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spectrue.workers.errors import ConfigError, InvalidRequestError
from spectrue.workers.tokenizer import Tokenizer

RULE = (
    "each line must be a JSON object with messages (a list of objects with role and content), "
    "turns (a list of strings, of which the first is asked) or prompt or text (a string)"
)


@dataclass(frozen=True, slots=True)
class Prompt:
    messages: list[dict[str, Any]]
    category: str = ""
    where: str = "prompt"  # file and line

    @staticmethod
    def of(text: str) -> Prompt:
        return Prompt([{"role": "user", "content": text}])

    def token_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Up to where the answer begins. Raises ConfigError for what the template refuses."""
        try:
            return tuple(tokenizer.apply_chat_template(self.messages))
        except InvalidRequestError as e:
            raise ConfigError(f"{self.where}: {e}") from None


def read_prompts(path: Path) -> list[Prompt]:
    """Raises ConfigError that names the file and the line for one that has no prompt."""
    try:
        # Not splitlines: JSON may hold the other separators as they are.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"cannot read the prompts file {path}: {e}") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        messages = _messages(row) if isinstance(row, dict) else None
        if messages is None:
            raise ConfigError(f"{where}: {RULE}")
        category = row.get("category")
        prompts.append(Prompt(messages, category if isinstance(category, str) else "", where))
    if not prompts:
        raise ConfigError(f"the prompts file {path} is empty; {RULE}")
    return prompts


def _messages(row: dict[str, Any]) -> list[dict[str, Any]] | None:
    messages, turns = row.get("messages"), row.get("turns")
    if messages is not None:
        if not isinstance(messages, list) or not messages:
            return None
        fine = all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages)
        return messages if fine else None
    first = turns[0] if isinstance(turns, list) and turns else None
    text = first or row.get("prompt") or row.get("text")
    return Prompt.of(text).messages if isinstance(text, str) else None
