"""Compile a @triton.jit function for a GPU that this machine does not have.

Arguments are specialised by Triton's own binder, so that the code is the one that a launch with the
same arguments would build on the device (divisible by 16, equal to 1, 32 or 64 bit, pointer range).
Compiling does not fail for everything that is wrong, hence two gates here: lines with `error:` that
the code generator writes to the C-level stderr while it returns a kernel with code dropped, and
`check_limits` for what the hardware would refuse or run slowly (spills, LDS, threads).
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.compiler import compile as triton_compile
from triton.runtime.jit import create_function_from_signature

WAVE64 = ("gfx90a", "gfx942", "gfx950")
WAVE32 = ("gfx1100", "gfx1201")
CUDA = ("sm_80", "sm_90", "sm_100")
ALL_TARGETS = WAVE64 + WAVE32 + CUDA
MAX_THREADS = 1024
# Bytes of shared memory that one block may use.
MAX_LDS = {
    **dict.fromkeys(("gfx90a", "gfx942", *WAVE32), 64 << 10),
    "gfx950": 160 << 10,
    "sm_80": 163 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
}


class CompileError(Exception):
    """The compiler complained, although it returned a kernel."""


class LimitError(Exception):
    """The hardware would refuse this kernel, or it spills registers."""


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel built for one target, with the resources that its metadata declares."""

    name: str
    arch: str
    num_warps: int
    warp_size: int
    asm: str  # amdgcn text, or PTX
    lds: int  # bytes
    vgprs: int = 0
    agprs: int = 0
    sgprs: int = 0
    vgpr_spills: int = 0
    sgpr_spills: int = 0
    scratch: int = 0  # bytes a lane, of the private segment
    occupancy: int = 0  # waves a SIMD
    # Which runtime arguments the binary takes: (position among all parameters, type).
    parameters: tuple[tuple[int, str], ...] = field(default=())

    @property
    def threads(self) -> int:
        return self.num_warps * self.warp_size

    def check_limits(
        self,
        *,
        max_vgprs: int | None = None,
        max_sgpr_spills: int = 0,
        min_occupancy: int = 0,
    ) -> None:
        """Raise LimitError unless the kernel fits the hardware and spills nothing.

        Scalar registers spill to lanes of vector registers, which costs no memory.
        """
        found = []
        if self.vgpr_spills or self.sgpr_spills > max_sgpr_spills or self.scratch:
            found.append(
                f"spills: {self.vgpr_spills} VGPRs, {self.sgpr_spills} SGPRs, "
                f"{self.scratch} bytes of scratch"
            )
        if self.lds > MAX_LDS[self.arch]:
            found.append(f"{self.lds} bytes of LDS, the limit is {MAX_LDS[self.arch]}")
        if self.threads > MAX_THREADS:
            found.append(f"{self.threads} threads, the limit is {MAX_THREADS}")
        if max_vgprs is not None and self.vgprs > max_vgprs:
            found.append(f"{self.vgprs} VGPRs, wanted at most {max_vgprs}")
        if self.occupancy < min_occupancy:
            found.append(f"occupancy {self.occupancy}, wanted at least {min_occupancy}")
        if found:
            raise LimitError(f"{self.name} for {self.arch}: " + "; ".join(found))


def target_of(arch: str) -> GPUTarget:
    if arch.startswith("sm_"):
        return GPUTarget("cuda", int(arch[3:]), 32)
    return GPUTarget("hip", arch, 64 if arch in WAVE64 else 32)


@contextmanager
def _knobs(buffer_ops: bool, fp_fusion: bool | None) -> Iterator[None]:
    """Triton's settings for one build; a cached binary would hide an `error:` line."""
    with (
        knobs.compilation.scope(),
        knobs.amd.scope(),
        knobs.language.scope(),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
        knobs.compilation.always_compile = True
        knobs.amd.use_buffer_ops = buffer_ops
        if fp_fusion is not None:
            knobs.language.default_fp_fusion = fp_fusion
        yield


@contextmanager
def _c_stderr(lines: list[str]) -> Iterator[None]:
    """Collect what C code writes to file descriptor 2."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as captured:
        old = os.dup(2)
        os.dup2(captured.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(old, 2)
            os.close(old)
            captured.seek(0)
            lines += captured.read().decode(errors="replace").splitlines()


@dataclass(frozen=True)
class Specialized:
    """A kernel with everything that the compiler needs to know of its arguments."""

    kernel: Any
    arch: str
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attrs: dict[tuple[int, ...], Any]
    num_warps: int
    num_stages: int
    buffer_ops: bool
    fp_fusion: bool | None

    def key(self) -> tuple[Any, ...]:
        def stable(value: Any) -> Any:
            return getattr(value, "cache_key", None) or (type(value).__name__, str(value))

        return (
            self.kernel.cache_key,
            self.arch,
            tuple(self.signature.items()),
            tuple((k, stable(v)) for k, v in sorted(self.constants.items())),
            str(sorted(self.attrs.items())),
            self.num_warps,
            self.num_stages,
            self.buffer_ops,
            self.fp_fusion,
        )


_binders: dict[tuple[int, str], tuple[Any, Any, Any]] = {}
_compiled: dict[tuple[Any, ...], CompiledKernel] = {}


def specialize(
    kernel: Any,
    args: tuple[Any, ...],
    constants: dict[str, Any],
    arch: str,
    num_warps: int = 4,
    num_stages: int = 2,
    *,
    buffer_ops: bool = True,
    fp_fusion: bool | None = None,
) -> tuple[Specialized, dict[str, Any]]:
    """What a launch would compile, and its arguments by name, by Triton's own binder."""
    if (id(kernel), arch) not in _binders:
        backend = make_backend(target_of(arch))
        binder = create_function_from_signature(kernel.signature, kernel.params, backend)
        _binders[id(kernel), arch] = (kernel, backend, binder)  # keeps the kernel alive: its id
    _, backend, binder = _binders[id(kernel), arch]
    options = {"num_warps": num_warps, "num_stages": num_stages}
    with _knobs(buffer_ops, fp_fusion):
        bound, specialization, _ = binder(*args, **constants, **options)
        kwargs = {**constants, **options}
        _, signature, constexprs, attrs = kernel._pack_args(
            backend, kwargs, bound, specialization, options
        )
    return (
        Specialized(
            kernel,
            arch,
            signature,
            constexprs,
            attrs,
            num_warps,
            num_stages,
            buffer_ops,
            fp_fusion,
        ),
        bound,
    )


def build(work: Specialized) -> CompiledKernel:
    """Compile, once for each distinct specialisation of this process."""
    key = work.key()
    if key in _compiled:
        return _compiled[key]
    options: dict[str, Any] = {"num_warps": work.num_warps, "num_stages": work.num_stages}
    if work.fp_fusion is not None:
        options["enable_fp_fusion"] = work.fp_fusion
    source = ASTSource(work.kernel, work.signature, work.constants, work.attrs)
    lines: list[str] = []
    failure: Exception | None = None
    try:
        with _knobs(work.buffer_ops, work.fp_fusion), _c_stderr(lines):
            built = triton_compile(source, target=target_of(work.arch), options=options)
    except RuntimeError as error:  # newer versions notice some of these themselves
        failure = error
    errors = [line for line in lines if "error:" in line]
    if errors:
        message = f"{work.kernel.__name__} for {work.arch}: " + "\n".join(errors)
        raise CompileError(message) from failure
    if failure is not None:
        raise failure
    parameters = tuple(
        (i, kind) for i, kind in enumerate(work.signature.values()) if kind != "constexpr"
    )
    amd = "amdgcn" in built.asm
    asm = built.asm["amdgcn" if amd else "ptx"]
    _compiled[key] = CompiledKernel(
        name=built.name,
        arch=work.arch,
        num_warps=work.num_warps,
        warp_size=built.metadata.warp_size,
        asm=asm,
        lds=built.metadata.shared,
        parameters=parameters,
        **(_resources(asm) if amd else {}),
    )
    return _compiled[key]


def compile_kernel(
    kernel: Any,
    args: tuple[Any, ...],
    constants: dict[str, Any],
    arch: str,
    num_warps: int = 4,
    num_stages: int = 2,
    *,
    buffer_ops: bool = True,
    fp_fusion: bool | None = None,
) -> CompiledKernel:
    """Build `kernel` as a launch with these arguments would; `fp_fusion=None` is the default."""
    work, _ = specialize(
        kernel,
        args,
        constants,
        arch,
        num_warps,
        num_stages,
        buffer_ops=buffer_ops,
        fp_fusion=fp_fusion,
    )
    return build(work)


def _resources(asm: str) -> dict[str, int]:
    names = {
        "vgprs": r"\.vgpr_count:\s*(\d+)",
        "agprs": r"\.agpr_count:\s*(\d+)",
        "sgprs": r"\.sgpr_count:\s*(\d+)",
        "vgpr_spills": r"\.vgpr_spill_count:\s*(\d+)",
        "sgpr_spills": r"\.sgpr_spill_count:\s*(\d+)",
        "scratch": r"\.private_segment_fixed_size:\s*(\d+)",
        "occupancy": r";\s*Occupancy:\s*(\d+)",
    }
    found = {name: re.search(pattern, asm) for name, pattern in names.items()}
    missing = [n for n, m in found.items() if m is None and n != "agprs"]  # gfx11 has no AGPRs
    if missing:
        raise CompileError(f"the metadata lacks {missing}")
    return {name: int(match[1]) for name, match in found.items() if match is not None}
