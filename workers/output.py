"""One request's committed tokens on their way out: stops, text, and what the client gets."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from spectrue.workers.core import (
    FinishReason,
    RequestOutput,
    SlotOutput,
    SpecDecodeStats,
    TokenLogprobs,
)
from spectrue.workers.policy import verify_path
from spectrue.workers.scheduler import RequestState
from spectrue.workers.tokenizer import IncrementalDetokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stop:
    """Where and why a block of committed tokens ends the request."""

    num_tokens: int  # of the block, the ending one included
    reason: FinishReason
    stop_reason: int | str | None = None


class OutputProcessor:
    """Finds the first stop in what a step committed.

    At one token the order is stop string, stop token or EOS, then length (sglang#31599): a cap
    never hides a stop. A stop token whose text is not shown takes no part in a stop string.
    Nothing after the stop reaches the client, its KV or its usage.
    """

    def __init__(
        self,
        state: RequestState,
        detokenizer: IncrementalDetokenizer | None,
        eos_token_ids: Sequence[int],
    ) -> None:
        self.state = state
        self.params = state.request.params
        self.detokenizer = detokenizer
        self.eos_token_ids = frozenset(eos_token_ids if not self.params.ignore_eos else ())
        self.stop_token_ids = frozenset(self.params.stop_token_ids)
        self.held = ""  # text that may be the beginning of a stop string
        self.stats = SpecDecodeStats(
            verify_path=verify_path(self.params.greedy),
            verify_method="greedy" if self.params.greedy else "match",
        )

    def process(self, output: SlotOutput) -> tuple[list[int], RequestOutput]:
        """Returns the tokens that stand, and the output for the client (perhaps the final one)."""
        self.stats = replace(
            self.stats,
            num_verify_steps=self.stats.num_verify_steps + 1,
            num_drafts=self.stats.num_drafts + (output.num_draft_tokens > 0),
            num_draft_tokens=self.stats.num_draft_tokens + output.num_draft_tokens,
            num_accepted_tokens=self.stats.num_accepted_tokens + output.num_accepted_tokens,
            verify_method=output.verify_method,
        )
        text, stop = self._advance(output.token_ids)
        if stop is None and output.error is not None:
            stop = Stop(len(output.token_ids), "error")
        kept = list(output.token_ids[: stop.num_tokens if stop else None])
        if stop is not None and stop.reason == "error":
            text += self.flush()
        return kept, self._output(
            token_ids=tuple(kept),
            text=text,
            logprobs=output.logprobs[: len(kept)],
            stop=stop,
            error=output.error if stop is not None and stop.reason == "error" else None,
            num_output_tokens=self.state.num_output_tokens + len(kept),
        )

    def end(self, reason: FinishReason, error: str | None = None) -> RequestOutput:
        """The final output of a request that no step ended: aborted, or by a fault. Never fails."""
        try:
            text = self.flush()
        except Exception:  # whatever the tokenizer has, the request ends now
            logger.exception("request %s: its last text is lost", self.state.request.request_id)
            text = ""
        return self._output(
            text=text,
            stop=Stop(0, reason),
            error=error,
            num_output_tokens=self.state.num_output_tokens,
        )

    def flush(self) -> str:
        """What was held back, when no stop string can come any more."""
        held, self.held = self.held, ""
        return held + (self.detokenizer.finish() if self.detokenizer is not None else "")

    def _output(
        self,
        *,
        stop: Stop | None,
        num_output_tokens: int,
        token_ids: tuple[int, ...] = (),
        text: str = "",
        logprobs: tuple[TokenLogprobs, ...] = (),
        error: str | None = None,
    ) -> RequestOutput:
        return RequestOutput(
            request_id=self.state.request.request_id,
            token_ids=token_ids,
            text=text,
            logprobs=logprobs,
            finish_reason=stop.reason if stop is not None else None,
            stop_reason=stop.stop_reason if stop is not None else None,
            error=error,
            num_prompt_tokens=self.state.num_prompt_tokens,
            num_output_tokens=num_output_tokens,
            num_cached_tokens=self.state.num_cached_tokens,
            spec_decode=self.stats,
        )

    def _advance(self, token_ids: Sequence[int]) -> tuple[str, Stop | None]:
        """The text of the tokens up to the first stop, and that stop."""
        stop = self._token_stop(token_ids)
        visible = token_ids if stop is None else token_ids[: stop.num_tokens]
        if stop and stop.reason == "stop" and not self.params.include_stop_str_in_output:
            visible = visible[:-1]
        if not self.params.stop:
            text = self._push(visible)
        else:
            text = ""
            for i, token_id in enumerate(visible, start=1):
                self.held += self._push([token_id])
                released, found = self._release(self.state.num_output_tokens + i)
                text += released
                if found is not None:
                    return text, Stop(i, "stop", found)
        return (text + self.flush() if stop else text), stop

    def _token_stop(self, token_ids: Sequence[int]) -> Stop | None:
        """The first stop that token ids alone decide."""
        room = self.state.max_len - len(self.state.token_ids)
        for i, token_id in enumerate(token_ids[:room], start=1):
            if token_id in self.eos_token_ids:
                return Stop(i, "stop")
            if token_id in self.stop_token_ids:
                return Stop(i, "stop", token_id)
        return Stop(room, "length") if len(token_ids) >= room else None

    def _push(self, token_ids: Sequence[int]) -> str:
        if self.detokenizer is None or not token_ids:
            return ""
        return self.detokenizer.push(token_ids)

    def _release(self, num_output_tokens: int) -> tuple[str, str | None]:
        """Text that may go out, and the stop string that ends it, if one does.

        What could be the beginning of a stop string is held back. Text of the tokens before the
        `min_tokens`-th goes out unsearched.
        """
        held, self.held = self.held, ""
        if num_output_tokens < self.params.min_tokens:
            return held, None
        hits = [(held.find(s), -len(s), s) for s in self.params.stop if s in held]
        if hits:
            at, _, stop = min(hits)  # the earliest, of those the longest
            keep = at + len(stop) if self.params.include_stop_str_in_output else at
            return held[:keep], stop
        longest = max(len(s) for s in self.params.stop) - 1
        for size in range(min(longest, len(held)), 0, -1):
            if any(s.startswith(held[-size:]) for s in self.params.stop):
                self.held = held[-size:]
                return held[:-size], None
        return held, None
