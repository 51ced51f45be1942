"""One rank: its shard of the target and draft models, and its part in every step."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from spectrue.kernels.dispatch import FP8_DTYPES
from spectrue.workers.config import EngineConfig
from spectrue.workers.core import SchedulerOutput, StepOutput
from spectrue.workers.device import rank_device
from spectrue.workers.drafters.base import NoDrafter
from spectrue.workers.drafters.eagle import EagleDrafter
from spectrue.workers.drafters.load import load_draft, make_drafter
from spectrue.workers.errors import ConfigError
from spectrue.workers.graphs import StepGraphs
from spectrue.workers.input_buffers import InputBuffers
from spectrue.workers.kv_cache import KVCachePool
from spectrue.workers.kv_dtype import architecture, resolve_kv_dtype
from spectrue.workers.model_runner import ModelRunner
from spectrue.workers.model_store import resolve_model
from spectrue.workers.models.base import Model
from spectrue.workers.models.head import DraftHead
from spectrue.workers.models.llama import LlamaModel
from spectrue.workers.parallel import TPGroup
from spectrue.workers.policy import Decision, ResolvedSpeculative, resolve_speculative
from spectrue.workers.self_check import check_draft, judge, prompt_token_ids
from spectrue.workers.speculative import start_step
from spectrue.workers.weights import load_model, resolve_dtype

logger = logging.getLogger(__name__)

CPU_KV_BYTES = 512 * 2**20
# Of a GPU's memory that is free once the weights are there: what activations, graphs and logits
# need stays out, and a share for what other processes may take.
GPU_RESERVE = 4 * 2**30
GPU_SHARE = 0.9

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
        device = _device(config, group, decisions)
        threads = config.cpu_threads
        if threads is None:
            threads = max(1, (os.cpu_count() or 1) // config.tp_size)
            decisions.append(
                Decision("cpu_threads", str(threads), "the machine's cores, shared by the ranks")
            )
        torch.set_num_threads(threads)
        dtype = resolve_dtype(config.dtype, device)
        if config.dtype == "auto":
            what = "GPU" if device.type == "cuda" else "CPU"
            fast = dtype is torch.bfloat16
            verb = "computes in bf16" if fast else "has no bf16 instructions"
            decisions.append(Decision("dtype", _name(dtype), f"the {what} {verb}"))
        if config.load_format == "dummy":
            reason = "random weights, for measuring speed: the text is noise"
            decisions.append(Decision("load_format", "dummy", reason))

        path = resolve_model(config.model)
        start = time.perf_counter()
        model: Model = load_model(
            path,
            dtype=dtype,
            device=device,
            group=group,
            progress=_report(progress, "target weights"),
            load_format=config.load_format,
        )
        logger.info("target weights loaded in %.1f s", time.perf_counter() - start)
        max_model_len = config.max_model_len
        if max_model_len is None:
            max_model_len = model.config.max_context
        model.config.check_context(max_model_len)
        draft = load_draft(
            config, path, model, dtype, group, _report(progress, "draft weights"), decisions
        )

        kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, dtype, architecture(device), decisions)
        if kv_dtype in FP8_DTYPES:
            scales, reason = "1.0", "the checkpoint has none"
            if model.kv_scales:
                scales, reason = "by layer", "those of the checkpoint"
            decisions.append(Decision("kv_cache_scales", scales, reason))
        num_blocks, max_model_len = _size_pool(
            config, max_model_len, model, draft, kv_dtype, group, decisions
        )
        kv_cache = model.new_kv_cache(num_blocks, config.block_size, kv_dtype)
        self.target = ModelRunner(model, kv_cache)
        self.drafter = make_drafter(config, draft, num_blocks, group, kv_dtype)
        self._self_check(config, path, max_model_len, decisions)
        self.buffers = InputBuffers(
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            block_size=config.block_size,
            resolved=self.resolved,
            eos_token_ids=model.config.eos_token_ids,
        )
        self.graphs = self._graphs(config, model, max_model_len, decisions)
        self.info = ModelInfo(
            model_path=path,
            max_model_len=max_model_len,
            vocab_size=model.config.vocab_size,
            num_kv_blocks=num_blocks,
            eos_token_ids=tuple(model.config.eos_token_ids),
            dtype=_name(dtype),
            device=str(device),
            resolved=self.resolved,
            decisions=tuple(decisions),
            needs_hidden_states=self.drafter.needs_hidden_states,
        )
        for decision in decisions:
            logger.info("%s = %s: %s", decision.setting, decision.value, decision.reason)

    @torch.inference_mode()
    def launch(self, plan: SchedulerOutput) -> Callable[[], StepOutput]:
        """Start a step; the call that is returned ends it (see `start_step`)."""
        if self.target.device.index:  # a thread's GPU is the first until it says otherwise
            torch.cuda.set_device(self.target.device)
        finish = start_step(plan, self.buffers, self.target, self.drafter, self.group, self.graphs)
        return torch.inference_mode()(finish)

    def can_follow(self, plan: SchedulerOutput) -> bool:
        """Whether the next step of the same requests may be launched before that of `plan`, the
        last one launched, has ended: nothing that it needs is known on the host alone. The same on
        every rank."""
        in_graph = self.graphs is not None and self.graphs.last is not None
        return in_graph and isinstance(self.drafter, NoDrafter | EagleDrafter)

    def _graphs(
        self, config: EngineConfig, model: Model, max_model_len: int, decisions: list[Decision]
    ) -> StepGraphs | None:
        if model.device.type != "cuda" or not config.enable_graphs:
            return None
        if not isinstance(model, LlamaModel):
            # Their code writes the KV of padding too, and may ask the host in between.
            reason = "models that run by transformers' code are not captured"
            decisions.append(Decision("enable_graphs", "false", reason))
            return None
        graphs = StepGraphs(
            self.target,
            self.buffers,
            group=self.group,
            device=model.device,
            max_model_len=max_model_len,
            law=self.drafter.law,
        )
        num_positions = self.buffers.block_tables.shape[1] * self.buffers.block_size
        model.rope.reserve(num_positions)
        if isinstance(self.drafter, EagleDrafter):
            self.drafter.runner.head.rope.reserve(num_positions)
            self.drafter.use_graphs(graphs)
        return graphs

    @torch.inference_mode()
    def _self_check(
        self, config: EngineConfig, path: Path, max_model_len: int, decisions: list[Decision]
    ) -> None:
        """What a head is worth on this target; of random weights or made-up accepts nothing is."""
        if not isinstance(self.drafter, EagleDrafter):
            return
        if config.load_format == "dummy" or self.resolved.simulated_acceptance:
            return
        check = check_draft(
            self.target,
            self.drafter,
            self.group,
            prompt=prompt_token_ids(path, self.target.vocab_size),
            resolved=self.resolved,
            block_size=config.block_size,
            max_model_len=max_model_len,
        )
        speculative = config.speculative
        found = judge(check, speculative.drafter, speculative.strict_draft)
        decisions.append(Decision("speculative.self_check", f"{check.acceptance:.3f}", found))


def _report(progress: Progress | None, what: str) -> Callable[[int, int], None] | None:
    return None if progress is None else (lambda done, total: progress(what, done, total))


def _device(config: EngineConfig, group: TPGroup, decisions: list[Decision]) -> torch.device:
    """Of this rank; collectives of a group on GPUs are set up. Raises ConfigError."""
    device = rank_device(config) if group.size == 1 else group.device
    if config.device == "auto":
        found = "a GPU was found" if device.type == "cuda" else "no GPU was found"
        if group.size > 1:
            found += f" for each of tp_size = {group.size} ranks"
        decisions.append(Decision("device", device.type, found))
    elif config.device != device.type:
        raise ConfigError(f"device: {config.device}, but the ranks have met on {device.type}")
    if group.size > 1 and device.type == "cuda" and config.enable_p2p_all_reduce:
        reason = group.use_one_shot()
        if reason is not None:
            reason = f"all sums over the ranks go by NCCL: {reason}"
            decisions.append(Decision("enable_p2p_all_reduce", "false", reason))
    return device


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size_pool(
    config: EngineConfig,
    max_model_len: int,
    model: Model,
    draft: Model | DraftHead | None,
    kv_dtype: torch.dtype,
    group: TPGroup,
    decisions: list[Decision],
) -> tuple[int, int]:
    """(KV blocks, max_model_len), the same on every rank: room for one request of full length."""
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
                kv_dtype,
            )
            for m in (model, draft)
            if m is not None
        )
        size = config.kv_cache_bytes
        if size is None:
            size = CPU_KV_BYTES
            if model.device.type == "cuda":
                free, _ = torch.cuda.mem_get_info(model.device)
                # A rank's GPU may have less free than the others'.
                size = group.least(max(int((free - GPU_RESERVE) * GPU_SHARE), 0))
        num_blocks, setting = size // per_block, "kv_cache_bytes"
        decisions.append(
            Decision("num_kv_blocks", str(num_blocks), f"{size} bytes of KV / {per_block} a block")
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
