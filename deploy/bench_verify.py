"""`spectrue bench verify`: every verify op and pipeline on this device, against the time that its
bytes take and against other implementations, each checked against the reference once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from spectrue.deploy.bench_verify_cases import OPS, PIPELINES, Case, floor_bytes, with_guess
from spectrue.deploy.bench_verify_check import check
from spectrue.deploy.bench_verify_inputs import Inputs, make_inputs
from spectrue.deploy.bench_verify_peers import flashinfer_peer, load_flashinfer, torch_peers
from spectrue.deploy.bench_verify_report import Result, device_name, make_table, versions
from spectrue.deploy.bench_verify_timing import (
    Pass,
    Times,
    copy_bandwidth,
    empty_graph_time,
    time_passes,
)
from spectrue.workers.errors import ConfigError, SpectrueError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
DRAFT_VOCAB_SIZE = 32000
SWEEP_BATCH = (64, 1, 4, 16, 256)
SWEEP_VOCAB = (128256, 32000, 49152, 151666)
NUM_MAIN = 6  # pipelines of --quick and of the sweep's points
_MAX_SETS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    batch: tuple[int, ...]
    num_speculative_tokens: int
    vocab_size: tuple[int, ...]
    dtype: str
    replays: int
    quick: bool
    sweep: bool  # of the plot, by default sizes

    def points(self) -> list[tuple[int, int, tuple[Case, ...]]]:
        """Every batch at the first vocabulary, and the first batch at every other."""
        first_batch, first_vocab = self.batch[0], self.vocab_size[0]
        sizes = [(b, first_vocab) for b in self.batch]
        sizes += [(first_batch, v) for v in self.vocab_size[1:]]
        main = PIPELINES[:NUM_MAIN]
        every = PIPELINES + OPS
        return [
            (b, v, main if self.quick or (self.sweep and i > 1) else every)
            for i, (b, v) in enumerate(sizes)
        ]


def make_options(
    device: torch.device,
    *,
    batch: str | None = None,
    num_speculative_tokens: int | None = None,
    vocab_size: str | None = None,
    dtype: str = "bfloat16",
    quick: bool = False,
    plot: bool = False,
) -> Options:
    """A CPU gets small sizes where none are given. Raises ConfigError naming the option."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    on_cpu = device.type == "cpu"
    sweep = plot and batch is None and vocab_size is None and not on_cpu
    batches: tuple[int, ...] = (2, 1) if on_cpu else SWEEP_BATCH if sweep else (64, 1)
    vocabs: tuple[int, ...] = (2000,) if on_cpu else SWEEP_VOCAB if sweep else (128256,)
    k = num_speculative_tokens
    if k is None:
        k = 2 if on_cpu else 4
    if k < 1:
        raise ConfigError(f"num_speculative_tokens must be at least 1, got {k}")
    return Options(
        batch=_sizes("batch", batch, 1) or (batches[:1] if quick and not sweep else batches),
        num_speculative_tokens=k,
        vocab_size=_sizes("vocab_size", vocab_size, 32) or vocabs,
        dtype=dtype,
        replays=8 if on_cpu else 52,
        quick=quick,
        sweep=sweep,
    )


def _sizes(name: str, text: str | None, least: int) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < least:
        raise ConfigError(f"{name} must be integers from {least} up, like 64,128, got {text!r}")
    return tuple(dict.fromkeys(sizes))


def run(
    *,
    batch: str | None = None,
    num_speculative_tokens: int | None = None,
    vocab_size: str | None = None,
    dtype: str = "bfloat16",
    json_file: Path | None = None,
    plot: Path | None = None,
    quick: bool = False,
) -> None:
    """Measure, print a table, write what was asked for.

    Raises SpectrueError, at the end, where more than 1 % of the rows differ from the reference.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options = make_options(
        device,
        batch=batch,
        num_speculative_tokens=num_speculative_tokens,
        vocab_size=vocab_size,
        dtype=dtype,
        quick=quick,
        plot=plot is not None,
    )
    if plot is not None:
        try:
            import_module("matplotlib")
        except ModuleNotFoundError:
            raise ConfigError("plot needs matplotlib: pip install 'spectrue[bench]'") from None
    for name, file in (("json", json_file), ("plot", plot)):
        if file is not None and not file.parent.is_dir():
            raise ConfigError(f"{name}: there is no directory {file.parent}")
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, 160))  # a pipe's 80 columns cut the table
    about, results = measure(options, device, console)
    for note in about["notes"]:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    console.print(make_table(about, results))
    if json_file is not None:
        document = about | {"results": [asdict(r) for r in results]}
        json_file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if plot is not None:
        from spectrue.deploy.bench_verify_plot import save_plot

        save_plot(plot, about, results)
    wrong = [r for r in results if not r.checked.ok]
    if wrong:
        names = ", ".join(f"{r.name} ({r.checked.wrong} of {r.checked.rows})" for r in wrong)
        raise SpectrueError(f"rows differ from the reference: {names}")


def measure(
    options: Options, device: torch.device, console: Console
) -> tuple[dict[str, Any], list[Result]]:
    on_cpu = device.type == "cpu"
    notes = []
    if on_cpu:
        notes.append("no GPU: this times the reference, which is also what is checked against")
    with console.status("loading and compiling flashinfer"):
        ops, said = load_flashinfer(device)
    if ops is None:
        notes.append(f"{said}; it is left out")
    else:
        notes.append("flashinfer cannot renormalise by min_p: with cuts it does without")
    bandwidth = copy_bandwidth(device)
    about: dict[str, Any] = {
        "device": device_name(device),
        "backend": "reference" if on_cpu else "triton",
        "versions": versions() | ({} if ops is None else {"flashinfer": said}),
        "dtype": options.dtype,
        "num_speculative_tokens": options.num_speculative_tokens,
        "replays": options.replays,
        "copy_bandwidth": bandwidth,
        "empty_graph_us": empty_graph_time(device),
        "notes": notes,
    }
    results = []
    points = options.points()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("", total=sum(len(cases) for _, _, cases in points))
        for batch_size, vocab, cases in points:
            made_for: tuple[str, bool] | None = None
            sets: list[Inputs] = []
            for case in sorted(cases, key=lambda c: (c.rows, c.reduced)):
                what = f"batch {batch_size}, V {vocab}: {case.name}"
                progress.update(task, description=what)
                if made_for != (case.rows, case.reduced):
                    made_for = case.rows, case.reduced
                    sets = []  # frees them before the next are made
                    sets = _sets(options, case, batch_size, vocab, device)
                results.append(_measure_case(case, sets, options, bandwidth, ops))
                progress.advance(task)
    for r in results:
        failed = [f"{r.name}: {n}: {t}" for n, t in r.peers.items() if not isinstance(t, Times)]
        notes += [note for note in failed if note not in notes]
    order = {case.name: i for i, case in enumerate(PIPELINES + OPS)}
    sizes = {(b, v): i for i, (b, v, _) in enumerate(points)}
    results.sort(key=lambda r: (sizes[r.batch, r.vocab_size], order[r.name]))
    return about, results


def _sets(
    options: Options, case: Case, batch: int, vocab_size: int, device: torch.device
) -> list[Inputs]:
    """Enough of them that one is out of the L2 when its turn comes again."""
    dtype, k = DTYPES[options.dtype], options.num_speculative_tokens
    num_sets = 2
    if device.type != "cpu":
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
        if torch.version.hip:
            l2 = max(l2, 2**28)  # the memory-side cache of MI300, which no property tells
        num_bytes = batch * (k + 1) * vocab_size * dtype.itemsize
        num_sets = min(max(2, -(-4 * l2 // num_bytes)), _MAX_SETS)
    reduced = min(DRAFT_VOCAB_SIZE, vocab_size // 2)
    return make_inputs(
        case.rows,
        batch=batch,
        k=k,
        vocab_size=vocab_size,
        draft_vocab_size=reduced if case.reduced else vocab_size,
        num_sets=num_sets,
        dtype=dtype,
        device=device,
    )


def _measure_case(
    case: Case, sets: Sequence[Inputs], options: Options, bandwidth: float, ops: Any
) -> Result:
    sets = [with_guess(case, x) for x in sets]
    given: list[Any] = list(sets) if case.prepare is None else [case.prepare(x) for x in sets]
    methods: dict[str, list[Pass]] = {"ours": [partial(case.run, x) for x in given]}
    for name, peer in torch_peers(case).items():
        methods[name] = [partial(peer, x) for x in sets]
    peer_of_flashinfer = None if ops is None else flashinfer_peer(case, ops)
    if peer_of_flashinfer is not None:
        methods["flashinfer"] = [partial(peer_of_flashinfer, x) for x in sets]
    x = sets[0]
    device = x.logits.device
    checked = check(case, sets)
    accept_length = None
    if case.method is not None:
        accept_length = 1 + sum(float(case.run(s)[1].float().mean()) for s in sets) / len(sets)
    guard = nullcontext() if device.type == "cpu" else torch.cuda.device(device)
    with guard, torch.inference_mode():
        times = time_passes(methods, options.replays, device)
    if device.type != "cpu":
        methods.clear()
        torch.cuda.empty_cache()
    ours = times.pop("ours")
    assert isinstance(ours, Times)
    num_bytes = floor_bytes(case, x)
    return Result(
        name=case.name,
        kind="op" if case.method is None else "pipeline",
        batch=x.batch,
        num_rows=len(x.logits),
        vocab_size=x.logits.shape[1],
        draft_vocab_size=x.draft_logits.shape[1],
        floor_bytes=num_bytes,
        floor_us=1e6 * num_bytes / bandwidth,
        ours=ours,
        peers=times,
        accept_length=accept_length,
        checked=checked,
    )
