"""The picture of `spectrue bench verify`. matplotlib loads here alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from spectrue.deploy.bench_verify_report import Result

METHOD_CASES = ("match", "rejection", "rejection, cuts")  # in the lower row
STYLES = {"ours": "-", "torch": "--", "flashinfer": ":"}


def save_plot(file: Path, about: dict[str, Any], results: Sequence[Result]) -> None:
    """Above time over floor, below time per method; left over the batch, right the vocabulary."""
    pipelines = [r for r in results if r.kind == "pipeline"]
    batch, vocab_size = pipelines[0].batch, pipelines[0].vocab_size
    by_batch = [r for r in pipelines if r.vocab_size == vocab_size]
    by_vocab = [r for r in pipelines if r.batch == batch]
    names = list(dict.fromkeys(r.name for r in pipelines))
    styles = {
        name: {"color": f"C{i % 10}", "marker": "o" if i < 10 else "s"}
        for i, name in enumerate(names)
    }
    figure = Figure(figsize=(12, 9), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    sides: tuple[tuple[str, list[Result], Callable[[Result], int]], ...] = (
        (f"batch, V = {vocab_size}", by_batch, lambda r: r.batch),
        (f"vocabulary, batch {batch}", by_vocab, lambda r: r.vocab_size),
    )
    for column, (label, group, place) in enumerate(sides):
        above, below = axes[0][column], axes[1][column]
        for name in names:
            chosen = sorted((r for r in group if r.name == name), key=place)
            x = [place(r) for r in chosen]
            above.plot(x, [r.ratio_to_floor for r in chosen], label=name, **styles[name])
            if name in METHOD_CASES:
                for method, line in STYLES.items():
                    y = [r.ours.median if method == "ours" else r.peer(method) for r in chosen]
                    if any(v is not None for v in y):
                        shown = [float("nan") if v is None else v for v in y]
                        below.plot(x, shown, line, label=f"{name}: {method}", **styles[name])
        above.axhline(1, color="grey", linewidth=1)
        above.set_ylabel("time / time of its bytes")
        below.set_ylabel("us a step")
        for axis in (above, below):
            axis.set_xlabel(label)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.grid(alpha=0.3)
            sizes = sorted({place(r) for r in group})
            axis.set_xticks(sizes, [str(s) for s in sizes])
            axis.legend(fontsize=7)
    figure.suptitle(
        f"{about['device']}, {about['backend']}, {about['dtype']}, "
        f"k={about['num_speculative_tokens']}, copy {about['copy_bandwidth'] / 1e9:.0f} GB/s"
    )
    figure.savefig(file, dpi=120, format="png")
