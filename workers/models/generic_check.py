"""Finds out from a transformers model itself whether our attention can serve it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from spectrue.workers.errors import ModelLoadError
from spectrue.workers.forward_batch import ForwardBatch
from spectrue.workers.models.generic_attention import PAGED, PROBE, LayerAttention, probing
from spectrue.workers.models.generic_config import TAKE_BACK, max_positions

if TYPE_CHECKING:
    from spectrue.workers.models.generic import GenericModel

PROBE_TOKENS = 4
CHECK_TOKENS, CHECK_CUT = 12, 3  # the second piece is the longer: it sees KV of the first
BLOCK_SIZE = 4
# Of the median row's logits. A forgotten state is an error of the size of the logits themselves.
TOLERANCE = {torch.float32: 1e-2}
COARSE_TOLERANCE = 0.25


def refusal(path: Path, hf: Any, why: object) -> ModelLoadError:
    kind = hf.config.model_type
    return ModelLoadError(f"{path}: model type {kind!r} is not supported: {why}")


@torch.no_grad()
def probe_attention(path: Path, hf: Any, device: torch.device) -> tuple[LayerAttention, ...]:
    """What each layer asks of attention, from one forward of a few tokens.

    Raises ModelLoadError if a layer has no attention, or one that ours does not compute.
    """
    if not hf._can_set_attn_implementation():
        raise refusal(path, hf, "its code does not use transformers' AttentionInterface")
    hf.set_attn_implementation(PROBE)
    tokens = torch.arange(PROBE_TOKENS, device=device)[None]
    try:
        with probing(max_positions(hf.config)) as found:
            hf.base_model(input_ids=tokens, position_ids=tokens, use_cache=False)
    except ModelLoadError as error:
        raise refusal(path, hf, error) from error
    num_layers = hf.config.num_hidden_layers
    lacking = [str(i) for i in range(num_layers) if i not in found]
    if lacking:
        raise refusal(path, hf, f"layers {', '.join(lacking)} have no attention; {TAKE_BACK}")
    layers = tuple(found[i] for i in range(num_layers))
    heads = {(layer.num_heads, layer.num_kv_heads) for layer in layers}
    if len(heads) > 1 or len(found) > num_layers:
        raise refusal(path, hf, f"its layers differ in their numbers of heads: {sorted(heads)}")
    return layers


@torch.no_grad()
def check_pieces(path: Path, model: GenericModel) -> None:
    """Raises ModelLoadError unless a text fed in pieces through the paged KV gives the logits
    that the model's own code gives for the whole.

    It catches what no argument of attention shows: state kept outside the KV cache, a rotation or
    a scale that depends on the batch, a head that needs more than hidden states.
    """
    positions = torch.arange(CHECK_TOKENS, device=model.device)[None]
    tokens = positions[0] % model.config.vocab_size
    model.hf.set_attn_implementation("eager")
    expected = model.hf(input_ids=tokens[None], position_ids=positions, use_cache=False).logits[
        0, CHECK_CUT:
    ]
    model.hf.set_attn_implementation(PAGED)
    num_blocks = CHECK_TOKENS // BLOCK_SIZE
    kv_cache = model.new_kv_cache(num_blocks, BLOCK_SIZE)

    def batch_of(start: int, stop: int) -> ForwardBatch:
        return ForwardBatch.build(
            token_ids=[tokens[start:stop].cpu()],
            starts=[start],
            block_tables=torch.arange(num_blocks, dtype=torch.int32)[None],
            block_size=BLOCK_SIZE,
            device=model.device,
        )

    first, second = batch_of(0, CHECK_CUT), batch_of(CHECK_CUT, CHECK_TOKENS)
    try:
        model.forward(first, kv_cache)
        got = model.compute_logits(model.forward(second, kv_cache).hidden_states)
    except (AttributeError, KeyError, TypeError) as error:
        raise refusal(path, model.hf, f"its code needs more than we give it: {error!r}") from error
    if got is None:  # another rank judges
        return
    expected = expected.float()
    off = float(((got - expected).norm(dim=-1) / expected.norm(dim=-1)).median())
    if not off <= TOLERANCE.get(model.dtype, COARSE_TOLERANCE):  # NaN fails too
        raise refusal(
            path,
            model.hf,
            f"a text fed in pieces gives other logits than the whole (by {off:.2g} of "
            f"their size), so it keeps more than the KV of its tokens; {TAKE_BACK}",
        )
