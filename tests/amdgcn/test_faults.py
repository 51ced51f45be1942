"""Planted errors are found: bounds, races, missing barriers, wrong instructions."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
import torch

from . import unit_kernels as k
from .compile import CompiledKernel, compile_kernel
from .coverage import covers
from .faults import Fault, Unsupported
from .launcher import RecordingLauncher, execute, launcher_for
from .machine import Machine
from .memory import Memory
from .races import WRITE, Access, RaceLog
from .snippet import program

ARCHS = ["gfx90a", "gfx942", "gfx950"]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def waves(code: str, count: int, *, lds: int = 1024, seed: int | None = 0) -> Machine:
    """Run a snippet with several waves; v0 is the thread number."""
    memory = Memory()
    random = None if seed is None else np.random.default_rng(seed)
    machine = Machine(program(code, "gfx942"), memory, lds, count, random, limit=10_000)
    machine.launch((1, 1, 1), 64 * count, 0)
    return machine


EXCHANGE = """
v_lshlrev_b32_e32 v1, 2, v0
ds_write_b32 v1, v0
s_barrier
v_xor_b32_e32 v2, 0x100, v1
ds_read_b32 v3, v2
"""


@covers("s_barrier")
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_lds_race(seed: int | None) -> None:
    machine = waves(EXCHANGE, 4, seed=seed)
    for w in machine.waves:
        assert (w.vectors[3] == (np.arange(64) + 64 * w.index) ^ 64).all()
    with pytest.raises(Fault, match=r"LDS race.*ds_(read|write)_b32"):
        waves(EXCHANGE.replace("s_barrier", "s_nop 0"), 4, seed=seed)
    # A second write after the barrier races with the reads.
    with pytest.raises(Fault, match="LDS race"):
        waves(EXCHANGE + "ds_write_b32 v1, v3", 4, seed=seed)
    waves(EXCHANGE + "s_barrier\nds_write_b32 v1, v3", 4, seed=seed)


def test_what_is_no_race() -> None:
    waves("v_mov_b32_e32 v1, 0\nv_mov_b32_e32 v2, 5\nds_write_b32 v1, v2", 4)  # the same value
    waves("v_mov_b32_e32 v1, 0\nv_mov_b32_e32 v2, 5\nds_add_u32 v1, v2", 4)  # atomics
    waves("v_mov_b32_e32 v1, 0\nds_read_b32 v2, v1", 4)
    code = "v_mov_b32_e32 v1, 0\nds_add_u32 v1, v0\n{}ds_read_b32 v2, v1"
    with pytest.raises(Fault, match="LDS race"):
        waves(code.format("") + "\nds_write_b32 v1, v1", 4)
    # Waves 2 and 3 only read.
    only = "v_cmp_gt_u32_e32 vcc, 0x80, v0\ns_and_saveexec_b64 s[0:1], vcc\n"
    rest = "ds_add_u32 v1, v0\ns_mov_b64 exec, s[0:1]\nds_read_b32 v2, v1"
    with pytest.raises(Fault, match="LDS race"):
        waves(f"v_mov_b32_e32 v1, 0\n{only}{rest}", 4)
    waves(code.format("s_barrier\n"), 4)


def test_barrier_divergence() -> None:
    code = """
    v_readfirstlane_b32 s0, v0
    s_cmp_lg_u32 s0, 64
    s_cbranch_scc1 .wait
    s_endpgm
    .wait:
    s_barrier
    """
    with pytest.raises(Fault, match=r"barrier divergence.*waves \[1\] ended"):
        waves(code, 4)


def test_endless_loop() -> None:
    with pytest.raises(Fault, match="more than 10000 instructions"):
        waves(".top:\ns_branch .top", 1)


@pytest.mark.parametrize("buffers", [True, False])
@pytest.mark.parametrize("arch", ARCHS)
def test_out_of_bounds(arch: str, buffers: bool) -> None:
    memory = torch.zeros(4096)  # what lies around the tensors is memory, too
    launcher = launcher_for(arch, buffer_ops=buffers)
    for store in (False, True):
        x, out = memory[:1000], memory[2048:3048]
        word = "store" if store else "load"
        with pytest.raises(Fault, match=rf"global {word}.*out of bounds.*4000 bytes into \w+_ptr"):
            launcher(k.out_of_bounds, (1,), (x, out, 1000), {"BLOCK": 1024, "STORE": store}, 4, 2)
        launcher(k.out_of_bounds, (1,), (x, out, 999), {"BLOCK": 1024, "STORE": store}, 4, 2)


@pytest.mark.parametrize("arch", ARCHS)
def test_global_race(arch: str) -> None:
    x, scratch, out = torch.randn(512), torch.zeros(512), torch.zeros(512)
    launcher = launcher_for(arch)
    launcher(k.through_scratch, (1,), (x, scratch, out), {"BLOCK": 512, "BARRIER": True}, 4, 2)
    assert torch.equal(out, x.flip(0))
    with pytest.raises(Fault, match="global memory race"):
        launcher(k.through_scratch, (1,), (x, scratch, out), {"BLOCK": 512, "BARRIER": False}, 4, 2)


def outcome(compiled: CompiledKernel, values: list[Any], out: torch.Tensor, asm: str) -> str:
    """'flagged', or a key of the result, over two orders of the waves."""
    found = set()
    for seed in (0, 1):
        out.zero_()
        try:
            execute(compiled, (1,), values, random=np.random.default_rng(seed), asm=asm)
        except Fault:
            return "flagged"
        found.add(out.numpy().tobytes().hex())
    return found.pop() if len(found) == 1 else "depends on the order"


def mutants(asm: str, pattern: str, replacement: str) -> list[str]:
    return [
        asm[: m.start()] + m.expand(replacement) + asm[m.end() :] for m in re.finditer(pattern, asm)
    ]


def barrier_case(name: str, arch: str) -> tuple[CompiledKernel, list[Any], torch.Tensor]:
    cases: dict[str, tuple[Any, list[Any], dict[str, Any]]] = {
        "reduction": (k.reductions, [torch.randn(1000), torch.zeros(6), 1000], {"BLOCK": 1024}),
        "scan": (k.scans, [torch.randn(1500), torch.zeros(3 * 1500), 1500], {"BLOCK": 2048}),
        "sort": (k.sorting, [torch.randn(512), torch.zeros(512)], {"BLOCK": 512}),
        "dot": (
            k.dot,
            [torch.randn(32, 64), torch.randn(64, 64), torch.zeros(32, 64), 2],
            {"M": 32, "N": 64, "K": 32, "PRECISION": "ieee"},
        ),
    }
    kernel, values, constants = cases[name]
    compiled = compile_kernel(kernel, tuple(values), constants, arch, 4)
    out = values[2] if name == "dot" else values[1]
    return compiled, [*values, *constants.values()], out


def brute_force(accesses: list[Access]) -> bool:
    """Do two waves meet in a byte? Written anew, byte by byte, to judge the race detector."""
    cells: dict[int, list[tuple[int, int, int]]] = {}
    for access in accesses:
        for i, address in enumerate(access.addresses.tolist()):
            for j in range(access.size):
                value = -1 if access.data is None else int(access.data[i, j])
                cells.setdefault(address + j, []).append((access.wave, access.kind, value))
    for entries in cells.values():
        for wave, kind, value in entries:
            for other, other_kind, other_value in entries:
                both_write = kind == other_kind == WRITE
                if wave != other and kind == WRITE and not (both_write and value == other_value):
                    return True
    return False


@pytest.mark.parametrize("name", ["reduction", "scan", "dot", "sort"])
@pytest.mark.parametrize(
    "arch", [pytest.param(a, marks=[] if a == "gfx942" else [pytest.mark.slow]) for a in ARCHS]
)
def test_every_barrier_matters(name: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removing any one barrier is flagged, or the barrier is proven redundant.

    Proven: with it removed, no byte of an interval is written by one wave and touched by another.
    The compiler emits such barriers before a buffer in LDS that has no later use.
    """
    compiled, values, out = barrier_case(name, arch)
    good = outcome(compiled, values, out, compiled.asm)
    assert good not in ("flagged", "depends on the order")
    changed = mutants(compiled.asm, r"\ts_barrier\b", "\ts_nop 0")
    outcomes = [outcome(compiled, values, out, asm) for asm in changed]
    flagged = outcomes.count("flagged")
    assert flagged >= 2
    assert flagged >= len(changed) // 2
    close = RaceLog.close

    def judged(log: RaceLog) -> None:
        assert not brute_force(log.accesses)
        close(log)

    monkeypatch.setattr(RaceLog, "close", judged)
    for asm, result in zip(changed, outcomes, strict=True):
        if result != "flagged":
            assert outcome(compiled, values, out, asm) == good


@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        (r"\tv_max_f32", r"\tv_min_f32"),
        (r"\tv_add_f32", r"\tv_sub_f32"),
        (r"\tv_cmp_gt_f32", r"\tv_cmp_lt_f32"),
        (r"row_shr:(1|2|8)\b", r"row_shr:3"),
    ],
)
def test_wrong_instruction(pattern: str, replacement: str) -> None:
    compiled, values, out = barrier_case("reduction", "gfx942")
    good = outcome(compiled, values, out, compiled.asm)
    changed = mutants(compiled.asm, pattern, replacement)[:6]
    assert changed
    different = sum(outcome(compiled, values, out, asm) != good for asm in changed)
    assert different >= 2  # v_max_f32 v, v is only a canonicalisation; others are idle moves


def test_unknown_instruction() -> None:
    compiled, values, _ = barrier_case("reduction", "gfx942")
    for pattern, replacement in (
        (r"\tv_add_f32_e32", r"\tv_addd_f32_e32"),
        (r" row_mask:", " row_musk:"),
        (r"\ts_endpgm", "\ts_endpgm_saved"),
    ):
        asm = mutants(compiled.asm, pattern, replacement)[0]
        with pytest.raises(Unsupported, match=r"line \d+"):
            execute(compiled, (1,), values, asm=asm)


def test_spills_are_refused() -> None:
    compiled, values, _ = barrier_case("reduction", "gfx942")
    asm = re.sub(r"(\.private_segment_fixed_size:) 0", r"\1 16", compiled.asm)
    with pytest.raises(Unsupported, match="spills"):
        execute(compiled, (1,), values, asm=asm)


def test_views_are_bounded() -> None:
    """A strided view is registered from its first to its last element."""
    base = torch.zeros(4, 100)
    view = base[1:3, :50]
    space = Memory()
    space.add_tensor(view, "view")
    start = view.data_ptr()
    assert space.find(start, start + 4 * 150)
    assert space.find(start - 4, start) is None
    assert space.find(start, start + 4 * 150 + 1) is None
    space.add_tensor(base, "base")
    assert space.find(start - 4, start + 4 * 151)
    assert space.find(start, start + 4 * 150)


def test_launcher_and_recorder() -> None:
    x, out = torch.randn(64, 2)[:, 0].contiguous(), torch.zeros(64)
    recorder = RecordingLauncher()
    for n in (64, 32, 63):
        recorder(k.typed_copy, (1,), (x, out, n), {"BLOCK": 64}, 2, 2)
    assert len(recorder.recorded) == 2  # 64 and 32 specialise alike
    assert (out == 0).all()
    work = dataclasses.replace(recorder.recorded[0], arch="gfx950")
    assert work.num_warps == 2
    jittered = launcher_for("gfx942", ulp_jitter=True)
    plain = launcher_for("gfx942", seed=None)
    y, results = torch.randn(512), []
    for launcher in (jittered, plain):
        out = torch.zeros(9, 512)
        launcher(k.elementary, (1,), (y, out, 512), {"BLOCK": 512}, 4, 2)
        results.append(out)
        assert launcher.launches == 1
    assert not torch.equal(*results)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="grid of 4"):
        plain(k.typed_copy, (1, 1, 1, 1), (x, out, 64), {"BLOCK": 64}, 2, 2)
