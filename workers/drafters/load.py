"""From the configuration to a drafter: its model or head, and the object that proposes."""

from __future__ import annotations

from pathlib import Path

import torch

from spectrue.workers.config import EngineConfig
from spectrue.workers.drafters.base import Drafter, NoDrafter
from spectrue.workers.drafters.chain import DraftCuts
from spectrue.workers.drafters.draft_model import DraftModelDrafter
from spectrue.workers.drafters.eagle import EagleDrafter
from spectrue.workers.drafters.ngram import NgramDrafter
from spectrue.workers.errors import ConfigError
from spectrue.workers.model_runner import HeadRunner, ModelRunner
from spectrue.workers.model_store import resolve_model
from spectrue.workers.models.base import Model
from spectrue.workers.models.head import DraftHead
from spectrue.workers.parallel import TPGroup
from spectrue.workers.policy import Decision, resolve_speculative
from spectrue.workers.weights import Progress, load_model
from spectrue.workers.weights_head import check_method, load_head
from spectrue.workers.weights_mtp import load_mtp


def load_draft(
    config: EngineConfig,
    target_path: Path,
    target: Model,
    dtype: torch.dtype,
    group: TPGroup,
    progress: Progress | None,
    decisions: list[Decision],
) -> Model | DraftHead | None:
    """The drafter's model or head, if it has one; the target is told which layers a head reads.

    Raises ConfigError for a checkpoint that the drafter or the target does not fit.
    """
    speculative = config.speculative
    name, given = speculative.drafter, speculative.draft_model
    if speculative.max_draft_tokens == 0:
        return None
    if name == "mtp":
        head, _ = load_mtp(target_path, target, dtype=dtype, group=group, progress=progress)
        _check_tree(config, target, head)
        return head
    if given is None:
        return None
    path = resolve_model(given)
    if name == "draft_model":
        if config.load_format != "dummy":
            check_method(path, name)
        draft = load_model(
            path,
            dtype=dtype,
            device=target.device,
            group=group,
            progress=progress,
            load_format=config.load_format,
        )
        if draft.config.vocab_size != target.config.vocab_size:
            raise ConfigError(
                f"speculative.draft_model must have the target's vocabulary of "
                f"{target.config.vocab_size} tokens, it has {draft.config.vocab_size}"
            )
        return draft
    head, found = load_head(
        path,
        name,
        target,
        convention=speculative.aux_layer_convention,
        dtype=dtype,
        group=group,
        progress=progress,
        load_format=config.load_format,
        token_map=speculative.token_map,
        target_path=target_path,
    )
    if found.aux_reason:
        layers = ", ".join(map(str, found.aux_layers)) or "none"
        setting = "speculative.aux_layer_convention"
        decisions.append(Decision(setting, f"outputs of layers {layers}", found.aux_reason))
    target.aux_layers = head.aux_layers
    _check_tree(config, target, head)
    return head


def _check_tree(config: EngineConfig, target: Model, head: DraftHead) -> None:
    """Raise ConfigError where attention under a tree mask cannot be that of the model."""
    topk = config.speculative.tree_topk
    if topk == 1:
        return
    if topk > head.draft_vocab_size:
        raise ConfigError(
            f"speculative.tree_topk: {topk} is more than the head's {head.draft_vocab_size} tokens"
        )
    reason = None
    if any(target.config.layer_windows):
        reason = "has sliding-window attention, and a window has no tree mask"
    elif any(getattr(layer, "softcap", None) for layer in getattr(target, "layers", ())):
        reason = "caps its attention scores, which the tree kernel cannot"
    elif not all(16 <= m.config.head_dim <= 256 for m in (target, head)):
        reason = "has heads of a size beyond [16, 256], which the tree kernel cannot"
    if reason is not None:
        raise ConfigError(
            f"speculative.tree_topk: {topk} drafts trees, but the model {reason}; set it to 1"
        )


def make_drafter(
    config: EngineConfig,
    draft: Model | DraftHead | None,
    num_blocks: int,
    group: TPGroup,
    kv_dtype: torch.dtype,
) -> Drafter:
    """The drafter, with a KV pool of its own for as many blocks as the target has."""
    speculative, k = config.speculative, config.speculative.max_draft_tokens
    if k == 0:
        return NoDrafter()
    if draft is None:
        return NgramDrafter(speculative.ngram_min, speculative.ngram_max, group)
    kv_cache = draft.new_kv_cache(num_blocks, config.block_size, kv_dtype)
    cuts = DraftCuts(top_k=speculative.draft_top_k, top_p=speculative.draft_top_p)
    if isinstance(draft, DraftHead):
        return EagleDrafter(
            HeadRunner(draft, kv_cache),
            group,
            max_num_seqs=config.max_num_seqs,
            k=k,
            cuts=cuts,
            tree=resolve_speculative(speculative).tree,
        )
    return DraftModelDrafter(
        ModelRunner(draft, kv_cache),
        group,
        max_num_seqs=config.max_num_seqs,
        k=k,
        max_num_tokens=config.max_num_batched_tokens,
        cuts=cuts,
    )
