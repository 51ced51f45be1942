"""The engine without speculation against `transformers.generate`, in one process, alternating.

    python benchmarks/versus_transformers.py --model PATH --batch-size 1 8

Same weights, dtype, threads and prompts; both greedy, both for a fixed number of tokens. Prints
milliseconds a token and the paired ratio of each round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from spectrue.deploy.bench_engine import PROMPTS, run_batch
from spectrue.workers.async_engine import load_engine
from spectrue.workers.config import EngineConfig, SpeculativeConfig
from spectrue.workers.core import SamplingParams
from spectrue.workers.engine import Engine
from spectrue.workers.model_store import DEFAULT_MODEL, resolve_model
from spectrue.workers.weights import open_source, resolve_dtype


def load_transformers(path: Path, dtype: torch.dtype) -> LlamaForCausalLM:
    """The Llama-family checkpoint that the engine reads, GGUF included, as a transformers model."""
    source = open_source(path)
    ours = source.config
    config = LlamaConfig(
        vocab_size=ours.vocab_size,
        hidden_size=ours.hidden_size,
        intermediate_size=ours.intermediate_size,
        num_hidden_layers=ours.num_layers,
        num_attention_heads=ours.num_heads,
        num_key_value_heads=ours.num_kv_heads,
        head_dim=ours.head_dim,
        rms_norm_eps=ours.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": ours.rope_theta},
        max_position_embeddings=ours.max_position_embeddings,
        tie_word_embeddings=ours.tie_word_embeddings,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).to(dtype).eval()
    state = {
        name: source.read(name, 0, 0, shape[0], dtype).reshape(shape)
        for name, shape in source.shapes().items()
    }
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    return model


@torch.inference_mode()
def generate(model: LlamaForCausalLM, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    longest = max(len(p) for p in prompts)
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    output = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        min_new_tokens=max_tokens,
        max_new_tokens=max_tokens,
        pad_token_id=0,
    )
    return [row[longest:].tolist() for row in output]


def measure(
    engine: Engine, model: LlamaForCausalLM, batch_size: int, max_tokens: int, rounds: int
) -> list[tuple[float, float]]:
    """(ours, transformers) in milliseconds a token of the whole batch, a pair a round."""
    assert engine.tokenizer is not None
    asked = [PROMPTS[i % len(PROMPTS)] for i in range(batch_size)]
    prompts = [list(prompt.token_ids(engine.tokenizer)) for prompt in asked]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    run_batch(engine, asked, SamplingParams(temperature=0.0, max_tokens=4), batch_size)
    generate(model, prompts, 4)
    pairs = []
    for _ in range(rounds):
        ours = run_batch(engine, asked, params, batch_size)
        start = time.perf_counter()
        generate(model, prompts, max_tokens)
        theirs = time.perf_counter() - start
        pairs.append((1e3 * ours.seconds / max_tokens, 1e3 * theirs / max_tokens))
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    console = Console()
    path = resolve_model(args.model)
    with console.status("loading both"):
        engine = load_engine(
            EngineConfig(
                model=str(path),
                dtype=args.dtype,
                enable_prefix_caching=False,
                speculative=SpeculativeConfig(drafter="none"),
            )
        )
        model = load_transformers(path, resolve_dtype(args.dtype))
    table = Table(title=f"{path.name}, {engine.info.dtype}, {torch.get_num_threads()} threads")
    for name in ("batch", "engine ms/token", "transformers ms/token", "ratio (per round)"):
        table.add_column(name, justify="right")
    for batch_size in args.batch_size:
        with console.status(f"batch size {batch_size}"):
            pairs = measure(engine, model, batch_size, args.max_tokens, args.rounds)
        ratios = [theirs / ours for ours, theirs in pairs]
        table.add_row(
            str(batch_size),
            f"{statistics.median(o for o, _ in pairs):.1f}",
            f"{statistics.median(t for _, t in pairs):.1f}",
            f"{statistics.median(ratios):.2f} ({', '.join(f'{r:.2f}' for r in ratios)})",
        )
    console.print(table)


if __name__ == "__main__":
    main()
