"""Every kernel, in every configuration our ops use, built for every architecture, without a device.

The ops are called on tensors that nobody computes, a launcher notes what they launch, and that is
compiled. What must hold: no `error:` line, no spilled register, shared memory and threads within
what the architecture has, and no more registers than registers.json says. That file is written by

    SPECTRUE_UPDATE_GOLDEN=1 python -m pytest tests/kernels/test_builds.py

Without `-m slow` only the first configuration of a kernel is built, and not for every architecture.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import io
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from spectrue.kernels import dispatch

from .conftest import BACKEND

if BACKEND != "reference":
    pytest.skip("builds need no device: run with the reference tests", allow_module_level=True)

import triton
from triton import knobs
from triton.runtime.jit import JITFunction

from spectrue.kernels import triton_attention, triton_layers, triton_linear
from spectrue.kernels.fp8 import fp8_of
from spectrue.kernels.triton_launch import use_launcher
from spectrue.kernels.triton_linear import Plan
from tests.amdgcn import unit_kernels
from tests.amdgcn.compile import (
    CUDA,
    WAVE32,
    WAVE64,
    CompiledKernel,
    CompileError,
    LimitError,
    Specialized,
    build,
    specialize,
)
from tests.amdgcn.launcher import RecordingLauncher

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("registers.json")
HOW_TO_UPDATE = (
    "If that is meant: SPECTRUE_UPDATE_GOLDEN=1 python -m pytest tests/kernels/test_builds.py"
)
# A spilled SGPR goes to a lane of a VGPR, not to memory: a few are nothing to repair.
SGPR_SPILLS = 16
CUDA_SPILL = 8  # bytes: ptxas keeps two words on the stack in the search of whole rows
UPDATE = os.environ.get("SPECTRUE_UPDATE_GOLDEN") == "1"
GFX = (*WAVE64, *WAVE32)
# What attention's plan calls a GPU -> compute units, and the architectures that get its code.
PLANS = {
    "wave64": (304, WAVE64),
    "wave32": (96, WAVE32),
    "sm_80": (108, ("sm_80",)),
    "sm_90": (132, ("sm_90", "sm_100")),
}
PLAN_OF = {arch: plan for plan, (_, archs) in PLANS.items() for arch in archs}
# Built in the short run: all kernels for the first, those with the most registers elsewhere.
SHORT: dict[str, set[str] | None] = {
    "gfx942": None,
    "sm_90": None,
    "gfx90a": {"_attend", "_draw_kernel", "_add_kernel", "final_kernel"},
    "gfx950": {"_attend", "_draw_kernel", "_cut_kernel", "residual_kernel"},
    "gfx1100": {"_attend", "_draw_kernel", "_chunk_kernel", "_rms_norm", "residual_kernel"},
}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROWS = 40
REQUESTS = 8
DRAFT_VOCAB = 32000


# ---- the cases: a name, and calls of public ops ----

Case = tuple[str, Callable[[], object]]


def _ints(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


def _floats(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.empty(*shape, dtype=dtype)  # untouched memory, which is not even mapped


def _keys(n: int) -> tuple[Tensor, Tensor, Tensor]:
    return _ints(n), _ints(n), _ints(n)


def _name(dtype: torch.dtype) -> str:
    return {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]


CUTS = ("top_k", "top_p", "min_p")


def _process(logits: Tensor, cuts: Iterable[str] = (), **edits: Any) -> dispatch.RowLaw:
    n = len(logits)
    values = {"top_k": _ints(n), "top_p": _floats(n), "min_p": _floats(n)}
    chosen: dict[str, Any] = {name: values[name] for name in cuts}
    return dispatch.process_logits(logits, temperature=_floats(n), **chosen, **edits)


def _edits(entries: int) -> dict[str, Any]:
    triple = _ints(entries), _ints(entries), _ints(entries)
    strengths = {name: _floats(ROWS) for name in ("repetition", "presence", "frequency")}
    bias = _ints(entries), _ints(entries), _floats(entries)
    return {"penalties": triple, **strengths, "bias": bias, "mask": triple[:2]}


def _reject(law: dispatch.RowLaw, drafts: Tensor, index: Tensor | None, k: int = 4) -> object:
    n = len(drafts)
    return dispatch.verify_rejection(
        law,
        _ints(n),
        _ints(law.num_rows - n),
        draft_logits=drafts,
        draft_inv_temperature=_floats(n),
        draft_log_normalizer=_floats(n),
        draft_token_probs=_floats(n),
        draft_index=index,
        coins=_floats(n),
        uniforms=_floats(law.num_rows),
        max_draft_tokens=k,
    )


def _of_law(
    name: str, law: Callable[[], dispatch.RowLaw], vocab_size: int, thorough: bool = True
) -> Iterator[Case]:
    """Every op that takes a law; if not thorough, those with the most code."""

    def sample(uniform: bool) -> object:
        rows = law()
        n = rows.num_rows
        seed, choice, position = _keys(n)
        u = _floats(n) if uniform else None
        kind = _ints(n, dtype=torch.int32)
        return dispatch.sample_rows(
            rows, kind, uniform=u, seed=seed, choice=choice, position=position
        )

    def reject(draft_vocab: int, index: Tensor | None) -> object:
        rows = law()
        return _reject(rows, _floats(rows.num_rows - REQUESTS, draft_vocab), index)

    index = _ints(vocab_size, dtype=torch.int32)
    yield f"sample_rows {name}", partial(sample, True)
    yield f"row_statistics {name}", lambda: dispatch.row_statistics(law(), _ints(law().num_rows))
    yield f"verify_rejection {name} draft_index", partial(reject, DRAFT_VOCAB, index)
    if not thorough:
        return
    yield f"verify_rejection {name}", partial(reject, vocab_size, None)
    yield f"sample_rows {name} no uniform", partial(sample, False)
    yield (
        f"draw_inverse_cdf {name}",
        lambda: dispatch.draw_inverse_cdf(law(), _floats(law().num_rows)),
    )
    yield f"draw_gumbel {name}", lambda: dispatch.draw_gumbel(law(), *_keys(law().num_rows))


def _sampling(vocab_size: int, dtype: torch.dtype, thorough: bool = False) -> Iterator[Case]:
    name = f"V={vocab_size} {_name(dtype)}"
    logits = _floats(ROWS, vocab_size, dtype=dtype)
    index = torch.arange(1, ROWS)

    def law(cuts: Iterable[str], select: bool) -> Callable[[], dispatch.RowLaw]:
        def make() -> dispatch.RowLaw:
            found = _process(logits, cuts)
            return found.select(index) if select else found

        return make

    yield f"process_logits {name} {' '.join(CUTS)}", partial(_process, logits, CUTS)
    yield from _of_law(f"{name} cuts index", law(CUTS, True), vocab_size, thorough)
    yield f"argmax_lowest {name}", partial(dispatch.argmax_lowest, logits)
    yield f"valid_rows {name}", partial(dispatch.valid_rows, logits)
    yield f"logsumexp_rows {name}", partial(dispatch.logsumexp_rows, logits)
    yield (
        f"logsumexp_rows {name} inv_temperature",
        partial(dispatch.logsumexp_rows, logits, _floats(ROWS)),
    )
    if not thorough:
        return
    for cuts in ((), *((c,) for c in CUTS), CUTS[:2], CUTS[1:], CUTS[::2]):
        label = f"process_logits {name} {' '.join(cuts) or 'uncut'}"
        yield label, partial(_process, logits, cuts)
    for entries, cuts in ((300, CUTS), (1, CUTS[1:2]), (16, ())):  # specialised differently
        label = f"process_logits {name} {' '.join(cuts) or 'uncut'} edited n={entries}"
        yield label, partial(_process, logits, cuts, **_edits(entries))
    yield from _of_law(f"{name} uncut", law((), False), vocab_size)
    yield from _of_law(f"{name} cuts", law(CUTS, False), vocab_size)
    yield from _of_law(f"{name} bare", partial(dispatch.RowLaw, logits), vocab_size)


def _keyed() -> Iterator[Case]:
    """Noise by key, reduced vocabularies, the match walk and widths of the rejection."""
    for stream in ("STREAM_DRAW", "STREAM_DRAFT", "STREAM_COIN"):
        for n in (40, 1, 16):
            op = partial(dispatch.uniform, *_keys(n), getattr(dispatch, stream))
            yield f"uniform {stream} n={n}", op
    for width in (128256, 1000, 1):
        op = partial(dispatch.gumbel, *_keys(ROWS), _ints(ROWS, width))
        yield f"gumbel width={width}", op
    for dtype in (BF16, FP32):
        for cuts in (CUTS, ()):
            label = f"draw_gumbel V={DRAFT_VOCAB} {_name(dtype)} {'cuts' if cuts else 'uncut'}"
            yield f"{label} token_ids", partial(_draw_reduced, dtype, cuts)
    for k in (7, 1, 16, 63):
        yield f"verify_rejection V=128256 bf16 draft bf16 K={k}", partial(_reject_halves, k)
        for ids in (torch.int64, torch.int32):
            yield f"verify_match K={k} {str(ids)[6:]} tree", partial(_match, k, ids, True)
            yield f"verify_match K={k} {str(ids)[6:]} chain", partial(_match, k, ids, False)


def _draw_reduced(dtype: torch.dtype, cuts: Iterable[str]) -> object:
    law = _process(_floats(ROWS, DRAFT_VOCAB, dtype=dtype), cuts)
    return dispatch.draw_gumbel(law, *_keys(ROWS), _ints(DRAFT_VOCAB))


def _reject_halves(k: int) -> object:
    logits = _floats(ROWS, 128256, dtype=BF16)
    return _reject(_process(logits, CUTS), logits[REQUESTS:], None, k)


def _match(k: int, ids: torch.dtype, tree: bool) -> object:
    return dispatch.verify_match(
        _ints(ROWS, dtype=ids),
        _ints(ROWS - REQUESTS, dtype=ids),
        _ints(REQUESTS, dtype=ids),
        _ints(ROWS, dtype=torch.bool),
        parents=_ints(ROWS - REQUESTS, dtype=ids) if tree else None,
        max_draft_tokens=k,
    )


# batch, query_len, seq_len, window, tree
ATTENTION = {
    "prefill": (4, 2048, 8192, 0, False),
    "decode": (32, 1, 4096, 0, False),
    "decode of one": (1, 1, 32768, 0, False),
    "verify": (16, 5, 4096, 0, False),
    "tree": (8, 33, 4096, 0, True),
    "window": (8, 5, 8192, 1024, False),
}


def _attention(
    mode: str,
    head_dim: int,
    dtype: torch.dtype,
    heads: tuple[int, int],
    block_size: int,
    kv_dtype: torch.dtype | None = None,  # fp8: of the pool
) -> Iterator[Case]:
    batch, query_len, seq_len, window, tree = ATTENTION[mode]
    num_heads, num_kv_heads = heads
    num_tokens = batch * query_len
    qkv = _floats(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    # A pool of less than 2 GiB a layer has a code of its own on AMD: addresses of 32 bits.
    slot_size = 2 * num_kv_heads * head_dim * (kv_dtype or dtype).itemsize
    num_slots = ((1 << 31) // slot_size) + 64 if mode == "decode of one" else 1 << 16
    kv = _floats(num_slots, 2, num_kv_heads, head_dim, dtype=kv_dtype or dtype)
    yield (
        f"paged_attention {mode} D={head_dim} {_name(dtype)} H={num_heads}/{num_kv_heads} "
        f"block={block_size}{_of_pool(kv_dtype)}",
        partial(
            dispatch.paged_attention,
            qkv[:, :num_heads],
            kv,
            block_tables=_ints(batch, seq_len // block_size, dtype=torch.int32),
            block_size=block_size,
            cu_query_lens=_ints(batch + 1, dtype=torch.int32),
            seq_lens=_ints(batch, dtype=torch.int32),
            max_query_len=query_len,
            max_seq_len=seq_len,
            window=window,
            tree_mask=_ints(num_tokens, 2, dtype=torch.int32) if tree else None,
        ),
    )


def _of_pool(kv_dtype: torch.dtype | None) -> str:
    return "" if kv_dtype is None else f" KV={str(kv_dtype).removeprefix('torch.float8_')}"


def _rope(
    heads: tuple[int, int, int], dtype: torch.dtype, kv_dtype: torch.dtype | None = None
) -> Iterator[Case]:
    num_heads, num_kv_heads, head_dim = heads
    rope = partial(
        dispatch.rope_write_kv,
        _floats(ROWS, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype),
        _floats(ROWS, 1, head_dim),
        _floats(ROWS, 1, head_dim),
        _floats(4096, 2, num_kv_heads, head_dim, dtype=kv_dtype or dtype),
        _ints(ROWS),
        num_heads=num_heads,
    )
    head = _floats(head_dim, dtype=dtype)
    name = f"rope_write_kv {_name(dtype)} H={num_heads}/{num_kv_heads} D={head_dim}"
    yield f"{name} norm{_of_pool(kv_dtype)}", partial(rope, q_norm=head, k_norm=head)
    yield f"{name}{_of_pool(kv_dtype)}", rope


def _layers(size: int, heads: tuple[int, int, int], dtype: torch.dtype) -> Iterator[Case]:
    x, weight = _floats(ROWS, size, dtype=dtype), _floats(size, dtype=dtype)
    name = f"{_name(dtype)} N={size}"
    yield f"rms_norm {name}", partial(dispatch.rms_norm, x, weight, 1e-5)
    yield f"add_rms_norm {name}", partial(dispatch.add_rms_norm, x, x, weight, 1e-5)
    yield f"swiglu {name}", partial(dispatch.swiglu, _floats(ROWS, 7 * size, dtype=dtype))
    yield from _rope(heads, dtype)


def _linears(size: int, dtype: torch.dtype) -> Iterator[Case]:
    """As one or two rows are computed everywhere, and the kernel that more rows have on CUDA."""
    for rows, gated in ((1, False), (2, True)):
        n, k = (7 * size // 2, size) if gated else (size, 7 * size // 2)
        x, weight = _floats(rows, k, dtype=dtype), _floats(n * (1 + gated), k, dtype=dtype)
        plan = triton_linear.make_plan(rows, n, k, gated, x.element_size() == 2, 304, "wave64")
        assert plan is not None
        name = f"linear {_name(dtype)} M={rows} N={n} K={k}" + " gated" * gated
        yield name, partial(triton_linear.run, plan, x, weight, None, None, gated)
    if dtype is FP32:
        return
    for rows, plan in (
        (16, Plan(False, 64, 64, 4, 2)),
        (64, Plan(False, 32, 128, 4, 2)),
        (32, Plan(False, 64, 64, 4, 2, 4)),
    ):
        gated = plan.splits == 1
        x = _floats(rows, size, dtype=dtype)
        weight = _floats(size * (1 + gated), size, dtype=dtype)
        residual = _floats(rows, size, dtype=dtype)
        call = partial(triton_linear.run, plan, x, weight, weight[:, 0], residual, gated)
        how = "gated bias" if gated else f"bias splits={plan.splits}"
        yield f"linear {_name(dtype)} M={rows} N={size} K={size} {how}", call


def _record(vocab_size: int, dtype: torch.dtype, cuts: Iterable[str]) -> object:
    n = 16
    return dispatch.record_law(
        _process(_floats(n, vocab_size, dtype=dtype), cuts),
        _ints(n),
        _ints(n),
        logits=_floats(64, vocab_size),
        log_normalizer=_floats(64),
        token_probs=_floats(64),
    )


def _slots() -> Iterator[Case]:
    cu = _ints(REQUESTS + 1, dtype=torch.int32)
    tables = _ints(REQUESTS, 64, dtype=torch.int32)
    at, rows = _ints(REQUESTS), _ints(ROWS)
    yield "place_tokens", partial(dispatch.place_tokens, rows, rows, at, rows, tables, 16)
    commit = partial(dispatch.advance_slots, rows, at, at, at, at, cu, ROWS, tables.long(), at)
    yield "advance_slots", commit


def _cases() -> Iterator[Case]:
    """The first one that launches a kernel stands for it in the short run."""
    yield from _sampling(128256, BF16, thorough=True)
    for vocab_size, dtype in (
        (151666, BF16),  # rows that are not aligned
        (151666, FP16),
        (151666, FP32),
        (49152, BF16),
        (248320, BF16),
    ):
        yield from _sampling(vocab_size, dtype)
    yield from _keyed()
    for cuts in ((), CUTS):
        how = "cuts" if cuts else "whole"
        yield f"record_law bf16 V=32000 {how}", partial(_record, 32000, BF16, cuts)
    yield from _slots()
    for mode in ATTENTION:
        yield from _attention(mode, 128, BF16, (32, 8), 16)
    for mode in ATTENTION:
        yield from _attention(mode, 64, BF16, (9, 3), 16)
        yield from _attention(mode, 80, BF16, (32, 32), 64)
        yield from _attention(mode, 128, BF16, (28, 4), 64)
        yield from _attention(mode, 256, BF16, (16, 8), 16)
    for mode in ("prefill", "verify", "tree"):
        yield from _attention(mode, 128, FP16, (32, 8), 16)
        yield from _attention(mode, 64, FP32, (9, 3), 16)
    for dtype in (BF16, FP16, FP32):
        yield from _layers(4096, (32, 8, 128), dtype)
        yield from _linears(4096, dtype)
    yield from _linears(576, BF16)
    yield from _layers(576, (9, 3, 64), BF16)
    yield from _layers(8192, (64, 8, 128), BF16)
    yield from _layers(5120, (16, 16, 80), BF16)
    yield from _layers(2304, (8, 4, 256), BF16)
    for kv_dtype in dispatch.FP8_DTYPES:
        for mode in ATTENTION:
            yield from _attention(mode, 128, BF16, (32, 8), 16, kv_dtype)
        for mode in ("prefill", "verify"):
            yield from _attention(mode, 64, BF16, (9, 3), 16, kv_dtype)
            yield from _attention(mode, 80, BF16, (32, 32), 64, kv_dtype)
            yield from _attention(mode, 256, BF16, (16, 8), 16, kv_dtype)
        yield from _rope((32, 8, 128), BF16, kv_dtype)


# ---- recording ----


@dataclasses.dataclass
class Recorder(RecordingLauncher):
    """Records by name: the kernel and what was called, `label`."""

    fp_fusion: bool | None = True
    label: str = ""
    found: dict[str, Specialized] = dataclasses.field(default_factory=dict)

    def __call__(self, kernel: Any, grid: Any, args: Any, constants: Any, *options: int) -> None:
        if self.arch == "sm_90" and "PDL" in kernel.arg_names:  # as it is launched there
            constants = {**constants, "PDL": True}
        super().__call__(kernel, grid, args, constants, *options)

    def record(self, work: Specialized) -> None:
        name = f"{work.kernel.__name__}: {self.label}"
        same = sum(n == name or n.startswith(f"{name} #") for n in self.found)
        self.found[f"{name} #{same + 1}" if same else name] = work


@functools.cache
def _recorded(plan: str, buffer_ops: bool) -> dict[str, Specialized]:
    """What all the cases launch on one kind of GPU, each thing once, by name."""
    units, archs = PLANS[plan]
    recorder = Recorder(archs[0], buffer_ops)
    with (
        mock.patch.object(triton_attention, "_gpu", return_value=(units, plan)),
        mock.patch.object(triton_layers, "_gpu", return_value=(units, plan)),
        dispatch.use_backend("triton"),
        use_launcher(recorder),
    ):
        for recorder.label, call in _cases():
            call()
    return recorder.found


def _configurations(
    arch: str, buffer_ops: bool = True, fp_fusion: bool = True
) -> dict[str, Specialized]:
    others = {_of_pool(dtype) for dtype in dispatch.FP8_DTYPES if dtype is not fp8_of(arch)}
    return {
        name: dataclasses.replace(work, arch=arch, fp_fusion=fp_fusion)
        for name, work in _recorded(PLAN_OF[arch], buffer_ops).items()
        if _pool_in(name) not in others
    }


def _pool_in(name: str) -> str:
    """As `_of_pool`, of a configuration's name."""
    found = re.search(r" KV=\w+", name)
    return found[0] if found else ""


def _representatives(arch: str) -> dict[str, Specialized]:
    found: dict[tuple[str, str], tuple[str, Specialized]] = {}
    for name, work in _configurations(arch).items():
        found.setdefault((work.kernel.__name__, _pool_in(name)), (name, work))
    wanted = SHORT[arch]
    assert wanted is None or wanted <= {kernel for kernel, _ in found}
    return dict(pair for (kernel, _), pair in found.items() if wanted is None or kernel in wanted)


# ---- the gates ----


_ptxas_logs: dict[tuple[Any, ...], str] = {}


def _check(work: Specialized) -> CompiledKernel:
    """Build, and raise CompileError or LimitError."""
    if work.arch not in CUDA:
        built = build(work)
        built.check_limits(max_sgpr_spills=SGPR_SPILLS)
        return built
    # Triton runs the ptxas of its wheel that fits, and this prints what `ptxas -v` says.
    log = io.StringIO()
    with knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        knobs.nvidia.dump_ptxas_log = True
        built = build(work)
    # A build is kept, and the second time it prints nothing.
    text = _ptxas_logs.setdefault(work.key(), log.getvalue())
    built.check_limits(max_sgpr_spills=SGPR_SPILLS)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", text)
    if not spills or max(map(int, spills)) > CUDA_SPILL:
        said = [line.split(":")[-1].strip() for line in text.splitlines()]
        said = [line for line in said if "spill" in line or line.startswith("Used")]
        raise LimitError(f"{built.name} for {built.arch}: ptxas: {'; '.join(said) or 'no log'}")
    return built


def _build_all(works: dict[str, Specialized]) -> dict[str, CompiledKernel]:
    """All of them; one AssertionError says everything that failed."""
    built, failures = {}, []
    for name, work in works.items():
        try:
            built[name] = _check(work)
        except Exception as error:  # of the compiler, of ptxas, or of a gate
            failures.append(f"{name}\n    {type(error).__name__}: {error}")
    assert not failures, f"{len(failures)} of {len(works)} builds:\n" + "\n".join(failures)
    return built


class Use(NamedTuple):
    """What a kernel takes of a compute unit."""

    vgprs: int
    sgprs: int
    lds: int
    occupancy: int

    def worse_than(self, golden: Use) -> list[str]:
        """The fields that are, beyond the tolerance."""
        slack = {"vgprs": 8, "sgprs": 8, "lds": 256}
        found = [
            name
            for name, least in slack.items()
            if (old := getattr(golden, name)) + max(old // 10, least) < getattr(self, name)
        ]
        return found + ["occupancy"] * (self.occupancy < golden.occupancy)


Golden = dict[str, dict[str, Use]]  # configuration -> architecture -> use


def _load_golden() -> Golden:
    rows = json.loads(GOLDEN.read_text())["configurations"]
    return {
        name: {arch: Use(*values) for arch, values in archs.items()} for name, archs in rows.items()
    }


def _save_golden(arch: str, uses: dict[str, Use]) -> None:
    """Replace what the file says of one architecture, and drop what no longer exists."""
    golden = _load_golden() if GOLDEN.exists() else {}
    for name in {*golden, *uses}:
        golden.setdefault(name, {}).pop(arch, None)
        if name in uses:
            golden[name][arch] = uses[name]
    for name, archs in golden.items():
        golden[name] = {a: archs[a] for a in GFX if a in archs and name in _configurations(a)}
    rows = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(golden[name])}" for name in sorted(golden) if golden[name]
    )
    fields = json.dumps(Use._fields)
    GOLDEN.write_text(
        f'{{\n"triton": "{triton.__version__}",\n"fields": {fields},\n'
        f'"configurations": {{\n{rows}\n}}\n}}\n'
    )


def _compare(arch: str, uses: dict[str, Use], golden: Golden) -> str:
    """A table of what got worse; empty if nothing did."""
    rows = []
    for name, use in uses.items():
        old = golden.get(name, {}).get(arch)
        if old is None:
            rows.append(f"{name}: has no entry, takes {use}")
        elif worse := use.worse_than(old):
            changes = (f"{f} {getattr(old, f)} -> {getattr(use, f)}" for f in worse)
            rows.append(f"{name}: {', '.join(changes)}")
    if not rows:
        return ""
    return "\n".join([f"{arch}, against {GOLDEN.name}:", *rows, HOW_TO_UPDATE])


def _uses(built: dict[str, CompiledKernel]) -> dict[str, Use]:
    return {name: Use(b.vgprs, b.sgprs, b.lds, b.occupancy) for name, b in built.items()}


def _kernels() -> set[Any]:
    """The JIT functions of spectrue.kernels that no other one calls: those that are launched."""
    modules = [
        importlib.import_module(f"spectrue.kernels.{path.stem}")
        for path in sorted((ROOT / "kernels").glob("*.py"))
    ]
    every = {f for m in modules for f in vars(m).values() if isinstance(f, JITFunction)}
    names = ((f.fn.__globals__, name) for f in every for name in f.fn.__code__.co_names)
    called = [scope.get(name) for scope, name in names]
    return every - {f for f in called if isinstance(f, JITFunction)}


def _unrecorded(kernels: set[Any], works: Iterable[Specialized]) -> list[str]:
    return sorted(f.__name__ for f in kernels - {work.kernel for work in works})


# ---- the tests ----

not_when_updating = pytest.mark.skipif(UPDATE, reason="only the golden file is written")


@not_when_updating
def test_version() -> None:
    """Registers, and what compiles at all, are those of one release."""
    pinned = re.search(r"^triton==(.+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert pinned is not None
    assert triton.__version__ == pinned[1] == json.loads(GOLDEN.read_text())["triton"]


@not_when_updating
@pytest.mark.parametrize("plan", PLANS)
def test_every_kernel_is_recorded(plan: str) -> None:
    kernels = _kernels()
    assert {f for f in kernels if f.__name__.endswith("_kernel")}
    works = _recorded(plan, True).values()
    assert not (missing := _unrecorded(kernels, works)), f"no case launches {missing}"
    assert _unrecorded({*kernels, unit_kernels.reductions}, works) == ["reductions"]


@not_when_updating
@pytest.mark.parametrize("arch", SHORT)
def test_representatives(arch: str) -> None:
    built = _build_all(_representatives(arch))
    if arch in GFX:
        assert not (table := _compare(arch, _uses(built), _load_golden())), table


@not_when_updating
def test_golden_file_is_complete() -> None:
    expected = {(name, arch) for arch in GFX for name in _configurations(arch)}
    present = {(name, arch) for name, archs in _load_golden().items() for arch in archs}
    missing, stale = sorted(expected - present), sorted(present - expected)
    assert not missing, f"{HOW_TO_UPDATE}\nmissing: {missing}"
    assert not stale, f"{HOW_TO_UPDATE}\nstale: {stale}"


@pytest.mark.slow
@pytest.mark.parametrize("arch", GFX)
def test_registers(arch: str) -> None:
    works = _configurations(arch)
    if UPDATE:
        _save_golden(arch, _uses({name: build(work) for name, work in works.items()}))
    else:
        table = _compare(arch, _uses(_build_all(works)), _load_golden())
        assert not table, table


@not_when_updating
@pytest.mark.slow
@pytest.mark.parametrize("arch", CUDA)
def test_cuda(arch: str) -> None:
    _build_all(_configurations(arch))


@not_when_updating
@pytest.mark.slow
@pytest.mark.parametrize("arch", GFX)
def test_without_buffer_operations(arch: str) -> None:
    _build_all(_configurations(arch, buffer_ops=False))


@not_when_updating
@pytest.mark.slow
@pytest.mark.parametrize("buffer_ops", [True, False])
def test_without_fp_fusion(buffer_ops: bool) -> None:
    _build_all(_configurations("gfx942", buffer_ops=buffer_ops, fp_fusion=False))


# ---- planted faults: each gate is seen to fail ----


def _planted(
    kernel: Any, args: tuple[Any, ...], arch: str, num_warps: int, **constants: int
) -> Specialized:
    return specialize(kernel, args, constants, arch, num_warps, fp_fusion=True)[0]


@not_when_updating
def test_wrong_vendor_is_an_error() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(CompileError, match="error:"):
        _check(_planted(unit_kernels.wrong_vendor, (out,), "gfx942", 1))


@not_when_updating
@pytest.mark.parametrize(("arch", "num_warps"), [("gfx942", 2), ("sm_90", 4)])
def test_spills_are_an_error(arch: str, num_warps: int) -> None:
    x = torch.zeros(1 << 15)
    work = _planted(unit_kernels.huge, (x, x), arch, num_warps, BLOCK=1 << 15)
    for _ in range(2):  # not only when it is built first
        with pytest.raises(LimitError, match="spill"):
            _check(work)


@not_when_updating
def test_too_many_threads_are_an_error() -> None:
    x = torch.zeros(4096)
    arguments = unit_kernels.typed_copy, (x, x, 5), "gfx942"
    _check(_planted(*arguments, 16, BLOCK=4096))
    with pytest.raises(LimitError, match="2048 threads, the limit is 1024"):
        _check(_planted(*arguments, 32, BLOCK=4096))


@not_when_updating
def test_too_much_shared_memory_is_an_error() -> None:
    x = torch.zeros(1 << 15)
    work = _planted(unit_kernels.shapes, (x, x), "gfx942", 16, M=256, N=128)
    with pytest.raises(LimitError, match="bytes of LDS, the limit is 65536"):
        _check(work)


@not_when_updating
def test_a_kernel_that_grew_is_an_error() -> None:
    golden = _load_golden()
    name = next(name for name, archs in golden.items() if "gfx942" in archs)
    old = golden[name]["gfx942"]

    def table(**change: int) -> str:
        return _compare("gfx942", {name: old._replace(**change)}, golden)

    assert not table()
    assert not table(vgprs=old.vgprs + 8, sgprs=old.sgprs + 8, occupancy=old.occupancy + 1)
    grown = table(vgprs=math.ceil(old.vgprs * 1.1) + 9)
    assert f"vgprs {old.vgprs} -> " in grown
    assert "SPECTRUE_UPDATE_GOLDEN=1" in grown
    assert f"occupancy {old.occupancy} -> {old.occupancy - 1}" in table(occupancy=old.occupancy - 1)
    assert "sgprs" in table(sgprs=2 * old.sgprs + 9)
    assert "lds" in table(lds=2 * old.lds + 257)
    assert "has no entry" in _compare("gfx942", {"new": old}, golden)
