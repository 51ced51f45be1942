"""Accept length of a draft head in vLLM; run by vLLM's own Python, see `accept.py`.

Reads a JSON job (target, head, prompts as token ids, k, max_tokens, temperature) and writes a JSON
file of vLLM's own counters.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    from vllm import LLM, SamplingParams

    job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(
        model=job["target"],
        dtype=job["dtype"],
        max_model_len=job["max_model_len"],
        max_num_seqs=job["batch_size"],
        gpu_memory_utilization=0.3,  # of the CPU's memory, there
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config={
            "method": "eagle3",
            "model": job["head"],
            "num_speculative_tokens": job["num_speculative_tokens"],
        },
    )
    params = SamplingParams(temperature=job["temperature"], max_tokens=job["max_tokens"])
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    llm.generate(prompts, params, use_tqdm=False)
    counts: dict[str, Any] = {}
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:spec_decode"):
            counts[metric.name] = getattr(metric, "value", None) or getattr(metric, "values", None)
    Path(sys.argv[2]).write_text(json.dumps(counts))


if __name__ == "__main__":
    main()
