"""What a draft head is worth on this target, tried once before the first request.

A head of another target, a dropped d2t or auxiliary layers read one off leave a server that is
right and slow, and says nothing (vllm#18909, sglang#21272): so it is measured at start.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from spectrue.workers.core import (
    NewRequest,
    Request,
    SamplingParams,
    ScheduledRequest,
    SchedulerOutput,
)
from spectrue.workers.drafters.base import Drafter
from spectrue.workers.errors import ConfigError, SpectrueError
from spectrue.workers.input_buffers import InputBuffers
from spectrue.workers.model_runner import ModelRunner
from spectrue.workers.parallel import TPGroup
from spectrue.workers.policy import ResolvedSpeculative
from spectrue.workers.speculative import speculative_step

logger = logging.getLogger(__name__)

PROMPT = (
    "The water cycle describes how water moves above, on and below the surface of the Earth. "
    "The sun heats the sea, and water rises into the air as vapour. There it"
)
NUM_STEPS = 16
NEAR_ZERO = 0.05  # a head that was trained for its target accepts ten times as much
CAUSES = (
    "it was trained for another target, the target's weights are quantized or fine-tuned since, "
    "or the auxiliary layers are read by another convention (speculative.aux_layer_convention)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheck:
    """Greedy drafts on the built-in prompt."""

    num_draft_tokens: int
    num_accepted_tokens: int

    @property
    def acceptance(self) -> float:
        return self.num_accepted_tokens / max(self.num_draft_tokens, 1)


def prompt_token_ids(path: Path, vocab_size: int) -> tuple[int, ...]:
    """The built-in prompt; arbitrary tokens where the checkpoint has no tokenizer."""
    from spectrue.workers.tokenizer import load_tokenizer

    try:
        token_ids = load_tokenizer(path).encode(PROMPT)
    except (SpectrueError, OSError, ValueError) as error:
        logger.warning("the self-check of the draft head has no tokenizer: %s", error)
        token_ids = list(range(1, 33))
    return tuple(token for token in token_ids if token < vocab_size) or (0,)


def check_draft(
    target: ModelRunner,
    drafter: Drafter,
    group: TPGroup,
    *,
    prompt: tuple[int, ...],
    resolved: ResolvedSpeculative,
    block_size: int,
    max_model_len: int,
) -> SelfCheck:
    """Draft and verify greedily. Runs on every rank, before the first request; uses KV from 0."""
    k = resolved.num_speculative_tokens
    length = min(max_model_len, len(prompt) + NUM_STEPS * (k + 1) + 1)
    prompt = prompt[: max(1, length - NUM_STEPS)]
    buffers = InputBuffers(
        max_num_seqs=1,
        max_model_len=length,
        block_size=block_size,
        resolved=resolved,
        eos_token_ids=(),
    )
    request = Request(
        request_id="self-check",
        prompt_token_ids=prompt,
        params=SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=length),
    )
    blocks = tuple(range(-(-length // block_size)))
    new: tuple[NewRequest, ...] = (NewRequest(slot=0, request=request, seed=0),)
    computed, drafted, accepted = 0, 0, 0
    for _ in range(NUM_STEPS + 1):
        num_tokens = buffers.num_tokens[0] if computed else len(prompt)
        depth = min(k, length - num_tokens - 1) if computed else 0
        if computed and depth <= 0:
            break
        step = speculative_step(
            SchedulerOutput(
                scheduled=(
                    ScheduledRequest(
                        slot=0,
                        num_computed_tokens=computed,
                        num_scheduled_tokens=num_tokens - computed,
                        num_draft_tokens=depth,
                        samples=True,
                        new_block_ids=() if computed else blocks,
                    ),
                ),
                new_requests=new,
            ),
            buffers,
            target,
            drafter,
            group,
        )
        new, computed = (), buffers.num_tokens[0] - 1
        (output,) = step.outputs
        if output.error is not None:
            break
        drafted += output.num_draft_tokens
        accepted += output.num_accepted_tokens
    return SelfCheck(num_draft_tokens=drafted, num_accepted_tokens=accepted)


def judge(check: SelfCheck, name: str, strict: bool) -> str:
    """A sentence on the acceptance. Near 0: a warning, or ConfigError if `strict`."""
    found = (
        f"{check.num_accepted_tokens} of {check.num_draft_tokens} greedy drafts of the built-in "
        f"prompt were accepted"
    )
    if check.num_draft_tokens and check.acceptance < NEAR_ZERO:
        message = f"the {name} head drafts next to nothing right: {found}. Likely {CAUSES}"
        if strict:
            raise ConfigError(f"speculative.strict_draft: {message}")
        logger.warning("%s", message)
    return found
