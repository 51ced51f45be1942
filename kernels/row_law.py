"""The law of a token at each row, as the ops hand it to one another."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Tokens in a chunk: sums of a law, and Gumbel noise, have two levels. Wide enough that a
# vocabulary has few chunks, narrow enough that one of them is a single load.
CHUNK = 128


@dataclass(frozen=True, slots=True)
class RowLaw:
    """Token x of a row has the weight exp((logit - max) / temperature) inside the row's support.

    `RowLaw(logits)` alone is a law that has its parameters applied: the row's maximum is 0 and
    what is cut is -inf. That is what the reference makes. A GPU backend leaves the logits as they
    are and describes the support: every cut keeps the largest logits, equal ones by token id, so
    the smallest logit kept (`pivot`) and the last id that has it (`last_tie`) say all.
    """

    logits: Tensor  # [M, V] floating, penalties, bias and mask applied
    temperature: Tensor | None = None  # [M] float32, 0 is greedy; None: applied already
    pivot: Tensor | None = None  # [M] float32, -inf keeps all
    last_tie: Tensor | None = None  # [M] int32
    chunk_peak: Tensor | None = None  # [M, ceil(V / CHUNK)] float32, the largest logit
    chunk_sum: Tensor | None = None  # [M, ceil(V / CHUNK)] float32, weights relative to chunk_peak
    index: Tensor | None = None  # [R] int64, the M-row that each row is; None: R = M

    @property
    def num_rows(self) -> int:
        return len(self.logits if self.index is None else self.index)

    @property
    def vocab_size(self) -> int:
        return self.logits.shape[1]

    def select(
        self,
        index: Tensor,  # [R] int64, distinct and ascending
    ) -> RowLaw:
        """Some of the rows. On a GPU nothing is copied."""
        if len(index) == self.num_rows:
            return self
        if self.temperature is None and self.index is None:
            return RowLaw(self.logits.index_select(0, index))
        return replace(self, index=index if self.index is None else self.index[index])

    def scaled(self) -> Tensor:
        """The processed logits [R, V]: `(logit - max) / temperature` in the support, -inf outside.

        float32, or float64 where the logits are. Rows of temperature 0 keep their logits.
        """
        if self.temperature is None and self.index is None:
            return self.logits
        rows = slice(None) if self.index is None else self.index
        logits = self.logits[rows]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.temperature is None:
            return logits
        temperature = self.temperature[rows].to(logits.dtype)[:, None]
        sampled = temperature > 0
        shift = torch.where(sampled, logits.amax(1, keepdim=True), 0)
        scaled = (logits - shift) / torch.where(sampled, temperature, 1)
        if self.pivot is None or self.last_tie is None:
            return scaled
        pivot, last_tie = self.pivot[rows, None], self.last_tie[rows, None]
        tokens = torch.arange(self.vocab_size, device=logits.device)
        outside = (logits < pivot) | ((logits == pivot) & (tokens > last_tie))
        return scaled.masked_fill_(outside, float("-inf"))
