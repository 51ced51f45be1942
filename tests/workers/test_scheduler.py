import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrue.workers.block_manager import BlockManager
from spectrue.workers.core import Request, SamplingParams, SchedulerOutput
from spectrue.workers.depth import FixedDepth
from spectrue.workers.scheduler import RequestState, RequestStatus, Scheduler


def make_scheduler(
    num_blocks: int = 16, block_size: int = 4, max_num_seqs: int = 4, budget: int = 16
) -> Scheduler:
    return Scheduler(
        BlockManager(num_blocks, block_size),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
    )


def make_state(
    prompt: list[int], max_tokens: int = 8, k: int = 3, request_id: str = "r"
) -> RequestState:
    request = Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(max_tokens=max_tokens),
    )
    return RequestState(request, seed=0, max_len=len(prompt) + max_tokens, max_draft_tokens=k)


def run_step(scheduler: Scheduler, plan: SchedulerOutput, accept: int = 0, token: int = 7) -> None:
    """What the engine does with a plan, for workers that accept `accept` drafts."""
    for s in plan.scheduled:
        state = scheduler.slots[s.slot]
        assert state is not None
        accepted = min(accept, s.num_draft_tokens)
        tokens = [token] * (accepted + 1) if s.samples else []
        scheduler.commit(state, s.num_scheduled_tokens + accepted, tokens, 0)
        if len(state.token_ids) >= state.max_len:
            scheduler.finish(state)
    scheduler.check_integrity()


def test_a_long_prompt_is_chunked_and_samples_once() -> None:
    scheduler = make_scheduler(budget=16)
    scheduler.add(make_state(list(range(40))))
    chunks = []
    for _ in range(3):
        plan = scheduler.schedule()
        chunks.append((plan.scheduled[0].num_scheduled_tokens, plan.scheduled[0].samples))
        run_step(scheduler, plan)
    assert chunks == [(16, False), (16, False), (8, True)]


def test_decoding_goes_on_while_a_prompt_is_chunked() -> None:
    scheduler = make_scheduler(num_blocks=64)
    scheduler.add(make_state([1], max_tokens=64))
    run_step(scheduler, scheduler.schedule())
    scheduler.add(make_state(list(range(64))))
    plan = scheduler.schedule()
    decode, chunk = plan.scheduled
    assert (decode.num_scheduled_tokens, decode.num_draft_tokens) == (1, 3)
    assert chunk.num_scheduled_tokens == 16 - 4


def test_drafts_never_pass_the_length_limit() -> None:
    scheduler = make_scheduler()
    state = make_state([1, 2], max_tokens=3)
    scheduler.add(state)
    run_step(scheduler, scheduler.schedule())
    plan = scheduler.schedule()
    assert plan.scheduled[0].num_draft_tokens == 1  # two tokens are left: one draft, one bonus
    run_step(scheduler, plan, accept=1)
    assert len(state.token_ids) == state.max_len
    assert state.status is RequestStatus.FINISHED


def test_drafts_are_given_up_before_a_neighbour_is_preempted() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    for name in ("a", "b"):
        scheduler.add(make_state([ord(name)] * 7, max_tokens=4, request_id=name))
    run_step(scheduler, scheduler.schedule())
    plan = scheduler.schedule()  # 7 tokens computed, 1 to feed: the 2 blocks are full
    assert [s.num_draft_tokens for s in plan.scheduled] == [0, 0]
    assert scheduler.num_preemptions == 0


def test_the_last_admitted_is_preempted_and_comes_back() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    states = [make_state([ord(n)] * 7, max_tokens=4, request_id=n) for n in "ab"]
    for state in states:
        scheduler.add(state)
    for _ in range(30):
        run_step(scheduler, scheduler.schedule())
        if all(s.status is RequestStatus.FINISHED for s in states):
            break
    assert [s.num_preemptions > 0 for s in states] == [False, True]
    assert all(len(s.token_ids) == s.max_len for s in states)
    assert scheduler.blocks.num_used == 0


def test_prompts_that_starve_each_other_are_untangled() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4, budget=4)
    states = [make_state([i] * 12, max_tokens=2, request_id=str(i)) for i in range(2)]
    for state in states:
        scheduler.add(state)
    for _ in range(60):
        if not (scheduler.waiting or scheduler.running):
            break
        run_step(scheduler, scheduler.schedule())
    assert all(s.status is RequestStatus.FINISHED for s in states)


def test_a_resumed_request_sends_its_output_again() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    for name in "ab":
        scheduler.add(make_state([ord(name)] * 7, max_tokens=4, request_id=name))
    seen = []
    for _ in range(30):
        if not (scheduler.waiting or scheduler.running):
            break
        plan = scheduler.schedule()
        seen += [(n.request.request_id, n.output_token_ids) for n in plan.new_requests]
        run_step(scheduler, plan)
    assert seen[:2] == [("a", ()), ("b", ())]
    assert seen[2][0] == "b"
    assert seen[2][1] == (7,) * len(seen[2][1]) != ()


@pytest.mark.parametrize("seed", range(40))
def test_random_sequences(seed: int) -> None:
    """Whatever arrives, is accepted, aborted or preempted: everything adds up and ends."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 16])
    longest = 48
    scheduler = Scheduler(
        BlockManager(-(-longest // block_size) + rng.randint(0, 8), block_size, rng.random() < 0.8),
        max_num_seqs=rng.randint(1, 6),
        max_num_batched_tokens=rng.randint(6, 40),
        recompute_last_block=rng.random() < 0.3,
    )
    live: list[RequestState] = []
    # What the workers would hold: block table and committed tokens per slot.
    tables: dict[int, list[int]] = {}
    for step in range(400):
        if step < 200 and rng.random() < 0.3:
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, 30))]
            state = make_state(
                prompt, rng.randint(1, longest - len(prompt)), rng.randint(0, 5), f"{step}"
            )
            live.append(state)
            scheduler.add(state)
        if live and rng.random() < 0.05:
            scheduler.finish(live.pop(rng.randrange(len(live))))
            scheduler.check_integrity()
        if not (scheduler.running or scheduler.waiting):
            continue
        plan = scheduler.schedule()
        assert 0 < plan.num_tokens <= scheduler.max_num_batched_tokens
        assert len({s.slot for s in plan.scheduled}) == len(plan.scheduled)
        for new in plan.new_requests:
            tables[new.slot] = []
        for s in plan.scheduled:
            planned = scheduler.slots[s.slot]
            assert planned is not None
            tables[s.slot].extend(s.new_block_ids)
            assert tables[s.slot] == planned.table.block_ids
            end = s.num_computed_tokens + s.num_scheduled_tokens + s.num_draft_tokens
            assert end <= len(tables[s.slot]) * block_size
            assert end < planned.max_len
            assert s.num_draft_tokens == 0 or s.num_scheduled_tokens == 1
        # Blocks that are written to in this step belong to one request alone.
        written = [
            tables[s.slot][position // block_size]
            for s in plan.scheduled
            for position in range(
                s.num_computed_tokens,
                s.num_computed_tokens + s.num_scheduled_tokens + s.num_draft_tokens,
            )
        ]
        owners = [b for table in (s.table.block_ids for s in scheduler.running) for b in set(table)]
        assert all(owners.count(block) == 1 for block in written)
        run_step(scheduler, plan, accept=rng.randint(0, 5), token=rng.randrange(2))
        live = [s for s in live if s.status is not RequestStatus.FINISHED]
    for _ in range(3000):
        if not (scheduler.waiting or scheduler.running):
            break
        run_step(scheduler, scheduler.schedule())
    assert not live or all(s.status is RequestStatus.FINISHED for s in live)
    assert scheduler.blocks.num_used == 0


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_whatever_the_depth_drafts_keep_to_their_limits(data: st.DataObject) -> None:
    """A new depth each step: nobody gets more drafts than it, its own k, the length limit or its
    blocks allow, and every request ends at its length."""
    max_k = data.draw(st.integers(1, 6))

    class Depth(FixedDepth):
        sizes: list[int] = []  # noqa: RUF012

        def choose(self, num_requests: int) -> int:
            self.sizes.append(num_requests)
            self.depth = data.draw(st.integers(0, max_k))
            return self.depth

    depth = Depth(0)
    depth.sizes = []
    scheduler = Scheduler(
        BlockManager(data.draw(st.integers(6, 20)), 4),
        max_num_seqs=data.draw(st.integers(1, 4)),
        max_num_batched_tokens=data.draw(st.integers(4, 30)),
        depth=depth,
    )
    lengths = data.draw(
        st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=5)
    )
    own = [data.draw(st.integers(0, max_k)) for _ in lengths]
    states = [
        make_state(list(range(p)), n, k, f"{i}")
        for i, ((p, n), k) in enumerate(zip(lengths, own, strict=True))
    ]
    for state in states:
        scheduler.add(state)
    for _ in range(400):
        if not (scheduler.waiting or scheduler.running):
            break
        asked, decoding = len(depth.sizes), sum(s.decoding for s in scheduler.running)
        plan = scheduler.schedule()
        # Once a step, for those who decode; not at all when nobody does.
        assert depth.sizes[asked:] == ([decoding] if decoding else [])
        for s in plan.scheduled:
            planned = scheduler.slots[s.slot]
            assert planned is not None
            k = s.num_draft_tokens
            assert k <= min(depth.depth, planned.max_draft_tokens) or k == 0
            end = s.num_computed_tokens + s.num_scheduled_tokens + k
            assert end <= len(planned.table.block_ids) * 4
            assert end < planned.max_len
        run_step(scheduler, plan, accept=data.draw(st.integers(0, max_k)))
    assert all(s.status is RequestStatus.FINISHED for s in states)
    assert all(len(s.token_ids) == s.max_len for s in states)
    assert sum(scheduler.depths.values()) == len(depth.sizes)


def test_without_a_depth_policy_requests_get_their_own_k() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_state([1, 2], k=2))
    run_step(scheduler, scheduler.schedule())
    assert scheduler.schedule().scheduled[0].num_draft_tokens == 2
    assert not scheduler.depths


@pytest.mark.parametrize("accept", [0, 1, 3])
def test_a_step_ahead_has_room_for_all_that_is_in_flight(accept: int) -> None:
    """Whatever the step before commits, no draft and no block passes the length limit."""
    scheduler = make_scheduler(num_blocks=64, budget=64)
    limits = [23, 20, 14]
    for i, limit in enumerate(limits):
        scheduler.add(make_state([1, 2, 3], max_tokens=limit - 3, request_id=f"r{i}"))
    run_step(scheduler, scheduler.schedule())
    plan, num_ahead, most_drafts = scheduler.schedule(), 0, 0
    while plan.scheduled:
        following = scheduler.schedule_ahead(plan)
        in_flight = {s.slot: s for s in plan.scheduled}
        if following is not None:
            num_ahead += 1
            for s in following.scheduled:
                state, before = scheduler.slots[s.slot], in_flight[s.slot]
                assert s.ahead
                assert state is not None
                longest = len(state.token_ids) + before.num_draft_tokens + 1
                assert longest + s.num_draft_tokens < state.max_len or s.num_draft_tokens == 0
                room = len(state.table.block_ids) * 4
                assert longest + s.num_draft_tokens <= room <= -(-state.max_len // 4) * 4
                most_drafts = max(most_drafts, s.num_draft_tokens)
        run_step(scheduler, plan, accept)
        plan = scheduler.schedule()
    assert num_ahead > 2
    assert most_drafts == 3
