"""The picture of `spectrue bench draft` and of a trained head. matplotlib loads here alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from spectrue.deploy.bench_draft import DraftResult


def save_plot(file: Path, about: dict[str, Any], results: Sequence[DraftResult]) -> None:
    """Left acceptance by position, right accept length by category; a colour a temperature."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.6))
    width = 0.8 / len(results)
    for number, result in enumerate(results):
        shift = (number - (len(results) - 1) / 2) * width
        label = f"T={result.temperature:g}, {result.verify_method}"
        rates = next(iter(result.by_category.values())).rates
        bars = left.bar([i + 1 + shift for i in range(len(rates))], rates, width, label=label)
        left.bar_label(bars, fmt="%.2f", fontsize=8)
        lengths = [found.accept_length for found in result.by_category.values()]
        bars = right.bar([i + shift for i in range(len(lengths))], lengths, width, label=label)
        right.bar_label(bars, fmt="%.2f", fontsize=7)
    depth = max(len(next(iter(result.by_category.values())).rates) for result in results)
    left.set_xticks(range(1, depth + 1))
    left.set_xlabel("draft position")
    left.set_ylabel("share of steps that accept it")
    left.set_ylim(0, 1)
    names = list(results[0].by_category)
    right.set_xticks(range(len(names)), names, rotation=20, ha="right")
    right.set_ylabel("accept length, tokens a step")
    right.set_ylim(1, about["num_speculative_tokens"] + 1)
    for axis in (left, right):
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
        axis.legend(fontsize=8)
    figure.suptitle(
        f"{about['model']}, {about['drafter']}, k={about['num_speculative_tokens']}, "
        f"{about['num_prompts']} prompts of up to {about['max_tokens']} tokens"
    )
    figure.savefig(file, dpi=120, format="png")
