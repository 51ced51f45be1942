"""Specialisation as the JIT does it, metadata, and the gates on what compile() lets pass."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from . import unit_kernels as k
from .compile import ALL_TARGETS, CompileError, LimitError, build, compile_kernel, specialize
from .launcher import RecordingLauncher


@pytest.mark.parametrize("arch", ALL_TARGETS)
def test_targets(arch: str) -> None:
    x, out = torch.zeros(1024), torch.zeros(8)
    built = compile_kernel(k.reductions, (x, out, 1000), {"BLOCK": 1024}, arch, 4)
    built.check_limits()
    assert built.warp_size == (64 if arch in ("gfx90a", "gfx942", "gfx950") else 32)
    assert built.threads == 4 * built.warp_size
    assert built.lds > 0
    if arch.startswith("gfx"):
        assert built.vgprs > 0
        assert built.sgprs > 0
        assert built.occupancy > 0
        assert arch in built.asm
    assert [kind for _, kind in built.parameters] == ["*fp32", "*fp32", "i32"]
    assert compile_kernel(k.reductions, (x, out, 1000), {"BLOCK": 1024}, arch, 4) is built


def test_specialisation() -> None:
    x, out = torch.zeros(1024), torch.zeros(1024)

    def signature(n: int, tensor: torch.Tensor = x, **options: bool) -> tuple[str, str]:
        work, _ = specialize(k.typed_copy, (tensor, out, n), {"BLOCK": 64}, "gfx942", **options)
        return work.signature["n"], str(work.attrs)

    assert signature(5)[0] == "i32"
    assert signature(1)[0] == "constexpr"
    assert signature(2**31)[0] == "i64"
    assert "divisibility" in signature(16)[1].split("(2,)")[1]
    assert "divisibility" not in signature(5)[1].split("(2,)")[-1]
    assert signature(5)[1].count("pointer_range") == 2
    assert "pointer_range" not in signature(5, buffer_ops=False)[1]
    assert signature(5, x[1:])[1].count("divisibility") == 1  # not aligned to 16 bytes
    work, bound = specialize(k.typed_copy, (None, out, 5), {"BLOCK": 64}, "gfx942")
    assert work.signature["x_ptr"] == "constexpr"
    assert bound["x_ptr"] is None


def test_buffer_operations_and_fusion() -> None:
    x, out = torch.zeros(1024), torch.zeros(1024)
    arguments = (k.typed_copy, (x, out, 5), {"BLOCK": 1024}, "gfx942", 4)
    assert "buffer_load" in compile_kernel(*arguments).asm
    assert "buffer_load" not in compile_kernel(*arguments, buffer_ops=False).asm
    assert "fma" in compile_kernel(*arguments, fp_fusion=True).asm
    assert "fma" not in compile_kernel(*arguments, fp_fusion=False).asm


def test_errors_on_stderr_are_raised() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    for _ in range(2):  # a cached binary hides nothing
        with pytest.raises(CompileError, match="error:"):
            compile_kernel(k.wrong_vendor, (out,), {}, "gfx942", 1)


@pytest.mark.slow
def test_a_kernel_that_spills() -> None:
    x, out = torch.zeros(1 << 15), torch.zeros(1 << 15)
    with pytest.raises(LimitError, match="spills"):
        compile_kernel(k.huge, (x, out), {"BLOCK": 1 << 15}, "gfx942", 1).check_limits()


def test_limits() -> None:
    x, out = torch.zeros(1024), torch.zeros(8)
    built = compile_kernel(k.reductions, (x, out, 1000), {"BLOCK": 1024}, "gfx942", 4)
    with pytest.raises(LimitError, match="spills: 3 VGPRs"):
        dataclasses.replace(built, vgpr_spills=3).check_limits()
    with pytest.raises(LimitError, match="2048 threads"):
        dataclasses.replace(built, num_warps=32).check_limits()
    big = dataclasses.replace(built, lds=100_000)
    with pytest.raises(LimitError, match="LDS"):
        big.check_limits()
    dataclasses.replace(big, arch="gfx950").check_limits()
    with pytest.raises(LimitError, match="VGPRs"):
        built.check_limits(max_vgprs=3)
    with pytest.raises(LimitError, match="occupancy"):
        built.check_limits(min_occupancy=99)


def test_recorded_work_is_built_for_other_targets() -> None:
    recorder = RecordingLauncher()
    recorder(k.typed_copy, (1,), (torch.zeros(64), torch.zeros(64), 60), {"BLOCK": 64}, 2, 2)
    for arch in ("gfx950", "gfx1100", "sm_90"):
        built = build(dataclasses.replace(recorder.recorded[0], arch=arch))
        assert built.arch == arch
        built.check_limits()
