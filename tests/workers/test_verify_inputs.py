"""Verification in shapes of fixed size, as graphs run it, decides what the exact shapes decide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from spectrue.workers import sampler, speculative
from spectrue.workers.drafters.base import DraftProposal
from spectrue.workers.executor import GroupExecutor
from spectrue.workers.graphs import batch_buckets
from spectrue.workers.input_buffers import InputBuffers
from spectrue.workers.packed import PackedTensors
from spectrue.workers.rows import Rows
from spectrue.workers.verify_inputs import VerifyInputs, VerifyShape

from .harness import complete, make_engine, make_request

PROMPTS = ([3, 5, 7, 9], [11, 13, 11, 13, 11], [20, 21, 22], [40] * 6, [50, 51], [60, 61, 62])


@pytest.mark.parametrize("drafter", ["none", "ngram", "draft_model"])
@pytest.mark.parametrize(
    "kinds",
    [
        [{"temperature": 0.0}],
        [{"seed": 3}],
        [{}],
        [{"temperature": 0.0}, {"seed": 3, "top_k": 5}, {"min_p": 0.1, "top_p": 0.9}],
        [{}, {"temperature": 0.0, "num_speculative_tokens": 1}, {"num_speculative_tokens": 0}],
    ],
)
def test_a_padded_step_decides_as_the_exact_one(
    tiny_llama: Path, drafter: str, kinds: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if drafter == "none":
        kinds = [{**kind, "num_speculative_tokens": None} for kind in kinds]
    engine = make_engine(tiny_llama, drafter)
    assert isinstance(engine.executor, GroupExecutor)
    whole_law = engine.executor.worker.drafter.law
    exact, compared = sampler.verify, 0

    def both(
        logits: Tensor,
        buffers: InputBuffers,
        slots: list[int],
        drafts: list[list[int]],
        proposal: DraftProposal,
    ) -> sampler.VerifyResult:
        nonlocal compared
        rows = Rows.build(slots, [buffers.num_tokens[slot] for slot in slots], drafts)
        size, width = len(buffers.requests), max(rows.num_drafts)
        shape = VerifyShape.of(buffers, rows).padded(size, width)
        inputs = VerifyInputs(shape, logits.device)
        for values in inputs.packed.host.values():  # what the step before left
            values[:] = 3
        inputs.fill(buffers, rows)
        padded = torch.full((shape.num_rows, logits.shape[1]), torch.nan)
        padded[: len(logits)] = logits
        law = None
        if shape.reject is not None and whole_law is not None:
            law = whole_law.first(shape.reject.num_drafts)
        processed = sampler.process_rows(padded, inputs, {})
        decided = sampler.decide(processed, inputs, law)
        assert len(decided) == sampler.num_decided(shape)  # for ranks that have no logits
        got = sampler.collect(decided.numpy(), shape, buffers, rows, logits.shape[1])
        want = exact(logits, buffers, slots, drafts, proposal)
        assert got == want
        compared += 1
        return want

    monkeypatch.setattr(speculative, "verify", both)
    requests = [
        make_request(f"r{i}", prompt, ignore_eos=True, **kinds[i % len(kinds)])
        for i, prompt in enumerate(PROMPTS)
    ]
    complete(engine, *requests)
    assert compared > 5


def test_buckets_waste_little() -> None:
    for most in (1, 3, 8, 9, 32, 64, 100, 256):
        sizes = batch_buckets(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most
        for n in range(1, most + 1):
            size = next(s for s in sizes if s >= n)
            assert size <= max(2 * n, n + 8) if n < 64 else size < 1.25 * n


def test_packed_tensors_are_aligned_and_apart() -> None:
    packed = PackedTensors(
        {"a": (torch.int64, 3), "b": (torch.float32, 5), "c": (torch.int32, 0)},
        torch.device("cpu"),
    )
    for i, values in enumerate(packed.host.values()):
        values[:] = i + 1
    packed.upload()
    assert {k: v.tolist() for k, v in packed.device.items()} == {
        "a": [1] * 3,
        "b": [2.0] * 5,
        "c": [],
    }
    assert packed.host["b"].dtype == np.float32
    assert all(t.data_ptr() % 16 == 0 for t in packed.device.values())
