"""The target writes what its head is trained on: it asks itself, and answers.

A chat model that is given a conversation's text up to where the user's turn begins writes that turn
(Magpie, Xu et al., arXiv 2406.08464). Its answers are the text that a head will draft. So no data
set is needed, and a fine-tune gets what it was tuned to say.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from spectrue.workers.core import Request, RequestOutput, SamplingParams
from spectrue.workers.engine import Engine
from spectrue.workers.errors import ConfigError
from spectrue.workers.tokenizer import Tokenizer
from spectrue.workers.training.corpus import Conversation, write_shard
from spectrue.workers.training.openings import OPENINGS

MIN_ROOM = 32  # tokens that an answer must have, at least
MAX_LOST_TURNS = 1000  # turns of users before the first that is of use
MARK = "\u241eSPECTRUE\u241e"  # stands for the user's words; in no template


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthorConfig:
    """How conversations are made. Each gets its own choice of these."""

    seed: int = 0
    num_tokens: int = 1_000_000  # of answers
    answer_tokens: int = 256  # of one, at most
    turn_tokens: int = 160  # of a user's turn; one that is longer is dropped
    opening_share: float = 0.6  # user turns that begin with one of OPENINGS
    second_turn_share: float = 0.15
    turn_temperatures: tuple[float, ...] = (0.7, 0.8, 0.9, 1.0)
    answer_temperatures: tuple[float, ...] = (0.0, 0.0, 0.6, 1.0, 1.0)  # greedy text among it
    shard_conversations: int = 4096

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The tokens around the turns of a chat model."""

    begin: list[int]  # up to where the user's words begin
    between: list[int]  # from their end to where the answer begins
    again: list[int]  # from the end of an answer to where the user's words begin


def chat_format(tokenizer: Tokenizer) -> ChatFormat:
    """Of any template. Raises ConfigError for one that does not show a user's words as they are."""
    ask, answer = {"role": "user", "content": MARK}, {"role": "assistant", "content": MARK}

    def render(*messages: dict[str, str], more: bool) -> list[str]:
        text: str = tokenizer.hf.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=more
        )
        return text.split(MARK)

    if not tokenizer.has_chat_template:
        raise ConfigError("the model has no chat template to write user turns with: give --prompts")
    first, second = render(ask, more=True), render(ask, answer, ask, more=True)
    if len(first) != 2 or len(second) != 4:
        raise ConfigError("the chat template changes what users say: give --prompts")
    return ChatFormat(
        tokenizer.encode(first[0]), tokenizer.encode(first[1]), tokenizer.encode(second[2])
    )


@dataclass(slots=True)
class _Dialogue:
    """One that is being written."""

    token_ids: list[int]
    asking: bool  # the user's turn is being written
    loss_from: int
    opening: int  # tokens of the user's turn that were given
    turns_left: int
    choice: random.Random


class Author:
    """Keeps an engine busy with dialogues. The engine needs no tokenizer: nothing is made text.

    Turns begin in waves, when a quarter of the engine's slots are free: a step in which a prompt
    is read runs without a graph, and one by one nearly every step would be such a step.
    """

    def __init__(
        self,
        engine: Engine,
        config: AuthorConfig,
        tokenizer: Tokenizer | None,
        prompts: Sequence[Sequence[int]] | None = None,  # whole, up to where the answer begins
    ) -> None:
        self.engine, self.config = engine, config
        self.limit = engine.info.max_model_len
        self.prompts: list[Sequence[int]] | None = None
        self.format = None
        if prompts is not None:
            longest = self.limit - MIN_ROOM
            self.prompts = [prompt for prompt in prompts if len(prompt) <= longest]
            if not self.prompts:
                raise ConfigError(
                    f"prompts: none leaves room for an answer in {self.limit} tokens of context"
                )
        else:
            assert tokenizer is not None
            self.format = chat_format(tokenizer)
            self.openings = [tokenizer.encode(text) for text in OPENINGS]
            if self.limit < config.turn_tokens + 2 * MIN_ROOM:
                raise ConfigError(f"a context of {self.limit} tokens has no room for a dialogue")
        self._rng = random.Random(f"author-{config.seed}")
        self._ids = count()
        self._open: dict[str, _Dialogue] = {}
        self._asked: list[tuple[_Dialogue, SamplingParams]] = []  # wait for the next wave
        self._seen: set[int] = set()  # hashes of turns of users that were answered
        self.num_tokens = 0  # of answers that are complete
        self._num_turns = 0  # of users, written

    def write(self) -> Iterator[Conversation]:
        """Dialogues as they are completed, until there are enough tokens."""
        slots = self.engine.config.max_num_seqs
        while self.num_tokens < self.config.num_tokens:
            if len(self._open) <= slots * 3 // 4:
                while len(self._open) + len(self._asked) < slots:
                    self._begin()
                self._enqueue(slots - len(self._open))
            for output in self.engine.step():
                dialogue = self._open[output.request_id]
                dialogue.token_ids += output.token_ids
                if output.finish_reason is None:
                    continue
                del self._open[output.request_id]
                done = self._turn(dialogue, output)
                if done is not None:
                    self.num_tokens += len(done.token_ids) - done.loss_from
                    yield done
        for request_id in list(self._open):
            self.engine.abort(request_id)
        self.engine.drain()

    def _begin(self) -> None:
        choice = random.Random(self._rng.getrandbits(64))
        if self.prompts is not None:
            prompt = choice.choice(self.prompts)
            self._ask(_Dialogue(list(prompt), False, len(prompt), 0, 0, choice))
            return
        assert self.format is not None
        turns = int(choice.random() < self.config.second_turn_share)
        dialogue = _Dialogue(list(self.format.begin), True, 0, 0, turns, choice)
        self._open_turn(dialogue)

    def _open_turn(self, dialogue: _Dialogue) -> None:
        dialogue.asking, dialogue.opening = True, 0
        first = dialogue.loss_from == 0  # later turns refer to what was said
        if first and dialogue.choice.random() < self.config.opening_share:
            opening = dialogue.choice.choice(self.openings)
            dialogue.token_ids += opening
            dialogue.opening = len(opening)
        self._ask(dialogue)

    def _ask(self, dialogue: _Dialogue) -> None:
        """Let the model go on, from the next wave on."""
        config, choice = self.config, dialogue.choice
        most = config.turn_tokens if dialogue.asking else config.answer_tokens
        room = self.limit - len(dialogue.token_ids) - 1
        if room < 2:
            return
        if dialogue.asking:
            params = SamplingParams(
                temperature=choice.choice(config.turn_temperatures),
                top_p=0.95,
                max_tokens=min(most, room),
                seed=choice.getrandbits(62),
            )
        else:
            params = SamplingParams(
                temperature=choice.choice(config.answer_temperatures),
                max_tokens=min(most, room),
                seed=choice.getrandbits(62),
            )
        self._asked.append((dialogue, params))

    def _enqueue(self, number: int) -> None:
        for dialogue, params in self._asked[:number]:
            prompt, request_id = tuple(dialogue.token_ids), str(next(self._ids))
            self._open[request_id] = dialogue
            self.engine.enqueue(
                Request(request_id=request_id, prompt_token_ids=prompt, params=params)
            )
        del self._asked[:number]

    def _turn(self, dialogue: _Dialogue, output: RequestOutput) -> Conversation | None:
        """A turn has ended: go on, or hand out what is complete."""
        ended = output.finish_reason == "stop"
        if not dialogue.asking:
            if ended and dialogue.turns_left and self.format is not None:
                dialogue.turns_left -= 1
                dialogue.token_ids = dialogue.token_ids[:-1] + self.format.again
                self._open_turn(dialogue)
                return None
            if output.num_output_tokens < 2 or output.finish_reason not in ("stop", "length"):
                return None
            return Conversation(tuple(dialogue.token_ids), dialogue.loss_from)
        assert self.format is not None
        self._num_turns += 1
        if self._num_turns > MAX_LOST_TURNS and not self._seen:
            raise ConfigError(
                f"of {MAX_LOST_TURNS} turns that the model wrote for the user, none was ended "
                f"within {self.config.turn_tokens} tokens: give --prompts"
            )
        asked = tuple(dialogue.token_ids[-output.num_output_tokens - dialogue.opening : -1])
        # Not to its end, empty, or asked before.
        if not ended or len(asked) < 3 or hash(asked) in self._seen:
            return None
        self._seen.add(hash(asked))
        dialogue.token_ids = dialogue.token_ids[:-1] + self.format.between
        dialogue.asking = False
        dialogue.loss_from = dialogue.loss_from or len(dialogue.token_ids)
        self._ask(dialogue)
        return None


def write_corpus(
    author: Author,
    folder: Path,
    *,
    name: str = "",  # of this author's shards, among others'
    go_on: Callable[[int], bool] = lambda num_tokens: True,  # after each dialogue
) -> int:
    """Write shards until there is enough or `go_on` says no; answer tokens written.

    Dialogues that are complete are never lost, whatever ends this.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made, number = author.config.as_dict(), count()
    conversations: list[Conversation] = []

    def flush() -> None:
        if conversations:
            write_shard(folder, conversations, made, f"{name}{next(number):05}")
            conversations.clear()

    try:
        for conversation in author.write():
            conversations.append(conversation)
            if len(conversations) >= author.config.shard_conversations:
                flush()
            if not go_on(author.num_tokens):
                break
    finally:
        flush()
    return author.num_tokens
