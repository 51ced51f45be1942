"""Paged attention for a list of plans against torch's flash SDPA on contiguous tensors, one GPU.

    PYTHONPATH=.typing python benchmarks/attention_sweep.py
    PYTHONPATH=.typing python benchmarks/attention_sweep.py --case decode --plans 16:64:4:4:5

A plan is block_m:block_n:num_splits:num_warps:num_stages. Both sides run inside a CUDA graph of
several calls, each on another pool of KV, so that none is found in L2; the figure is the median of
CUDA events around a replay, divided by the number of calls. Each plan is checked against SDPA.
Exit status 1 if the kernel's own plan is more than 10 % slower than SDPA for decode or verify.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from spectrue.kernels import triton_attention
from spectrue.kernels.dispatch import paged_attention
from spectrue.kernels.triton_attention import Plan

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
DTYPE = torch.bfloat16
COLD_BYTES = 256 << 20  # of KV that pass between two uses of a pool: several L2 caches


@dataclass(frozen=True)
class Case:
    batch: int
    query_len: int
    context: int  # the queries included

    @property
    def kv_bytes(self) -> int:
        return self.batch * self.context * 2 * NUM_KV_HEADS * HEAD_DIM * DTYPE.itemsize


CASES = {
    "decode": Case(32, 1, 2048),
    "verify": Case(32, 4, 2048),
    "decode1": Case(1, 1, 2048),
    "verify1": Case(1, 4, 2048),
    "long": Case(4, 4, 32768),
    "prefill": Case(1, 2048, 2048),
}
BAR = {"decode": 1.1, "verify": 1.1}  # of SDPA's time


def plans(case: Case) -> Iterator[Plan]:
    fold = NUM_HEADS // NUM_KV_HEADS
    if case.query_len * fold <= 16:
        splits = (1, 2, 4, 8) if case.batch > 8 else (8, 16, 32)
        for block_n, split, warps, stages in itertools.product(
            (32, 64, 128), splits, (2, 4), (3, 5, 7)
        ):
            if block_n * stages <= 5 * 64:  # shared memory
                yield Plan(16, block_n, split, warps, stages)
    else:
        for block_m, block_n, warps, stages in itertools.product(
            (64, 128), (32, 64, 128), (4, 8), (2, 3, 5)
        ):
            if block_n * stages <= 5 * 64:
                yield Plan(block_m, block_n, 1, warps, stages)


@dataclass
class Inputs:
    query: Tensor  # [tokens, H, D]
    pools: list[Tensor]  # each [num_slots, 2, Hkv, D]
    tables: Tensor  # [batch, blocks], shuffled
    cu_query_lens: Tensor
    seq_lens: Tensor

    @staticmethod
    def make(case: Case) -> Inputs:
        blocks = case.context // BLOCK_SIZE
        copies = max(2, min(-(-COLD_BYTES // case.kv_bytes) + 1, 32))
        shape = (case.batch * case.context, 2, NUM_KV_HEADS, HEAD_DIM)
        return Inputs(
            query=torch.randn(case.batch * case.query_len, NUM_HEADS, HEAD_DIM, dtype=DTYPE),
            pools=[torch.randn(shape, dtype=DTYPE) for _ in range(copies)],
            tables=torch.randperm(case.batch * blocks).int().view(case.batch, blocks),
            cu_query_lens=torch.arange(case.batch + 1, dtype=torch.int32) * case.query_len,
            seq_lens=torch.full((case.batch,), case.context, dtype=torch.int32),
        )

    def paged(self, case: Case, pool: Tensor) -> Tensor:
        return paged_attention(
            self.query,
            pool,
            block_tables=self.tables,
            block_size=BLOCK_SIZE,
            cu_query_lens=self.cu_query_lens,
            seq_lens=self.seq_lens,
            max_query_len=case.query_len,
            max_seq_len=case.context,
        )


def contiguous(case: Case, inputs: Inputs, pool: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of a pool in the order of positions, [batch, Hkv, context, D] as flash reads them."""
    blocks = pool.view(-1, BLOCK_SIZE, 2, NUM_KV_HEADS, HEAD_DIM)[inputs.tables.long()]
    key, value = blocks.flatten(1, 2).unbind(2)
    return key.contiguous().transpose(1, 2), value.contiguous().transpose(1, 2)


def sdpa(case: Case, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Without a mask for verify rows (the work is the same; torch's flash takes no such mask)."""
    heads = query.view(case.batch, case.query_len, NUM_HEADS, HEAD_DIM).transpose(1, 2)
    causal = case.query_len == case.context
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(heads, key, value, is_causal=causal, enable_gqa=True)
    return out.transpose(1, 2).reshape(len(query), -1)


def microseconds(calls: Sequence[Callable[[], Tensor]], repeats: int) -> float:
    """The median time of a call, in a graph of all of them, long enough to hide the launch."""
    rounds = max(1, 64 // len(calls))
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in list(calls) * rounds:
            call()
    times: list[float] = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (rounds * len(calls)))
    return statistics.median(times[3:])


def check(case: Case, inputs: Inputs) -> float:
    """The largest difference to attention in float32 of the first requests and heads."""
    key, value = contiguous(case, inputs, inputs.pools[0])
    batch = min(case.batch, 2)
    query = inputs.query.view(case.batch, case.query_len, NUM_HEADS, HEAD_DIM)[:batch]
    seen = torch.ones(case.query_len, case.context, dtype=torch.bool)
    expected = F.scaled_dot_product_attention(
        query.transpose(1, 2).float(),
        key[:batch].float(),
        value[:batch].float(),
        seen.tril(case.context - case.query_len),
        enable_gqa=True,
    )
    got = inputs.paged(case, inputs.pools[0])[: batch * case.query_len]
    expected = expected.transpose(1, 2).reshape(got.shape)
    return float((got.float() - expected).abs().max())


def fixed(plan: Plan, **_: object) -> Plan:
    return plan


def sweep(name: str, chosen: list[Plan] | None, repeats: int, top: int) -> bool:
    case = CASES[name]
    inputs = Inputs.make(case)
    flat = [contiguous(case, inputs, pool) for pool in inputs.pools]
    floor = microseconds([partial(sdpa, case, inputs.query, *kv) for kv in flat], repeats)
    del flat
    print(f"\n{name}: {case}, {case.kv_bytes / 1e6:.0f} MB of KV; SDPA flash {floor:.1f} us")
    own = triton_attention._plan
    rows: list[tuple[float, str, float, Plan | None]] = []
    for plan in [None, *(chosen or plans(case))]:
        if plan is not None:
            triton_attention._plan = partial(fixed, plan)
        try:
            error = check(case, inputs)
            calls = [partial(inputs.paged, case, pool) for pool in inputs.pools]
            took = microseconds(calls, repeats)
            rows.append((took, "" if error < 0.02 else "WRONG", error, plan))
        except Exception as problem:  # a plan that does not fit shared memory
            print(f"  {plan}: {str(problem).splitlines()[0][:90]}")
        finally:
            triton_attention._plan = own
    print(f"  {'us':>8} {'x SDPA':>7} {'GB/s':>6} {'error':>8}  plan")
    default = next((row for row in rows if row[3] is None), None)
    best = sorted(rows, key=lambda row: row[0])[:top]
    for took, wrong, error, plan in [*filter(None, [default]), *best]:
        speed = case.kv_bytes / took / 1e3
        label = plan or "its own"
        print(f"  {took:8.1f} {took / floor:7.2f} {speed:6.0f} {error:8.5f}  {label} {wrong}")
    return default is not None and default[1] == "" and default[0] <= floor * BAR.get(name, 1e9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--plans", nargs="+", metavar="M:N:SPLITS:WARPS:STAGES")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--top", type=int, default=8)
    arguments = parser.parse_args()
    chosen = None
    if arguments.plans:
        chosen = [Plan(*map(int, text.split(":"))) for text in arguments.plans]
    torch.set_default_device("cuda")
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    good = [sweep(name, chosen, arguments.repeats, arguments.top) for name in arguments.case]
    sys.exit(not all(good))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
