"""One set of test functions, run on the backend that SPECTRUE_TEST_BACKEND names.

reference   plain torch on the CPU (default)
interpret   Triton's interpreter on the CPU; needs TRITON_INTERPRET=1 from the start
gfx90a, gfx942, gfx950   compiled AMD code, executed on the CPU (tests/amdgcn)
cuda        Triton on a GPU
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sized
from dataclasses import dataclass

import pytest
import torch

from spectrue.kernels import dispatch
from spectrue.kernels.fp8 import fp8_of

BACKEND = os.environ.get("SPECTRUE_TEST_BACKEND", "reference")
if BACKEND == "cuda":
    torch.set_default_device("cuda")  # before the modules make their constants


@dataclass(frozen=True)
class Tier:
    """How far a backend's parameters go: what runs on a GPU in no time takes minutes elsewhere."""

    max_vocab: int
    max_batch: int
    bf16: bool  # whether half precision is computed as on hardware
    draws: int  # of a distribution test
    exact: bool = False  # float64, and equal to the bit where the reference is

    def vocabs(self, *sizes: int) -> list[int]:
        return [size for size in sizes if size <= self.max_vocab]

    @property
    def floats(self) -> list[torch.dtype]:
        return [torch.float32, torch.float64] if self.exact else [torch.float32]


def _fp8() -> torch.dtype | None:
    if BACKEND == "cuda":
        return torch.float8_e4m3fn
    return fp8_of(BACKEND) if BACKEND.startswith("gfx") else None


TIERS = {
    "reference": Tier(max_vocab=248320, max_batch=256, bf16=True, draws=100_000, exact=True),
    "cuda": Tier(max_vocab=248320, max_batch=256, bf16=True, draws=1_000_000),
    "interpret": Tier(max_vocab=32000, max_batch=8, bf16=False, draws=1_000),
    **dict.fromkeys(
        ("gfx90a", "gfx942", "gfx950"),
        Tier(max_vocab=4097, max_batch=8, bf16=True, draws=20_000),
    ),
}
TIER = TIERS[BACKEND]
# The 8 bit floats that this backend's KV cache may have
FP8 = [dtype] if (dtype := _fp8()) else list(dispatch.FP8_DTYPES)
SLOW_BACKEND = BACKEND not in ("reference", "cuda")  # a program at a time, in Python


def rng(seed: int) -> torch.Generator:
    """A generator of the device that tensors are made on."""
    return torch.Generator(device=torch.get_default_device()).manual_seed(seed)


def spread(rows: Sized, limit: int) -> list[int]:
    """Indices of at most `limit` of the rows, evenly spaced and with the last."""
    n = len(rows)
    if n <= limit:
        return list(range(n))
    return sorted({round(i * (n - 1) / (limit - 1)) for i in range(limit)})


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _backend() -> Iterator[None]:
    if BACKEND in ("reference", "cuda"):
        yield
    elif BACKEND == "interpret":
        assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
        from .interpreter_fp8 import torch_fp8

        with dispatch.use_backend("triton"), torch_fp8():
            yield
    else:
        from spectrue.kernels.triton_launch import use_launcher
        from tests.amdgcn.launcher import launcher_for

        with dispatch.use_backend("triton"), use_launcher(launcher_for(BACKEND)):
            yield
