"""How paged attention is cut into tiles and splits on each kind of GPU."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton

MAX_SPLITS = 64
MIN_SPLIT = 128  # tokens: fewer are not worth a program
LONG_SPLIT = 4096  # tokens: a sequence of more than this a split is cut further, batch or no batch
# (kind of GPU, float32) -> largest block_m, block_n, num_stages, num_warps: what fits without
# spilling registers. NVIDIA keeps tiles in flight in shared memory, two stages each (the block
# table, then the KV); AMD keeps the next tile in registers. float32, where there is no matrix unit
# for it, is for tests.
TILES = {
    ("sm_90", False): (128, 64, 5, 8),
    ("sm_90", True): (16, 16, 1, 8),
    ("sm_80", False): (64, 32, 3, 4),
    ("sm_80", True): (16, 16, 1, 8),
    ("wave64", False): (64, 32, 2, 4),
    ("wave64", True): (32, 16, 2, 4),
    ("wave32", False): (64, 16, 1, 8),
    ("wave32", True): (16, 16, 1, 8),
}
# The same for heads of more than 128, not float32.
WIDE_TILES = {
    "sm_90": (64, 32, 3, 8),
    "sm_80": (64, 32, 3, 8),
    "wave64": (64, 16, 2, 4),
    "wave32": (64, 16, 1, 8),
}


@dataclass(frozen=True)
class Plan:
    """How the work is cut. A row's result depends on this and on its own request alone."""

    block_m: int  # rows of a tile: queries x fold
    block_n: int  # KV tokens of a tile
    num_splits: int
    num_warps: int
    num_stages: int
    chunk_d: int = 0  # dims of a head that are multiplied at once; 0: all


def make_plan(
    *,
    batch: int,
    num_tokens: int,
    fold: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    max_query_len: int,
    max_seq_len: int,
    units: int,
    kind: str,
) -> Plan:
    """From host-known sizes alone, in coarse steps: never from the lengths of single requests."""
    half = itemsize < 4
    wide = head_dim > 128
    tile = WIDE_TILES[kind] if wide and half else TILES[kind, not half]
    block_m, block_n, num_stages, num_warps = tile
    block_m = min(max(triton.next_power_of_2(max_query_len * fold), 16), block_m)
    block_m = max(block_m, triton.next_power_of_2(fold))
    busy = 8  # programs a unit that hide the latency of memory
    if block_m < 64 and half:
        num_warps = 4
        if kind.startswith("sm_"):  # measured on an H200: docs/performance.md
            num_warps, num_stages, busy = 2, 3, 4
    if kind == "sm_90" and block_m == 64 and half and not wide:
        num_warps = 4  # a group of 4 warps multiplies 64 rows
    queries = block_m // fold
    tiles = batch if max_query_len <= queries else num_tokens // queries + batch
    wanted = units * (busy if block_m < 64 else 2) // max(tiles * num_kv_heads, 1)
    wanted = max(wanted, triton.cdiv(max_seq_len, LONG_SPLIT))
    num_splits = max(min(wanted, triton.cdiv(max_seq_len, MIN_SPLIT), MAX_SPLITS), 1)
    num_splits = 1 << num_splits.bit_length() - 1
    # RDNA 3 holds queries and keys twice: beside the sums, its registers do not take whole ones.
    chunk_d = 64 if kind == "wave32" and half else 0
    return Plan(block_m, block_n, num_splits, num_warps, num_stages, chunk_d)


@functools.cache
def gpu_kind(device: torch.device) -> tuple[int, str]:
    """Its compute units and its kind."""
    if device.type != "cuda":
        return 64, "wave64"  # AMD's code, interpreted or executed on the CPU: tests
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is None:
        kind = "sm_90" if properties.major >= 9 else "sm_80"
        return properties.multi_processor_count, kind
    return properties.multi_processor_count, f"wave{properties.warp_size}"
