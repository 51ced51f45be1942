"""Runs requests through a real engine on a tiny model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from spectrue.workers.async_engine import load_engine
from spectrue.workers.config import HAS_CHECKPOINT, EngineConfig, SpeculativeConfig
from spectrue.workers.core import (
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from spectrue.workers.engine import Engine

torch.set_num_threads(1)  # on tensors this small a second thread only waits

DEVICE = os.environ.get("SPECTRUE_TEST_DEVICE", "cpu")
NEAR_TIE = 1e-4  # of the two best log-probabilities: floating point may decide either way


@dataclass
class Completion:
    """Everything that one request's outputs said."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    last: RequestOutput | None = None

    def add(self, output: RequestOutput) -> None:
        assert self.finish_reason is None, "an output after the final one"
        self.token_ids += output.token_ids
        self.text += output.text
        self.logprobs += output.logprobs
        self.finish_reason = output.finish_reason
        self.last = output
        assert output.num_output_tokens == len(self.token_ids)


def make_engine(
    model: Path, drafter: str = "none", k: int = 3, draft: Path | None = None, **options: Any
) -> Engine:
    """A float32 engine; `options` go to the speculative config where they belong there."""
    names = SpeculativeConfig.__dataclass_fields__
    speculative = {n: options.pop(n) for n in list(options) if n in names}
    if drafter in HAS_CHECKPOINT:
        speculative["draft_model"] = str(draft or model)
    return load_engine(
        EngineConfig(
            **{
                "model": str(model),
                "dtype": "float32",
                "cpu_threads": 1,
                "device": DEVICE,
                "max_num_seqs": 8,
                "max_num_batched_tokens": 64,
                "block_size": 4,
                "num_kv_blocks": 256,
                "warm_up_seconds": 0.0,
                **options,
            },
            speculative=SpeculativeConfig(
                drafter=drafter,  # type: ignore[arg-type]
                num_speculative_tokens=k,
                **speculative,
            ),
        )
    )


def make_request(name: str, prompt: Sequence[int], choice: int = 0, **params: Any) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**{"max_tokens": 24, **params}),
        choice=choice,
    )


def complete(engine: Engine, *requests: Request, check: bool = True) -> list[Completion]:
    """Run to the end; completions in the order of the requests."""
    done = {r.request_id: Completion(r.request_id) for r in requests}
    for request in requests:
        engine.add_request(request)
    for _ in range(100 * sum(r.params.max_tokens for r in requests)):
        if not engine.num_unfinished:
            break
        for output in engine.step():
            done[output.request_id].add(output)
        if check:
            engine.check_integrity()
    assert engine.num_unfinished == 0
    assert engine.blocks.num_used == 0
    return list(done.values())


def assert_same_tokens(got: Completion, want: Completion) -> None:
    """Equal up to the first position at which `want`'s two best tokens are a near tie.

    `want` must have asked for two logprobs.
    """
    for i, (a, b) in enumerate(zip(got.token_ids, want.token_ids, strict=False)):
        if a != b:
            (_, first), (_, second) = want.logprobs[i].top[:2]
            assert first - second < NEAR_TIE, f"position {i}: {a} != {b}, {got} {want}"
            return
    assert len(got.token_ids) == len(want.token_ids), (got, want)
