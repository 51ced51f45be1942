"""Decides who runs in a step: continuous batching, chunked prefill, preemption. No tensors.

A request is decoding when only its last committed token has no KV yet; then it is fed that token
and k drafts. Otherwise it is prefilling (a new prompt, or everything again after a preemption)
and is fed as many tokens as the step's budget has left.
"""

from __future__ import annotations

import enum
from collections import Counter, deque

from spectrue.workers.block_manager import BlockManager, BlockTable
from spectrue.workers.core import NewRequest, Request, ScheduledRequest, SchedulerOutput
from spectrue.workers.depth import DepthPolicy
from spectrue.workers.tree import TreeShape


class RequestStatus(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class RequestState:
    """A request's progress. `token_ids` are committed; the first `num_computed_tokens` have KV."""

    def __init__(self, request: Request, seed: int, max_len: int, max_draft_tokens: int) -> None:
        self.request = request
        self.seed = seed
        self.max_len = max_len  # tokens, prompt included, at which it ends with "length"
        self.max_draft_tokens = max_draft_tokens
        self.status = RequestStatus.WAITING
        self.token_ids = list(request.prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_draft_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.table = BlockTable()
        self.num_sent_blocks = 0  # of the table, known to the workers
        self.slot = -1

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def decoding(self) -> bool:
        return self.num_uncomputed_tokens == 1


class Scheduler:
    """Owns the queues and, through the block manager, the KV blocks."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        recompute_last_block: bool = False,
        depth: DepthPolicy | None = None,  # None: every request gets its own k
        tree: TreeShape | None = None,  # None: drafts are chains
    ) -> None:
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.recompute_last_block = recompute_last_block
        self.depth = depth
        self.tree = tree
        self.depths: Counter[int] = Counter()  # steps with decoding requests, by chosen depth
        self.waiting: deque[RequestState] = deque()
        self.running: list[RequestState] = []  # in order of admission; the last is preempted first
        self.slots: list[RequestState | None] = [None] * max_num_seqs
        self.num_preemptions = 0

    def add(self, state: RequestState) -> None:
        self.waiting.append(state)

    def schedule(self) -> SchedulerOutput:
        """Plan one step. Decoding requests go first, so that a long prompt never stalls them."""
        scheduled: list[ScheduledRequest] = []
        new: list[NewRequest] = []
        budget = self.max_num_batched_tokens

        num_preemptions = self.num_preemptions
        decoding = [s for s in self.running if s.decoding]
        # Drafts may fill the budget, unless a prompt waits for its turn: then half is left to it.
        free_slot = len(self.running) < self.max_num_seqs
        prompts = len(decoding) < len(self.running) or (self.waiting and free_slot)
        share = max(1, budget // (2 if prompts else 1) // max(1, len(decoding)))
        # Before anything is drafted: it may depend on past steps only.
        depth = None
        if self.depth is not None and decoding:
            depth = self.depth.choose(len(decoding))
            self.depths[depth] += 1
        for state in decoding:
            if state.status is not RequestStatus.RUNNING:
                continue  # preempted by an earlier one of this loop
            k, tree_depth, room = self._drafts(state, depth, share - 1)
            planned = {s.slot for s in scheduled}
            # Drafts are given up before anybody is preempted for them.
            while not (self._grow(state, 1, room) or self._grow(state, 1, room := 0)):
                victim = next(s for s in reversed(self.running) if s.slot not in planned)
                self._preempt(victim)
                if victim is state:
                    break
            else:
                if not room:
                    k = tree_depth = 0
                scheduled.append(self._plan(state, 1, k, tree_depth))
                budget -= 1 + k

        prefilling = [s for s in self.running if not s.decoding]
        for state in prefilling:
            if not self._schedule_chunk(state, budget, scheduled):
                continue
            budget -= scheduled[-1].num_scheduled_tokens

        # Blocks that a preemption freed belong to those who run, not to the one preempted.
        preempted = self.num_preemptions > num_preemptions
        while self.waiting and len(self.running) < self.max_num_seqs and budget and not preempted:
            if not self._admit(self.waiting[0], new):
                break
            if not self._schedule_chunk(self.running[-1], budget, scheduled):
                break
            budget -= scheduled[-1].num_scheduled_tokens

        if not scheduled and self.running:
            # Prompts that wait for each other's blocks: the last one gives way.
            assert len(self.running) > 1, "the pool holds one request of any length"
            self._preempt(self.running[-1])
            return self.schedule()
        return SchedulerOutput(scheduled=tuple(scheduled), new_requests=tuple(new))

    def schedule_ahead(self, plan: SchedulerOutput) -> SchedulerOutput | None:
        """The step after `plan`, which is in flight and commits a token or more a request, unseen.

        None where it is not known yet: a prompt has its turn, or memory is short. A request that
        `plan` will end by its length is left out; one that it ends otherwise takes part in vain.
        Room is for all drafts in flight, accepted or not: near a request's end it drafts less.
        """
        if len(plan.scheduled) != len(self.running):
            return None
        if self.waiting and len(self.running) < self.max_num_seqs:
            return None
        if self.tree is not None or not all(s.decoding for s in self.running):
            return None
        drafts = {s.slot: s.num_draft_tokens for s in plan.scheduled}
        states = [s for s in self.running if len(s.token_ids) + 1 < s.max_len]
        if not states:
            return None
        depth = None if self.depth is None else self.depth.choose(len(states))
        share = max(1, self.max_num_batched_tokens // len(states))
        scheduled = []
        for state in states:
            most = 1 + drafts[state.slot]  # that the step in flight commits
            k = max(0, min(self._drafts(state, depth, share - 1)[0], self._room(state) - most))
            if not self._grow(state, 1 + most, k) and not self._grow(state, 1 + most, k := 0):
                return None
            scheduled.append((state, k))
        if depth is not None:
            self.depths[depth] += 1
        return SchedulerOutput(
            scheduled=tuple(self._plan(state, 1, k, ahead=True) for state, k in scheduled)
        )

    def commit(
        self, state: RequestState, num_computed: int, token_ids: list[int], num_draft_computed: int
    ) -> None:
        """Record that a step computed `num_computed` more tokens and committed `token_ids`.

        KV of rejected drafts is rolled back by not counting it: the next step overwrites it.
        """
        state.num_computed_tokens += num_computed
        state.num_draft_computed_tokens = num_draft_computed
        state.token_ids.extend(token_ids)
        # A stop may have cut tokens whose KV was computed.
        state.num_computed_tokens = min(state.num_computed_tokens, len(state.token_ids))
        self.blocks.publish(
            state.table,
            state.token_ids,
            state.num_computed_tokens,
            min(num_draft_computed, state.num_computed_tokens),
        )

    def finish(self, state: RequestState, faulty: bool = False) -> None:
        """End a request. KV of a `faulty` one is in doubt: nobody else is given it."""
        if state.status is RequestStatus.RUNNING:
            self.running.remove(state)
            if faulty:
                self.blocks.forget(state.table)
            self._release(state)
        elif state.status is RequestStatus.WAITING:
            self.waiting.remove(state)
        state.status = RequestStatus.FINISHED

    def check_integrity(self) -> None:
        """Raise AssertionError unless queues, slots and blocks agree with each other."""
        self.blocks.check_integrity([s.table for s in self.running])
        assert [s for s in self.slots if s is not None and s not in self.running] == []
        for state in self.running:
            assert state.status is RequestStatus.RUNNING
            assert self.slots[state.slot] is state
            assert 0 <= state.num_computed_tokens < len(state.token_ids) <= state.max_len
            room = len(state.table.block_ids) * self.blocks.block_size
            assert state.num_computed_tokens <= room
            assert len(state.table.hashes) * self.blocks.block_size <= state.num_computed_tokens
        for state in self.waiting:
            assert state.status is RequestStatus.WAITING
            assert not state.table.block_ids
            assert state.slot == -1

    def _drafts(self, state: RequestState, depth: int | None, most: int) -> tuple[int, int, int]:
        """Drafts of a decoding request, the levels of their tree (0: a chain), their KV slots."""
        k = min(state.max_draft_tokens, self._room(state))
        if depth is not None:
            k = min(k, depth)
        if self.tree is None:
            k = min(k, most)
            return k, 0, k
        num_nodes = min(self.tree.num_nodes(k), most)
        levels = min(k, num_nodes)
        return num_nodes, levels, self.tree.num_slots(num_nodes, levels)

    def _room(self, state: RequestState) -> int:
        """Drafts that may be accepted before one more token is the last."""
        return state.max_len - len(state.token_ids) - 1

    def _grow(self, state: RequestState, num_tokens: int, k: int) -> bool:
        return self.blocks.grow(state.table, state.num_computed_tokens + num_tokens + k)

    def _schedule_chunk(
        self, state: RequestState, budget: int, scheduled: list[ScheduledRequest]
    ) -> bool:
        """Plan as much of a prompt as budget and free blocks allow; False if that is nothing."""
        size = self.blocks.block_size
        room = (len(state.table.block_ids) + self.blocks.num_free) * size
        chunk = min(state.num_uncomputed_tokens, budget, room - state.num_computed_tokens)
        if chunk <= 0:
            return False
        grown = self._grow(state, chunk, 0)
        assert grown
        scheduled.append(self._plan(state, chunk, 0))
        return True

    def _admit(self, state: RequestState, new: list[NewRequest]) -> bool:
        """Move a waiting request to a slot if its whole prompt fits now."""
        cached, draft_cached = self.blocks.match_prefix(
            state.table, state.token_ids, self.recompute_last_block
        )
        if self.blocks.num_missing(state.table, len(state.token_ids)) > self.blocks.num_free:
            self.blocks.free(state.table)
            return False
        self.blocks.count_prefix(len(state.token_ids), cached)
        self.waiting.popleft()
        state.status = RequestStatus.RUNNING
        state.slot = self.slots.index(None)
        self.slots[state.slot] = state
        state.num_computed_tokens = cached
        state.num_draft_computed_tokens = draft_cached
        if state.num_preemptions == 0:
            state.num_cached_tokens = min(cached, state.num_prompt_tokens)
        self.running.append(state)
        new.append(
            NewRequest(
                slot=state.slot,
                request=state.request,
                seed=state.seed,
                output_token_ids=tuple(state.token_ids[state.num_prompt_tokens :]),
                num_draft_computed_tokens=draft_cached,
            )
        )
        return True

    def _plan(
        self,
        state: RequestState,
        num_tokens: int,
        k: int,
        tree_depth: int = 0,
        ahead: bool = False,
    ) -> ScheduledRequest:
        new_block_ids = tuple(state.table.block_ids[state.num_sent_blocks :])
        state.num_sent_blocks = len(state.table.block_ids)
        return ScheduledRequest(
            slot=state.slot,
            num_computed_tokens=state.num_computed_tokens,
            num_scheduled_tokens=num_tokens,
            num_draft_tokens=k,
            samples=num_tokens == state.num_uncomputed_tokens,
            new_block_ids=new_block_ids,
            tree_depth=tree_depth,
            ahead=ahead,
        )

    def _preempt(self, state: RequestState) -> None:
        self.running.remove(state)
        self._release(state)
        state.status = RequestStatus.WAITING
        state.num_computed_tokens = state.num_draft_computed_tokens = 0
        state.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(state)

    def _release(self, state: RequestState) -> None:
        self.blocks.free(state.table)
        self.slots[state.slot] = None
        state.slot = -1
        state.num_sent_blocks = 0
