"""The cases of `spectrue bench verify`: our ops on the inputs, and the bytes they must move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from spectrue.deploy.bench_verify_inputs import Inputs, RowKind, guess_near
from spectrue.kernels import dispatch
from spectrue.kernels.dispatch import RowLaw

CHUNK = 128  # tokens whose maximum and sum a law carries, 4 bytes each

Method = Literal["greedy", "match", "rejection", "coupled"]
Floor = Literal["logits", "rejection", "draw", "walk", "verify"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A verify pipeline, or one op of it."""

    name: str
    rows: RowKind
    method: Method | None  # None: one op
    run: Callable[[Inputs], Any]  # what is timed, and checked
    prepare: Callable[[Inputs], Any] | None = None  # made before, given to `run` in place of inputs
    cuts: bool = False
    reduced: bool = False  # the draft vocabulary
    floor: Floor = "logits"


def process(x: Inputs, cuts: bool) -> RowLaw:
    if not cuts:
        return dispatch.process_logits(x.logits, temperature=x.temperature)
    return dispatch.process_logits(
        x.logits, temperature=x.temperature, top_k=x.top_k, top_p=x.top_p, min_p=x.min_p
    )


def with_guess(case: Case, x: Inputs) -> Inputs:
    """Drafts that are right where this case's own tokens say so."""
    if case.method == "greedy":
        target = dispatch.argmax_lowest(x.logits)
    elif case.method == "coupled":
        law = RowLaw(x.logits, x.temperature)
        target = dispatch.draw_gumbel(law, x.seed, x.choice, x.position)
    elif case.method == "match" and case.cuts:
        target = dispatch.draw_inverse_cdf(process(x, True), x.uniform)
    else:
        return x
    return replace(x, guess=guess_near(target, x.hit, x.k, x.logits.shape[1]))


def _sampled(x: Inputs, law: RowLaw, kind: Tensor | None, uniform: Tensor | None) -> Any:
    token_ids, valid = dispatch.sample_rows(
        law, kind, uniform=uniform, seed=x.seed, choice=x.choice, position=x.position
    )
    return dispatch.verify_match(token_ids, x.guess, x.cu, valid, max_draft_tokens=x.k)[:3]


def greedy(x: Inputs) -> Any:
    # The logits themselves are the law of a greedy row: no sums are asked for.
    return _sampled(x, RowLaw(x.logits), None, None)


def match(x: Inputs, cuts: bool = False) -> Any:
    return _sampled(x, process(x, cuts), x.uniform_kind, x.uniform)


def coupled(x: Inputs) -> Any:
    return _sampled(x, RowLaw(x.logits, x.temperature), x.gumbel_kind, None)


def rejection(x: Inputs, cuts: bool = False, law: RowLaw | None = None) -> Any:
    return dispatch.verify_rejection(
        process(x, cuts) if law is None else law,
        x.draft,
        x.cu,
        draft_logits=x.draft_logits,
        draft_inv_temperature=x.draft_inv_temperature,
        draft_log_normalizer=x.draft_log_normalizer,
        draft_token_probs=x.draft_token_probs,
        draft_index=x.draft_index,
        coins=x.coins,
        uniforms=x.uniform,
        max_draft_tokens=x.k,
    )[:3]


def _with_law(x: Inputs) -> tuple[Inputs, RowLaw]:
    return x, process(x, False)


def _walk(x: Inputs) -> Any:
    return dispatch.verify_match(x.target, x.guess, x.cu, x.valid, max_draft_tokens=x.k)[:3]


def _pipeline(name: str, rows: RowKind, method: Method, **more: Any) -> Case:
    cuts = more.get("cuts", False)
    runs: dict[Method, Callable[[Inputs], Any]] = {
        "greedy": greedy,
        "match": lambda x: match(x, cuts),
        "rejection": lambda x: rejection(x, cuts),
        "coupled": coupled,
    }
    floor: Floor = "rejection" if method == "rejection" else "logits"
    return Case(name=name, rows=rows, method=method, run=runs[method], floor=floor, **more)


PIPELINES = (
    _pipeline("greedy", "peaked", "greedy"),
    _pipeline("match", "peaked", "match"),
    _pipeline("match, cuts", "peaked", "match", cuts=True),
    _pipeline("rejection", "peaked", "rejection"),
    _pipeline("rejection, cuts", "peaked", "rejection", cuts=True),
    _pipeline("rejection, draft ids", "peaked", "rejection", reduced=True),
    _pipeline("match, flat rows", "normal", "match"),
    _pipeline("rejection, flat rows", "normal", "rejection"),
    _pipeline("coupled, top 0.5", "top 0.5", "coupled"),
    _pipeline("coupled, top 0.9", "top 0.9", "coupled"),
    _pipeline("coupled, flat rows", "normal", "coupled"),
)


def _op(name: str, run: Callable[[Any], Any], **more: Any) -> Case:
    return Case(name=name, rows="peaked", method=None, run=run, **more)


OPS = (
    _op("argmax_lowest", lambda x: dispatch.argmax_lowest(x.logits)),
    _op("valid_rows", lambda x: dispatch.valid_rows(x.logits)),
    _op("logsumexp_rows", lambda x: dispatch.logsumexp_rows(x.logits, 1 / x.temperature)),
    _op("process_logits", lambda x: process(x, False)),
    _op("process_logits, cuts", lambda x: process(x, True), cuts=True),
    _op(
        "draw_inverse_cdf",
        lambda x: dispatch.draw_inverse_cdf(x[1], x[0].uniform),
        prepare=_with_law,
        floor="draw",
    ),
    _op("verify_match", _walk, floor="walk"),
    _op(
        "verify_rejection",
        lambda x: rejection(x[0], law=x[1]),
        prepare=_with_law,
        floor="verify",
    ),
)


def floor_bytes(case: Case, x: Inputs) -> int:
    """What the case must read and write whatever its method, each byte once."""
    num_rows, vocab_size = x.logits.shape
    size = x.logits.element_size()
    row, draft_row = vocab_size * size, x.draft_logits.shape[1] * size
    tables = num_rows * -(-vocab_size // CHUNK) * 2 * 4  # maximum and sum of every chunk
    ids = 8 * (num_rows + len(x.draft) + x.batch * (x.k + 1))  # tokens and drafts in, tokens out
    return {
        "logits": num_rows * row,
        "rejection": num_rows * row + x.batch * (row + draft_row),
        "draw": tables + num_rows * CHUNK * size,
        "walk": ids,
        "verify": tables + x.batch * (row + draft_row) + ids,
    }[case.floor]
