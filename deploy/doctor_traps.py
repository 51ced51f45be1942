"""What is known to go wrong on a node, most of it AMD's and without an error; one check a trap.

Each was seen in Ray, vLLM or ROCm's device plugin; the issue is named where the check is.
"""

from __future__ import annotations

import importlib.util
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from spectrue.workers.reference_policy import Platform

Status = Literal["ok", "warning", "error"]
GIB = 2**30
NOSET = (
    "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
)
TESTED_ARCHITECTURES = ("gfx90a", "gfx942", "gfx950")


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    status: Status
    text: str  # what was found, and what to do about it


def _importable(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _shm_bytes() -> int | None:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None
    return found.f_blocks * found.f_frsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What the checks look at; tests give their own."""

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    root: Path = Path("/")
    importable: Callable[[str], bool] = _importable
    shm_bytes: Callable[[], int | None] = _shm_bytes
    groups: Callable[[], list[int]] = os.getgroups
    torch_hip: str | None = None  # version of ROCm that torch was built for


def check_node(
    node: Node, platform: Platform, arch: str, tp_size: int, simulated: bool
) -> list[Check]:
    """`simulated`: the platform is not this machine's, so its devices are not looked for."""
    found = [*_variables(node, platform)]
    if not simulated:
        found += _devices(node)
    if platform == "hip":
        found.append(_amdsmi(node))
        found.append(_architecture(arch))
    found.append(_shm(node, tp_size))
    found += _caches(node)
    return found


def _variables(node: Node, platform: Platform) -> Iterator[Check]:
    environ = node.environ
    if "ROCR_VISIBLE_DEVICES" in environ:
        # ray's AMD accelerator manager; ray#46563
        yield Check(
            "ROCR_VISIBLE_DEVICES",
            "error",
            "is set: Ray refuses to start with amdsmi, and masks twice without; unset it and use "
            "HIP_VISIBLE_DEVICES",
        )
    for name in NOSET:
        if environ.get(name, "0") not in ("", "0"):
            # vllm#33308: ROCm images of vLLM preset them
            yield Check(
                name,
                "warning",
                "is set: Ray shows every actor all GPUs; a rank takes GPU 0 of what it sees, so "
                "two replicas on a node would share one; unset it",
            )
    masks = [environ.get(name) for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")]
    if platform == "hip" and None not in masks and masks[0] != masks[1]:
        yield Check(
            "CUDA_VISIBLE_DEVICES",
            "warning",
            f"= {masks[1]} and HIP_VISIBLE_DEVICES = {masks[0]}: on AMD both mask, and they "
            f"differ; set one",
        )


def _devices(node: Node) -> Iterator[Check]:
    """/dev/kfd and the render nodes; the group to add where they cannot be read."""
    kfd = node.root / "dev/kfd"
    if not kfd.exists():
        return
    if node.torch_hip is None:
        yield Check(
            "torch",
            "error",
            "this node has an AMD GPU (/dev/kfd), but torch is built without ROCm and finds none; "
            "install torch from a ROCm index (make serve TORCH_INDEX=...)",
        )
    for path in (kfd, *sorted((node.root / "dev/dri").glob("renderD*"))):
        name = "/" + str(path.relative_to(node.root))
        if os.access(path, os.R_OK | os.W_OK):
            yield Check(name, "ok", "can be read and written")
            continue
        found = path.stat()
        # ROCm/k8s-device-plugin#39
        yield Check(
            name,
            "error",
            f"cannot be opened: it is owned by group {found.st_gid} with mode "
            f"{stat.filemode(found.st_mode)}, this process is in {sorted(node.groups())}; add the "
            f"group (docker: --group-add {found.st_gid}; Kubernetes: supplementalGroups: "
            f"[{found.st_gid}])",
        )


def _amdsmi(node: Node) -> Check:
    if node.importable("amdsmi"):
        return Check("amdsmi", "ok", "can be imported: Ray sees AMD GPUs as such")
    return Check(
        "amdsmi",
        "warning",
        "cannot be imported: Ray takes the GPUs for NVIDIA's, sets CUDA_VISIBLE_DEVICES and has no "
        "accelerator_type and no GPU metrics; install it from the ROCm release "
        "(its share/amd_smi, by pip)",
    )


def _architecture(arch: str) -> Check:
    if arch in TESTED_ARCHITECTURES:
        return Check("architecture", "ok", f"{arch}: kernels are built and executed in tests")
    return Check(
        "architecture",
        "warning",
        f"{arch} is none of {', '.join(TESTED_ARCHITECTURES)}, for which kernels are tested",
    )


def _shm(node: Node, tp_size: int) -> Check:
    size = node.shm_bytes()
    if size is None:
        return Check("/dev/shm", "warning", "is not there: Ray and RCCL need it")
    needed = GIB * max(1, tp_size)
    text = f"{size / GIB:.1f} GiB"
    if size >= needed:
        return Check("/dev/shm", "ok", text)
    # production-stack#276, #899: 64 MB is a container's default
    return Check(
        "/dev/shm",
        "warning",
        f"{text}, and at least {needed / GIB:.0f} GiB is wanted for Ray and RCCL with tp_size = "
        f"{tp_size}; mount a larger one (docker: --shm-size; Kubernetes: emptyDir, medium Memory)",
    )


def _caches(node: Node) -> Iterator[Check]:
    """kserve#3562: a random user id whose home is /, which it cannot write."""
    home = node.environ.get("HOME", "/")
    places = {
        "SPECTRUE_CACHE": node.environ.get("SPECTRUE_CACHE", f"{home}/.cache/spectrue"),
        "TRITON_CACHE_DIR": node.environ.get("TRITON_CACHE_DIR", f"{home}/.triton"),
        "HF_HOME": node.environ.get("HF_HOME", f"{home}/.cache/huggingface"),
    }
    for name, place in places.items():
        path = Path(place).expanduser()
        existing = next(p for p in (path, *path.parents) if p.exists())
        if not os.access(existing, os.W_OK):
            yield Check(
                name,
                "error",
                f"{path} cannot be written by this user: mount a volume there, or point {name} at "
                f"one that can",
            )
