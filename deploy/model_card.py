"""README.md of a trained head: what it is, how it was made, what it is worth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from spectrue.deploy.bench_draft import DraftResult
from spectrue.workers.training.config import TrainConfig
from spectrue.workers.training.corpus import Corpus
from spectrue.workers.training.trainer import TrainResult


def model_card(
    *,
    model: str,
    command: str,
    own_text: bool,  # the model wrote the prompts too
    measured_on: str,
    corpus: Corpus,
    config: TrainConfig,
    result: TrainResult,
    results: Sequence[DraftResult],
) -> str:
    name = Path(model).name
    shape = result.head.shape
    sizes = (weight.numel() for weight in result.head.published().values())
    source = "prompts and answers" if own_text else "answers to given prompts"
    lines = [
        f"# EAGLE3 head for {name}",
        "",
        "A draft head for speculative decoding, in the published EAGLE3 layout "
        "(Li et al., arXiv 2503.01840). It changes how fast the target answers and nothing of what "
        "it answers.",
        "",
        "```",
        f"spectrue serve --model {model} --drafter eagle3 --draft-model <this folder>",
        "```",
        "",
        "| | |",
        "|---|---|",
        f"| target | {name}, its hidden states after layers "
        f"{', '.join(map(str, shape.aux_layers))} |",
        f"| parameters | {sum(sizes) / 1e6:.1f} M, bfloat16; embeddings are the target's |",
        f"| draft vocabulary | {shape.draft_vocab_size:,} of {shape.target.vocab_size:,} tokens, "
        f"{result.vocab.coverage:.1%} of the answers |",
        f"| data | {len(corpus):,} conversations, {corpus.num_answer_tokens:,} answer tokens; "
        f"{source} are the target's own |",
        f"| training | {result.step:,} steps of up to {config.tokens_per_step:,} tokens, "
        f"{config.num_unrolled} unrolled draft steps, {config.optimizer} at "
        f"{config.learning_rate:g}, {result.seconds:.0f} s |",
        f"| seed | {config.seed} |",
        f"| command | `{command}` |",
        "",
        f"Measured on {measured_on}:",
    ]
    for found in results:
        depth = len(next(iter(found.by_category.values())).rates)
        lines += [
            "",
            f"Temperature {found.temperature:g}, verified by {found.verify_method}:",
            "",
            "| category | accept length | "
            + " | ".join(f"position {i + 1}" for i in range(depth))
            + " |",
            "|---|" + "---:|" * (depth + 1),
        ]
        for category, acceptance in found.by_category.items():
            rates = " | ".join(f"{rate:.3f}" for rate in acceptance.rates)
            lines.append(f"| {category} | {acceptance.accept_length:.3f} | {rates} |")
    held = result.held_out
    if held is not None:
        greedy = ", ".join(f"{rate:.3f}" for rate in held.greedy)
        overlap = ", ".join(f"{rate:.3f}" for rate in held.overlap)
        lines += [
            "",
            f"On {config.held_out} conversations held out, by draft step, as if those before were "
            f"accepted: argmax agrees {greedy}; overlap of the laws {overlap}.",
        ]
    return "\n".join(lines) + "\n"
