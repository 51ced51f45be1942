"""Tensor parallelism on the GPUs of one machine (or on its CPU, to try the script).

    python benchmarks/tensor_parallel.py                      # all three parts, on two GPUs
    python benchmarks/tensor_parallel.py speed --batch-size 1 8 32
    python benchmarks/tensor_parallel.py --device cpu --steps 200 --max-tokens 16

speed   an 8B Llama shape with random weights, no drafts: tokens/s of one GPU, and of the group with
        and without peer-to-peer sums, one after the other
texts   tiny fp32 models, greedy, by drafter: the group's texts against one rank's, up to the first
        position at which one rank's two best tokens are nearer than 1e-4
aborts  steps of the group with random arrivals and aborts: it ends, and the ranks agree

Each engine has processes of its own. The exit status is 1 if texts differ, or if ranks disagree,
hang or die.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from spectrue.workers.async_engine import load_engine
from spectrue.workers.config import HAS_CHECKPOINT, EngineConfig, SpeculativeConfig
from spectrue.workers.core import Request, SamplingParams
from spectrue.workers.device import rank_device
from spectrue.workers.engine import Engine
from spectrue.workers.executor import GroupExecutor, follow
from spectrue.workers.input_buffers import InputBuffers
from spectrue.workers.parallel import TPGroup

Work = Callable[[Engine], Any]
NEAR_TIE = 1e-4
DRAFTERS = ("none", "ngram", "draft_model", "eagle3")

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5}
LLAMA_8B = LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "eos_token_id": 128001,
}
TINY = LLAMA | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 1024,
    "eos_token_id": 0,
}
TINY_HEAD = TINY | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 500,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2]},
}


# -- a group of ranks ---------------------------------------------------------------------------


def _digest(buffers: InputBuffers) -> str:
    """Of what a rank believes was said."""
    said = buffers.token_ids.numpy().tobytes() + repr(buffers.num_tokens).encode()
    return hashlib.sha256(said).hexdigest()


def _rank(rank: int, config: EngineConfig, meet: str, work: Work, answer: Connection) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    logging.getLogger("spectrue.workers.weights").setLevel(logging.ERROR)  # random: we know
    device = rank_device(config, rank)
    group = TPGroup.init(rank, config.tp_size, f"file://{meet}", device=device)
    result = None
    if rank == 0:
        engine = load_engine(config, group)
        assert isinstance(engine.executor, GroupExecutor)
        worker = engine.executor.worker
        result = work(engine)
        engine.executor.shutdown()
    else:
        worker = follow(config, group)
    answer.send((result, _digest(worker.buffers)))
    answer.close()
    os._exit(0)  # without the patience of NCCL, which waits for the graphs


def run_group(config: EngineConfig, work: Work, timeout: float) -> Any:
    """What `work` says of rank 0's engine; exits if a rank hangs, dies or holds other texts."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks: dict[Connection, Any] = {}
        for rank in range(config.tp_size):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (rank, config, f"{folder}/meet", work, theirs)
            process = context.Process(target=_rank, args=arguments)
            process.start()
            theirs.close()
            ranks[ours] = process
        answers: list[Any] = []
        try:
            end = time.monotonic() + timeout
            for rank, answer in enumerate(ranks):
                if not wait([answer], max(0.0, end - time.monotonic())):
                    sys.exit(f"rank {rank} of {config.tp_size} said nothing in {timeout:.0f} s")
                try:
                    answers.append(answer.recv())
                except EOFError:
                    sys.exit(f"rank {rank} of {config.tp_size} died; its message is above")
        finally:
            for process in ranks.values():
                process.join(5)
                process.kill()
    if len({digest for _, digest in answers}) > 1:
        sys.exit("the ranks disagree about what was said")
    return answers[0][0]


# -- speed --------------------------------------------------------------------------------------


def decode_speed(
    engine: Engine, batch_size: int, prompt_tokens: int, max_tokens: int
) -> tuple[float, float, str | None]:
    """(tokens/s, median ms of a step, why there are no peer-to-peer sums), prefill left out."""
    rng = random.Random(0)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
    for i in range(batch_size):
        prompt = tuple(rng.randrange(1, engine.info.vocab_size) for _ in range(prompt_tokens))
        engine.add_request(Request(request_id=str(i), prompt_token_ids=prompt, params=params))
    decoded, times, tokens = 0, [], 0
    while engine.num_unfinished:
        before, start = engine.stats.num_committed_tokens, time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - start
        made = engine.stats.num_committed_tokens - before
        decoded += made == batch_size
        if made == batch_size and decoded > 4:  # prefill is over, and what captures graphs
            times.append(seconds)
            tokens += made
    refused = [d.reason for d in engine.info.decisions if d.setting == "enable_p2p_all_reduce"]
    return tokens / sum(times), 1e3 * statistics.median(times), refused[0] if refused else None


def speed(args: argparse.Namespace, model: Path) -> None:
    for batch_size in args.batch_size:
        config = EngineConfig(
            model=str(model),
            load_format="dummy",
            device=args.device,
            max_model_len=args.prompt_tokens + args.max_tokens,
            max_num_seqs=batch_size,
            max_num_batched_tokens=max(512, batch_size),
            speculative=SpeculativeConfig(drafter="none"),
        )
        work = partial(
            decode_speed,
            batch_size=batch_size,
            prompt_tokens=args.prompt_tokens,
            max_tokens=args.max_tokens,
        )
        alone = None
        ways = [(1, False), (args.tp_size, True), (args.tp_size, False)]
        for tp_size, p2p in ways if args.device == "cuda" else ways[::2]:
            engine = config.replace(tp_size=tp_size, enable_p2p_all_reduce=p2p)
            rate, step, refused = run_group(engine, work, args.timeout)
            alone = alone or rate
            how = ", sums peer to peer" if p2p else ""
            print(
                f"batch {batch_size}, tp_size {tp_size}{how}: {rate:.1f} tokens/s, {step:.3f} ms a "
                f"step, {rate / alone:.2f}x{f' ({refused})' if refused else ''}",
                flush=True,
            )


# -- texts --------------------------------------------------------------------------------------


def greedy_texts(engine: Engine, margins: bool, max_tokens: int) -> list[list[tuple[int, float]]]:
    """(token, by how much it was the best) of 32 requests; margins only where they are asked for,
    because a step with logprobs is no graph."""
    rng = random.Random(1)
    params = SamplingParams(
        temperature=0.0, ignore_eos=True, max_tokens=max_tokens, logprobs=2 if margins else None
    )
    texts: dict[str, list[tuple[int, float]]] = {}
    for i in range(32):
        prompt = tuple(rng.randrange(1, 1000) for _ in range(rng.randrange(4, 60)))
        engine.add_request(Request(request_id=str(i), prompt_token_ids=prompt, params=params))
        texts[str(i)] = []
    while engine.num_unfinished:
        for output in engine.step():
            gaps = [p.top[0][1] - p.top[1][1] for p in output.logprobs] or [
                float("inf") for _ in output.token_ids
            ]
            texts[output.request_id] += zip(output.token_ids, gaps, strict=True)
    return list(texts.values())


def tiny_config(args: argparse.Namespace, drafter: str, folder: Path) -> EngineConfig:
    draft = {"draft_model": folder / "tiny", "eagle3": folder / "head"}.get(drafter)
    return EngineConfig(
        model=str(folder / "tiny"),
        load_format="dummy",
        dtype="float32",
        device=args.device,
        cpu_threads=1,
        max_model_len=256,
        max_num_seqs=12,
        num_kv_blocks=400,
        speculative=SpeculativeConfig(
            drafter=drafter,  # type: ignore[arg-type]
            draft_model=str(draft) if drafter in HAS_CHECKPOINT else None,
        ),
    )


def texts(args: argparse.Namespace, folder: Path) -> bool:
    same = True
    # One rank's texts are one whatever drafts: no drafter is needed for them.
    alone = run_group(
        tiny_config(args, "none", folder),
        partial(greedy_texts, margins=True, max_tokens=args.max_tokens),
        args.timeout,
    )
    for drafter in DRAFTERS:
        config = tiny_config(args, drafter, folder).replace(tp_size=args.tp_size)
        work = partial(greedy_texts, margins=False, max_tokens=args.max_tokens)
        group = run_group(config, work, args.timeout)
        compared, near, wrong = 0, 0, 0
        for ours, theirs in zip(group, alone, strict=True):
            for (token, _), (want, margin) in zip(ours, theirs, strict=True):
                compared += 1
                if margin < NEAR_TIE:
                    near += 1
                    break
                if token != want:
                    wrong += 1
                    break
        same &= not wrong
        print(
            f"{drafter}, tp_size {args.tp_size}: {compared} positions compared, {near} near ties, "
            f"{wrong} texts differ",
            flush=True,
        )
    return same


# -- aborts -------------------------------------------------------------------------------------


def random_steps(engine: Engine, num_steps: int) -> tuple[int, int, float]:
    """(requests, aborted ones, seconds)"""
    rng, made, aborted, start = random.Random(2), 0, 0, time.perf_counter()
    for step in range(num_steps):
        while engine.num_unfinished < rng.choice((1, 4, 12, 20)):
            params = SamplingParams(
                temperature=rng.choice((0.0, 0.7, 1.3)),
                top_k=rng.choice((0, 0, 20)),
                top_p=rng.choice((1.0, 1.0, 0.9)),
                seed=rng.choice((None, step)),
                num_speculative_tokens=rng.choice((None, None, 0, 1)),
                max_tokens=rng.randrange(1, 120),
                ignore_eos=True,
            )
            prompt = tuple(rng.randrange(1, 1000) for _ in range(rng.randrange(1, 120)))
            engine.add_request(
                Request(request_id=str(made), prompt_token_ids=prompt, params=params)
            )
            made += 1
        if rng.random() < 0.1:
            engine.abort(rng.choice(list(engine.processors)))
            aborted += 1
        engine.step()
    for request_id in list(engine.processors):
        engine.abort(request_id)
    engine.check_integrity()
    return made, aborted, time.perf_counter() - start


def aborts(args: argparse.Namespace, folder: Path) -> None:
    config = tiny_config(args, "eagle3", folder).replace(tp_size=args.tp_size)
    made, aborted, seconds = run_group(
        config, partial(random_steps, num_steps=args.steps), args.timeout
    )
    print(
        f"{args.steps} steps in {seconds:.1f} s, {made} requests, {aborted} of them aborted: no "
        f"hang, and the ranks agree",
        flush=True,
    )


def _write(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="part", help="speed, texts, aborts; all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tp-size", type=int, default=2)
    parser.add_argument("--model", type=Path, help="of speed: a folder with config.json; 8B Llama")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1])
    parser.add_argument("--prompt-tokens", type=int, help="of speed; 900, on a CPU 50")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10_000, help="of aborts")
    parser.add_argument("--timeout", type=float, default=540, help="seconds that a group may take")
    args = parser.parse_args()
    parts = args.parts or ["speed", "texts", "aborts"]
    if unknown := set(parts) - {"speed", "texts", "aborts"}:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    on_gpu = args.device == "cuda"
    args.prompt_tokens = args.prompt_tokens or (900 if on_gpu else 50)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write(folder / "tiny", TINY)
        _write(folder / "head", TINY_HEAD)
        model = args.model or _write(folder / "model", LLAMA_8B if on_gpu else TINY)
        if "speed" in parts:
            speed(args, model)
        same = "texts" not in parts or texts(args, folder)
        if "aborts" in parts:
            aborts(args, folder)
    sys.exit(0 if same else "the texts differ")


if __name__ == "__main__":
    main()
