"""The ops of spectrue.kernels, each run by the backend of the platform its tensors are on.

This is the only public module of the package. An op that a platform has no implementation of
raises NotImplementedError: nothing falls back to another backend unless `use_backend` says so.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from spectrue.kernels import reference
from spectrue.kernels.fp8 import FP8_DTYPES, fp8_of, quantize_fp8
from spectrue.kernels.philox import (
    STREAM_COIN,
    STREAM_DRAFT,
    STREAM_DRAW,
    STREAM_GUMBEL,
)
from spectrue.kernels.reference_draw import DRAW_ARGMAX, DRAW_GUMBEL, DRAW_UNIFORM
from spectrue.kernels.reference_rows import RowStatistics
from spectrue.kernels.reference_verify import (
    GUARD_DRAFT_ID_OUT_OF_RANGE,
    GUARD_DRAFT_LAW_CHANGED,
    GUARD_DRAFT_PROB_INVALID,
    GUARD_NAMES,
    GUARD_RESIDUAL_EMPTY,
    GUARD_ROW_INVALID,
    NUM_GUARDS,
    PLACEHOLDER_TOKEN_ID,
    MatchResult,
)
from spectrue.kernels.row_law import RowLaw

__all__ = [
    "BACKENDS",
    "DRAW_ARGMAX",
    "DRAW_GUMBEL",
    "DRAW_UNIFORM",
    "FP8_DTYPES",
    "GUARD_DRAFT_ID_OUT_OF_RANGE",
    "GUARD_DRAFT_LAW_CHANGED",
    "GUARD_DRAFT_PROB_INVALID",
    "GUARD_NAMES",
    "GUARD_RESIDUAL_EMPTY",
    "GUARD_ROW_INVALID",
    "NUM_GUARDS",
    "PLACEHOLDER_TOKEN_ID",
    "STREAM_COIN",
    "STREAM_DRAFT",
    "STREAM_DRAW",
    "STREAM_GUMBEL",
    "MatchResult",
    "Platform",
    "RowLaw",
    "RowStatistics",
    "add_rms_norm",
    "advance_slots",
    "argmax_lowest",
    "default_backend",
    "draw_gumbel",
    "draw_inverse_cdf",
    "fp8_of",
    "gumbel",
    "linear",
    "logsumexp_rows",
    "paged_attention",
    "place_tokens",
    "platform_of",
    "process_logits",
    "quantize_fp8",
    "record_law",
    "rms_norm",
    "rope_write_kv",
    "row_statistics",
    "sample_rows",
    "swiglu",
    "uniform",
    "use_backend",
    "valid_rows",
    "verify_match",
    "verify_rejection",
]

Platform = Literal["cpu", "cuda", "hip"]
P = ParamSpec("P")
T = TypeVar("T")

# backend -> op -> implementation; those of Triton are found at their first use, see _TRITON_OPS
BACKENDS: dict[str, dict[str, Callable[..., Any]]] = {"reference": {}, "triton": {}}
# op -> the module that has it in Triton. Imported late: a CPU machine has no triton.
_TRITON_OPS: dict[str, str] = {
    "argmax_lowest": "spectrue.kernels.triton_draw",
    "draw_gumbel": "spectrue.kernels.triton_draw",
    "draw_inverse_cdf": "spectrue.kernels.triton_draw",
    "gumbel": "spectrue.kernels.triton_philox",
    "logsumexp_rows": "spectrue.kernels.triton_rows",
    "process_logits": "spectrue.kernels.triton_process",
    "record_law": "spectrue.kernels.triton_record",
    "row_statistics": "spectrue.kernels.triton_rows",
    "sample_rows": "spectrue.kernels.triton_draw",
    "uniform": "spectrue.kernels.triton_philox",
    "valid_rows": "spectrue.kernels.triton_rows",
    "verify_match": "spectrue.kernels.triton_verify",
    "verify_rejection": "spectrue.kernels.triton_rejection",
    "add_rms_norm": "spectrue.kernels.triton_layers",
    "paged_attention": "spectrue.kernels.triton_attention",
    "rms_norm": "spectrue.kernels.triton_layers",
    "rope_write_kv": "spectrue.kernels.triton_layers",
    "swiglu": "spectrue.kernels.triton_layers",
    "linear": "spectrue.kernels.triton_linear",
    "advance_slots": "spectrue.kernels.triton_slots",
    "place_tokens": "spectrue.kernels.triton_slots",
}
_DEFAULT: dict[Platform, str] = {"cpu": "reference", "cuda": "triton", "hip": "triton"}
_override: ContextVar[str | None] = ContextVar("spectrue_kernels_backend", default=None)


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run the ops of this thread or task by one backend, whatever the platform: tests, selftest.

    Raises ValueError for a backend that does not exist.
    """
    if name not in BACKENDS:
        raise ValueError(f"no backend {name!r}; there are {', '.join(sorted(BACKENDS))}")
    token = _override.set(name)
    try:
        yield
    finally:
        _override.reset(token)


def default_backend(platform: Platform) -> str:
    """Whose ops tensors of a platform get."""
    return _DEFAULT[platform]


def platform_of(device: torch.device) -> Platform:
    """torch calls AMD GPUs "cuda" too. Raises NotImplementedError for a device of another kind."""
    if device.type == "cpu":
        return "cpu"
    if device.type == "cuda":
        return "hip" if torch.version.hip else "cuda"
    raise NotImplementedError(f"device type {device.type!r} is not supported")


def _op(specification: Callable[P, T]) -> Callable[P, T]:
    """The public function of an op: signature and contract are those of the reference."""
    name = specification.__name__
    BACKENDS["reference"][name] = specification

    @functools.wraps(specification)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        platform = platform_of(_device(*args, *kwargs.values()))
        backend = _override.get() or _DEFAULT[platform]
        implementation: Callable[P, T] = _implementation(backend, name, platform)
        return implementation(*args, **kwargs)

    return call


def _device(*values: object) -> torch.device:
    for value in values:
        if isinstance(value, Tensor):
            return value.device
        if isinstance(value, RowLaw):
            return value.logits.device
    raise ValueError("an op needs a tensor to know its platform")


def _implementation(backend: str, name: str, platform: Platform) -> Callable[..., Any]:
    found = BACKENDS[backend].get(name)
    if found is not None:
        return found
    where = f"on {platform} (backend {backend!r})"
    module = _TRITON_OPS.get(name) if backend == "triton" else None
    if module is None:
        raise NotImplementedError(f"{name} has no implementation {where}")
    try:
        implementation: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise NotImplementedError(
            f"{name} {where} needs triton: pip install 'spectrue[gpu]'"
        ) from error
    BACKENDS[backend][name] = implementation
    return implementation


uniform = _op(reference.uniform)
gumbel = _op(reference.gumbel)
process_logits = _op(reference.process_logits)
argmax_lowest = _op(reference.argmax_lowest)
valid_rows = _op(reference.valid_rows)
logsumexp_rows = _op(reference.logsumexp_rows)
row_statistics = _op(reference.row_statistics)
sample_rows = _op(reference.sample_rows)
draw_inverse_cdf = _op(reference.draw_inverse_cdf)
draw_gumbel = _op(reference.draw_gumbel)
record_law = _op(reference.record_law)
verify_match = _op(reference.verify_match)
verify_rejection = _op(reference.verify_rejection)
paged_attention = _op(reference.paged_attention)
rms_norm = _op(reference.rms_norm)
add_rms_norm = _op(reference.add_rms_norm)
rope_write_kv = _op(reference.rope_write_kv)
swiglu = _op(reference.swiglu)
linear = _op(reference.linear)
place_tokens = _op(reference.place_tokens)
advance_slots = _op(reference.advance_slots)
