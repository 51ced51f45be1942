"""Where tokens are and what a step commits, counted from lengths, against loops written here."""

from __future__ import annotations

import pytest
import torch

from spectrue.kernels.dispatch import advance_slots, place_tokens

BLOCK_SIZE = 4


@pytest.mark.core
@pytest.mark.parametrize("size", [1, 7, 300])
def test_places(size: int) -> None:
    generator = torch.Generator().manual_seed(size)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        values = torch.randint(low, high, shape, generator=generator, device="cpu")
        return values.to(torch.empty(0).device)

    lengths, tables = draw(0, 30, 6), draw(0, 1000, 5, 8).int()
    offset, base, request = draw(-3, 9, size), draw(0, 6, size), draw(-1, 5, size)
    positions, slots, narrow = place_tokens(offset, base, lengths, request, tables, BLOCK_SIZE)
    for i in range(size):
        position = max(int(lengths[base[i]]) + int(offset[i]), 0)
        block, owner = position // BLOCK_SIZE, int(request[i])
        position = min(position, 8 * BLOCK_SIZE - 1)  # tables of rotations end there
        slot = -1
        if owner >= 0 and block < 8:
            slot = int(tables[owner, block]) * BLOCK_SIZE + position % BLOCK_SIZE
        assert (int(positions[i]), int(slots[i]), int(narrow[i])) == (position, slot, position)
    assert narrow.dtype == torch.int32
    assert size < 300 or {-1} < set(slots.tolist())  # both kinds were met


@pytest.mark.core
def test_a_step_is_committed() -> None:
    """Two parts of the decision, requests of different size, a request that is not there."""
    width = 20  # wider than a program's block
    of_walk = [5, 6, -1, *[-1] * 17, 40, *range(41, 60)]  # tokens of two requests
    decided = torch.tensor([*of_walk, 1, 19, 0, 0, 7, -1, 0, 99])
    counts, accepted = [3, 20, 1], [1, 19, 0]
    tokens_at, accepted_at = [0, width, 44, 0], [40, 41, 46, 0]
    slots, before = [4, 0, 2, 6], [10, 30, 50, 0]
    tokens, lengths = torch.zeros(7, 3, dtype=torch.int64), torch.zeros(8, dtype=torch.int64)
    starts = [0, 3, 23, 24, 24]
    following, last = advance_slots(
        decided,
        torch.tensor(tokens_at),
        torch.tensor(accepted_at),
        torch.tensor(before),
        torch.tensor(slots),
        torch.tensor(starts, dtype=torch.int32),
        27,
        tokens,
        lengths,
    )
    want = [5, 6, 0, *range(40, 60), 7, 0, 0, 0]
    assert following.tolist() == want
    assert last.tolist()[:3] == [s + a for s, a in zip(starts, accepted, strict=False)]
    assert 0 <= last[3] < 27  # read, though nobody is there
    assert [tokens[s, 0].item() for s in slots[:3]] == [6, 59, 7]
    assert [lengths[s].item() for s in slots[:3]] == [12, 50, 51]
    assert not tokens[:, 1:].any()
    assert not tokens[[1, 3, 5]].any()
    assert not lengths[[1, 3, 5, 7]].any()
    assert sum(counts) == starts[3]


@pytest.mark.core
def test_more_accepted_than_there_are_rows() -> None:
    """What a request that is not there finds where its count would be is no count."""
    tokens, lengths = torch.zeros(2, 1, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    index = torch.zeros(1, dtype=torch.int64)
    for found in (900, -5):
        decided = torch.tensor([7, 8, found])
        following, last = advance_slots(
            decided,
            index,
            index + 2,
            index,
            index + 1,
            torch.tensor([0, 2], dtype=torch.int32),
            2,
            tokens,
            lengths,
        )
        assert following.tolist() == [7, 8]
        assert last.item() == (1 if found > 0 else 0)


def test_wrong_arguments_are_named() -> None:
    index, tables = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match="offset, base and request"):
        place_tokens(index, index[:1], index, index, tables, 4)
    with pytest.raises(ValueError, match="block_tables"):
        place_tokens(index, index, index, index, tables.t(), 4)
    cu = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="slots must"):
        advance_slots(index, index, index, index, index[:1], cu, 2, index[:, None], index)
