"""The logits rows of a step: which there are, and each under its request's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spectrue.kernels import dispatch
from spectrue.workers.input_buffers import InputBuffers


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The logits rows of a step: k + 1 for each sampling request, flattened in batch order."""

    slots: list[int]  # [batch]
    num_drafts: list[int]  # [batch] k of each
    drafts: list[list[int]]  # batch x [k]
    slot: Tensor  # [rows] int64
    position: Tensor  # [rows] int64, of the token that the row decides
    starts: list[int]  # [batch] first row of each

    @staticmethod
    def build(buffers: InputBuffers, slots: list[int], drafts: list[list[int]]) -> Rows:
        num_drafts = [len(d) for d in drafts]
        counts = np.array(num_drafts) + 1
        starts = np.cumsum(counts) - counts
        offsets = np.arange(counts.sum()) - np.repeat(starts, counts)
        num_tokens = np.array([buffers.num_tokens[slot] for slot in slots])
        return Rows(
            slots=slots,
            num_drafts=num_drafts,
            drafts=drafts,
            slot=torch.from_numpy(np.repeat(np.array(slots), counts)),
            position=torch.from_numpy(np.repeat(num_tokens, counts) + offsets),
            starts=starts.tolist(),
        )

    def of(self, batch: Sequence[int]) -> Tensor:
        """Row indices of some of the requests, [rows of those] int64."""
        if len(batch) == len(self.slots):
            return torch.arange(len(self.slot))
        spans = [
            torch.arange(self.starts[b], self.starts[b] + self.num_drafts[b] + 1) for b in batch
        ]
        return torch.cat(spans)


def process_rows(logits: Tensor, buffers: InputBuffers, rows: Rows) -> dispatch.RowLaw:
    """The law of every row, each under its request's parameters and true prefix."""
    edits = _Edits()
    for b, first, drafts in zip(rows.slots, rows.starts, rows.drafts, strict=True):
        _penalise(edits, buffers, b, first, drafts, logits.shape[1])
        _mask(edits, buffers, b, first, drafts)
    slot = rows.slot
    return dispatch.process_logits(
        logits,
        temperature=buffers.temperature[slot],
        top_k=buffers.top_k[slot],
        top_p=buffers.top_p[slot],
        min_p=buffers.min_p[slot],
        repetition=buffers.repetition_penalty[slot],
        presence=buffers.presence_penalty[slot],
        frequency=buffers.frequency_penalty[slot],
        penalties=edits.penalties_columns(),
        bias=_columns(edits.bias),
        mask=_columns(edits.mask),
    )


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
    drafts: list[int],
    vocab_size: int,
) -> None:
    """Row j's text is the committed one and the j drafts before it.

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
    for j in range(len(drafts) + 1):
        if j and 0 <= drafts[j - 1] < vocab_size:  # another one is rejected: no row after it counts
            counts[drafts[j - 1]] += 1
            seen[drafts[j - 1]] = True
        tokens = np.flatnonzero(seen)
        edits.penalties.append((first_row + j, tokens, counts[tokens]))


def _mask(
    edits: _Edits, buffers: InputBuffers, slot: int, first_row: int, drafts: list[int]
) -> None:
    request = buffers.request(slot).request
    params = request.params
    num_output = buffers.num_tokens[slot] - len(request.prompt_token_ids)
    for j in range(len(drafts) + 1):
        row = first_row + j
        edits.bias.extend((row, token, value) for token, value in params.logit_bias)
        if num_output + j < params.min_tokens:
            edits.mask.extend((row, token) for token in params.stop_token_ids)
            if not params.ignore_eos:
                edits.mask.extend((row, token) for token in buffers.eos_token_ids)
    if not params.bad_words:
        return
    end = buffers.num_tokens[slot]
    text = [*buffers.token_ids[slot, end - num_output : end].tolist(), *drafts]
    for *head, last in params.bad_words:
        for j in range(len(drafts) + 1):
            end = num_output + j
            if text[max(end - len(head), 0) : end] == head:
                edits.mask.append((first_row + j, last))
