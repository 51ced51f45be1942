"""What verification needs to know of a step's rows, packed for the device.

Greedy and `match` requests are decided by one walk, `rejection` requests by another op: two parts,
each with its requests' rows, keys and drafts. A captured graph has parts of fixed size, whose ends
are padded: requests without drafts, rows that nobody reads.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spectrue.kernels import dispatch
from spectrue.workers.input_buffers import InputBuffers
from spectrue.workers.packed import PackedTensors
from spectrue.workers.rows import Rows
from spectrue.workers.simulate import num_simulated

_CUTS = {"top_k": torch.int64, "top_p": torch.float32, "min_p": torch.float32}
_KEYS = ("seed", "choice")  # beside the position
# Whose rows read nothing: a request that is not there.
_PADDING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "drafts": -1}


@dataclass(frozen=True, slots=True)
class PartShape:
    """Sizes of one part, and which ops it takes."""

    num_requests: int
    num_rows: int
    num_drafts: int
    width: int  # most drafts of a request
    whole: bool  # its rows are all rows, in order
    greedy: bool = False  # walk: no row is sampled
    uniform: bool = False  # walk: some are drawn by inverse CDF
    tree: bool = False  # walk: drafts have parents


@dataclass(frozen=True, slots=True)
class VerifyShape:
    """Everything that decides which kernels a verification launches, and over what."""

    num_rows: int
    cuts: bool  # some row has top_k, top_p or min_p
    walk: PartShape | None
    reject: PartShape | None
    on_device: bool = False  # the drafts are, and not known on the host yet

    @property
    def greedy(self) -> bool:
        return self.reject is None and (self.walk is None or self.walk.greedy)

    @staticmethod
    def of(buffers: InputBuffers, rows: Rows) -> VerifyShape:
        """The exact shape of a step."""
        rejects = [buffers.methods[slot] == "rejection" for slot in rows.slots]
        kinds = {int(buffers.draw_kind[slot]) for slot in rows.slots}
        parts = []
        for of_reject in (False, True):
            batch = [b for b, reject in enumerate(rejects) if reject == of_reject]
            drafts = [rows.num_drafts[b] for b in batch]
            parts.append(
                PartShape(
                    num_requests=len(batch),
                    num_rows=sum(drafts) + len(batch),
                    num_drafts=sum(drafts),
                    width=max(drafts),
                    whole=len(batch) == len(rejects),
                    greedy=not of_reject and kinds == {dispatch.DRAW_ARGMAX},
                    uniform=not of_reject and dispatch.DRAW_UNIFORM in kinds,
                    tree=not of_reject and rows.parents is not None,
                )
                if batch
                else None
            )
        sampled = [slot for slot in rows.slots if buffers.temperature[slot] > 0]
        walk, reject = parts
        cuts = any(buffers.cut[slot] for slot in sampled)
        return VerifyShape(len(rows.slot), cuts, walk, reject)

    def padded(self, num_requests: int, width: int, on_device: bool = False) -> VerifyShape:
        """The shape of a graph that can run this step."""

        def pad(part: PartShape | None) -> PartShape | None:
            if part is None:
                return None
            return PartShape(
                num_requests,
                num_requests * (width + 1),
                num_requests * width,
                width,
                part.whole,
                part.greedy,
                part.uniform,
            )

        rows = num_requests * (width + 1)
        return VerifyShape(rows, self.cuts, pad(self.walk), pad(self.reject), on_device)


class VerifyInputs:
    """Rows, keys and drafts of a step. Filled on the host, read on the device."""

    def __init__(
        self,
        shape: VerifyShape,
        device: torch.device,
        tokens: Tensor | None = None,  # [slots, k + 1] int64: where drafts on the device are
        *,
        simulated: bool = False,  # acceptance is made up
        based: bool = False,  # positions count from lengths on the device, see `place`
    ) -> None:
        self.shape = shape
        self._tokens = tokens
        self._positions: Tensor | None = None
        fields: dict[str, tuple[torch.dtype, int]] = {}
        if not shape.greedy:
            fields["temperature"] = torch.float32, shape.num_rows
        if shape.cuts:
            fields |= {name: (dtype, shape.num_rows) for name, dtype in _CUTS.items()}
        for name, part in self.parts.items():
            fields[f"{name}.cu_num_draft_tokens"] = torch.int64, part.num_requests
            fields[f"{name}.drafts"] = torch.int64, part.num_drafts
            if shape.on_device:
                fields[f"{name}.source"] = torch.int64, part.num_drafts
            fields |= {f"{name}.{key}": (torch.int64, part.num_rows) for key in _KEYS}
            if not part.whole:
                fields[f"{name}.index"] = torch.int64, part.num_rows
        if shape.walk is not None:
            fields["walk.kind"] = torch.int32, shape.walk.num_rows
            if shape.walk.tree:
                fields["walk.parents"] = torch.int64, shape.walk.num_drafts
            if simulated:
                fields["walk.accepts"] = torch.int64, shape.walk.num_rows
                fields["walk.kept"] = torch.int64, shape.walk.num_drafts
        if shape.reject is not None:  # the keys of the coins: rows that have a draft
            size = shape.reject.num_drafts
            fields |= {f"coin.{key}": (torch.int64, size) for key in _KEYS}
        # Positions of all keys lie side by side, so that one op can place them.
        sizes = {name: part.num_rows for name, part in self.parts.items()}
        if shape.reject is not None:
            sizes["coin"] = shape.reject.num_drafts
        total = sum(sizes.values())
        fields["position"] = torch.int64, total
        if based:
            fields["base"] = torch.int64, total
        self.packed = PackedTensors(fields, device)
        self._keyed: dict[str, slice] = {}
        end = 0
        for name, size in sizes.items():
            self._keyed[name] = slice(end, end + size)
            end += size

    @property
    def parts(self) -> dict[str, PartShape]:
        both = {"walk": self.shape.walk, "reject": self.shape.reject}
        return {name: part for name, part in both.items() if part is not None}

    def __getitem__(self, name: str) -> Tensor:
        return self.packed.device[name]

    def get(self, name: str) -> Tensor | None:
        return self.packed.device.get(name)

    def keys(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        positions = self["position"] if self._positions is None else self._positions
        return self[f"{name}.seed"], self[f"{name}.choice"], positions[self._keyed[name]]

    def place(self, lengths: Tensor) -> None:
        """Within a graph: let the positions of keys count from these lengths, [slots] int64."""
        if not self.shape.greedy:
            self._positions = lengths.index_select(0, self["base"]).add_(self["position"])

    def drafts(self, name: str) -> Tensor:
        drafts, source = self[f"{name}.drafts"], self.get(f"{name}.source")
        return drafts if source is None else from_device(drafts, source, self._tokens)

    def fill(self, buffers: InputBuffers, rows: Rows) -> None:
        """Write a step that the shape has room for. Does not upload."""
        host, slot = self.packed.host, rows.slot
        for name in ("temperature", *_CUTS):
            if name in host:
                _put(host[name], getattr(buffers, name).numpy()[slot], _PADDING[name])
        for name, part in self.parts.items():
            batch = [
                b
                for b, s in enumerate(rows.slots)
                if (buffers.methods[s] == "rejection") == (name == "reject")
            ]
            index = rows.of(batch)
            drafts = [token for b in batch for token in rows.drafts[b]]
            _put(host[f"{name}.drafts"], drafts, _PADDING["drafts"])
            cumulative = np.cumsum([rows.num_drafts[b] for b in batch])
            _put(host[f"{name}.cu_num_draft_tokens"], cumulative, len(drafts))
            if not part.whole:
                _put(host[f"{name}.index"], index, 0)
            keys = {
                "seed": buffers.seed.numpy()[slot[index]],
                "choice": buffers.choice.numpy()[slot[index]],
                "position": rows.position[index],
            }
            self._put_keys(name, keys)
            bases = None if rows.base is None else rows.base[index]
            self._put_bases(name, bases)
            if name == "walk":
                kind = buffers.draw_kind.numpy()[slot[index]]
                _put(host["walk.kind"], kind, dispatch.DRAW_ARGMAX)
                if rows.parents is not None:
                    _put(host["walk.parents"], [p for b in batch for p in rows.parents[b]], 0)
                if "walk.accepts" in host:
                    self._put_simulated(buffers, rows, batch)
            has_draft = np.ones(len(index), dtype=bool)
            has_draft[np.cumsum([rows.num_drafts[b] + 1 for b in batch]) - 1] = False
            if name == "reject":
                self._put_keys("coin", {k: v[has_draft] for k, v in keys.items()})
                self._put_bases("coin", None if bases is None else bases[has_draft])
            if self.shape.on_device:
                assert self._tokens is not None
                source = slot[index] * self._tokens.shape[1] + rows.offset[index] + 1
                _put(host[f"{name}.source"], source[has_draft], -1)

    def _put_keys(self, name: str, keys: Mapping[str, NDArray[np.generic]]) -> None:
        host = self.packed.host
        _put(host[f"{name}.seed"], keys["seed"], 0)
        _put(host[f"{name}.choice"], keys["choice"], 0)
        _put(host["position"][self._keyed[name]], keys["position"], 0)

    def _put_bases(self, name: str, bases: NDArray[np.int64] | None) -> None:
        if "base" in self.packed.host:
            assert bases is not None
            _put(self.packed.host["base"][self._keyed[name]], bases, 0)

    def _put_simulated(self, buffers: InputBuffers, rows: Rows, batch: list[int]) -> None:
        """Which draft each row accepts (-1: it decides by itself), and which drafts may be."""
        rates, start = buffers.resolved.simulated_acceptance, 0
        accepts: list[int] = []
        kept: list[int] = []
        for b in batch:
            num_drafts, slot = rows.num_drafts[b], rows.slots[b]
            path = rows.path(b, rows.deepest(b))
            # A step that is launched ahead begins with the same text on the host.
            key = buffers.seed[slot].item(), buffers.choice[slot].item(), buffers.num_tokens[slot]
            ahead = bool(rows.position[rows.starts[b]] < buffers.num_tokens[slot])
            n = num_simulated(rates, random.Random(str((*key, ahead))).random(), len(path))
            chosen = [-1] * (num_drafts + 1)
            for row, after in zip([0, *path], path[:n], strict=False):
                chosen[row] = start + after - 1
            accepts += chosen
            kept += [int(row in path[:n]) for row in range(1, num_drafts + 1)]
            start += num_drafts
        _put(self.packed.host["walk.accepts"], accepts, -1)
        _put(self.packed.host["walk.kept"], kept, 0)


def from_device(
    values: Tensor,  # [n] int64
    source: Tensor,  # [n] int64, where in `tokens` the value is; -1: it is the one given
    tokens: Tensor | None,  # any shape, int64
) -> Tensor:  # [n] int64
    assert tokens is not None
    found = tokens.view(-1).index_select(0, source.clamp(min=0))
    return torch.where(source >= 0, found, values)


def _put(to: NDArray[np.generic], values: NDArray[np.generic] | list[int], padding: float) -> None:
    to[: len(values)] = values
    to[len(values) :] = padding
