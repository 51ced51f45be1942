"""CUDA and HIP graphs of a draft head: a whole chain of drafts, and the feeding after a step.

One replay drafts every depth: the token of one is the input of the next, on the device. Inputs are
filled by one copy; hidden states, tokens and laws go to the engine's own buffers within the graph.
A request or a depth that is not there writes its KV nowhere and its law into a spare row. Rank 0
draws; each depth's tokens are broadcast within the graph, before they are fed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spectrue.kernels import dispatch
from spectrue.kernels.dispatch import RowLaw
from spectrue.workers.drafters.base import DraftProposal
from spectrue.workers.drafters.chain import ChainDraws
from spectrue.workers.forward_batch import (
    ForwardBatch,
    ForwardOutput,
    feed_batch,
    feed_fields,
    fill_feed,
)
from spectrue.workers.graphs import batch_buckets, record, warm_up
from spectrue.workers.input_buffers import InputBuffers
from spectrue.workers.model_runner import HeadRunner
from spectrue.workers.packed import PackedTensors
from spectrue.workers.parallel import TPGroup

_KINDS = {
    "greedy": dispatch.DRAW_ARGMAX,
    "sampled": dispatch.DRAW_UNIFORM,
    "coupled": dispatch.DRAW_GUMBEL,
}
_PARAMETERS = {
    "temperature": torch.float32,
    "top_k": torch.int64,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "seed": torch.int64,
    "choice": torch.int64,
    "kind": torch.int32,
}


@dataclass(frozen=True, slots=True)
class _ChainKey:
    num_requests: int
    depth: int
    greedy: bool  # every row takes its argmax
    cuts: bool
    law: bool  # some request is judged by rejection
    coupled_by_id: bool  # some draft is coupled, in a vocabulary whose columns are not token ids


@dataclass(frozen=True, slots=True)
class _Chain:
    graph: torch.cuda.CUDAGraph
    inputs: PackedTensors
    token_ids: Tensor  # [depth, requests] int64
    on_host: Tensor


@dataclass(frozen=True, slots=True)
class _Feed:
    graph: torch.cuda.CUDAGraph
    inputs: PackedTensors


class EagleGraphs:
    """The head of one drafter. `hidden` and the law's buffers have a spare row at their end."""

    def __init__(
        self,
        runner: HeadRunner,
        draws: ChainDraws,
        hidden: Tensor,  # [max_num_seqs + 1, hidden]
        tokens: Tensor,  # [max_num_seqs + 1, k + 1] int64, of `StepGraphs`: drafts go to 1 .. k
        group: TPGroup,
        *,
        k: int,
        max_num_seqs: int,
    ) -> None:
        self.runner, self.draws, self.hidden, self.k = runner, draws, hidden, k
        self.tokens = tokens
        self._drafted = torch.cuda.Event()
        self.group, self.device = group, runner.device
        self.sizes = batch_buckets(max_num_seqs)
        self.fallbacks: Counter[str] = Counter()  # by reason
        self._chains: dict[_ChainKey, _Chain] = {}
        self._feeds: dict[int, _Feed] = {}
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def captured_chains(self) -> tuple[_Chain, ...]:
        """For tests: replayed, they write over what the pool holds."""
        return tuple(self._chains.values())

    # -- drafting ---------------------------------------------------------------------------------

    def propose(
        self, buffers: InputBuffers, slots: Sequence[int], ks: Sequence[int]
    ) -> DraftProposal:
        """Draft ks[i] tokens for slots[i]."""
        active = [i for i, k in enumerate(ks) if k]
        of = [slots[i] for i in active]
        modes = [buffers.draft_modes[slot] for slot in of]
        has_law = [buffers.methods[slot] == "rejection" for slot in of]
        cuts = self.draws.cuts
        key = _ChainKey(
            self.sizes[bisect_left(self.sizes, len(of))],
            max(ks),
            set(modes) == {"greedy"},
            bool(cuts.top_k) or cuts.top_p < 1 or any(buffers.cut[slot] for slot in of),
            any(has_law),
            "coupled" in modes and self.draws.vocab is not None,
        )
        chain = self._chains.get(key) or self._capture_chain(key, buffers)
        self._fill_chain(chain.inputs, key, buffers, of, modes, [ks[i] for i in active], has_law)
        chain.inputs.upload()
        chain.graph.replay()
        chain.on_host.copy_(chain.token_ids, non_blocking=True)
        self._drafted.record()
        num_law = sum(ks[i] for i, law in zip(active, has_law, strict=True) if law)

        def fetch() -> Tensor:
            self._drafted.synchronize()
            drafted = chain.on_host.t()  # by active request
            return torch.cat([drafted[row, : ks[i]] for row, i in enumerate(active)])

        return DraftProposal(
            num_draft_tokens=tuple(ks),
            token_ids=torch.empty(0, dtype=torch.int64),
            law=self.draws.law.first(num_law),
            fetch=fetch,
        )

    def _fill_chain(
        self,
        inputs: PackedTensors,
        key: _ChainKey,
        buffers: InputBuffers,
        slots: list[int],
        modes: Sequence[str],
        ks: list[int],
        has_law: list[bool],
    ) -> None:
        host, n, size = inputs.host, len(slots), buffers.block_size
        cuts = self.draws.cuts
        host["slots"][:n], host["slots"][n:] = slots, len(self.hidden) - 1
        for name in _PARAMETERS:
            if name == "kind":
                host[name][:n] = [_KINDS[mode] for mode in modes]
                host[name][n:] = dispatch.DRAW_ARGMAX
            else:
                host[name][:n] = getattr(buffers, name).numpy()[slots]
        if cuts.top_k:
            top_k = buffers.top_k.numpy()[slots]
            host["top_k"][:n] = np.where((top_k <= 0) | (top_k > cuts.top_k), cuts.top_k, top_k)
        host["top_p"][:n] = np.minimum(buffers.top_p.numpy()[slots], cuts.top_p)
        committed = np.array([buffers.num_tokens[slot] for slot in slots])
        tables = buffers.block_tables.numpy()[slots]
        width = tables.shape[1]
        used = min(-(-int(committed.max() + key.depth) // size), width)
        host["block_tables"].reshape(-1, width)[:n, :used] = tables[:, :used]

        def of_depths(name: str) -> NDArray[np.generic]:  # [depth, requests]
            return host[name].reshape(key.depth, key.num_requests)

        depth = np.arange(key.depth)[:, None]
        drafts = np.array(ks) > depth  # [depth, n]
        of_depths("noise_position")[:, :n] = committed + depth
        law = np.array(has_law)
        first_row = np.cumsum(ks * law) - ks * law
        rows = of_depths("law_row")
        rows[:, :n] = np.where(drafts & law, first_row + depth, len(self.draws.law.logits) - 1)
        rows[:, n:] = len(self.draws.law.logits) - 1
        # Who drafts on is fed its last draft; the others' KV goes nowhere. (Nothing at depth 0.)
        position = np.maximum(committed + depth - 2, 0)
        block = tables[np.arange(n), np.minimum(position // size, width - 1)].astype(np.int64)
        slot_mapping = of_depths("slot_mapping")
        slot_mapping[:, :n] = np.where(drafts, block * size + position % size, -1)
        slot_mapping[:, n:] = -1
        of_depths("positions")[:, :n] = position
        kv_lens = of_depths("kv_lens")
        kv_lens[:, :n], kv_lens[:, n:] = position + 1, 0

    def _capture_chain(self, key: _ChainKey, buffers: InputBuffers) -> _Chain:
        n, total = key.num_requests, key.num_requests * key.depth
        inputs = PackedTensors(
            {
                "slots": (torch.int64, n),
                **{name: (dtype, n) for name, dtype in _PARAMETERS.items()},
                "noise_position": (torch.int64, total),
                "law_row": (torch.int64, total),
                "positions": (torch.int64, total),
                "slot_mapping": (torch.int64, total),
                "kv_lens": (torch.int32, total),
                "cu_query_lens": (torch.int32, n + 1),
                "block_tables": (torch.int32, n * buffers.block_tables.shape[1]),
            },
            self.device,
        )
        host, at = inputs.host, inputs.device
        host["cu_query_lens"][:] = np.arange(n + 1)
        host["slot_mapping"][:], host["law_row"][:] = -1, len(self.draws.law.logits) - 1
        host["slots"][:] = len(self.hidden) - 1
        host["temperature"][:] = host["top_p"][:] = 1.0
        inputs.upload()
        token_ids = torch.zeros(key.depth, n, dtype=torch.int64, device=self.device)
        max_len = buffers.token_ids.shape[1]

        def of(name: str, depth: int) -> Tensor:
            return at[name][depth * n : (depth + 1) * n]

        def step() -> None:
            hidden = self.hidden.index_select(0, at["slots"])
            first = at["slots"] * self.tokens.shape[1] + 1
            for depth in range(key.depth):
                if depth:
                    batch = ForwardBatch(
                        input_ids=token_ids[depth - 1],
                        positions=of("positions", depth),
                        slot_mapping=of("slot_mapping", depth),
                        block_tables=at["block_tables"].view(n, -1),
                        query_lens=(1,) * n,
                        seq_lens=(max_len,) * n,
                        cu_query_lens=at["cu_query_lens"],
                        kv_lens=of("kv_lens", depth),
                    )
                    hidden = self.runner.forward(batch, hidden)
                logits = self.runner.logits(hidden)
                if logits is not None:  # on rank 0
                    token_ids[depth].copy_(
                        self._draw(
                            logits, key, inputs, of("noise_position", depth), of("law_row", depth)
                        )
                    )
                self.group.broadcast_(token_ids[depth])
                self.tokens.view(-1).index_copy_(0, first + depth, token_ids[depth])

        warm_up(step, self.device)
        chain = _Chain(
            record(step, self._pool),
            inputs,
            token_ids,
            torch.empty_like(token_ids, device="cpu").pin_memory(),
        )
        self._chains[key] = chain
        return chain

    def _draw(
        self,
        logits: Tensor,  # [n, draft_vocab]
        key: _ChainKey,
        inputs: PackedTensors,
        position: Tensor,  # [n] int64
        law_row: Tensor,  # [n] int64
    ) -> Tensor:  # [n] int64, target ids
        """Draw as `sample_draft_proposal` does; record the law where it is asked for."""
        at, draws = inputs.device, self.draws
        keys = at["seed"], at["choice"], position
        law = RowLaw(logits)
        if not key.greedy:
            names = ("top_k", "top_p", "min_p")
            cuts: dict[str, Any] = {name: at[name] for name in names if key.cuts}
            law = dispatch.process_logits(logits, temperature=at["temperature"], **cuts)
        uniform = None if key.greedy else dispatch.uniform(*keys, dispatch.STREAM_DRAFT)
        draft_ids, _ = dispatch.sample_rows(
            law,
            None if key.greedy else at["kind"],
            uniform=uniform,
            seed=keys[0],
            choice=keys[1],
            position=keys[2],
        )
        if key.coupled_by_id:
            assert draws.vocab is not None
            by_id = dispatch.draw_gumbel(law, *keys, token_ids=draws.vocab.target_ids)
            draft_ids = torch.where(at["kind"] == dispatch.DRAW_GUMBEL, by_id, draft_ids)
        if key.law:
            dispatch.record_law(
                law,
                draft_ids,
                law_row,
                logits=draws.law.logits,
                log_normalizer=draws.law.log_normalizer,
                token_probs=draws.law.token_probs,
            )
        vocab = draws.vocab
        return draft_ids if vocab is None else vocab.target_ids.index_select(0, draft_ids)

    # -- feeding ----------------------------------------------------------------------------------

    def feed(
        self,
        batch: ForwardBatch,  # the target's
        output: ForwardOutput,
        following: Tensor,  # [num_tokens] int64, the token after each of the batch
        last: Tensor,  # [requests] int, row of the last that is committed
        slots: Tensor,  # [requests] int64
    ) -> None:
        """What the target computed, within a graph: of every row of a step, or of those that
        `extend` picks. No host synchronisation."""
        batch = replace(batch, input_ids=following)
        out = self.runner.forward(batch, self.runner.combine(output))
        self.hidden.index_copy_(0, slots, out.index_select(0, last))

    def extend(
        self,
        buffers: InputBuffers,
        output: ForwardOutput,  # a captured step's
        slots: list[int],
        starts: list[int],
        counts: list[int],  # tokens fed, at most k + 1 each
        rows: list[int],  # of each request's first token in `output`
    ) -> bool:
        """Feed the target's hidden states; False where only the eager way can."""
        if not output.persistent or max(counts) > self.k + 1:
            self.fallbacks["feed of an eager step"] += 1
            return False
        n = self.sizes[bisect_left(self.sizes, len(slots))]
        feed = self._feeds.get(n) or self._capture_feed(n, buffers, output)
        host, m = feed.inputs.host, len(slots)
        tables = buffers.block_tables.numpy()[slots]
        positions = fill_feed(feed.inputs, starts, counts, tables, buffers.block_size)
        total, owner = len(positions), np.repeat(slots, counts)
        host["input_ids"][:total] = buffers.token_ids.numpy()[owner, positions + 1]
        first = np.repeat(np.array(rows) - starts, counts)  # the row of position 0
        host["rows"][:total], host["rows"][total:] = first + positions, 0
        host["last"][:m], host["last"][m:] = np.cumsum(counts) - 1, 0
        host["slots"][:m], host["slots"][m:] = slots, len(self.hidden) - 1
        feed.inputs.upload()
        feed.graph.replay()  # the next step waits for its decision, and so for this copy
        return True

    def _capture_feed(self, n: int, buffers: InputBuffers, output: ForwardOutput) -> _Feed:
        total = n * (self.k + 1)
        inputs = PackedTensors(
            {
                **feed_fields(n, total, buffers.block_tables.shape[1]),
                "rows": (torch.int64, total),
                "last": (torch.int64, n),
                "slots": (torch.int64, n),
            },
            self.device,
        )
        inputs.host["slot_mapping"][:] = -1
        inputs.host["slots"][:] = len(self.hidden) - 1
        inputs.upload()
        at = inputs.device
        batch = feed_batch(inputs, (self.k + 1,) * n, (buffers.token_ids.shape[1],) * n)
        aux = output.aux_hidden_states

        def step() -> None:
            fed = ForwardOutput(
                hidden_states=output.hidden_states.index_select(0, at["rows"]),
                aux_hidden_states=None if aux is None else aux.index_select(0, at["rows"]),
            )
            self.feed(batch, fed, batch.input_ids, at["last"], at["slots"])

        warm_up(step, self.device)
        feed = _Feed(record(step, self._pool), inputs)
        self._feeds[n] = feed
        return feed
