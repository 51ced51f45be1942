"""Conversations of like length, side by side, in an order that a seed decides."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spectrue.workers.training.corpus import Corpus

ROUND = 32  # lengths are padded to a multiple: few shapes
POOL = 16  # batches whose conversations are sorted together


@dataclass(frozen=True, slots=True)
class Batch:
    """On the host. Unrolled step j at position i predicts token i + j + 2, of which the target's
    law is what it computes at i + j + 1; steps are judged where that token is the model's own."""

    token_ids: Tensor  # [requests, length] int64, padded at the end with 0
    lengths: list[int]
    judged: list[Tensor]  # by unrolled step, [judged] int64: positions, of all rows side by side
    num_answer_tokens: int

    def law_at(self, step: int) -> Tensor:
        """Where the target's laws of those positions are."""
        return self.judged[step] + step + 1


def make_batch(corpus: Corpus, indices: Sequence[int], max_length: int, steps: int) -> Batch:
    texts = [corpus.conversation(i)[:max_length] for i in indices]
    lengths = [len(text) for text in texts]
    token_ids = torch.zeros(len(texts), -(-max(lengths) // ROUND) * ROUND, dtype=torch.int64)
    for row, text in zip(token_ids, texts, strict=True):
        row[: len(text)] = text
    at = torch.arange(token_ids.shape[1])
    answered = at >= corpus.loss_from[list(indices)][:, None]
    answered &= at < torch.tensor(lengths)[:, None]
    judged = []
    for step in range(steps):
        shifted = torch.zeros_like(answered)
        shifted[:, : -(step + 2)] = answered[:, step + 2 :]
        judged.append(shifted.flatten().nonzero().squeeze(1))
    return Batch(token_ids, lengths, judged, int(answered.sum()))


def epoch(
    corpus: Corpus, indices: Sequence[int], *, max_length: int, max_tokens: int, seed: str
) -> list[list[int]]:
    """Every conversation once: batches of at most `max_tokens`, padding included."""
    rng = random.Random(seed)
    order = list(indices)
    rng.shuffle(order)
    lengths = corpus.starts.diff().clamp(max=max_length).tolist()
    batches: list[list[int]] = []
    at = 0
    while at < len(order):
        pool, total = [], 0
        while at < len(order) and total < POOL * max_tokens:
            pool.append(order[at])
            total += lengths[order[at]]
            at += 1
        batches += _cut(sorted(pool, key=lambda i: lengths[i]), lengths, max_tokens)
    rng.shuffle(batches)
    return batches


def _cut(pool: list[int], lengths: list[int], max_tokens: int) -> Iterator[list[int]]:
    batch: list[int] = []
    for i in pool:
        width = -(-lengths[i] // ROUND) * ROUND
        if batch and (len(batch) + 1) * width > max_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch
