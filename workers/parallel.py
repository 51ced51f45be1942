"""The tensor-parallel group of one rank. A group of size 1 never touches torch.distributed.

Tensors of a GPU travel by NCCL (RCCL on AMD), in the stream that computes them, so that a graph
captures them; small sums go peer to peer. Host tensors and plans travel by gloo.
"""

from __future__ import annotations

import datetime
import gc
import logging
import pickle
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from spectrue.workers.errors import ConfigError

if TYPE_CHECKING:
    from spectrue.workers.one_shot_reduce import OneShotReduce

logger = logging.getLogger(__name__)

# Followers wait for a plan as long as nobody asks anything. A dead peer is noticed by its closed
# connection, a stuck one by rank 0's heartbeat: this is no watchdog.
COLLECTIVE_TIMEOUT = 30 * 86400.0  # seconds
OBJECT_BUFFER = 16 * 1024  # bytes: a plan that fits travels in one broadcast


class TPGroup:
    """Rank 0 decides, the others follow. Collectives must be called by every rank in one order."""

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device | None = None) -> None:
        self.rank = rank
        self.size = size
        self.device = device or torch.device("cpu")  # what the ranks of a group compute on
        self._one_shot: OneShotReduce | None = None

    @staticmethod
    def init(
        rank: int,
        size: int,
        init_method: str | None = None,  # e.g. "tcp://host:port"
        *,
        device: torch.device | None = None,  # this rank's own GPU; None is the CPU
        timeout: float = COLLECTIVE_TIMEOUT,
    ) -> TPGroup:
        if not 0 <= rank < size:
            raise ConfigError(f"tp rank must be in [0, tp_size = {size}), got {rank}")
        on_gpu = device is not None and device.type == "cuda"
        if size > 1:
            if on_gpu:
                torch.cuda.set_device(device)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
                init_method=init_method,
                rank=rank,
                world_size=size,
                timeout=datetime.timedelta(seconds=timeout),
                device_id=device if on_gpu else None,
            )
        return TPGroup(rank, size, device)

    def use_one_shot(self) -> str | None:
        """Sum small tensors peer to peer from now on. Why that cannot be, or None; the ranks agree.

        Called by every rank.
        """
        one_shot, reason = None, "another rank's GPU cannot: see its log"
        try:
            from spectrue.workers.one_shot_reduce import OneShotReduce

            one_shot = OneShotReduce(self.device)
        except (ImportError, AttributeError, RuntimeError) as error:  # no such op or access
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            logger.warning("rank %d has no peer-to-peer all-reduce: %s", self.rank, error)
        if not self.least(int(one_shot is not None)):
            return reason
        assert one_shot is not None
        if not self.least(int(one_shot.is_right(self.rank, self.size))):
            return "its trial sums were wrong"
        self._one_shot = one_shot
        return None

    def all_reduce_(
        self,
        x: Tensor,  # contiguous
    ) -> Tensor:
        """The sum over the ranks, in place, the same bits on every rank."""
        if self.size > 1:
            if self._one_shot is not None and self._one_shot.takes(x):
                return self._one_shot(x)
            dist.all_reduce(x)
        return x

    def least(self, value: int) -> int:
        """The smallest of the ranks' values, on every rank."""
        x = torch.tensor([value])
        if self.size > 1:
            dist.all_reduce(x, dist.ReduceOp.MIN)
        return int(x)

    def broadcast_(self, x: Tensor) -> Tensor:
        """Give every rank rank 0's values, in place."""
        if self.size > 1:
            dist.broadcast(x, 0)
        return x

    def gather_vocab(
        self,
        x: Tensor,  # [rows, vocab / size]
    ) -> Tensor | None:  # [rows, vocab] on rank 0
        if self.size == 1:
            return x
        x = x.contiguous()
        if self.rank != 0:
            dist.gather(x, None, 0)
            return None
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.gather(x, parts, 0)
        return torch.cat(parts, -1)

    def broadcast_object(self, obj: Any) -> Any:
        """Rank 0's object, on every rank; the others pass None. Trusted peers only: pickle."""
        if self.size == 1:
            return obj
        buffer = torch.empty(OBJECT_BUFFER, dtype=torch.uint8)
        head = OBJECT_BUFFER - 8
        data = b""
        if self.rank == 0:
            data = pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
            part = data[:head]
            buffer[: 8 + len(part)] = torch.frombuffer(
                bytearray(len(data).to_bytes(8, "little") + part), dtype=torch.uint8
            )
        dist.broadcast(buffer, 0)
        length = int.from_bytes(bytes(buffer[:8].tolist()), "little")
        if length <= head:
            return obj if self.rank == 0 else pickle.loads(buffer[8 : 8 + length].numpy().tobytes())
        rest = torch.empty(length - head, dtype=torch.uint8)
        if self.rank == 0:
            rest.copy_(torch.frombuffer(bytearray(data[head:]), dtype=torch.uint8))
        dist.broadcast(rest, 0)
        return (
            obj if self.rank == 0 else pickle.loads(torch.cat((buffer[8:], rest)).numpy().tobytes())
        )

    def barrier(self) -> None:
        self.least(0)  # by gloo: no kernel waits on a GPU

    def destroy(self) -> None:
        """Leave the group. NCCL waits for graphs that captured it: drop their owner before."""
        if self.size > 1 and dist.is_initialized():
            self._one_shot = None
            gc.collect()
            dist.destroy_process_group()
