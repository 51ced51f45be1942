"""KV blocks: allocation, sharing by prefix hash, and their accounting. Integers only, no tensors.

A block is in one of three states: owned by `ref_count` > 0 requests; free but still cached (its
hash can be hit, it is evicted when nothing emptier is left); free and empty. A cached block
without an owner counts as free.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

_ROOT = b"spectrue"


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Chain hash of one full block: equal iff the whole prefix up to its end is equal."""
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


class Block:
    __slots__ = ("block_hash", "block_id", "has_draft_kv", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: bytes | None = None
        self.has_draft_kv = False  # the drafter's KV is valid too, not only the target's


class BlockTable:
    """One request's blocks in order, and the hashes of those that are full and committed."""

    __slots__ = ("block_ids", "hashes", "num_drafted")

    def __init__(self) -> None:
        self.block_ids: list[int] = []
        self.hashes: list[bytes] = []  # of the published prefix, one a block
        self.num_drafted = 0  # leading blocks that have the drafter's KV


class BlockManager:
    """Allocator of `num_blocks` blocks of `block_size` tokens with prefix caching."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True):
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self.blocks = [Block(i) for i in range(num_blocks)]
        # Oldest first: blocks are taken from the front and returned to the back, so a cached
        # block survives as long as possible. Empty blocks are put in front of the cached ones.
        self._free: OrderedDict[int, None] = OrderedDict((i, None) for i in range(num_blocks))
        self._cached: dict[bytes, int] = {}
        self.prefix_queries = 0  # tokens looked up
        self.prefix_hits = 0  # tokens found

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match_prefix(
        self, table: BlockTable, token_ids: Sequence[int], recompute_last_block: bool = False
    ) -> tuple[int, int]:
        """Take the cached blocks of the longest known prefix into an empty table.

        At least one token is left to compute, because its logits are needed. With
        `recompute_last_block` one more block is, for a drafter that needs its hidden states.
        Returns the tokens found, and how many of them have the drafter's KV too.
        """
        assert not table.block_ids
        if not self.enable_prefix_caching:
            return 0, 0
        parent, found = _ROOT, []
        for start in range(0, len(token_ids) - self.block_size, self.block_size):
            parent = hash_block(parent, token_ids[start : start + self.block_size])
            if parent not in self._cached:
                break
            found.append((self._cached[parent], parent))
        if recompute_last_block:
            found = found[:-1]
        drafted = True
        for block_id, block_hash in found:
            block = self.blocks[block_id]
            if block.ref_count == 0:
                del self._free[block_id]
            block.ref_count += 1
            table.block_ids.append(block_id)
            table.hashes.append(block_hash)
            drafted = drafted and block.has_draft_kv
            table.num_drafted += drafted
        return len(found) * self.block_size, table.num_drafted * self.block_size

    def count_prefix(self, num_queried: int, num_found: int) -> None:
        self.prefix_queries += num_queried
        self.prefix_hits += num_found

    def num_missing(self, table: BlockTable, num_tokens: int) -> int:
        """Blocks that `grow` would have to take so that the table holds `num_tokens` tokens."""
        return max(0, self.blocks_for(num_tokens) - len(table.block_ids))

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Give the table room for `num_tokens` tokens; False, and no change, if none is left."""
        missing = self.num_missing(table, num_tokens)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            block_id, _ = self._free.popitem(last=False)
            block = self.blocks[block_id]
            self._evict(block)
            block.ref_count = 1
            table.block_ids.append(block_id)
        return True

    def publish(
        self,
        table: BlockTable,
        token_ids: Sequence[int],
        num_computed: int,
        num_draft_computed: int,
    ) -> None:
        """Offer to others the blocks whose every token is committed and computed.

        `token_ids` are the request's committed tokens; their first `num_computed` have valid KV.
        """
        if not self.enable_prefix_caching:
            return
        size = self.block_size
        for i in range(len(table.hashes), num_computed // size):
            parent = table.hashes[-1] if table.hashes else _ROOT
            block_hash = hash_block(parent, token_ids[i * size : (i + 1) * size])
            table.hashes.append(block_hash)
            # Another request may have published the same prefix first: ours stays private.
            if block_hash not in self._cached:
                self._cached[block_hash] = table.block_ids[i]
                self.blocks[table.block_ids[i]].block_hash = block_hash
        num_drafted = min(len(table.hashes), num_draft_computed // size)
        for block_id in table.block_ids[table.num_drafted : num_drafted]:
            self.blocks[block_id].has_draft_kv = True
        table.num_drafted = max(table.num_drafted, num_drafted)

    def free(self, table: BlockTable) -> None:
        """Give the table's blocks back; those with a hash stay cached until they are needed."""
        for block_id in reversed(table.block_ids):  # the start of a prefix outlives its end
            block = self.blocks[block_id]
            assert block.ref_count > 0
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free[block_id] = None
                if block.block_hash is None:
                    block.has_draft_kv = False
                    self._free.move_to_end(block_id, last=False)
        table.block_ids.clear()
        table.hashes.clear()
        table.num_drafted = 0

    def forget(self, table: BlockTable) -> None:
        """Let no later request hit these blocks; who holds them keeps them."""
        for block_id in table.block_ids:
            self._evict(self.blocks[block_id])

    def _evict(self, block: Block) -> None:
        if block.block_hash is not None:
            del self._cached[block.block_hash]
            block.block_hash = None
        block.has_draft_kv = False

    def check_integrity(self, tables: Sequence[BlockTable]) -> None:
        """Raise AssertionError unless `tables` account for every block exactly."""
        counts = [0] * self.num_blocks
        for table in tables:
            assert len(set(table.block_ids)) == len(table.block_ids), "a block twice in a table"
            assert len(table.hashes) <= len(table.block_ids)
            for block_id in table.block_ids:
                counts[block_id] += 1
        for block in self.blocks:
            i = block.block_id
            assert block.ref_count == counts[i], f"block {i}: {block.ref_count} != {counts[i]}"
            assert (i in self._free) == (block.ref_count == 0), f"block {i}: free and owned"
            if block.block_hash is not None:
                assert self._cached.get(block.block_hash) == i, f"block {i}: hash not its own"
        for block_hash, i in self._cached.items():
            assert self.blocks[i].block_hash == block_hash, f"block {i}: stale hash"
