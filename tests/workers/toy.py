"""Toy language models and the exact law of the speculative step over them.

The toys implement what the step needs of a model runner, KV cache included: a forward writes the
tokens it is fed into slots, and a row's logits are a fixed random function of the prefix that its
block table leads to. A wrong slot, position or rollback therefore shows as a wrong law.

`step_law` runs the real step once for every combination of what its uniforms can decide, and adds
up the probabilities: no sampling error, so a bias of 1e-4 is seen.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from spectrue.kernels import dispatch
from spectrue.workers.config import SpeculativeConfig
from spectrue.workers.core import (
    NewRequest,
    Request,
    SamplingParams,
    ScheduledRequest,
    SchedulerOutput,
)
from spectrue.workers.drafters.base import Drafter, NoDrafter
from spectrue.workers.drafters.chain import DraftCuts
from spectrue.workers.drafters.draft_model import DraftModelDrafter
from spectrue.workers.drafters.ngram import NgramDrafter, lookup
from spectrue.workers.forward_batch import ForwardBatch, ForwardOutput
from spectrue.workers.input_buffers import InputBuffers
from spectrue.workers.parallel import TPGroup
from spectrue.workers.policy import resolve_speculative
from spectrue.workers.speculative import speculative_step

Law = NDArray[np.float64]  # [vocab]
Tokens = tuple[int, ...]

BLOCK_SIZE = 2
EOS = 0
EDGE = 1e-4  # of a uniform, from the end of an interval: above float32's error of a CDF

torch.set_num_threads(1)  # on tensors this small a second thread only waits


class ToyRunner:
    """A model whose logits are a table over prefixes."""

    def __init__(self, vocab_size: int, seed: int, num_slots: int = 8192, scale: float = 1.5):
        self.vocab_size = vocab_size
        self.device = torch.device("cpu")
        self.seed = seed
        self.scale = scale
        self.kv = torch.full((num_slots,), -1, dtype=torch.int64)
        self.table: dict[Tokens, Law] = {}

    def row(self, prefix: Tokens) -> Law:
        if prefix not in self.table:
            rng = np.random.default_rng([self.seed, *prefix])
            # Rounded, so that ties are common.
            self.table[prefix] = np.round(self.scale * rng.standard_normal(self.vocab_size), 1)
        return self.table[prefix]

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        self.kv[batch.slot_mapping] = batch.input_ids
        rows = [self.row(seen) for seen in seen_by_rows(self.kv, batch)]
        return ForwardOutput(hidden_states=torch.from_numpy(np.array(rows)).float())

    def move_kv(self, source: Tensor, to: Tensor) -> None:
        self.kv[to] = self.kv[source]

    def logits(self, hidden_states: Tensor) -> Tensor:
        return hidden_states


def seen_by_rows(slots: Tensor, batch: ForwardBatch) -> Iterator[Tokens]:
    """What the slots hold that each row attends to, its own last."""
    kv, row = slots.numpy(), 0
    lens = zip(batch.query_lens, batch.seq_lens, strict=True)
    for i, (query_len, seq_len) in enumerate(lens):
        blocks = batch.block_tables[i].numpy()
        held = kv[(blocks[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).reshape(-1)[:seq_len]]
        context = held[: seq_len - query_len].tolist()
        for j in range(query_len):
            if batch.tree_mask is None:
                own = list(range(j + 1))
            else:
                words = batch.tree_mask[row].tolist()
                own = [n for n in range(query_len) if words[n // 32] >> (n % 32) & 1]
            seen = (*context, *(int(held[len(context) + n]) for n in own))
            assert int(batch.positions[row]) == len(seen) - 1
            yield seen
            row += 1


def target_law(logits: Law, prefix: Tokens, num_prompt: int, params: SamplingParams) -> Law:
    """The specification, one row at a time and as plainly as possible."""
    x = logits.copy()
    output = Counter(prefix[num_prompt:])
    for token in set(prefix):
        x[token] = (
            x[token] / params.repetition_penalty
            if x[token] > 0
            else x[token] * params.repetition_penalty
        )
    for token, count in output.items():
        x[token] -= params.presence_penalty + count * params.frequency_penalty
    for token, value in params.logit_bias:
        x[token] += value
    for *head, last in params.bad_words:
        text = list(prefix[num_prompt:])
        if text[len(text) - len(head) :] == head and len(text) >= len(head):
            x[last] = -np.inf
    if len(prefix) - num_prompt < params.min_tokens:
        x[[EOS, *params.stop_token_ids]] = -np.inf
    if params.temperature == 0:
        law = np.zeros_like(x)
        law[int(np.argmax(x))] = 1
        return law
    law = np.exp((x - x.max()) / params.temperature)
    order = np.argsort(-law, kind="stable")
    if params.top_k > 0:
        law[order[params.top_k :]] = 0
    law /= law.sum()
    if params.top_p < 1:
        mass = np.cumsum(law[order])
        keep = int(np.searchsorted(mass, params.top_p - 1e-9)) + 1
        law[order[keep:]] = 0
    law[law < params.min_p * law.max() * (1 - 1e-9)] = 0
    return np.asarray(law / law.sum())


def draft_law(logits: Law, params: SamplingParams, cuts: DraftCuts | None = None) -> Law:
    """A drafter applies temperature and cuts, its own too, no penalties and no masks."""
    top_k, top_p = params.top_k, params.top_p
    if cuts is not None:
        top_k = min((k for k in (top_k, cuts.top_k) if k > 0), default=0)
        top_p = min(top_p, cuts.top_p)
    return target_law(
        logits,
        (),
        0,
        SamplingParams(
            temperature=params.temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=params.min_p,
            max_tokens=1,
        ),
    )


def intervals(law: Law) -> list[tuple[int, float, float]]:
    """(token, a uniform of its interval of the CDF, probability), tokens in order of their ids.

    The uniform lies next to one end or the other: from the middle a law that is somewhat wrong
    still gives the same token.
    """
    ends = np.cumsum(law) / law.sum()
    starts = np.concatenate([[0], ends[:-1]])
    found = []
    for t in np.flatnonzero(law):
        width = float(ends[t] - starts[t])
        edge = min(EDGE, width / 2)
        low = (t + int(1e6 * width)) % 2  # either, as good as at random
        found.append((int(t), float(starts[t] + edge if low else ends[t] - edge), width))
    return found


@dataclass
class Setup:
    """One configuration of the step under enumeration."""

    config: SpeculativeConfig
    params: SamplingParams
    prompt: Tokens
    vocab_size: int = 4
    k: int = 2
    wrap: Callable[[Drafter], Drafter] = lambda drafter: drafter

    def __post_init__(self) -> None:
        self.target = ToyRunner(self.vocab_size, seed=1)
        self.draft: Any = ToyRunner(self.vocab_size, seed=2)
        self.resolved = resolve_speculative(self.config)

    @property
    def plan(self) -> dict[str, Any]:
        """What a decoding request is scheduled with."""
        return {"num_draft_tokens": self.k}

    @property
    def room(self) -> int:
        """KV slots that its drafts take."""
        return self.k

    def target_law(self, prefix: Tokens) -> Law:
        return target_law(self.target.row(prefix), prefix, len(self.prompt), self.params)

    def draft_law(self, prefix: Tokens, drafts: Tokens) -> Law:
        """Of the token after `drafts`, which follow the committed `prefix`."""
        return draft_law(self.draft.row(prefix + drafts), self.params)

    def drafter(self, rows: int) -> Drafter:
        group = TPGroup()
        if self.config.drafter == "none":
            return NoDrafter()
        if self.config.drafter == "ngram":
            return NgramDrafter(self.config.ngram_min, self.config.ngram_max, group)
        return self.wrap(
            DraftModelDrafter(
                self.draft, group, max_num_seqs=rows, k=self.k, max_num_tokens=64 * rows
            )
        )

    # -- every way in which the uniforms of one step can fall -------------------------------

    def drafts(
        self, prefix: Tokens
    ) -> Iterator[tuple[Tokens, dict[tuple[int, int], float], float]]:
        """(drafts, uniforms by (position, stream), probability)."""
        if self.config.drafter == "none":
            yield (), {}, 1.0
        elif self.config.drafter == "ngram":
            found = lookup(np.array(prefix), self.k, self.config.ngram_min, self.config.ngram_max)
            yield tuple(found), {}, 1.0
        elif self.resolved.draft_sampling == "greedy" or self.params.greedy:
            drafts: Tokens = ()
            for _ in range(self.k):
                law = self.draft_law(prefix, drafts)
                drafts += (int(np.argmax(law)),)
            yield drafts, {}, 1.0
        else:
            yield from self._sampled_drafts(prefix, (), {}, 1.0)

    def _sampled_drafts(
        self, prefix: Tokens, drafts: Tokens, script: dict[tuple[int, int], float], weight: float
    ) -> Iterator[tuple[Tokens, dict[tuple[int, int], float], float]]:
        if len(drafts) == self.k:
            yield drafts, script, weight
            return
        position = len(prefix) + len(drafts)
        for token, u, p in intervals(self.draft_law(prefix, drafts)):
            noise = script | {(position, dispatch.STREAM_DRAFT): u}
            yield from self._sampled_drafts(prefix, (*drafts, token), noise, weight * p)

    def scenarios(self, prefix: Tokens) -> Iterator[tuple[dict[tuple[int, int], float], float]]:
        rejection = self.resolved.verify_method == "rejection" and not self.params.greedy
        verify = self._rejections if rejection else self._matches
        for drafts, script, weight in self.drafts(prefix):
            for more, p in verify(prefix, drafts, 0):
                yield script | more, weight * p

    def _matches(
        self, prefix: Tokens, drafts: Tokens, row: int
    ) -> Iterator[tuple[dict[tuple[int, int], float], float]]:
        for token, u, p in intervals(self.target_law(prefix + drafts[:row])):
            here = {(len(prefix) + row, dispatch.STREAM_DRAW): u}
            if row < len(drafts) and token == drafts[row]:
                for more, q in self._matches(prefix, drafts, row + 1):
                    yield here | more, p * q
            else:
                yield here, p

    def _rejections(
        self, prefix: Tokens, drafts: Tokens, row: int
    ) -> Iterator[tuple[dict[tuple[int, int], float], float]]:
        position = len(prefix) + row
        target = self.target_law(prefix + drafts[:row])
        if row == len(drafts):
            for _, u, p in intervals(target):
                yield {(position, dispatch.STREAM_DRAW): u}, p
            return
        draft = self.draft_law(prefix, drafts[:row])
        accept = min(1.0, target[drafts[row]] / draft[drafts[row]])
        if accept > 1e-12:
            coin = {(position, dispatch.STREAM_COIN): accept - min(EDGE, accept / 2)}
            for more, p in self._rejections(prefix, drafts, row + 1):
                yield coin | more, accept * p
        if accept < 1 - 1e-12:
            coin = {(position, dispatch.STREAM_COIN): accept + min(EDGE, (1 - accept) / 2)}
            residual = np.maximum(target - draft, 0)
            for _, u, p in intervals(residual):
                yield coin | {(position, dispatch.STREAM_DRAW): u}, (1 - accept) * p


def run_step(
    setup: Setup,
    prefix: Tokens,
    scripts: list[dict[tuple[int, int], float]],
    scripted: bool = True,
) -> list[Tokens]:
    """What one real step commits after `prefix`, for each script of uniforms.

    Not `scripted`: with the real noise, one seed a row.
    """
    rows, n = len(scripts), len(prefix)
    buffers = InputBuffers(
        max_num_seqs=rows,
        max_model_len=n + setup.room + 2,
        block_size=BLOCK_SIZE,
        resolved=setup.resolved,
        eos_token_ids=(EOS,),
    )
    drafter = setup.drafter(rows)
    per_row = -(-(n + setup.room) // BLOCK_SIZE)
    new = tuple(
        NewRequest(
            slot=i,
            request=Request(request_id=str(i), prompt_token_ids=setup.prompt, params=setup.params),
            seed=i,
            output_token_ids=prefix[len(setup.prompt) :],
        )
        for i in range(rows)
    )
    prefill = tuple(
        ScheduledRequest(
            slot=i,
            num_computed_tokens=0,
            num_scheduled_tokens=n - 1,
            num_draft_tokens=0,
            samples=False,
            new_block_ids=tuple(range(i * per_row, (i + 1) * per_row)),
        )
        for i in range(rows)
    )
    decode = tuple(
        ScheduledRequest(
            slot=i,
            num_computed_tokens=n - 1,
            num_scheduled_tokens=1,
            samples=True,
            **setup.plan,
        )
        for i in range(rows)
    )

    def script(seed: Tensor, choice: Tensor, position: Tensor, stream: int) -> Tensor:
        values = [
            scripts[s].get((p, stream), 0.5)
            for s, p in zip(seed.tolist(), position.tolist(), strict=True)
        ]
        return torch.tensor(values)

    target: Any = setup.target
    for runner in (setup.target, setup.draft):
        runner.kv.fill_(-1)
        if len(runner.kv) < rows * per_row * BLOCK_SIZE:
            runner.kv = torch.full((rows * per_row * BLOCK_SIZE,), -1, dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch:
        if scripted:
            patch.setattr(dispatch, "uniform", script)
        plan = SchedulerOutput(scheduled=prefill, new_requests=new)
        speculative_step(plan, buffers, target, drafter, TPGroup())
        step = speculative_step(
            SchedulerOutput(scheduled=decode), buffers, target, drafter, TPGroup()
        )
    assert all(output.error is None for output in step.outputs)
    return [output.token_ids for output in step.outputs]


def output_law(setup: Setup, length: int = 3) -> dict[Tokens, float]:
    """The exact joint law of the first `length` tokens, step after step."""
    law: Counter[Tokens] = Counter()
    open_: Counter[Tokens] = Counter({(): 1.0})
    while open_:
        (output, weight) = open_.popitem()
        scripts, weights = zip(*setup.scenarios(setup.prompt + output), strict=True)
        np.testing.assert_allclose(sum(weights), 1, atol=1e-9)
        for tokens, p in zip(
            run_step(setup, setup.prompt + output, list(scripts)), weights, strict=True
        ):
            reached = (output + tokens)[:length]
            (law if len(reached) == length else open_)[reached] += weight * p
    return dict(law)


def joint_law(setup: Setup, length: int = 3) -> dict[Tokens, float]:
    """The target model's own."""
    law: dict[Tokens, float] = {}
    for output in itertools.product(range(setup.vocab_size), repeat=length):
        p = 1.0
        for i, token in enumerate(output):
            p *= float(setup.target_law(setup.prompt + output[:i])[token])
            if p == 0:
                break
        law[output] = p
    return law


def total_variation(a: dict[Tokens, float], b: dict[Tokens, float]) -> float:
    return sum(abs(a.get(t, 0.0) - b.get(t, 0.0)) for t in a.keys() | b.keys()) / 2
