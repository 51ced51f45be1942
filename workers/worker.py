"""One rank: its shard of the target and draft models, and its part in every step."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from spectrue.workers.config import EngineConfig
from spectrue.workers.core import SchedulerOutput, StepOutput
from spectrue.workers.drafters.base import Drafter, NoDrafter
from spectrue.workers.drafters.draft_model import DraftModelDrafter
from spectrue.workers.drafters.ngram import NgramDrafter
from spectrue.workers.errors import ConfigError
from spectrue.workers.input_buffers import InputBuffers
from spectrue.workers.kv_cache import KVCachePool
from spectrue.workers.model_runner import ModelRunner
from spectrue.workers.model_store import resolve_model
from spectrue.workers.models.llama import LlamaModel
from spectrue.workers.parallel import TPGroup
from spectrue.workers.policy import Decision, ResolvedSpeculative, resolve_speculative
from spectrue.workers.speculative import speculative_step
from spectrue.workers.weights import load_model, resolve_dtype

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]  # what, done, total


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the engine must know of the loaded model, and how it was set up."""

    model_path: Path
    max_model_len: int
    vocab_size: int
    num_kv_blocks: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str
    resolved: ResolvedSpeculative
    decisions: tuple[Decision, ...]
    needs_hidden_states: bool


class Worker:
    """Loads what the configuration names. Slow; raises ConfigError or ModelLoadError."""

    def __init__(
        self, config: EngineConfig, group: TPGroup, progress: Progress | None = None
    ) -> None:
        decisions: list[Decision] = []
        self.group = group
        self.resolved = resolve_speculative(config.speculative)
        decisions.extend(self.resolved.decisions)
        if config.device == "cuda":
            raise ConfigError("device: cuda is not supported by this version, use cpu")
        if config.device == "auto":
            reason = "this version computes on CPUs only"
            decisions.append(Decision("device", "cpu", reason))
        threads = config.cpu_threads
        if threads is None:
            threads = max(1, (os.cpu_count() or 1) // config.tp_size)
            decisions.append(
                Decision("cpu_threads", str(threads), "the machine's cores, shared by the ranks")
            )
        torch.set_num_threads(threads)
        dtype = resolve_dtype(config.dtype)
        if config.dtype == "auto":
            fast = dtype is torch.bfloat16
            reason = "the CPU computes in bf16" if fast else "the CPU has no bf16 instructions"
            decisions.append(Decision("dtype", _name(dtype), reason))

        path = resolve_model(config.model)
        model = self._load(path, dtype, progress, "target weights")
        max_model_len = config.max_model_len
        if max_model_len is None:
            max_model_len = model.config.max_context
        model.config.check_context(max_model_len)
        draft = None
        if config.speculative.draft_model is not None:
            draft_path = resolve_model(config.speculative.draft_model)
            draft = self._load(draft_path, dtype, progress, "draft weights")
            if draft.config.vocab_size != model.config.vocab_size:
                raise ConfigError(
                    f"speculative.draft_model must have the target's vocabulary of "
                    f"{model.config.vocab_size} tokens, it has {draft.config.vocab_size}"
                )

        num_blocks, max_model_len = _size_pool(config, max_model_len, model, draft, decisions)
        self.target = ModelRunner(model, model.new_kv_cache(num_blocks, config.block_size))
        self.drafter = self._drafter(config, draft, num_blocks)
        self.buffers = InputBuffers(
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            block_size=config.block_size,
            resolved=self.resolved,
            eos_token_ids=model.config.eos_token_ids,
        )
        self.info = ModelInfo(
            model_path=path,
            max_model_len=max_model_len,
            vocab_size=model.config.vocab_size,
            num_kv_blocks=num_blocks,
            eos_token_ids=tuple(model.config.eos_token_ids),
            dtype=_name(dtype),
            device="cpu",
            resolved=self.resolved,
            decisions=tuple(decisions),
            needs_hidden_states=self.drafter.needs_hidden_states,
        )
        for decision in decisions:
            logger.info("%s = %s: %s", decision.setting, decision.value, decision.reason)

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> StepOutput:
        return speculative_step(plan, self.buffers, self.target, self.drafter, self.group)

    def _load(
        self, path: Path, dtype: torch.dtype, progress: Progress | None, what: str
    ) -> LlamaModel:
        start = time.perf_counter()
        report = None if progress is None else (lambda done, total: progress(what, done, total))
        model = load_model(path, dtype=dtype, group=self.group, progress=report)
        logger.info("%s loaded in %.1f s", what, time.perf_counter() - start)
        return model

    def _drafter(self, config: EngineConfig, draft: LlamaModel | None, num_blocks: int) -> Drafter:
        speculative = config.speculative
        if self.resolved.num_speculative_tokens == 0:
            return NoDrafter()
        if draft is not None:
            return DraftModelDrafter(
                ModelRunner(draft, draft.new_kv_cache(num_blocks, config.block_size)),
                self.group,
                max_num_seqs=config.max_num_seqs,
                k=speculative.num_speculative_tokens,
                max_num_tokens=config.max_num_batched_tokens,
            )
        return NgramDrafter(speculative.ngram_min, speculative.ngram_max, self.group)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size_pool(
    config: EngineConfig,
    max_model_len: int,
    model: LlamaModel,
    draft: LlamaModel | None,
    decisions: list[Decision],
) -> tuple[int, int]:
    """(KV blocks, max_model_len): the pool must hold one request of full length."""
    needed = -(-max_model_len // config.block_size)
    if config.num_kv_blocks is not None:
        num_blocks, setting = config.num_kv_blocks, "num_kv_blocks"
    else:
        per_block = sum(
            KVCachePool.bytes_per_block(
                m.config.num_layers,
                config.block_size,
                m.num_kv_heads,
                m.config.head_dim,
                m.dtype,
            )
            for m in (model, draft)
            if m is not None
        )
        num_blocks, setting = config.kv_cache_bytes // per_block, "kv_cache_bytes"
        decisions.append(
            Decision("num_kv_blocks", str(num_blocks), f"kv_cache_bytes / {per_block} a block")
        )
    if num_blocks >= needed:
        if config.max_model_len is None:
            decisions.append(Decision("max_model_len", str(max_model_len), "the model's context"))
        return num_blocks, max_model_len
    fits = num_blocks * config.block_size
    if config.max_model_len is not None or fits == 0:
        raise ConfigError(
            f"{setting} gives {num_blocks} KV blocks of {config.block_size} tokens, but one "
            f"request of max_model_len = {max_model_len} tokens needs {needed}"
        )
    decisions.append(Decision("max_model_len", str(fits), f"what {setting} has room for"))
    return num_blocks, fits


def follow(config: EngineConfig, group: TPGroup, progress: Progress | None = None) -> None:
    """The life of a rank other than 0: execute rank 0's plans until it says None."""
    worker = Worker(config, group, progress)
    while True:
        plan: SchedulerOutput | None = group.broadcast_object(None)
        if plan is None:
            return
        worker.execute(plan)
