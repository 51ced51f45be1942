"""`spectrue bench engine`: the engine alone, no HTTP and no Ray, on a batch of prompts."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from spectrue.workers.config import EngineConfig
from spectrue.workers.core import Request, SamplingParams, accept_length
from spectrue.workers.engine import Engine
from spectrue.workers.prompts import Prompt, read_prompts

PROMPTS = tuple(
    Prompt.of(text)
    for text in (
        "What is the capital of Germany?",
        "Explain why the sky is blue to a child of ten.",
        "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
        "List five things to check before a long bicycle tour, with one reason each.",
        "Write a Python function that returns the n-th Fibonacci number, and explain it.",
        "Summarise the causes of the French Revolution in one paragraph.",
        "A train leaves at 9:40 and arrives at 13:05. How long is the journey? Show your steps.",
        "Draft a polite e-mail that asks a colleague to move tomorrow's meeting to Friday.",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """One run. Times in seconds; shares are of the whole run's."""

    batch_size: int
    temperature: float
    drafter: str
    num_output_tokens: int
    num_cut_short: int  # prompts with which the context ends before max_tokens
    seconds: float
    tokens_per_second: float
    accept_length: float
    steps: int
    model_share: float
    verify_share: float
    draft_share: float
    outside_share: float  # neither model nor verify nor drafting


def prompt_ids(engine: Engine, prompt: Prompt) -> tuple[int, ...]:
    if engine.tokenizer is None:  # random weights: any ids will do, one a byte
        text = "".join(str(message.get("content")) for message in prompt.messages)
        return tuple(byte % engine.info.vocab_size for byte in text.encode())
    return prompt.token_ids(engine.tokenizer)


def run_batch(
    engine: Engine, prompts: Sequence[Prompt], params: SamplingParams, batch_size: int
) -> BenchResult:
    """Complete all `prompts`, `batch_size` at a time: one that ends is replaced by the next."""
    todo = [
        Request(request_id=f"bench-{i}", prompt_token_ids=prompt_ids(engine, prompt), params=params)
        for i, prompt in enumerate(prompts)
    ]
    limit = engine.info.max_model_len - params.max_tokens
    num_cut_short = sum(len(request.prompt_token_ids) > limit for request in todo)
    before = asdict(engine.stats)
    start = time.perf_counter()
    while todo or engine.num_unfinished:
        while todo and engine.num_unfinished < batch_size:
            engine.add_request(todo.pop(0))
        engine.step()
    seconds = time.perf_counter() - start
    stats = {name: value - before[name] for name, value in asdict(engine.stats).items()}
    inside = {part: stats[f"{part}_time"] / seconds for part in ("model", "verify", "draft")}
    return BenchResult(
        batch_size=batch_size,
        temperature=params.temperature,
        drafter=engine.info.resolved.drafter,
        num_output_tokens=stats["num_committed_tokens"],
        num_cut_short=num_cut_short,
        seconds=seconds,
        tokens_per_second=stats["num_committed_tokens"] / seconds,
        accept_length=accept_length(stats["num_accepted_tokens"], stats["num_verify_steps"]),
        steps=stats["num_steps"],
        model_share=inside["model"],
        verify_share=inside["verify"],
        draft_share=inside["draft"],
        outside_share=1 - sum(inside.values()),
    )


def run(
    config: EngineConfig,
    *,
    batch_size: int,
    max_tokens: int = 128,
    temperature: float = 0.0,
    num_prompts: int | None = None,
    prompts_file: Path | None = None,
    ignore_eos: bool = True,
    as_json: bool = False,
) -> None:
    """Load, warm up, measure and print a table (or JSON)."""
    import torch
    from rich.console import Console
    from rich.table import Table

    from spectrue.workers.async_engine import load_engine

    console = Console(stderr=as_json)
    prompts = list(PROMPTS) if prompts_file is None else read_prompts(prompts_file)
    wanted = num_prompts or max(len(prompts) if prompts_file else 0, batch_size)
    prompts = [prompts[i % len(prompts)] for i in range(wanted)]
    config = config.replace(max_num_seqs=max(config.max_num_seqs, batch_size))
    with console.status(f"loading {config.model}"):
        engine = load_engine(config)
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=ignore_eos)
    with console.status("warming up"):
        warm = SamplingParams(temperature=temperature, max_tokens=8, ignore_eos=True)
        run_batch(engine, PROMPTS[:batch_size], warm, batch_size)
    warm_depths = Counter(engine.scheduler.depths)
    with console.status(f"{len(prompts)} prompts of up to {max_tokens} tokens"):
        result = run_batch(engine, prompts, params, batch_size)
    resolved = engine.info.resolved
    depths = engine.scheduler.depths - warm_depths
    k = resolved.num_speculative_tokens
    if as_json:
        more = {
            "model": config.name,
            "dtype": engine.info.dtype,
            "load_format": config.load_format,
            "num_speculative_tokens": k,
            "tree": None if resolved.tree is None else asdict(resolved.tree),
            "depth": resolved.depth,
            "steps_by_depth": dict(sorted(depths.items())),
            "simulated_acceptance": list(resolved.simulated_acceptance),
            "verify_method": resolved.verify_method,
            "threads": torch.get_num_threads(),
        }
        print(json.dumps(asdict(result) | more))
        return
    table = Table(
        title=f"{config.name}, {engine.info.dtype}, T={temperature:g}", title_justify="left"
    )
    table.add_column("")
    table.add_column("value", justify="right")
    if config.load_format == "dummy":
        table.add_row("weights", "RANDOM (load_format: dummy)")
    table.add_row("batch size", str(result.batch_size))
    table.add_row("drafter", f"{result.drafter}, k={k}, verify {resolved.verify_method}")
    if resolved.tree is not None:
        kind = "dynamic" if resolved.tree.dynamic else "static"
        table.add_row("tree", f"{kind}, topk {resolved.tree.topk}, size {resolved.tree.size}")
    if resolved.simulated_acceptance:
        rates = ", ".join(f"{rate:.3g}" for rate in resolved.simulated_acceptance)
        table.add_row("acceptance", f"SIMULATED, {rates}")
    used = ", ".join(f"{depth}: {steps}" for depth, steps in sorted(depths.items()))
    table.add_row("steps by depth", used or "no drafts")
    table.add_row("output tokens", f"{result.num_output_tokens}")
    if result.num_cut_short:
        table.add_row(
            "cut short",
            f"{result.num_cut_short} of {len(prompts)} by the context of "
            f"{engine.info.max_model_len}, not by --max-tokens {max_tokens}",
        )
    table.add_row("tokens/s", f"{result.tokens_per_second:.1f}")
    table.add_row("accept length", f"{result.accept_length:.3f}")
    table.add_row("steps", f"{result.steps}, {1e3 * result.seconds / result.steps:.2f} ms each")
    for part in ("model", "verify", "draft", "outside"):
        table.add_row(f"time in {part}", f"{100 * getattr(result, part + '_share'):.1f} %")
    console.print(table)
