"""`spectrue bench draft`: how much of what a drafter proposes is accepted, and what that gains."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from spectrue.deploy.bench_engine import PROMPTS, prompt_ids
from spectrue.workers.config import EngineConfig, SpeculativeConfig
from spectrue.workers.core import Request, SamplingParams, SpecDecodeStats, accept_length
from spectrue.workers.engine import Engine
from spectrue.workers.errors import ConfigError
from spectrue.workers.prompts import read_prompts

ALL = "all"


@dataclass(frozen=True, slots=True)
class Asked:
    category: str
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class Acceptance:
    """Counts over verify steps; raw accepts, before stop cuts (vLLM's meanings)."""

    steps: int = 0
    drafted: list[int] = field(default_factory=list)  # by position
    accepted: list[int] = field(default_factory=list)

    def add(self, steps: int, drafted: int, accepted: int) -> None:
        self.steps += steps
        while len(self.drafted) < drafted:
            self.drafted.append(0)
            self.accepted.append(0)
        for position in range(drafted):
            self.drafted[position] += 1
            self.accepted[position] += position < accepted

    @property
    def accept_length(self) -> float:
        return accept_length(sum(self.accepted), self.steps)

    @property
    def rates(self) -> list[float]:
        """By position: of the steps that drafted there, how many accepted there."""
        return [a / d for a, d in zip(self.accepted, self.drafted, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        rates = [round(rate, 4) for rate in self.rates]
        return {
            "accept_length": round(self.accept_length, 4),
            "acceptance_by_position": rates,
            "verify_steps": self.steps,
        }


@dataclass(frozen=True, slots=True)
class DraftResult:
    """One temperature."""

    temperature: float
    verify_method: str
    by_category: dict[str, Acceptance]  # ALL first
    tokens_per_second: float
    speedups: list[float]  # over no speculation, one a batch; empty: not compared
    speedup: float | None  # of all batches together

    def as_dict(self) -> dict[str, Any]:
        categories = {name: found.as_dict() for name, found in self.by_category.items()}
        found = asdict(self) | {"by_category": categories}
        return found | {"speedups": [round(ratio, 4) for ratio in self.speedups]}


@dataclass(slots=True)
class _Run:
    tokens: int = 0
    seconds: float = 0.0
    method: str = "greedy"

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds

    def batch(
        self,
        engine: Engine,
        prompts: Sequence[Asked],
        params: SamplingParams,
        found: dict[str, Acceptance],
    ) -> float:
        """Complete one batch, prompts and all; its tokens per second."""
        before: dict[str, SpecDecodeStats] = {}
        for i, prompt in enumerate(prompts):
            before[str(i)] = SpecDecodeStats()
            engine.add_request(
                Request(request_id=str(i), prompt_token_ids=prompt.token_ids, params=params)
            )
        start, tokens = time.perf_counter(), 0
        while engine.num_unfinished:
            for output in engine.step():
                old, new = before[output.request_id], output.spec_decode
                before[output.request_id] = new
                tokens += len(output.token_ids)
                self.method = new.verify_method
                step = (
                    new.num_verify_steps - old.num_verify_steps,
                    new.num_draft_tokens - old.num_draft_tokens,
                    new.num_accepted_tokens - old.num_accepted_tokens,
                )
                for name in {ALL, prompts[int(output.request_id)].category or ALL}:
                    found.setdefault(name, Acceptance()).add(*step)
        seconds = time.perf_counter() - start
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
        return tokens / seconds


def measure(
    engine: Engine,
    prompts: Sequence[Asked],
    params: SamplingParams,
    batch_size: int,
    plain: Engine | None = None,  # the same without speculation
    advance: Callable[[int], None] = lambda number: None,
) -> DraftResult:
    """Every prompt once. With `plain`, each batch by both engines, which take turns to be first."""
    found: dict[str, Acceptance] = {ALL: Acceptance()}
    ours, theirs, ratios = _Run(), _Run(), []
    for number, at in enumerate(range(0, len(prompts), batch_size)):
        batch = prompts[at : at + batch_size]
        other = 0.0
        if plain is not None and number % 2:
            other = theirs.batch(plain, batch, params, {})
        own = ours.batch(engine, batch, params, found)
        if plain is not None:
            if not number % 2:
                other = theirs.batch(plain, batch, params, {})
            ratios.append(own / other)
        advance(len(batch))
    speedup = ours.speed / theirs.speed if plain is not None else None
    return DraftResult(params.temperature, ours.method, found, ours.speed, ratios, speedup)


def run(
    config: EngineConfig,
    *,
    temperatures: Sequence[float],
    batch_size: int,
    max_tokens: int,
    prompts_file: Path | None,
    num_prompts: int | None,
    ignore_eos: bool,
    compare: bool,
    json_file: Path | None,
    plot: Path | None,
) -> None:
    """Load, measure every temperature, print tables, write files."""
    from spectrue.workers.async_engine import load_engine

    if config.speculative.max_draft_tokens == 0:
        raise ConfigError("there is nothing to measure without a drafter: give --drafter")
    console = Console()
    given = list(PROMPTS) if prompts_file is None else read_prompts(prompts_file)
    config = config.replace(
        max_num_seqs=max(config.max_num_seqs, batch_size), enable_prefix_caching=False
    )
    with console.status(f"loading {config.name}"):
        engine = load_engine(config)
        plain = None
        if compare:
            none = SpeculativeConfig(drafter="none")
            plain = load_engine(config.replace(speculative=none))
    prompts = [Asked(p.category, prompt_ids(engine, p)) for p in given[:num_prompts]]
    about = describe(engine, len(prompts), max_tokens, batch_size)
    results: list[DraftResult] = []
    for temperature in temperatures:
        with Progress(console=console, transient=True) as progress:
            params = SamplingParams(
                temperature=temperature, max_tokens=max_tokens, ignore_eos=ignore_eos
            )
            warm = SamplingParams(temperature=temperature, max_tokens=8, ignore_eos=True)
            for loaded in (engine, plain) if plain else (engine,):
                _Run().batch(loaded, prompts[:batch_size], warm, {})
            task = progress.add_task(f"T={temperature:g}", total=len(prompts))
            results.append(
                measure(
                    engine,
                    prompts,
                    params,
                    batch_size,
                    plain,
                    lambda number, task=task: progress.advance(task, number),  # type: ignore[misc]
                )
            )
        show(console, about, results[-1:])
        write(about, results, json_file, plot)  # after each: a run of many prompts is long


def describe(engine: Engine, num_prompts: int, max_tokens: int, batch_size: int) -> dict[str, Any]:
    """What was measured, for `show` and `write`."""
    resolved = engine.info.resolved
    return {
        "model": engine.config.name,
        "drafter": resolved.drafter,
        "num_speculative_tokens": resolved.num_speculative_tokens,
        "depth": resolved.depth,
        "num_prompts": num_prompts,
        "max_tokens": max_tokens,
        "batch_size": batch_size,
    }


def write(
    about: dict[str, Any], results: Sequence[DraftResult], json_file: Path | None, plot: Path | None
) -> None:
    if json_file is not None:
        found = about | {"results": [result.as_dict() for result in results]}
        json_file.write_text(json.dumps(found, indent=1) + "\n")
    if plot is not None:
        from spectrue.deploy.bench_draft_plot import save_plot

        save_plot(plot, about, results)


def show(console: Console, about: dict[str, Any], results: Sequence[DraftResult]) -> None:
    for result in results:
        title = (
            f"{about['model']}, {about['drafter']}, k={about['num_speculative_tokens']} "
            f"({about['depth']}), T={result.temperature:g}, verified by {result.verify_method}"
        )
        table = Table(title=title, title_justify="left")
        depth = len(result.by_category[ALL].drafted)
        columns = ("category", "accept length", *(f"position {i + 1}" for i in range(depth)))
        for column in columns:
            table.add_column(column, justify="left" if column == "category" else "right")
        for name, found in result.by_category.items():
            rates = [f"{rate:.3f}" for rate in found.rates]
            table.add_row(name, f"{found.accept_length:.3f}", *rates)
        console.print(table)
        speed = f"{result.tokens_per_second:.1f} tokens/s"
        if result.speedup is not None:
            ordered = sorted(result.speedups)
            speed += (
                f", {result.speedup:.3f} times no speculation; by batch {ordered[0]:.2f} to "
                f"{ordered[-1]:.2f}, median {ordered[len(ordered) // 2]:.3f}"
            )
        console.print(speed)
