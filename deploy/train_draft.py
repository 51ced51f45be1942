"""`spectrue train-draft`: from a target to a head that serves it, in steps that can be resumed.

OUT/training/ has what is resumed: run.json (the settings), corpus/ and checkpoint.pt. OUT itself is
the head, with a model card and its evaluation.
"""

from __future__ import annotations

import contextlib
import json
import math
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from spectrue.deploy.bench_draft import Asked, DraftResult, describe, measure, show, write
from spectrue.deploy.model_card import model_card
from spectrue.workers.async_engine import load_engine
from spectrue.workers.config import Device, EngineConfig, SpeculativeConfig
from spectrue.workers.core import SamplingParams
from spectrue.workers.device import rank_device
from spectrue.workers.errors import ConfigError
from spectrue.workers.model_store import resolve_model
from spectrue.workers.prompts import read_prompts
from spectrue.workers.tokenizer import Tokenizer, load_tokenizer
from spectrue.workers.training.author import MIN_ROOM, AuthorConfig, chat_format
from spectrue.workers.training.config import TrainConfig
from spectrue.workers.training.corpus import Corpus
from spectrue.workers.training.export import export_head
from spectrue.workers.training.generation import (
    GenerationJob,
    generate,
    num_answer_tokens,
    plan_processes,
)
from spectrue.workers.training.trainer import Trainer, TrainProgress, TrainResult
from spectrue.workers.weights import load_model, resolve_dtype

ALGORITHMS = ("eagle3",)
LOG_EVERY = 15.0  # seconds, where the output is no terminal and bars do not move
EVALUATED = 64  # prompts held out, where no file is given
MAX_TOKENS = 128  # of an answer of the evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainDraftConfig:
    """What the command was asked for. Those of FREE may change when a run is resumed."""

    model: str
    algorithm: str = "eagle3"
    prompts: str | None = None  # a file; None: the model writes them
    tokens: int = 20_000_000  # of answers
    draft_vocab_size: int = 8192
    passes: float = 8.0  # over the corpus, if neither `steps` nor `minutes` is given
    steps: int | None = None
    minutes: float | None = None  # of training
    tokens_per_step: int | None = None  # None: 65536 on a GPU, 8192 on a CPU
    accumulate: int = 1  # parts in which a step is computed, for less memory
    max_length: int = 384
    learning_rate: float = 2e-3
    seed: int = 0
    dtype: str = "auto"
    device: Device = "auto"
    processes: int | None = None  # that write the corpus
    evaluation_prompts: str | None = None
    num_speculative_tokens: int = 3  # draft steps that are trained and measured

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise ConfigError(
                f"algorithm must be one of {', '.join(ALGORITHMS)}, got {self.algorithm!r}"
            )
        for name in ("tokens", "passes", "steps", "minutes", "processes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} must be more than 0, got {value}")


FREE = {
    "tokens",
    "passes",
    "steps",
    "minutes",
    "device",
    "processes",
    "evaluation_prompts",
}


def settings(out: Path, given: dict[str, Any], resume: bool) -> TrainDraftConfig:
    """`given` over what a resumed run was begun with. Raises ConfigError, naming the setting."""
    path = out / "training" / "run.json"
    if not resume:
        if path.exists():
            raise ConfigError(f"{out} has a training already: give --resume, or another --out")
        if "model" not in given:
            raise ConfigError("--model is needed: the target that the head is for")
        return TrainDraftConfig(**given)
    if not path.exists():
        raise ConfigError(f"--resume: {path} is not there, so {out} has no training to go on with")
    known = {field.name for field in fields(TrainDraftConfig)}
    before = {name: v for name, v in json.loads(path.read_text()).items() if name in known}
    for name, value in given.items():
        if name not in FREE and before.get(name) != value:
            raise ConfigError(
                f"--resume: {name} was {before.get(name)!r} when this training began, and cannot "
                f"become {value!r}"
            )
    return TrainDraftConfig(**{**before, **given})


def run(out: Path, given: dict[str, Any], resume: bool) -> bool:
    """All of it; False if Ctrl-C ended it before the end."""
    console = Console()
    config = settings(out, given, resume)
    path = resolve_model(config.model, progress=lambda text: console.print(text, style="dim"))
    device = rank_device(EngineConfig(model=config.model, device=config.device))
    folder = out / "training"
    folder.mkdir(parents=True, exist_ok=True)
    # Read before anything long begins: what is wrong with them shall be said now.
    tokenizer = load_tokenizer(path)
    asked = _asked(config.prompts, tokenizer)
    evaluated = _asked(config.evaluation_prompts, tokenizer)
    if asked is None:
        chat_format(tokenizer)
    else:
        asked = _that_fit(asked, config.max_length, "prompts", console)
    train_config = _train_config(config, device)
    (folder / "run.json").write_text(json.dumps(asdict(config), indent=1) + "\n")
    with _stop_on_interrupt(console) as stopped:
        num_tokens = _write_corpus(config, path, device, folder / "corpus", asked, console, stopped)
        if stopped():
            _say_resume(console, out, f"the corpus has {num_tokens:,} answer tokens")
            return False
        corpus = Corpus.open(folder / "corpus")
        tokens_per_step = train_config.tokens_per_step
        passes = config.passes * corpus.num_tokens(train_config.max_length) / tokens_per_step
        train_config = replace(
            train_config,
            steps=config.steps or max(1, round(passes)),
            held_out=max(1, min(256, len(corpus) // 20)),
        )
        result = _train(train_config, config, path, device, corpus, folder, console, stopped)
        if not result.finished:
            _say_resume(console, out, f"{result.step} steps are done")
            return False
    export_head(result.head, result.vocab, out)
    if evaluated is None:
        held_out = range(min(EVALUATED, train_config.held_out))
        evaluated = [
            Asked("", tuple(corpus.conversation(i)[: corpus.loss_from[i]].tolist()))
            for i in held_out
        ]
    results = _evaluate(config, path, device, out, evaluated, console)
    card = model_card(
        model=config.model,
        command=_command(config),
        own_text=asked is None,
        measured_on=Path(config.evaluation_prompts or "prompts held out").name,
        corpus=corpus,
        config=train_config,
        result=result,
        results=results,
    )
    (out / "README.md").write_text(card)
    console.print(
        f"the head is in {out}; serve it with\n"
        f"  spectrue serve --model {config.model} --drafter eagle3 --draft-model {out}",
        markup=False,
        soft_wrap=True,
    )
    return True


def _command(config: TrainDraftConfig) -> str:
    """The whole training as one command, however often it was resumed."""
    words = ["spectrue", "train-draft", "--out", "DIR"]
    for field in fields(config):
        value = getattr(config, field.name)
        if value != field.default:
            words += [f"--{field.name.replace('_', '-')}", str(value)]
    return shlex.join(words)


def _asked(file: str | None, tokenizer: Tokenizer) -> list[Asked] | None:
    if file is None:
        return None
    return [Asked(p.category, p.token_ids(tokenizer)) for p in read_prompts(Path(file))]


def _that_fit(asked: list[Asked], limit: int, setting: str, console: Console) -> list[Asked]:
    """Those that leave room for an answer within `limit` tokens. Raises ConfigError for none."""
    found = [prompt for prompt in asked if len(prompt.token_ids) + MIN_ROOM <= limit]
    if not found:
        raise ConfigError(f"{setting}: none leaves room for an answer within {limit} tokens")
    if len(found) < len(asked):
        number = len(asked) - len(found)
        console.print(
            f"{number} of {len(asked)} {setting} are left out: longer than {limit} tokens"
        )
    return found


def _train_config(config: TrainDraftConfig, device: torch.device) -> TrainConfig:
    on_gpu = device.type == "cuda"
    return TrainConfig(
        seed=config.seed,
        draft_vocab_size=config.draft_vocab_size,
        num_unrolled=config.num_speculative_tokens,
        max_length=config.max_length,
        tokens_per_step=config.tokens_per_step or (65536 if on_gpu else 8192),
        accumulate=config.accumulate,
        time_limit=None if config.minutes is None else 60 * config.minutes,
        learning_rate=config.learning_rate,
        compile=on_gpu,
        report_every=20 if on_gpu else 1,
        checkpoint_every=500 if on_gpu else 20,
    )


# -- the corpus -----------------------------------------------------------------------------------


def _write_corpus(
    config: TrainDraftConfig,
    path: Path,
    device: torch.device,
    folder: Path,
    prompts: list[Asked] | None,
    console: Console,
    stopped: Callable[[], bool],
) -> int:
    weight_bytes = sum(f.stat().st_size for f in ([path] if path.is_file() else path.glob("*")))
    number, kv_cache_bytes = plan_processes(device, weight_bytes)
    on_gpu = device.type == "cuda"
    author = AuthorConfig(seed=config.seed, num_tokens=config.tokens)
    engine = EngineConfig(
        model=str(path),
        dtype=config.dtype,  # type: ignore[arg-type]
        device=config.device,
        max_num_seqs=256 if on_gpu else 16,
        max_num_batched_tokens=8192 if on_gpu else 512,
        kv_cache_bytes=kv_cache_bytes,
        enable_prefix_caching=False,  # every prompt is read once
        warm_up_seconds=0.0,
        speculative=SpeculativeConfig(drafter="none", num_speculative_tokens=0),
    )
    given = None if prompts is None else tuple(asked.token_ids for asked in prompts)
    job = GenerationJob(engine=engine, author=author, folder=folder, prompts=given)
    with _bar(console) as bar:
        task = bar.add_task("corpus", total=config.tokens, text="starting")

        def report(done: int) -> None:
            text = f"{done:,} of {config.tokens:,} answer tokens"
            bar.update(task, completed=min(done, config.tokens), text=text)

        report(num_answer_tokens(folder))
        return generate(job, config.tokens, config.processes or number, report, stopped)


# -- training -------------------------------------------------------------------------------------


def _train(
    train_config: TrainConfig,
    config: TrainDraftConfig,
    path: Path,
    device: torch.device,
    corpus: Corpus,
    folder: Path,
    console: Console,
    stopped: Callable[[], bool],
) -> TrainResult:
    with _bar(console) as bar:
        task = bar.add_task("training", total=1.0, text="loading the target")
        dtype = resolve_dtype(config.dtype, device)
        target = load_model(path, dtype=dtype, device=str(device))
        trainer = Trainer(train_config, target, corpus, folder, _reporter(bar, task))
        console.print(
            f"{len(corpus):,} conversations, {corpus.num_answer_tokens:,} answer tokens; "
            f"{len(trainer.vocab.target_ids):,} hot tokens are {trainer.vocab.coverage:.1%} of them"
        )
        bar.update(task, text="first step")
        return trainer.run(resume=True, stopped=stopped)


def _reporter(bar: Progress, task: TaskID) -> Callable[[TrainProgress], None]:
    logged = 0.0

    def report(found: TrainProgress) -> None:
        nonlocal logged
        rates = " ".join(f"{rate:.2f}" for rate in found.greedy)
        text = (
            f"step {found.step:,} of {found.steps:,}, loss {found.loss:.3f}, accepts {rates}, "
            f"{found.tokens_per_second:,.0f} tokens/s"
        )
        bar.update(task, completed=found.step, total=found.steps, text=text)
        if not bar.console.is_terminal and time.monotonic() - logged > LOG_EVERY:
            logged = time.monotonic()
            bar.console.print(text)

    return report


# -- the end --------------------------------------------------------------------------------------


def _evaluate(
    config: TrainDraftConfig,
    path: Path,
    device: torch.device,
    out: Path,
    asked: list[Asked],
    console: Console,
) -> list[DraftResult]:
    """By the engine that serves it, at temperature 0 and 1."""
    batch_size = 32 if device.type == "cuda" else 8
    if device.type == "cuda":
        torch.cuda.empty_cache()
    speculative = SpeculativeConfig(
        drafter="eagle3",
        draft_model=str(out),
        num_speculative_tokens=config.num_speculative_tokens,
    )
    engine = load_engine(
        EngineConfig(
            model=str(path),
            served_model_name=Path(config.model).name,
            dtype=config.dtype,  # type: ignore[arg-type]
            device=config.device,
            enable_prefix_caching=False,
            warm_up_seconds=0.0,
            speculative=speculative,
        )
    )
    asked = _that_fit(asked, engine.info.max_model_len, "evaluation prompts", console)
    results = []
    with _bar(console) as bar:
        for temperature in (0.0, 1.0):
            task = bar.add_task("evaluation", total=len(asked), text=f"T={temperature:g}")
            params = SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS)
            results.append(
                measure(
                    engine,
                    asked,
                    params,
                    batch_size,
                    advance=lambda number, task=task: bar.advance(task, number),  # type: ignore[misc]
                )
            )
    about = describe(engine, len(asked), MAX_TOKENS, batch_size)
    show(console, about, results)
    try:
        write(about, results, out / "evaluation.json", out / "evaluation.png")
    except ImportError:
        console.print("no evaluation.png: it needs matplotlib (pip install spectrue[bench])")
    return results


@contextlib.contextmanager
def _stop_on_interrupt(console: Console) -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C ends the step in flight and saves; a second one is Python's own."""
    stopped_at = math.inf
    before = signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: object) -> None:
        nonlocal stopped_at
        if time.monotonic() - stopped_at > 1:  # some send one signal twice
            raise KeyboardInterrupt
        if stopped_at == math.inf:
            stopped_at = time.monotonic()
            console.print("stopping after the step in flight; once more to stop at once")

    signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: stopped_at < math.inf
    finally:
        signal.signal(signal.SIGINT, before)


def _say_resume(console: Console, out: Path, done: str) -> None:
    console.print(
        f"interrupted: {done}. Go on with\n  spectrue train-draft --out {out} --resume",
        markup=False,
        soft_wrap=True,
    )


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:10}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}"),
        console=console,
    )
