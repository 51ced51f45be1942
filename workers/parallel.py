"""The tensor-parallel group of one rank. A group of size 1 never touches torch.distributed."""

from __future__ import annotations

import datetime
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spectrue.workers.errors import ConfigError

# Followers wait for a plan as long as nobody asks anything. A dead peer is noticed by its closed
# connection, a stuck one by rank 0's heartbeat: this is no watchdog.
COLLECTIVE_TIMEOUT = 30 * 86400.0  # seconds
OBJECT_BUFFER = 16 * 1024  # bytes: a plan that fits travels in one broadcast


class TPGroup:
    """Rank 0 decides, the others follow. Collectives must be called by every rank in one order."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    @staticmethod
    def init(
        rank: int,
        size: int,
        init_method: str | None = None,  # e.g. "tcp://host:port"
        *,
        backend: str = "gloo",
        timeout: float = COLLECTIVE_TIMEOUT,
    ) -> TPGroup:
        if not 0 <= rank < size:
            raise ConfigError(f"tp rank must be in [0, tp_size = {size}), got {rank}")
        if size > 1:
            dist.init_process_group(
                backend,
                init_method=init_method,
                rank=rank,
                world_size=size,
                timeout=datetime.timedelta(seconds=timeout),
            )
        return TPGroup(rank, size)

    def all_reduce_(self, x: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(x)
        return x

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
        if self.size > 1:
            dist.barrier()

    def destroy(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()
