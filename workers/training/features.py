"""What a head is fed and what it shall say: hidden states and laws of the target.

The target runs by the engine's own model file, as a prefill does, so that a head is trained on
what it is served: same kernels, same dtype, any model that is served.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spectrue.kernels import dispatch
from spectrue.workers.forward_batch import ForwardBatch
from spectrue.workers.kv_cache import KVCachePool
from spectrue.workers.models.base import Model
from spectrue.workers.training.batches import Batch

BLOCK_SIZE = 16
CHUNK = 8192  # rows whose logits are computed at once


@dataclass(frozen=True, slots=True)
class Features:
    """Of every token of a batch, the rows side by side; those of padding are zeros."""

    aux: Tensor  # [requests * length, aux layers * hidden]
    hot_logits: Tensor  # [requests * length, draft vocabulary], raw
    log_normalizer: Tensor  # [requests * length] float32, over the whole vocabulary
    argmax: Tensor  # [requests * length] int64, target ids


class FeatureMaker:
    def __init__(self, target: Model, target_ids: Tensor, dtype: torch.dtype) -> None:
        self.target = target
        self.hot = target_ids.to(target.device)
        self.dtype = dtype
        self._kv: KVCachePool | None = None

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Features:
        requests, length = batch.token_ids.shape
        per_request = -(-length // BLOCK_SIZE)
        if self._kv is None or self._kv.layers[0].shape[0] < requests * per_request * BLOCK_SIZE:
            self._kv = None  # the old one's memory first
            self._kv = self.target.new_kv_cache(requests * per_request, BLOCK_SIZE)
        lengths = batch.lengths
        blocks = torch.arange(requests * per_request, dtype=torch.int32).view(requests, -1)
        forward = ForwardBatch.build(
            token_ids=[row[:n] for row, n in zip(batch.token_ids, lengths, strict=True)],
            starts=[0] * requests,
            block_tables=blocks,
            block_size=BLOCK_SIZE,
            device=self.target.device,
        )
        output = self.target.forward(forward, self._kv)
        assert output.aux_hidden_states is not None, "the target was not told of aux_layers"
        found = [self._law(rows) for rows in output.hidden_states.split(CHUNK)]
        hot, normalizer, argmax = (torch.cat(parts) for parts in zip(*found, strict=True))
        at = torch.arange(length)[None] < torch.tensor(lengths)[:, None]
        index = at.flatten().nonzero().squeeze(1).to(self.target.device)

        def padded(rows: Tensor) -> Tensor:
            out = rows.new_zeros(requests * length, *rows.shape[1:])
            return out.index_copy_(0, index, rows)

        aux = output.aux_hidden_states.to(self.dtype)
        return Features(padded(aux), padded(hot), padded(normalizer), padded(argmax))

    def _law(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.target.compute_logits(hidden)
        assert logits is not None
        hot = logits.index_select(1, self.hot).to(self.dtype)
        return hot, dispatch.logsumexp_rows(logits), dispatch.argmax_lowest(logits)
