"""The weights of a transformers model: read strictly, or random."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from spectrue.workers.errors import ModelLoadError
from spectrue.workers.models.generic import GenericModel
from spectrue.workers.models.generic_attention import PAGED, register
from spectrue.workers.models.generic_config import read_hf_config
from spectrue.workers.models.generic_parallel import shard
from spectrue.workers.parallel import TPGroup
from spectrue.workers.weights_dummy import dummy_weight

logger = logging.getLogger(__name__)


def load_generic(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    group: TPGroup,
    progress: Callable[[int, int], None] | None = None,
    *,
    dummy: bool = False,
) -> GenericModel:
    """Raises ConfigError or ModelLoadError. transformers' own code runs, none of the checkpoint.

    A rank reads the whole checkpoint into memory and keeps its part.
    """
    from spectrue.workers.weights_kv_scales import read_kv_scales
    from spectrue.workers.weights_safetensors import SafetensorsFiles

    config = read_hf_config(path)
    register()
    hf = _dummy(config, dtype, device) if dummy else _read(path, config, dtype)
    vocab_size = hf.get_output_embeddings().weight.shape[0]
    if group.size > 1:
        shard(hf, group)  # before it goes to the device: only this rank's part does
    model = GenericModel(path, hf.to(device), device, group, vocab_size)
    if not dummy:
        model.kv_scales = read_kv_scales(path, SafetensorsFiles(path), config.num_hidden_layers)
    logger.info("%s runs by transformers' %s", path.name, type(hf).__name__)
    if progress is not None:
        progress(1, 1)
    return model


def _read(path: Path, config: Any, dtype: torch.dtype) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as hf_logging

    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        hf, info = AutoModelForCausalLM.from_pretrained(
            str(path),
            config=config,
            dtype=dtype,
            attn_implementation=PAGED,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # named below
        )
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    finally:
        if bars:
            hf_logging.enable_progress_bar()
    from spectrue.workers.weights import named
    from spectrue.workers.weights_kv_scales import is_kv_scale
    from spectrue.workers.weights_mtp import is_mtp_weight, num_mtp_layers

    unused = {n for name in info["unexpected_keys"] if not is_kv_scale(n := str(name))}
    if num_mtp_layers(config.to_dict()):  # for drafter `mtp`
        unused = {n for n in unused if not is_mtp_weight(n, config.num_hidden_layers)}
    wrong = {str(name) for name, *_ in info["mismatched_keys"]}
    for what, names in (
        ("lacks weights of its model", set(info["missing_keys"])),
        ("has weights that its model would ignore", unused),
        ("has weights of other shapes than its model's", wrong),
    ):
        if names:
            raise ModelLoadError(f"{path} {what}: {named(names)}")
    return hf


def _dummy(config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        hf = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=PAGED)
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            parameter.copy_(dummy_weight(name, tuple(parameter.shape), parameter.dtype, device))
    return hf
