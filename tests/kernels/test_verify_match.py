"""The match rule by hand: ragged batches, invalid rows, ids that are none."""

from __future__ import annotations

import pytest
import torch

from spectrue.kernels import reference
from spectrue.kernels.dispatch import PLACEHOLDER_TOKEN_ID, verify_match

from .conftest import TIER, rng

PAD = PLACEHOLDER_TOKEN_ID


def match(
    target: list[int], draft: list[int], cu: list[int], invalid_rows: tuple[int, ...] = ()
) -> tuple[list[list[int]], list[int], list[bool]]:
    valid = torch.ones(len(target), dtype=torch.bool)
    valid[list(invalid_rows)] = False
    output, num_accepted, invalid, _ = verify_match(
        torch.tensor(target, dtype=torch.int32),
        torch.tensor(draft, dtype=torch.int32),
        torch.tensor(cu, dtype=torch.int32),
        valid,
    )
    assert output.dtype == num_accepted.dtype == torch.int64
    return output.tolist(), num_accepted.tolist(), invalid.tolist()


def test_match_over_a_ragged_batch() -> None:
    # k = 2 (all accepted), 0, 3 (first rejected), 1 (rejected), 2 (second rejected), 0
    output, num_accepted, invalid = match(
        target=[*(4, 5, 6), 7, *(1, 2, 3, 4), *(9, 3), *(1, 8, 2), 5],
        draft=[*(4, 5), *(2, 2, 3), 0, *(1, 9)],
        cu=[2, 2, 5, 6, 8, 8],
    )
    assert output == [
        [4, 5, 6, PAD],
        [7, PAD, PAD, PAD],
        [1, PAD, PAD, PAD],
        [9, PAD, PAD, PAD],
        [1, 8, PAD, PAD],
        [5, PAD, PAD, PAD],
    ]
    assert num_accepted == [2, 0, 0, 0, 1, 0]
    assert invalid == [False] * 6


def test_match_with_no_drafts_at_all_and_with_no_requests() -> None:
    assert match([3, 1], [], [0, 0]) == ([[3], [1]], [0, 0], [False, False])
    assert match([], [], []) == ([], [], [])


def test_match_with_a_given_width() -> None:
    output, num_accepted, *_ = verify_match(
        torch.tensor([1, 2, 3]),
        torch.tensor([1]),
        torch.tensor([1, 1]),
        torch.ones(3, dtype=torch.bool),
        max_draft_tokens=4,
    )
    assert output.tolist() == [[1, 2, PAD, PAD, PAD], [3, PAD, PAD, PAD, PAD]]
    assert num_accepted.tolist() == [1, 0]


@pytest.mark.core
def test_match_judges_only_rows_that_the_walk_reaches() -> None:
    target, draft, cu = [1, 2, 3] * 4, [1, 2, 1, 9, 1, 2, 9, 2], [2, 4, 6, 8]
    output, num_accepted, invalid = match(target, draft, cu, invalid_rows=(0, 5, 8, 10))
    # 0: first row bad; 1: bad row after the stop; 2: bonus row bad; 3: bad row after the stop
    assert invalid == [True, False, True, False]
    assert output == [[PAD, PAD, PAD], [1, 2, PAD], [1, 2, PAD], [1, PAD, PAD]]
    assert num_accepted == [0, 1, 2, 0]


@pytest.mark.parametrize("draft", [-1, 97, 2**31 - 1, -(2**31)])
def test_match_rejects_ids_outside_the_vocabulary(draft: int) -> None:
    assert match([4, 5], [draft], [1])[0] == [[4, PAD]]


def walk_tree(
    target: list[int], draft: list[int], parents: list[int], valid: list[bool]
) -> tuple[list[int], list[int], bool]:
    """One request in plain Python: tokens, rows of the accepted drafts, whether it must end."""
    tokens: list[int] = []
    rows: list[int] = []
    row = 0
    while True:
        if not valid[row]:
            return tokens, rows, True
        tokens.append(target[row])
        children = [i for i, p in enumerate(parents) if p == row and draft[i] == target[row]]
        if not children:
            return tokens, rows, False
        row = children[0] + 1
        rows.append(row)


@pytest.mark.core
def test_match_over_a_tree_by_hand() -> None:
    # Two roots' children (9 twice: equal siblings), a child of the first 9, one of the second.
    draft, parents = [7, 9, 9, 4, 5], [0, 0, 0, 2, 3]
    target = [9, 0, 4, 5, 8, 6]
    valid = torch.ones(6, dtype=torch.bool)
    result = verify_match(
        torch.tensor(target),
        torch.tensor(draft),
        torch.tensor([5]),
        valid,
        parents=torch.tensor(parents),
    )
    assert result.output_token_ids.tolist() == [[9, 4, 8, PAD, PAD, PAD]]
    assert result.accepted_rows.tolist() == [[2, 4, -1, -1, -1]]
    assert result.num_accepted.tolist() == [2]


@pytest.mark.parametrize("invalid_share", [0.0, 0.15])
def test_match_over_random_trees(invalid_share: float) -> None:
    generator = rng(4)
    n = min(40, TIER.max_batch)
    sizes = [int(k) for k in torch.randint(0, 41, (n,), generator=generator)]
    sizes[:3] = [0, 1, 40]
    draft, parents, target, valid, expected = [], [], [], [], []
    for k in sizes:
        ids = torch.randint(0, 3, (2 * k + 1,), generator=generator).tolist()
        before = [int(torch.randint(0, i + 1, (), generator=generator)) for i in range(k)]
        good = (torch.rand(k + 1, generator=generator) >= invalid_share).tolist()
        draft += ids[:k]
        parents += before
        target += ids[k:]
        valid += good
        expected.append(walk_tree(ids[k:], ids[:k], before, good))
    result = verify_match(
        torch.tensor(target),
        torch.tensor(draft),
        torch.tensor(sizes).cumsum(0),
        torch.tensor(valid),
        parents=torch.tensor(parents),
    )
    width = max(sizes)
    for b, (tokens, rows, invalid) in enumerate(expected):
        pad = [PAD] * (width + 1 - len(tokens))
        assert result.output_token_ids[b].tolist() == tokens + pad
        assert result.accepted_rows[b].tolist() == rows + [-1] * (width - len(rows))
        assert int(result.num_accepted[b]) == len(rows)
        assert bool(result.invalid[b]) == invalid


def test_a_chain_is_a_tree() -> None:
    generator = rng(5)
    ks = [3, 0, 5, 1]
    target = torch.randint(0, 2, (sum(ks) + len(ks),), generator=generator)
    draft = torch.randint(0, 2, (sum(ks),), generator=generator)
    chain = torch.tensor([i for k in ks for i in range(k)])
    valid = torch.ones(len(target), dtype=torch.bool)
    cu = torch.tensor(ks).cumsum(0)
    for op in (verify_match, reference.verify_match):
        as_chain = op(target, draft, cu, valid)
        as_tree = op(target, draft, cu, valid, parents=chain)
        assert all(torch.equal(a, b) for a, b in zip(as_chain, as_tree, strict=True))


def test_a_parent_that_comes_later_is_never_followed() -> None:
    """Parents that form a ring must not make the walk endless."""
    result = verify_match(
        torch.tensor([1, 1, 1]),
        torch.tensor([1, 1]),
        torch.tensor([2]),
        torch.ones(3, dtype=torch.bool),
        parents=torch.tensor([2, 1]),
    )
    assert result.output_token_ids.tolist() == [[1, PAD, PAD]]
