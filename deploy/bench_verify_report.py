"""What `spectrue bench verify` reports: a result a case, as a table."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch
from rich.table import Table

from spectrue.deploy.bench_verify_check import Checked
from spectrue.deploy.bench_verify_timing import Times


@dataclass(slots=True, kw_only=True)
class Result:
    name: str
    kind: str  # pipeline or op
    batch: int
    num_rows: int
    vocab_size: int
    draft_vocab_size: int
    floor_bytes: int
    floor_us: float
    ours: Times
    peers: dict[str, Times | str]  # a text says why there is no time
    accept_length: float | None
    checked: Checked
    ratio_to_floor: float = field(init=False)
    speedup: float | None = field(init=False)  # over the fastest peer

    def __post_init__(self) -> None:
        self.ratio_to_floor = self.ours.median / self.floor_us
        others = [t.median for t in self.peers.values() if isinstance(t, Times)]
        self.speedup = min(others) / self.ours.median if others else None

    def peer(self, prefix: str) -> float | None:
        """The fastest of one kind."""
        times = [
            t.median
            for name, t in self.peers.items()
            if isinstance(t, Times) and name.startswith(prefix)
        ]
        return min(times, default=None)


def make_table(about: dict[str, Any], results: Sequence[Result]) -> Table:
    launch = about["empty_graph_us"]
    table = Table(
        title=f"{about['device']}, {about['backend']}, {about['dtype']} logits, "
        f"k={about['num_speculative_tokens']}, copy {about['copy_bandwidth'] / 1e9:.0f} GB/s"
        + ("" if launch is None else f", an idle kernel {launch:.1f} us"),
        caption="us: median a pass; checked: rows equal to the reference, "
        "+ rows at an edge, ! wrong rows",
        title_justify="left",
        caption_justify="left",
    )
    heads = "floor us", "us", "p10 - p90", "us / floor", "torch us", "flashinfer us", "speed-up"
    table.add_column("case")
    for head in (*heads, "accept length", "checked"):
        table.add_column(head, justify="right")
    size: tuple[int, int] | None = None
    for r in results:
        if size != (r.batch, r.vocab_size):
            size = r.batch, r.vocab_size
            table.add_section()
            table.add_row(f"batch {r.batch}, V {r.vocab_size}", style="bold")
        c = r.checked
        equal = c.rows - c.near_edge - c.wrong
        table.add_row(
            r.name,
            f"{r.floor_us:.2f}",
            f"{r.ours.median:.1f}",
            f"{r.ours.p10:.1f} - {r.ours.p90:.1f}",
            f"{r.ratio_to_floor:.2f}" if r.floor_us > 0.5 else "-",  # else it is all launches
            _number(r.peer("torch")),
            _number(r.peer("flashinfer")),
            _number(r.speedup, 2),
            _number(r.accept_length, 2),
            f"{equal}" + f"+{c.near_edge}" * (c.near_edge > 0) + f"!{c.wrong}" * (c.wrong > 0),
        )
    return table


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"
    return str(torch.cuda.get_device_name(device))


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }
    for name in ("spectrue", "triton"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found
