"""The match rule by hand: ragged batches, invalid rows, ids that are none."""

from __future__ import annotations

import pytest
import torch

from spectrue.kernels.dispatch import PLACEHOLDER_TOKEN_ID, verify_match

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
