"""Tokens per second by how the depth is chosen, on text of which an n-gram drafter guesses nothing.

    PYTHONPATH=.typing python benchmarks/depth.py --batch-size 1 8 --rounds 5

Temperature 1.5 and long suffixes leave nothing to find: the best depth is 0 (vllm#49548). Engines
take turns in one process, each batch whole, and ratios are of neighbours in time. `--repeats` gives
text that repeats itself instead, greedy and with prompts to copy from.
"""

from __future__ import annotations

import argparse
import statistics
import time

from spectrue.workers.adaptive_depth import AdaptiveDepth
from spectrue.workers.async_engine import load_engine
from spectrue.workers.config import EngineConfig, SpeculativeConfig
from spectrue.workers.core import Request, SamplingParams, SchedulerOutput, StepOutput
from spectrue.workers.engine import Engine
from spectrue.workers.model_store import DEFAULT_MODEL


def engines(
    model: str, k: int, ngram_min: int, batch_size: int, cpu_threads: int | None
) -> dict[str, Engine]:
    small = max(1, batch_size // 2)
    variants = {
        "none": SpeculativeConfig(drafter="none"),
        "fixed": SpeculativeConfig(num_speculative_tokens=k, ngram_min=ngram_min),
        "schedule": SpeculativeConfig(
            num_speculative_tokens=k,
            ngram_min=ngram_min,
            depth_schedule=((1, small, k), (small + 1, 1024, 0)),
        ),
        "adaptive": SpeculativeConfig(
            num_speculative_tokens=k, ngram_min=ngram_min, depth="adaptive"
        ),
    }
    return {
        name: load_engine(
            EngineConfig(
                model=model,
                max_model_len=512,
                max_num_seqs=max(32, batch_size),
                enable_prefix_caching=False,
                cpu_threads=cpu_threads,
                speculative=speculative,
            )
        )
        for name, speculative in variants.items()
    }


def run(
    engine: Engine, batch_size: int, max_tokens: int, repeats: bool, seed: int, cpu: bool
) -> float:
    """Tokens per second of one batch, its prompts included."""
    clock = time.process_time if cpu else time.perf_counter
    vocab_size = engine.info.vocab_size
    for i in range(batch_size):
        prompt = [(7919 * (i + 1) + 104729 * j) % (vocab_size - 3) + 3 for j in range(32)]
        engine.add_request(
            Request(
                request_id=f"{seed}-{i}",
                prompt_token_ids=tuple(prompt * (4 if repeats else 1)),
                params=SamplingParams(
                    temperature=0.0 if repeats else 1.5,
                    seed=seed + i,
                    max_tokens=max_tokens,
                    ignore_eos=True,
                ),
            )
        )
    start, tokens = clock(), 0
    while engine.num_unfinished:
        tokens += sum(len(output.token_ids) for output in engine.step())
    return tokens / (clock() - start)


class Timed:
    """A depth policy, and what it costs."""

    def __init__(self, policy: AdaptiveDepth) -> None:
        self.policy = policy
        self.seconds = 0.0
        self.steps = 0

    def choose(self, num_requests: int) -> int:
        start = time.thread_time()
        depth = self.policy.choose(num_requests)
        self.seconds += time.thread_time() - start
        return depth

    def observe(self, plan: SchedulerOutput, step: StepOutput, seconds: float) -> None:
        start = time.thread_time()
        self.policy.observe(plan, step, seconds)
        self.seconds += time.thread_time() - start
        self.steps += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--ngram-min", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", action="store_true")
    parser.add_argument("--cpu-threads", type=int)
    parser.add_argument(
        "--cpu-time", action="store_true", help="per second of CPU time, where cores are shared"
    )
    args = parser.parse_args()
    for batch_size in args.batch_size:
        group = engines(args.model, args.k, args.ngram_min, batch_size, args.cpu_threads)
        adaptive = group["adaptive"]
        assert isinstance(adaptive.depth, AdaptiveDepth)
        timed = adaptive.depth = adaptive.scheduler.depth = Timed(adaptive.depth)
        speeds: dict[str, list[float]] = {name: [] for name in group}
        for turn in range(args.rounds + 1):
            for name, engine in group.items():
                speed = run(
                    engine, batch_size, args.max_tokens, args.repeats, 1000 * turn, args.cpu_time
                )
                if turn:  # the first is a warm-up, and the time to learn
                    speeds[name].append(speed)
        print(f"batch size {batch_size}, k={args.k}:")
        for name, values in speeds.items():
            ratios = [v / w for v, w in zip(values, speeds["none"], strict=True)]
            print(
                f"  {name:9} {statistics.median(values):8.1f} tokens/s, "
                f"{statistics.median(ratios):.3f} of none ({min(ratios):.3f} to {max(ratios):.3f})"
                f", accept length {group[name].stats.accept_length:.3f}"
                f", steps by depth {dict(sorted(group[name].scheduler.depths.items()))}"
            )
        print(f"  choosing and learning: {1e6 * timed.seconds / timed.steps:.1f} us a step")


if __name__ == "__main__":
    main()
