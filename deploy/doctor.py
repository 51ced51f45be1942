"""`spectrue doctor`: what this deployment would do on this machine, or on another, and why."""

from __future__ import annotations

import dataclasses
import json
import platform as host
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import get_args

import torch
from rich.console import Console
from rich.table import Table

from spectrue.deploy.config import ServerConfig
from spectrue.deploy.doctor_traps import Check, Node, check_node
from spectrue.kernels import dispatch
from spectrue.workers.attention import resolve_backend
from spectrue.workers.config import EngineConfig, SpeculativeConfig
from spectrue.workers.errors import ConfigError, SpectrueError
from spectrue.workers.kv_dtype import architecture, resolve_kv_dtype
from spectrue.workers.models.config import read_json
from spectrue.workers.policy import Decision, resolve_speculative
from spectrue.workers.reference_policy import Platform, reference_outcome
from spectrue.workers.weights import resolve_dtype

PACKAGES = ("spectrue", "torch", "triton", "transformers", "ray", "safetensors", "gguf")
STYLES = {"ok": "green", "warning": "yellow", "error": "red"}
DEFAULT_ARCH: dict[str, str] = {"cpu": "cpu", "cuda": "sm_90", "hip": "gfx942", "xpu": "xpu"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A deployment, as it is or changed in one point: who samples, here and elsewhere."""

    change: str
    verify_method: str  # or "refused"
    reason: str
    reference_samples: bool
    reference_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    platform: str
    arch: str
    simulated: bool
    versions: dict[str, str]
    gpus: list[str]
    backends: dict[str, str]
    decisions: list[Decision]
    variants: list[Variant]
    checks: list[Check]

    @property
    def healthy(self) -> bool:
        return all(check.status != "error" for check in self.checks)


def run(config: ServerConfig, *, platform: str | None, arch: str | None, as_json: bool) -> bool:
    """Print it; whether no check is an error."""
    report = examine(config.engine, platform, arch)
    if as_json:
        print(json.dumps(asdict(report) | {"healthy": report.healthy}))
    else:
        show(report, config.engine, Console())
    return report.healthy


def examine(
    config: EngineConfig,
    platform: str | None = None,
    arch: str | None = None,
    node: Node | None = None,
) -> Report:
    """Raises ConfigError for a platform that does not exist."""
    names = get_args(Platform)
    if platform is not None and platform not in names:
        raise ConfigError(f"--platform must be one of {', '.join(names)}, got {platform!r}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    own = dispatch.platform_of(device)
    if platform is None and arch is not None:
        platform = "hip" if arch.startswith("gfx") else "cuda" if arch.startswith("sm_") else own
    simulated = platform is not None and platform != own
    chosen = platform or own
    if arch is None:
        arch = DEFAULT_ARCH[chosen] if simulated else architecture(device)
    node = node or Node(torch_hip=torch.version.hip)
    checks = check_node(node, chosen, arch, config.tp_size, simulated)  # type: ignore[arg-type]
    decisions: list[Decision] = []
    backends: dict[str, str] = {}
    try:
        decisions += resolve_speculative(config.speculative).decisions
        dtype = resolve_dtype(config.dtype, "cpu" if chosen == "cpu" else "cuda")
        decisions.append(Decision("dtype", str(dtype).removeprefix("torch."), _why(config.dtype)))
        if chosen != "xpu":
            resolve_kv_dtype(config.kv_cache_dtype, dtype, arch, decisions)
            backends["attention"] = resolve_backend("auto", chosen)  # type: ignore[arg-type]
            backends["verify"] = dispatch.default_backend(chosen)  # type: ignore[arg-type]
    except SpectrueError as e:
        checks.append(Check("configuration", "error", str(e)))
    if chosen == "xpu":
        checks.append(Check("platform", "error", "xpu is not supported: cpu, cuda and hip are"))
    fp8 = dispatch.fp8_of(arch)
    if chosen in ("cuda", "hip"):
        backends["fp8"] = "none" if fp8 is None else str(fp8).removeprefix("torch.")
    return Report(
        platform=chosen,
        arch=arch,
        simulated=simulated,
        versions=_versions(),
        gpus=[] if simulated else _gpus(),
        backends=backends,
        decisions=decisions,
        variants=_variants(config.speculative, chosen),  # type: ignore[arg-type]
        checks=checks,
    )


def _why(dtype: str) -> str:
    return "as this kind of device computes" if dtype == "auto" else "set by the configuration"


def _versions() -> dict[str, str]:
    found = {"python": host.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    found["torch built for"] = (
        f"ROCm {torch.version.hip}"
        if torch.version.hip
        else f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else "CPU"
    )
    for driver, file in {
        "amdgpu driver": "/sys/module/amdgpu/version",
        "nvidia driver": "/sys/module/nvidia/version",
    }.items():
        path = Path(file)
        if path.exists():
            found[driver] = path.read_text().strip()
    return found


def _gpus() -> list[str]:
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        size = properties.total_memory / 2**30
        arch = architecture(torch.device("cuda", index))
        found.append(f"{index}: {properties.name}, {arch}, {size:.0f} GiB")
    return found


# -- who samples ----------------------------------------------------------------------------------


def _variants(config: SpeculativeConfig, platform: Platform) -> list[Variant]:
    reduced = _drafts_a_part(config)
    found = [_variant("as configured", config, platform, reduced)]
    if config.max_draft_tokens == 0:
        return found
    if config.tree_topk == 1:
        tree = dataclasses.replace(config, tree_topk=2)
        found.append(_variant("with tree_topk = 2", tree, platform, reduced))
    if not reduced and config.drafter in ("eagle", "eagle3"):
        found.append(_variant("with a reduced draft vocabulary", config, platform, True))
    return found


def _variant(change: str, config: SpeculativeConfig, platform: Platform, reduced: bool) -> Variant:
    try:
        resolved = resolve_speculative(config)
    except ConfigError as e:
        return Variant(
            change=change,
            verify_method="refused",
            reason=str(e),
            reference_samples=False,
            reference_reason="",
        )
    reason = resolved.verify_reason
    if reduced and resolved.verify_method == "rejection":
        reason += ", in the ids that the head drafts: tokens outside have draft probability 0"
    theirs = reference_outcome(resolved, platform, reduced)
    return Variant(
        change=change,
        verify_method=resolved.verify_method,
        reason=reason,
        reference_samples=theirs.samples,
        reference_reason=theirs.reason,
    )


def _drafts_a_part(config: SpeculativeConfig) -> bool:
    """Whether the head that is configured has fewer ids than its target, as far as can be seen."""
    if config.token_map is not None:
        return True
    path = None if config.draft_model is None else Path(config.draft_model) / "config.json"
    if path is None or not path.exists():
        return False
    raw = read_json(path)
    size = raw.get("draft_vocab_size")
    return isinstance(size, int) and size < int(raw.get("vocab_size", 0))


# -- for people -----------------------------------------------------------------------------------


def show(report: Report, config: EngineConfig, console: Console) -> None:
    where = f"{report.platform}, {report.arch}"
    if report.simulated:
        where += " (simulated: this machine has none)"
    console.print(f"[bold]platform[/bold] {where}", highlight=False)
    console.print(
        ", ".join(f"{name} {version}" for name, version in report.versions.items()), style="dim"
    )
    for gpu in report.gpus:
        console.print(f"GPU {gpu}", highlight=False)
    for name, value in report.backends.items():
        console.print(f"{name}: {value}", highlight=False)

    settings = Table(title="settings that were decided", title_justify="left")
    for column in ("setting", "value", "why"):
        settings.add_column(column, overflow="fold")
    for decision in report.decisions:
        settings.add_row(decision.setting, decision.value, decision.reason)
    console.print(settings)

    drafter = config.speculative.drafter
    variants = Table(title=f"rows at temperature > 0, drafter {drafter}", title_justify="left")
    for column in ("", "Spectrue", "why", "SGLang 0.5.23", "why"):
        variants.add_column(column, overflow="fold")
    for variant in report.variants:
        theirs = "samples" if variant.reference_samples else "argmax"
        if not variant.reference_reason:
            theirs = "-"
        ours = variant.verify_method, variant.reason
        variants.add_row(variant.change, *ours, theirs, variant.reference_reason)
    console.print(variants)
    for check in report.checks:
        style = STYLES[check.status]
        console.print(f"[{style}]{check.status:8}[/{style}] {check.name}: ", end="")
        console.print(check.text, markup=False, highlight=False, soft_wrap=True)
