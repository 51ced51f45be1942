"""After a tree is verified: the accepted path becomes a chain, in the KV and in what drafters read.

A node's KV lies in the slot of its row, and its position is its depth's. The rows of an accepted
path rise, so row r of depth d moves to row d <= r; nothing that is still to move is written over,
since all is read first. Then the cache and the hidden states are those of plain decoding.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from spectrue.workers.core import SchedulerOutput
from spectrue.workers.forward_batch import ForwardBatch, ForwardOutput
from spectrue.workers.model_runner import ModelRunner


def compact(
    plan: SchedulerOutput,
    target: ModelRunner,
    batch: ForwardBatch,
    output: ForwardOutput,  # of `batch`
    accepted_rows: list[list[int]],  # per sampling request, rows after its root's, rising
) -> ForwardOutput:
    """Move the KV of accepted nodes; the output with their rows first, one after another."""
    paths = iter(accepted_rows)
    moved: list[int] = []
    to: list[int] = []
    first = 0
    for s, query_len in zip(plan.scheduled, batch.query_lens, strict=True):
        if s.samples:
            root = first + s.num_scheduled_tokens - 1
            for depth, row in enumerate(next(paths), 1):
                if row != depth:
                    moved.append(root + row)
                    to.append(root + depth)
        first += query_len
    if not moved:
        return output
    device = batch.slot_mapping.device
    source, place = torch.tensor(moved, device=device), torch.tensor(to, device=device)
    target.move_kv(batch.slot_mapping[source], batch.slot_mapping[place])
    aux = output.aux_hidden_states
    return replace(
        output,
        hidden_states=output.hidden_states.index_copy(0, place, output.hidden_states[source]),
        aux_hidden_states=None if aux is None else aux.index_copy(0, place, aux[source]),
    )
