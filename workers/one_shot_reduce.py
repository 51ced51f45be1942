"""All-reduce of small tensors by peer-to-peer reads, for which NCCL's rings take too long.

Every rank leaves its part where the others can read it, then reads all parts and adds them: one
exchange, where a ring has one a rank. The kernel is that of torch's symmetric memory
(`one_shot_all_reduce`, by plain loads; its `multimem` ops, NVLink multicast, are never used).
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

MAX_BYTES = 512 * 1024  # beyond it reading everything of every rank costs more than a ring
DTYPES = (torch.bfloat16, torch.float32)  # that the kernel adds


class OneShotReduce:
    """Of the ranks of the default process group, which are on one host, each with its own GPU.

    All ranks add in the order of the ranks, so all get the same bits. No host synchronisation, and
    one buffer for ever: fit for graphs. Every rank must construct it, and raises RuntimeError where
    its GPU cannot read those of the others.
    """

    def __init__(self, device: torch.device, max_bytes: int = MAX_BYTES) -> None:
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        # A rank that is shown its own GPU alone calls it cuda:0, as the others call theirs. Two
        # ranks on one GPU never get here: NCCL refuses them.
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        self._add = torch.ops.symm_mem.one_shot_all_reduce_out
        self._group_name = dist.group.WORLD.group_name  # type: ignore[union-attr]
        self._buffer = symm_mem.empty(max_bytes, dtype=torch.uint8, device=device)
        symm_mem.rendezvous(self._buffer, self._group_name)

    def takes(self, x: Tensor) -> bool:
        """Whether it sums tensors like this. By what is the same on every rank, and that alone."""
        size = x.numel() * x.element_size()
        return x.dtype in DTYPES and 0 < size <= len(self._buffer) and size % 16 == 0

    def __call__(
        self,
        x: Tensor,  # contiguous, one that it takes
    ) -> Tensor:
        """The sum over the ranks, in place."""
        flat = x.view(-1)
        assert flat.data_ptr() % 16 == 0, "the kernel writes 16 bytes at a time"
        # NOTE: not the op that copies as well: it signals the peers before its block has copied.
        # The last sum has ended on every rank, and so has the reading of the buffer.
        part = self._buffer[: x.numel() * x.element_size()].view(x.dtype)
        part.copy_(flat)
        self._add(part, "sum", self._group_name, flat)
        return x

    def is_right(self, rank: int, size: int) -> bool:
        """Whether small integers are added exactly. Called by all ranks."""
        right = []
        for dtype in DTYPES:
            for length in (16 // dtype.itemsize, len(self._buffer) // dtype.itemsize):
                i = torch.arange(length, device=self._buffer.device) % 8
                want = (size * i + size * (size - 1) // 2).to(dtype)
                right.append(torch.equal(self((i + rank).to(dtype)), want))
        return all(right)
