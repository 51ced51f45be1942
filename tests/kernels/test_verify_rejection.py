"""The rejection rule by hand: laws that are not laws, guards, invalid rows, ragged batches."""

from __future__ import annotations

from typing import TypedDict

import pytest
import torch
from torch import Tensor

from spectrue.kernels.dispatch import (
    GUARD_DRAFT_ID_OUT_OF_RANGE,
    GUARD_DRAFT_LAW_CHANGED,
    GUARD_DRAFT_PROB_INVALID,
    GUARD_NAMES,
    GUARD_RESIDUAL_EMPTY,
    GUARD_ROW_INVALID,
    NUM_GUARDS,
    PLACEHOLDER_TOKEN_ID,
    RowLaw,
    draw_inverse_cdf,
    logsumexp_rows,
    process_logits,
    verify_rejection,
)

from .conftest import SLOW_BACKEND, TIER, rng

INF, NAN = float("inf"), float("nan")
PAD = PLACEHOLDER_TOKEN_ID


class Law(TypedDict):
    draft_logits: Tensor
    draft_inv_temperature: Tensor
    draft_log_normalizer: Tensor
    draft_token_probs: Tensor
    draft_index: Tensor | None


def law_of(probs: Tensor, draft: Tensor, draft_index: Tensor | None = None) -> Law:
    """What a drafter that drew `draft` from `probs` [D, Vd] hands over; entries as they are."""
    draft_id = draft if draft_index is None else draft_index.long()[draft.clamp(0, 4)]
    inside = draft_id.clamp(0, probs.shape[1] - 1)
    return Law(
        draft_logits=probs.log(),
        draft_inv_temperature=torch.ones(len(probs)),
        draft_log_normalizer=torch.zeros(len(probs)),
        draft_token_probs=probs.gather(1, inside[:, None])[:, 0],
        draft_index=draft_index,
    )


TARGET = torch.tensor([0.3, 0.25, 0.2, 0.15, 0.1])
DRAFT = torch.tensor([0.1, 0.2, 0.5, 0.1, 0.1])


def step(
    draft: int,
    coin: float,
    uniform: float,
    law: Law,
    target: Tensor = TARGET,
    valid: tuple[bool, bool] = (True, True),
) -> tuple[list[int], int, list[str]]:
    """One request, k = 1: tokens, number accepted, guards that fired."""
    scaled = (target / target.max()).log().expand(2, -1).clone()
    scaled[~torch.tensor(valid), 1] = NAN
    output, num_accepted, invalid, guards = verify_rejection(
        RowLaw(scaled),
        torch.tensor([draft]),
        torch.tensor([1]),
        **law,
        coins=torch.tensor([coin]),
        uniforms=torch.full((2,), uniform),
    )
    assert guards.shape == (1, NUM_GUARDS)
    assert guards.dtype == torch.int32
    assert invalid.tolist() == [bool(guards[0, GUARD_ROW_INVALID])]
    fired = [name for name, n in zip(GUARD_NAMES, guards[0].tolist(), strict=True) if n]
    return [t for t in output[0].tolist() if t != PAD], int(num_accepted[0]), fired


def drawn_law(
    draft: int,
    coin: float,
    law: Law,
    target: Tensor = TARGET,
    n: int = 40 if SLOW_BACKEND else 4000,
) -> Tensor:
    """Frequencies of the first token committed, over a grid of uniforms."""
    scaled = (target / target.max()).log().expand(2 * n, -1)
    many = Law(
        draft_logits=law["draft_logits"].expand(n, -1),
        draft_inv_temperature=law["draft_inv_temperature"].expand(n),
        draft_log_normalizer=law["draft_log_normalizer"].expand(n),
        draft_token_probs=law["draft_token_probs"].expand(n),
        draft_index=law["draft_index"],
    )
    output, _, _, _ = verify_rejection(
        RowLaw(scaled),
        torch.full((n,), draft),
        torch.arange(1, n + 1),
        **many,
        coins=torch.full((n,), coin),
        uniforms=((torch.arange(2 * n) // 2) + 0.5) / n,
    )
    return torch.bincount(output[:, 0], minlength=len(target)) / n


def close(frequencies: Tensor, law: Tensor) -> bool:
    return bool(((frequencies - law / law.sum()).abs() < (0.03 if SLOW_BACKEND else 1e-3)).all())


def test_acceptance_is_strict_and_does_not_divide() -> None:
    law = law_of(DRAFT[None], torch.tensor([2]))  # accepted iff coin * 0.5 < 0.2
    assert step(2, 0.39, 0.0, law) == ([2, 0], 1, [])
    assert step(2, 0.41, 0.0, law) == ([0], 0, [])
    half = torch.tensor([0.5, 0.5, 0, 0, 0])
    quarter = torch.tensor([0.25, 0.75, 0, 0, 0])
    law = law_of(half[None], torch.tensor([0]))
    assert step(0, 0.5, 0.0, law, target=quarter)[1] == 0 or not TIER.exact  # 0.25 is not below
    edge = 2**-24 if TIER.exact else 1e-5
    assert step(0, 0.5 + edge, 0.0, law, target=quarter)[1] == 0
    assert step(0, 0.5 - edge, 0.0, law, target=quarter)[1] == 1


def test_a_token_that_the_target_excludes_is_never_accepted() -> None:
    target = torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0])
    tokens, accepted, fired = step(2, 0.0, 0.9, law_of(DRAFT[None], torch.tensor([2])), target)
    assert (tokens, accepted, fired) == ([1], 0, [])


def test_a_token_of_draft_probability_zero_is_never_accepted() -> None:
    one_hot = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0])
    assert step(2, 0.0, 0.0, law_of(one_hot[None], torch.tensor([2])))[1] == 0


def test_equal_laws_accept_everything() -> None:
    """sglang#9877: with draft = target all drafts stay. A hair above 1 is a probability."""
    # Elsewhere than on the CPU the two laws differ in their last bits.
    for coin in (0.0, 0.5, 1 - 2**-24) if TIER.exact else (0.0, 1 - 1e-5):
        for draft in range(5):
            assert step(draft, coin, 0.0, law_of(TARGET[None], torch.tensor([draft])))[1] == 1
    one_hot = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0])
    law = law_of(one_hot[None] * (1 + 5e-6), torch.tensor([2]))
    assert step(2, 1 - 2e-5, 0.3, law, target=one_hot) == ([2, 2], 1, [])


@pytest.mark.parametrize("bad", [NAN, INF, 1.5, 1.001])
def test_an_entry_that_is_no_probability_never_accepts_and_counts_as_zero(bad: float) -> None:
    """sglang#37134. At the drawn token, and elsewhere (seen where the request stops)."""
    probs = DRAFT.clone()
    probs[2] = bad
    law = law_of(probs[None], torch.tensor([2]))
    for coin in (0.0, 0.5):
        assert step(2, coin, 0.0, law)[1:] == (0, ["draft_prob_invalid"])
    rest = torch.where(torch.arange(5) == 2, 0, DRAFT)
    assert close(drawn_law(2, 0.0, law), (TARGET - rest).clamp(min=0))
    # Elsewhere: token 3 is accepted as before; token 1 is rejected, and then the row is read.
    probs = DRAFT.clone()
    probs[0] = bad
    assert step(3, 0.99, 0.0, law_of(probs[None], torch.tensor([3]))) == ([3, 0], 1, [])
    probs[1] = 0.5
    law = law_of(probs[None], torch.tensor([1]))
    assert step(1, 0.9, 0.0, law)[1:] == (0, ["draft_prob_invalid"])
    rest = torch.where(torch.arange(5) == 0, 0, probs)
    assert close(drawn_law(1, 0.9, law), (TARGET - rest).clamp(min=0))


def test_a_row_of_minus_infinity_or_nan_is_no_law() -> None:
    """Zeros are never accepted and do not sum to 1; of NaN every entry is invalid."""
    law = law_of(torch.zeros(1, 5), torch.tensor([2]))
    assert step(2, 0.0, 0.0, law)[1:] == (0, ["draft_law_changed"])
    assert close(drawn_law(2, 0.0, law), TARGET)
    law = law_of(torch.full((1, 5), NAN), torch.tensor([2]))
    assert step(2, 0.0, 0.0, law)[1:] == (0, ["draft_prob_invalid"])
    assert close(drawn_law(2, 0.0, law), TARGET)


def test_a_law_that_changed_since_the_draw() -> None:
    """A recycled buffer of zeros reads as 1 / vocab and would accept nearly everything."""
    law = law_of(DRAFT[None], torch.tensor([2]))
    zeroed = Law(
        **{
            **law,
            "draft_logits": torch.zeros(1, 5),
            "draft_log_normalizer": torch.tensor([5.0]).log(),
        }
    )
    assert step(2, 0.5, 0.0, zeroed)[1:] == (0, ["draft_law_changed"])
    assert close(drawn_law(2, 0.5, zeroed), TARGET)
    for factor, expected in ((1 + 5e-4, 1), (1 - 5e-4, 1), (1 + 2e-3, 0), (1 - 2e-3, 0), (NAN, 0)):
        moved = Law(**{**law, "draft_token_probs": law["draft_token_probs"] * factor})
        fired = [] if expected else ["draft_law_changed"]
        assert step(2, 0.1, 0.0, moved)[1:] == (expected, fired)


@pytest.mark.parametrize("scale", [0.9, 0.998, 1.002, 1.2])
def test_a_law_with_a_wrong_sum_is_caught_though_every_entry_is_fine(scale: float) -> None:
    probs = DRAFT * scale
    probs[2] = DRAFT[2]  # the drawn entry is as recorded
    law = law_of(
        (probs + (DRAFT[2] * (scale - 1)) / 4 * (torch.arange(5) != 2))[None], torch.tensor([2])
    )
    assert step(2, 0.9, 0.0, law)[1:] == (0, ["draft_law_changed"])
    assert close(drawn_law(2, 0.9, law), TARGET)


def test_an_empty_residual_falls_back_to_the_target() -> None:
    law = law_of(TARGET[None] * (1 + 4e-4), torch.tensor([2]))  # within the tolerance
    assert step(2, 1 - 2**-24, 0.0, law)[1:] == (0, ["residual_empty"])
    assert close(drawn_law(2, 1 - 2**-24, law), TARGET)


@pytest.mark.parametrize("draft", [-1, -5, 5, 10**9, -(2**31)])
def test_a_draft_id_outside_the_vocabulary(draft: int) -> None:
    law = law_of(DRAFT[None], torch.tensor([0]))
    assert step(draft, 0.0, 0.0, law)[1:] == (0, ["draft_id_out_of_range"])
    assert close(drawn_law(draft, 0.0, law), TARGET)


def test_a_draft_absent_from_the_draft_vocabulary() -> None:
    index = torch.tensor([1, -1, 0, -1, -1], dtype=torch.int32)
    probs = torch.tensor([[0.7, 0.3]])
    law = law_of(probs, torch.tensor([1]), index)
    assert step(1, 0.0, 0.0, law)[1:] == (0, ["draft_id_out_of_range"])
    assert close(drawn_law(1, 0.0, law), TARGET)
    law = law_of(probs, torch.tensor([2]), index)  # EAGLE3: tokens outside d2t by the residual
    assert close(drawn_law(2, 0.9, law), torch.tensor([0.0, 0.25, 0.0, 0.15, 0.1]))
    beyond = torch.tensor([1, 7, 0, -1, -1], dtype=torch.int32)
    assert step(1, 0.0, 0.0, law_of(probs, torch.tensor([2]), index) | {"draft_index": beyond})[
        2
    ] == ["draft_id_out_of_range"]


def test_a_smaller_draft_vocabulary_without_an_index() -> None:
    probs = torch.tensor([[0.2, 0.2, 0.6]])
    law = law_of(probs, torch.tensor([2]))
    assert close(drawn_law(2, 0.9, law), torch.tensor([0.1, 0.05, 0.0, 0.15, 0.1]))
    assert step(3, 0.0, 0.0, law)[1:] == (0, ["draft_id_out_of_range"])
    with pytest.raises(ValueError, match="draft_index"):
        step(2, 0.0, 0.0, law_of(torch.ones(1, 6) / 6, torch.tensor([2])))


def test_invalid_rows_end_the_request_with_no_token_of_theirs() -> None:
    law = law_of(DRAFT[None], torch.tensor([0]))
    assert step(0, 0.0, 0.0, law, valid=(False, True)) == ([], 0, ["row_invalid"])
    assert step(0, 0.0, 0.0, law, valid=(True, False)) == ([0], 1, ["row_invalid"])
    law = law_of(DRAFT[None], torch.tensor([2]))
    assert step(2, 0.9, 0.0, law, valid=(True, False)) == ([0], 0, [])  # after the stop


def random_batch(
    num_drafts: list[int], vocab_size: int, draft_vocab_size: int | None, seed: int
) -> tuple[Tensor, Tensor, Tensor, Law, Tensor, Tensor]:
    generator = rng(seed)
    d, r = sum(num_drafts), sum(num_drafts) + len(num_drafts)
    target = torch.randn(r, vocab_size, generator=generator) * 2
    law = process_logits(target, temperature=torch.ones(r), top_p=torch.full((r,), 0.95))
    scaled = law.scaled()
    size = draft_vocab_size or vocab_size
    d2t = torch.randperm(vocab_size, generator=generator)[:size]
    draft_index = torch.full((vocab_size,), -1, dtype=torch.int32)
    draft_index[d2t] = torch.arange(size, dtype=torch.int32)
    logits = torch.randn(d, size, generator=generator) * 2
    inv = torch.full((d,), 1.25)
    normalizer = logsumexp_rows(logits, inv)
    draft_ids = draw_inverse_cdf(
        process_logits(logits, temperature=1 / inv), torch.rand(d, generator=generator)
    )
    probs = (logits.gather(1, draft_ids[:, None])[:, 0] * inv - normalizer).exp()
    draft_law = Law(
        draft_logits=logits,
        draft_inv_temperature=inv,
        draft_log_normalizer=normalizer,
        draft_token_probs=probs,
        draft_index=draft_index,
    )
    coins, uniforms = torch.rand(d, generator=generator), torch.rand(r, generator=generator)
    return scaled, d2t[draft_ids], torch.tensor(num_drafts).cumsum(0), draft_law, coins, uniforms


@pytest.mark.parametrize("vocab_size", [97] if SLOW_BACKEND else [7, 97, 4097])
@pytest.mark.parametrize("draft_vocab_size", [None, 5])
def test_requests_do_not_depend_on_their_neighbours(
    vocab_size: int, draft_vocab_size: int | None
) -> None:
    num_drafts = [3, 0, 1, 5, 0, 2, 2, 4] * (1 if SLOW_BACKEND else 3)
    scaled, draft, cu, law, coins, uniforms = random_batch(
        num_drafts, vocab_size, draft_vocab_size, seed=vocab_size
    )
    output, num_accepted, invalid, guards = verify_rejection(
        RowLaw(scaled), draft, cu, **law, coins=coins, uniforms=uniforms
    )
    assert not bool(invalid.any())
    assert not bool(guards.any())
    assert draft_vocab_size or int(num_accepted.sum()) > 0
    support = scaled > -INF
    first_draft, first_row = 0, 0
    for b, k in enumerate(num_drafts):
        drafts, rows = slice(first_draft, first_draft + k), slice(first_row, first_row + k + 1)
        alone, accepted, _, _ = verify_rejection(
            RowLaw(scaled[rows]),
            draft[drafts],
            torch.tensor([k]),
            draft_logits=law["draft_logits"][drafts],
            draft_inv_temperature=law["draft_inv_temperature"][drafts],
            draft_log_normalizer=law["draft_log_normalizer"][drafts],
            draft_token_probs=law["draft_token_probs"][drafts],
            draft_index=law["draft_index"],
            coins=coins[drafts],
            uniforms=uniforms[rows],
        )
        n = int(num_accepted[b])
        assert int(accepted[0]) == n
        assert alone[0, : n + 1].tolist() == output[b, : n + 1].tolist()
        assert output[b, n + 1 :].tolist() == [PAD] * (max(num_drafts) - n)
        for depth, token in enumerate(output[b, : n + 1].tolist()):
            assert bool(support[first_row + depth, token])
        first_draft, first_row = first_draft + k, first_row + k + 1


def test_guards_of_rows_after_the_stop_stay_silent() -> None:
    """k = 2, the first draft is rejected; the second law and row are garbage."""
    probs = torch.stack([DRAFT, torch.full((5,), NAN)])
    law = law_of(probs, torch.tensor([2, -7]))
    scaled = (TARGET / TARGET.max()).log().expand(3, -1).clone()
    scaled[1:] = NAN
    output, num_accepted, invalid, guards = verify_rejection(
        RowLaw(scaled),
        torch.tensor([2, -7]),
        torch.tensor([2]),
        **law,
        coins=torch.tensor([0.9, 0.0]),
        uniforms=torch.zeros(3),
    )
    assert output.tolist() == [[0, PAD, PAD]]
    assert int(num_accepted) == 0
    assert not bool(invalid.any())
    assert not bool(guards.any())


def test_guard_columns_have_names() -> None:
    columns = [
        GUARD_DRAFT_PROB_INVALID,
        GUARD_DRAFT_LAW_CHANGED,
        GUARD_RESIDUAL_EMPTY,
        GUARD_DRAFT_ID_OUT_OF_RANGE,
        GUARD_ROW_INVALID,
    ]
    assert sorted(columns) == list(range(NUM_GUARDS))
    assert GUARD_NAMES[GUARD_DRAFT_LAW_CHANGED] == "draft_law_changed"


def test_no_drafts_and_no_requests() -> None:
    scaled = torch.zeros(2, 5)
    law = law_of(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64))
    output, num_accepted, _, _ = verify_rejection(
        RowLaw(scaled),
        torch.zeros(0, dtype=torch.int64),
        torch.tensor([0, 0]),
        **law,
        coins=torch.zeros(0),
        uniforms=torch.tensor([0.0, 0.9]),
    )
    assert output.tolist() == [[0], [4]]
    assert num_accepted.tolist() == [0, 0]
    output, *_ = verify_rejection(
        RowLaw(scaled[:0]),
        torch.zeros(0, dtype=torch.int64),
        torch.zeros(0, dtype=torch.int64),
        **law,
        coins=torch.zeros(0),
        uniforms=torch.zeros(0),
    )
    assert output.shape == (0, 1)
