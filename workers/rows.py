"""The logits rows of a step: which there are, and what changes single logits of theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spectrue.workers.core import MAX_STOP_LENGTH, Request
from spectrue.workers.input_buffers import InputBuffers
from spectrue.workers.tree_mask import depths_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The logits rows of a step: k + 1 for each sampling request, flattened in batch order."""

    slots: list[int]  # [batch]
    num_drafts: list[int]  # [batch] k of each
    drafts: list[list[int]]  # batch x [k]
    slot: NDArray[np.int64]  # [rows]
    position: NDArray[np.int64]  # [rows], of the token that the row decides
    offset: NDArray[np.int64]  # [rows], of the row in its request
    starts: list[int]  # [batch] first row of each
    parents: list[list[int]] | None = None  # batch x [k], of a tree: each draft's parent's row
    # [rows], of a captured graph: the slot whose length, on the device, is added to `position`.
    base: NDArray[np.int64] | None = None

    @staticmethod
    def build(
        slots: list[int],
        first: list[int],
        drafts: list[list[int]],
        parents: list[list[int]] | None = None,
        bases: Sequence[int] | None = None,
    ) -> Rows:
        """`first`: the position of each request's first row, the number of tokens before it; with
        `bases`, its distance from the length of that slot."""
        num_drafts = [len(d) for d in drafts]
        counts = np.array(num_drafts) + 1
        starts = np.cumsum(counts) - counts
        offsets = depths = np.arange(counts.sum()) - np.repeat(starts, counts)
        if parents is not None:
            depths = np.concatenate([depths_of([-1, *p]) for p in parents])
        return Rows(
            slots=slots,
            num_drafts=num_drafts,
            drafts=drafts,
            slot=np.repeat(np.array(slots), counts),
            position=np.repeat(np.array(first), counts) + depths,
            offset=offsets,
            starts=starts.tolist(),
            parents=parents,
            base=None if bases is None else np.repeat(np.array(bases), counts),
        )

    def path(self, b: int, row: int) -> list[int]:
        """The rows from request b's first draft down to `row`, its first row left out."""
        if self.parents is None:
            return list(range(1, row + 1))
        found: list[int] = []
        while row:
            found.append(row)
            row = self.parents[b][row - 1]
        return found[::-1]

    def deepest(self, b: int) -> int:
        """The row of request b that most drafts lead to, the first of them."""
        if self.parents is None:
            return len(self.drafts[b])
        depths = depths_of([-1, *self.parents[b]])
        return depths.index(max(depths))

    def prefixes(self, b: int) -> list[list[int]]:
        """Of each row of request b the drafts that lead to it."""
        drafts = self.drafts[b]
        if self.parents is None:
            return [drafts[:j] for j in range(len(drafts) + 1)]
        found: list[list[int]] = [[]]
        for token, parent in zip(drafts, self.parents[b], strict=True):
            found.append([*found[parent], token])
        return found

    def of(self, batch: Sequence[int]) -> NDArray[np.int64]:
        """Row indices of some of the requests."""
        if len(batch) == len(self.slots):
            return np.arange(len(self.slot))
        return np.concatenate(
            [np.arange(self.starts[b], self.starts[b] + self.num_drafts[b] + 1) for b in batch]
        )


def needs_edits(request: Request) -> bool:
    """Whether single logits of its rows change before temperature and cuts."""
    params = request.params
    return bool(
        params.repetition_penalty != 1
        or params.presence_penalty
        or params.frequency_penalty
        or params.logit_bias
        or params.min_tokens
        or params.bad_words
    )


def edits_of(
    buffers: InputBuffers, rows: Rows, vocab_size: int, device: torch.device
) -> dict[str, Any]:
    """What `process_logits` takes of penalties, bias and mask, each row under its true prefix."""
    if not any(needs_edits(buffers.request(slot).request) for slot in rows.slots):
        return {}
    edits = _Edits()
    for b, (slot, first) in enumerate(zip(rows.slots, rows.starts, strict=True)):
        if needs_edits(buffers.request(slot).request):
            prefixes = rows.prefixes(b)
            _penalise(edits, buffers, slot, first, prefixes, vocab_size)
            _mask(edits, buffers, slot, first, prefixes)
    found: dict[str, Any] = {
        "penalties": edits.penalties_columns(),
        "bias": _columns(edits.bias),
        "mask": _columns(edits.mask),
    }
    if found["penalties"] is not None:
        slots = torch.from_numpy(rows.slot)
        for name in ("repetition", "presence", "frequency"):
            found[name] = getattr(buffers, f"{name}_penalty")[slots]
    return {name: _to(value, device) for name, value in found.items()}


def _to(value: Tensor | tuple[Tensor, ...] | None, device: torch.device) -> Any:
    if isinstance(value, tuple):
        return tuple(tensor.to(device) for tensor in value)
    return value if value is None else value.to(device)


@dataclass(slots=True)
class _Edits:
    """Single logits to change before temperature and cuts, as (row, token, ...) entries."""

    penalties: list[tuple[int, NDArray[np.int64], NDArray[np.int64]]] = field(default_factory=list)
    bias: list[tuple[int, int, float]] = field(default_factory=list)
    mask: list[tuple[int, int]] = field(default_factory=list)

    def penalties_columns(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """(row, token, count in the output), one entry for each distinct token of the text."""
        if not self.penalties:
            return None
        rows, tokens, counts = zip(*self.penalties, strict=True)
        row = np.repeat(np.array(rows), [len(t) for t in tokens])
        columns = row, np.concatenate(tokens), np.concatenate(counts)
        return tuple(torch.from_numpy(c) for c in columns)  # type: ignore[return-value]


def _columns(entries: Sequence[tuple[float, ...]]) -> Any:
    return tuple(torch.tensor(column) for column in zip(*entries, strict=True)) or None


def _penalise(
    edits: _Edits,
    buffers: InputBuffers,
    slot: int,
    first_row: int,
    prefixes: list[list[int]],  # of each row
    vocab_size: int,
) -> None:
    """A row's text is the committed one and the drafts that lead to it.

    So penalties count drafts that the walk may accept, and a rejected one leaves no trace
    (sglang#22049).
    """
    request = buffers.request(slot).request
    params = request.params
    if params.repetition_penalty == 1 and params.presence_penalty == params.frequency_penalty == 0:
        return
    text = buffers.token_ids[slot, : buffers.num_tokens[slot]].numpy()
    num_prompt = len(request.prompt_token_ids)
    counts = np.bincount(text[num_prompt:], minlength=vocab_size)
    seen = counts > 0
    if params.repetition_penalty != 1:
        seen[text[:num_prompt]] = True
    for row, prefix in enumerate(prefixes, first_row):
        drafts = [token for token in prefix if 0 <= token < vocab_size]  # others end the walk
        unseen = [token for token in drafts if not seen[token]]
        seen[unseen] = True
        np.add.at(counts, drafts, 1)
        tokens = np.flatnonzero(seen)
        edits.penalties.append((row, tokens, counts[tokens]))
        np.subtract.at(counts, drafts, 1)
        seen[unseen] = False


def _mask(
    edits: _Edits, buffers: InputBuffers, slot: int, first_row: int, prefixes: list[list[int]]
) -> None:
    request = buffers.request(slot).request
    params = request.params
    num_output = buffers.num_tokens[slot] - len(request.prompt_token_ids)
    for row, prefix in enumerate(prefixes, first_row):
        edits.bias.extend((row, token, value) for token, value in params.logit_bias)
        if num_output + len(prefix) < params.min_tokens:
            edits.mask.extend((row, token) for token in params.stop_token_ids)
            if not params.ignore_eos:
                edits.mask.extend((row, token) for token in buffers.eos_token_ids)
    if not params.bad_words:
        return
    end = buffers.num_tokens[slot]
    output = buffers.token_ids[slot, end - num_output : end].tolist()
    for row, prefix in enumerate(prefixes, first_row):
        text = [*output[-MAX_STOP_LENGTH:], *prefix]
        for *head, last in params.bad_words:
            if text[max(len(text) - len(head), 0) :] == head:
                edits.mask.append((row, last))
