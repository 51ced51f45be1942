import random

import pytest

from spectrue.workers.block_manager import BlockManager, BlockTable


def fill(blocks: BlockManager, token_ids: list[int], num_draft_computed: int = 0) -> BlockTable:
    table = BlockTable()
    blocks.match_prefix(table, token_ids)
    assert blocks.grow(table, len(token_ids))
    blocks.publish(table, token_ids, len(token_ids), num_draft_computed)
    return table


def test_a_prefix_is_shared_and_survives_its_owner() -> None:
    blocks = BlockManager(8, 4)
    prompt = list(range(10))
    first = fill(blocks, prompt)
    second = BlockTable()
    assert blocks.match_prefix(second, [*prompt, 99]) == (8, 0)
    assert second.block_ids == first.block_ids[:2]
    blocks.free(first)
    blocks.free(second)
    assert blocks.num_used == 0  # cached blocks with no owner are free
    third = BlockTable()
    assert blocks.match_prefix(third, prompt) == (8, 0)
    blocks.check_integrity([third])


def test_a_hit_leaves_a_token_to_compute() -> None:
    blocks = BlockManager(8, 4)
    fill(blocks, list(range(8)))
    table = BlockTable()
    assert blocks.match_prefix(table, list(range(8))) == (4, 0)


def test_a_drafter_with_hidden_states_recomputes_the_last_block() -> None:
    blocks = BlockManager(8, 4)
    fill(blocks, list(range(12)))
    assert blocks.match_prefix(BlockTable(), list(range(13)), recompute_last_block=True) == (8, 0)


def test_draft_kv_is_known_as_far_as_it_was_computed() -> None:
    blocks = BlockManager(8, 4)
    fill(blocks, list(range(12)), num_draft_computed=9)
    assert blocks.match_prefix(BlockTable(), list(range(13))) == (12, 8)


def test_another_prefix_does_not_hit() -> None:
    blocks = BlockManager(8, 4)
    fill(blocks, [1, 2, 3, 4, 5, 6, 7, 8])
    # The second block holds the same tokens, but after another first block.
    assert blocks.match_prefix(BlockTable(), [0, 2, 3, 4, 5, 6, 7, 8, 9]) == (0, 0)


def test_empty_blocks_are_taken_before_cached_ones() -> None:
    blocks = BlockManager(3, 2)
    cached = fill(blocks, [1, 2])
    blocks.free(cached)
    assert blocks.grow(BlockTable(), 4)
    assert blocks.match_prefix(BlockTable(), [1, 2, 3]) == (2, 0)


def test_growing_too_far_changes_nothing() -> None:
    blocks = BlockManager(4, 2)
    table = BlockTable()
    assert not blocks.grow(table, 9)
    assert (blocks.num_free, table.block_ids) == (4, [])


def test_without_prefix_caching_nothing_is_found() -> None:
    blocks = BlockManager(8, 4, enable_prefix_caching=False)
    fill(blocks, list(range(8)))
    assert blocks.match_prefix(BlockTable(), list(range(9))) == (0, 0)


@pytest.mark.parametrize("seed", range(20))
def test_random_operations_account_for_every_block(seed: int) -> None:
    rng = random.Random(seed)
    blocks = BlockManager(rng.randint(4, 24), rng.choice([1, 2, 4]))
    live: list[tuple[BlockTable, list[int]]] = []
    for _ in range(300):
        if live and rng.random() < 0.4:
            table, _ = live.pop(rng.randrange(len(live)))
            blocks.free(table)
        elif live and rng.random() < 0.5:
            table, token_ids = rng.choice(live)
            token_ids.append(rng.randrange(2))
            if blocks.grow(table, len(token_ids)):
                blocks.publish(table, token_ids, len(token_ids), rng.randrange(len(token_ids)))
            else:
                token_ids.pop()
        else:
            table = BlockTable()
            token_ids = [rng.randrange(2) for _ in range(rng.randint(1, 12))]
            hit, _ = blocks.match_prefix(table, token_ids)
            assert hit < len(token_ids)
            if blocks.grow(table, len(token_ids)):
                blocks.publish(table, token_ids, len(token_ids), 0)
                live.append((table, token_ids))
            else:
                blocks.free(table)
        blocks.check_integrity([table for table, _ in live])
        assert blocks.num_free + blocks.num_used == blocks.num_blocks


def test_cached_blocks_hold_what_their_hash_says() -> None:
    """Whatever is evicted and reused, a hit returns blocks that were filled with those tokens."""
    rng = random.Random(0)
    blocks = BlockManager(6, 2)
    content: dict[int, tuple[int, ...]] = {}  # block -> the whole prefix it was written for
    for _ in range(500):
        table, token_ids = BlockTable(), [rng.randrange(2) for _ in range(rng.randint(1, 8))]
        hit, _ = blocks.match_prefix(table, token_ids)
        for i, block_id in enumerate(table.block_ids):
            assert content[block_id] == tuple(token_ids[: 2 * (i + 1)])
        assert blocks.grow(table, len(token_ids))
        for i in range(hit // 2, len(token_ids) // 2):
            content[table.block_ids[i]] = tuple(token_ids[: 2 * (i + 1)])
        blocks.publish(table, token_ids, len(token_ids), 0)
        blocks.free(table)
