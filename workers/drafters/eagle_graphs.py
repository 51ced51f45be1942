"""CUDA and HIP graphs of a draft head: a whole chain of drafts. A step's graph feeds it (`feed`).

One replay drafts every depth: the token of one is the input of the next, on the device. Inputs are
filled by one copy; hidden states, tokens and laws go to the engine's own buffers within the graph.
A request or a depth that is not there writes its KV nowhere and its law into a spare row. Rank 0
draws; each depth's tokens are broadcast within the graph, before they are fed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spectrue.kernels import dispatch
from spectrue.kernels.dispatch import RowLaw
from spectrue.workers.core import SchedulerOutput
from spectrue.workers.drafters.base import DraftProposal
from spectrue.workers.drafters.chain import ChainDraws
from spectrue.workers.forward_batch import ForwardBatch, ForwardOutput
from spectrue.workers.graphs import batch_buckets, record, warm_up
from spectrue.workers.input_buffers import InputBuffers
from spectrue.workers.model_runner import HeadRunner
from spectrue.workers.packed import PackedTensors
from spectrue.workers.parallel import TPGroup
from spectrue.workers.places import Places, SlotLengths, copy_tables

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
    places: Places  # of the inputs
    token_ids: Tensor  # [depth, requests] int64


class EagleGraphs:
    """The head of one drafter. `hidden` and the law's buffers have a spare row at their end."""

    def __init__(
        self,
        runner: HeadRunner,
        draws: ChainDraws,
        hidden: Tensor,  # [max_num_seqs + 1, hidden]
        tokens: Tensor,  # [max_num_seqs + 1, k + 1] int64, of `StepGraphs`: drafts go to 1 .. k
        lengths: SlotLengths,  # its too
        group: TPGroup,
        *,
        k: int,
        max_num_seqs: int,
    ) -> None:
        self.runner, self.draws, self.hidden, self.k = runner, draws, hidden, k
        self.tokens, self.lengths = tokens, lengths
        self._uploaded = torch.cuda.Event()
        self.group, self.device = group, runner.device
        self.sizes = batch_buckets(max_num_seqs)
        self._chains: dict[_ChainKey, _Chain] = {}
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def captured_chains(self) -> tuple[_Chain, ...]:
        """For tests: replayed, they write over what the pool holds."""
        return tuple(self._chains.values())

    # -- drafting ---------------------------------------------------------------------------------

    def propose(
        self, plan: SchedulerOutput, buffers: InputBuffers, ks: Sequence[int]
    ) -> DraftProposal:
        """Draft ks[i] tokens for the plan's request i."""
        active = [i for i, k in enumerate(ks) if k]
        of = [plan.scheduled[i].slot for i in active]
        bases, committed = self.lengths.origins(plan)
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
        self._uploaded.synchronize()  # a step in flight may not have read its inputs yet
        self._fill_chain(chain, key, buffers, of, modes, [ks[i] for i in active], has_law)
        self._fill_places(
            chain,
            key,
            np.array([bases[i] for i in active]),
            np.array([committed[i] for i in active]),
            np.array([ks[i] for i in active]),
        )
        chain.inputs.upload()
        self._uploaded.record()
        chain.graph.replay()
        num_law = sum(ks[i] for i, law in zip(active, has_law, strict=True) if law)

        def fetch() -> Tensor:
            torch.cuda.current_stream(self.device).synchronize()
            drafted = chain.token_ids.t().cpu()  # by active request
            return torch.cat([drafted[row, : ks[i]] for row, i in enumerate(active)])

        return DraftProposal(
            num_draft_tokens=tuple(ks),
            token_ids=torch.empty(0, dtype=torch.int64),
            law=self.draws.law.first(num_law),
            fetch=fetch,
        )

    def _fill_chain(
        self,
        chain: _Chain,
        key: _ChainKey,
        buffers: InputBuffers,
        slots: list[int],
        modes: Sequence[str],
        ks: list[int],
        has_law: list[bool],
    ) -> None:
        host, n = chain.inputs.host, len(slots)
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
        copy_tables(host, buffers, slots)
        depth = np.arange(key.depth)[:, None]
        law = np.array(has_law)
        first_row = np.cumsum(ks * law) - ks * law
        rows, spare = host["law_row"].reshape(key.depth, -1), len(self.draws.law.logits) - 1
        rows[:, :n] = np.where((np.array(ks) > depth) & law, first_row + depth, spare)
        rows[:, n:] = spare

    def _fill_places(
        self,
        chain: _Chain,
        key: _ChainKey,
        bases: NDArray[np.int64],  # [active requests]
        committed: NDArray[np.int64],
        ks: NDArray[np.int64],
    ) -> None:
        """Who drafts on is fed its last draft; others' KV goes nowhere. (Nothing at depth 0.)"""
        host, n = chain.inputs.host, len(bases)
        chain.places.clear(host, self.lengths)
        depth = np.arange(key.depth)[:, None]
        for name, added in (("fed", -2), ("kv_len", -1), ("drawn", 0)):
            offset, base, request = chain.places.of(host, name, key.depth)
            offset[:, :n], base[:, :n] = committed + depth + added, bases
            if name == "fed":
                request[:, :n] = np.where(ks > depth, np.arange(n), -1)

    def _capture_chain(self, key: _ChainKey, buffers: InputBuffers) -> _Chain:
        n, total = key.num_requests, key.num_requests * key.depth
        places = Places({"fed": total, "kv_len": total, "drawn": total})
        inputs = PackedTensors(
            {
                "slots": (torch.int64, n),
                **{name: (dtype, n) for name, dtype in _PARAMETERS.items()},
                "law_row": (torch.int64, total),
                "cu_query_lens": (torch.int32, n + 1),
                "block_tables": (torch.int32, n * buffers.block_tables.shape[1]),
                **places.fields,
            },
            self.device,
        )
        host, at = inputs.host, inputs.device
        host["cu_query_lens"][:] = np.arange(n + 1)
        places.clear(host, self.lengths)
        host["law_row"][:] = len(self.draws.law.logits) - 1
        host["slots"][:] = len(self.hidden) - 1
        host["temperature"][:] = host["top_p"][:] = 1.0
        inputs.upload()
        token_ids = torch.zeros(key.depth, n, dtype=torch.int64, device=self.device)
        max_len = buffers.token_ids.shape[1]

        tables = at["block_tables"].view(n, -1)

        def step() -> None:
            placed = places.place(at, self.lengths, tables, buffers.block_size)

            def of(values: Tensor, depth: int) -> Tensor:
                return values[depth * n : (depth + 1) * n]

            hidden = self.hidden.index_select(0, at["slots"])
            first = at["slots"] * self.tokens.shape[1] + 1
            for depth in range(key.depth):
                if depth:
                    batch = ForwardBatch(
                        input_ids=token_ids[depth - 1],
                        positions=of(placed["fed"].positions, depth),
                        slot_mapping=of(placed["fed"].slots, depth),
                        block_tables=tables,
                        query_lens=(1,) * n,
                        seq_lens=(max_len,) * n,
                        cu_query_lens=at["cu_query_lens"],
                        kv_lens=of(placed["kv_len"].narrow, depth),
                    )
                    hidden = self.runner.forward(batch, hidden)
                logits = self.runner.logits(hidden)
                if logits is not None:  # on rank 0
                    drawn = of(placed["drawn"].positions, depth)
                    token_ids[depth].copy_(
                        self._draw(logits, key, inputs, drawn, of(at["law_row"], depth))
                    )
                self.group.broadcast_(token_ids[depth])
                self.tokens.view(-1).index_copy_(0, first + depth, token_ids[depth])

        warm_up(step, self.device)
        chain = _Chain(record(step, self._pool), inputs, places, token_ids)
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
        """What the target computed of every row of a step, within its graph. A request whose head
        has a gap in its KV takes part in vain. No host synchronisation."""
        batch = replace(batch, input_ids=following)
        out = self.runner.forward(batch, self.runner.combine(output))
        self.hidden.index_copy_(0, slots, out.index_select(0, last))
