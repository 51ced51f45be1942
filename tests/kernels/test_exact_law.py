"""The law of what a verify step commits, integrated exactly over every uniform.

A case is a target law and a draft law for each prefix. Every draft path, every interval of each
coin and of each row's uniform is one request of a batch, evaluated at the intervals' midpoints by
the real op; their widths multiply to its weight. Outputs are completed to k + 1 tokens by the
target law, and the law of the result must be the target's joint law.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from spectrue.kernels import reference_verify
from spectrue.kernels.dispatch import (
    PLACEHOLDER_TOKEN_ID,
    RowLaw,
    argmax_lowest,
    draw_inverse_cdf,
    logsumexp_rows,
    valid_rows,
    verify_match,
    verify_rejection,
)

from .conftest import BACKEND, SLOW_BACKEND, TIER, rng

DTYPE = TIER.floats[-1]
# In float32 a uniform next to an interval's edge may fall on its other side: those are narrow.
TOLERANCE = 1e-9 if TIER.exact else 1e-5
FAULT = 1e-3  # a planted fault must be off by more than this, or the check proves nothing
INF = float("inf")

Law = list[float]
Prefix = tuple[int, ...]


@dataclass
class Case:
    """Laws by prefix. The draft law is over draft ids; `d2t` maps them to target ids."""

    k: int
    vocab_size: int
    target: dict[Prefix, Law]
    draft: dict[Prefix, Law]
    d2t: list[int]

    def draft_paths(self) -> Iterator[tuple[Prefix, float]]:
        """Target ids of each possible draft, with its probability."""
        for ids in itertools.product(range(len(self.d2t)), repeat=self.k):
            path = tuple(self.d2t[i] for i in ids)
            weight = 1.0
            for depth, draft_id in enumerate(ids):
                weight *= self.draft[path[:depth]][draft_id]
            if weight > 0:
                yield path, weight


def random_law(size: int, kind: str, generator: torch.Generator) -> Law:
    weights = torch.rand(size, generator=generator, dtype=torch.float64) ** 3
    if kind == "zeros":
        weights[torch.rand(size, generator=generator) < 0.4] = 0
    if kind == "ties":
        weights = (weights * 2).ceil()
    if kind == "one_hot" or float(weights.sum()) == 0:
        weights = torch.zeros(size, dtype=torch.float64)
        weights[int(torch.randint(size, (), generator=generator))] = 1
    law: Law = (weights / weights.sum()).tolist()
    return law


def random_case(
    k: int,
    vocab_size: int,
    target_kind: str,
    draft_kind: str,
    seed: int,
    reduced: int | None = None,
) -> Case:
    generator = rng(seed)
    d2t: list[int] = torch.randperm(vocab_size, generator=generator)[
        : reduced or vocab_size
    ].tolist()
    if reduced is None:
        d2t.sort()
    prefixes = [p for n in range(k + 1) for p in itertools.product(range(vocab_size), repeat=n)]
    target = {p: random_law(vocab_size, target_kind, generator) for p in prefixes}
    if draft_kind == "equal":
        return Case(k, vocab_size, target, dict(target), d2t)
    draft = {p: random_law(len(d2t), draft_kind, generator) for p in prefixes}
    return Case(k, vocab_size, target, draft, d2t)


def intervals(*laws: Law) -> list[tuple[float, float]]:
    """(midpoint, width) of the pieces of [0, 1) on which inverse CDF draws from the laws agree."""
    edges = {0.0, 1.0}
    for law in laws:
        total, mass = sum(law), 0.0
        if total > 0:
            for weight in law:
                mass += weight / total
                edges.add(min(mass, 1.0))
    ordered = sorted(edges)
    return [((a + b) / 2, b - a) for a, b in itertools.pairwise(ordered) if b - a > 1e-13]


def logits(laws: list[Law]) -> Tensor:
    return torch.tensor(laws, dtype=torch.float64).log().to(DTYPE)


def scaled(laws: list[Law]) -> Tensor:
    rows = logits(laws)
    return rows - rows.amax(1, keepdim=True)


@dataclass
class Batch:
    """Requests with one k, flattened, and what each is worth."""

    paths: list[Prefix]
    weights: list[float]
    coins: list[tuple[float, ...]]
    uniforms: list[tuple[float, ...]]


def enumerate_requests(case: Case, rejection: bool, law: dict[Prefix, Law] | None = None) -> Batch:
    """`law` is what the drafter hands over, if not what it draws from."""
    law = case.draft if law is None else law
    batch = Batch([], [], [], [])
    for path, weight in case.draft_paths():
        coins, uniforms = [], []
        for depth in range(case.k + 1):
            target = case.target[path[:depth]]
            if depth == case.k or not rejection:
                uniforms.append(intervals(target))
                continue
            draft = [0.0] * case.vocab_size
            for draft_id, probability in enumerate(law[path[:depth]]):
                draft[case.d2t[draft_id]] = probability
            token = path[depth]
            coins.append(intervals([ratio := min(1.0, target[token] / draft[token]), 1 - ratio]))
            residual = [max(t - d, 0.0) for t, d in zip(target, draft, strict=True)]
            uniforms.append(intervals(target, residual))
        for combination in itertools.product(*coins, *uniforms):
            worth = weight
            for _, width in combination:
                worth *= width
            batch.paths.append(path)
            batch.weights.append(worth)
            batch.coins.append(tuple(mid for mid, _ in combination[: len(coins)]))
            batch.uniforms.append(tuple(mid for mid, _ in combination[len(coins) :]))
    return batch


Outputs = dict[Prefix, float]


def collect(output: Tensor, weights: list[float]) -> Outputs:
    law: Outputs = {}
    for row, weight in zip(output.tolist(), weights, strict=True):
        tokens = tuple(t for t in row if t != PLACEHOLDER_TOKEN_ID)
        law[tokens] = law.get(tokens, 0.0) + weight
    return law


def error(case: Case, outputs: Outputs) -> float:
    """Largest difference between the completed outputs' law and the target's joint law."""
    worst = 0.0
    for sequence in itertools.product(range(case.vocab_size), repeat=case.k + 1):
        suffix, got = 1.0, 0.0
        for length in range(case.k + 1, 0, -1):
            got += outputs.get(sequence[:length], 0.0) * suffix
            suffix *= case.target[sequence[: length - 1]][sequence[length - 1]]
        worst = max(worst, abs(got - suffix))
    assert sum(outputs.values()) == pytest.approx(1, abs=1e-9)
    return worst


def run_rejection(case: Case, batch: Batch, law: dict[Prefix, Law] | None = None) -> Outputs:
    """`law` is what the drafter hands over, if not what it drew from."""
    law = case.draft if law is None else law
    k, n = case.k, len(batch.paths)
    draft_index = torch.full((case.vocab_size,), -1, dtype=torch.int32)
    draft_index[case.d2t] = torch.arange(len(case.d2t), dtype=torch.int32)
    shifted = [[logits([law[p[:d]]])[0] + 3.0 for d in range(k)] for p in batch.paths]
    draft_logits = (
        torch.stack([row for request in shifted for row in request])
        if k
        else torch.zeros(0, len(case.d2t), dtype=DTYPE)
    )
    inverse = torch.full((n * k,), 2.0, dtype=DTYPE)
    tokens = torch.tensor([t for p in batch.paths for t in p], dtype=torch.int64)
    draft_ids = draft_index.long()[tokens]
    rows = scaled([case.target[p[:d]] for p in batch.paths for d in range(k + 1)])
    log_normalizer = logsumexp_rows(draft_logits / 2, inverse)
    recorded = (draft_logits.gather(1, draft_ids[:, None])[:, 0] - log_normalizer).exp()
    output, _, invalid, guards = verify_rejection(
        RowLaw(rows),
        tokens,
        torch.arange(1, n + 1) * k,
        draft_logits=draft_logits / 2,
        draft_inv_temperature=inverse,
        draft_log_normalizer=log_normalizer,
        draft_token_probs=recorded,
        draft_index=None if case.d2t == list(range(case.vocab_size)) else draft_index,
        coins=torch.tensor(batch.coins, dtype=DTYPE).flatten(),
        uniforms=torch.tensor(batch.uniforms, dtype=DTYPE).flatten(),
    )
    assert not bool(invalid.any())
    assert not bool(guards.any())
    return collect(output, batch.weights)


def run_match(case: Case, batch: Batch) -> Outputs:
    k, n = case.k, len(batch.paths)
    rows = scaled([case.target[p[:d]] for p in batch.paths for d in range(k + 1)])
    uniforms = torch.tensor(batch.uniforms, dtype=DTYPE).flatten()
    tokens = torch.tensor([t for p in batch.paths for t in p], dtype=torch.int64)
    output, *_ = verify_match(
        draw_inverse_cdf(RowLaw(rows), uniforms),
        tokens,
        torch.arange(1, n + 1) * k,
        valid_rows(rows),
    )
    return collect(output, batch.weights)


reference_only = pytest.mark.skipif(SLOW_BACKEND or BACKEND == "cuda", reason="of the reference")

TARGETS = ["dense", "zeros", "ties", "one_hot"]
DRAFTS = ["dense", "zeros", "ties", "one_hot", "equal"]
SHAPES = [(0, 8), (1, 2), (1, 8), (2, 3)]
if SLOW_BACKEND:  # thousands of requests: one of each kind
    TARGETS, DRAFTS, SHAPES = ["zeros", "ties"], ["dense"], [(1, 2)]


@pytest.mark.parametrize("draft_kind", DRAFTS)
@pytest.mark.parametrize("target_kind", TARGETS)
@pytest.mark.parametrize(("k", "vocab_size"), SHAPES)
def test_rejection_is_exact(k: int, vocab_size: int, target_kind: str, draft_kind: str) -> None:
    case = random_case(k, vocab_size, target_kind, draft_kind, seed=vocab_size)
    outputs = run_rejection(case, enumerate_requests(case, rejection=True))
    assert error(case, outputs) < TOLERANCE


@pytest.mark.parametrize(
    ("k", "vocab_size", "reduced"),
    [(1, 3, 2)] if SLOW_BACKEND else [(1, 8, 3), (1, 5, 1), (2, 4, 2)],
)
@pytest.mark.parametrize("target_kind", TARGETS)
@pytest.mark.parametrize("draft_kind", ["dense"] if SLOW_BACKEND else ["dense", "zeros"])
def test_rejection_is_exact_with_a_reduced_draft_vocabulary(
    k: int, vocab_size: int, reduced: int, target_kind: str, draft_kind: str
) -> None:
    case = random_case(k, vocab_size, target_kind, draft_kind, seed=reduced, reduced=reduced)
    outputs = run_rejection(case, enumerate_requests(case, rejection=True))
    assert error(case, outputs) < TOLERANCE


@pytest.mark.parametrize("draft_kind", DRAFTS)
@pytest.mark.parametrize("target_kind", TARGETS)
@pytest.mark.parametrize(("k", "vocab_size"), SHAPES)
def test_match_is_exact(k: int, vocab_size: int, target_kind: str, draft_kind: str) -> None:
    case = random_case(k, vocab_size, target_kind, draft_kind, seed=vocab_size)
    assert error(case, run_match(case, enumerate_requests(case, rejection=False))) < TOLERANCE


@reference_only
def test_greedy_rows_commit_the_argmax_path() -> None:
    case = random_case(2, 3, "ties", "dense", seed=3)
    batch = enumerate_requests(case, rejection=False)
    rows = scaled([case.target[p[:d]] for p in batch.paths for d in range(3)])
    tokens = torch.tensor([t for p in batch.paths for t in p])
    output, num_accepted, *_ = verify_match(
        argmax_lowest(rows), tokens, torch.arange(1, len(batch.paths) + 1) * 2, valid_rows(rows)
    )
    greedy: Prefix = ()
    for _ in range(3):
        law = case.target[greedy]
        greedy += (law.index(max(law)),)
    for row, accepted in zip(output.tolist(), num_accepted.tolist(), strict=True):
        assert tuple(row[: accepted + 1]) == greedy[: accepted + 1]
        assert row[accepted + 1 :] == [PLACEHOLDER_TOKEN_ID] * (2 - accepted)


# -- planted faults: the check above must see each of them --------------------------------------


def softmax_of_argmax(case: Case) -> Case:
    """The drafter of the case, taking its argmax."""
    greedy = {
        p: [float(i == law.index(max(law))) for i in range(len(law))]
        for p, law in case.draft.items()
    }
    return Case(case.k, case.vocab_size, case.target, greedy, case.d2t)


@reference_only
@pytest.mark.parametrize("k", [1, 2])
def test_fault_argmax_draft_with_a_softmax_law(k: int) -> None:
    """transformers#47932, DeepSpec#31, xLLM#2175. With its one-hot law that drafter is exact."""
    case = random_case(k, 4 if k == 1 else 3, "dense", "dense", seed=1)
    argmax = softmax_of_argmax(case)
    honest = run_rejection(argmax, enumerate_requests(argmax, rejection=True))
    assert error(case, honest) < TOLERANCE
    faulty = enumerate_requests(argmax, rejection=True, law=case.draft)
    assert error(case, run_rejection(argmax, faulty, law=case.draft)) > FAULT


@reference_only
@pytest.mark.parametrize(
    "residual",
    [
        lambda target, law, draft_index: (target - law).abs(),
        lambda target, law, draft_index: target.clone(),
    ],
    ids=["unclamped", "target"],
)
def test_fault_in_the_residual(
    monkeypatch: pytest.MonkeyPatch, residual: Callable[[Tensor, Tensor, None], Tensor]
) -> None:
    case = random_case(1, 5, "dense", "dense", seed=2)
    batch = enumerate_requests(case, rejection=True)
    assert error(case, run_rejection(case, batch)) < TOLERANCE
    monkeypatch.setattr(reference_verify, "_residual", residual)
    assert error(case, run_rejection(case, batch)) > FAULT


def dropped(case: Case, outputs: Callable[[Case], Outputs], illegal: int) -> Outputs:
    """k = 1, but a draft equal to `illegal` is dropped before verify: that request has k = 0."""
    plain = Case(0, case.vocab_size, {(): case.target[()]}, {}, case.d2t)
    lost = case.draft[()][illegal]
    kept_law = [0.0 if i == illegal else p / (1 - lost) for i, p in enumerate(case.draft[()])]
    kept = Case(1, case.vocab_size, case.target, {(): kept_law}, case.d2t)
    total: Outputs = {}
    for part, weight in ((outputs(kept), 1 - lost), (outputs(plain), lost)):
        for tokens, p in part.items():
            total[tokens] = total.get(tokens, 0.0) + p * weight
    return total


@reference_only
def test_fault_illegal_draft_dropped_under_rejection_but_not_under_match() -> None:
    case = random_case(1, 4, "dense", "dense", seed=6)
    illegal = 2
    for prefix, law in case.target.items():
        total = 1 - law[illegal]
        case.target[prefix] = [0.0 if i == illegal else p / total for i, p in enumerate(law)]

    def match(part: Case) -> Outputs:
        return run_match(part, enumerate_requests(part, rejection=False))

    def rejection(part: Case) -> Outputs:
        # The law handed over is that of the drafter, which knew of no drop.
        batch = enumerate_requests(part, rejection=True, law=case.draft)
        return run_rejection(part, batch, law=case.draft)

    assert error(case, dropped(case, match, illegal)) < TOLERANCE
    assert error(case, dropped(case, rejection, illegal)) > FAULT
    # What must be done instead: leave it in the chain with target probability 0.
    whole = run_rejection(case, enumerate_requests(case, rejection=True))
    assert error(case, whole) < TOLERANCE
