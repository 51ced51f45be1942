"""The pipelines that `spectrue bench verify` compares with: plain torch, and flashinfer.

They get what their engines have at hand: draft probabilities in float32 over the target's
vocabulary. Nothing waits for the device, so that each can be captured in a graph.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from spectrue.deploy.bench_verify_cases import Case
from spectrue.deploy.bench_verify_inputs import TOP_K, TOP_P, Inputs

Draw = Literal["cumsum", "noise"]
Peer = Callable[[Inputs], Any]


def torch_probs(x: Inputs, cuts: bool) -> Tensor:  # [R, V]
    """Softmax; with cuts a sort, and the law renormalised: exactly k, ties by token id."""
    probs = (x.logits / x.temperature[:, None]).softmax(-1)  # float32: that of temperature
    if not cuts:
        return probs
    kept, order = probs.sort(stable=True, dim=-1, descending=True)
    rank = torch.arange(kept.shape[1], device=kept.device)
    kept.masked_fill_(rank >= x.top_k[:, None], 0)
    running = kept.cumsum(-1)
    kept.masked_fill_(running - kept >= x.top_p[:, None] * running[:, -1:], 0)
    kept.masked_fill_(kept < x.min_p[:, None] * kept[:, :1], 0)
    kept /= kept.sum(-1, keepdim=True)
    return probs.scatter_(1, order, kept)


def torch_draw(weights: Tensor, uniform: Tensor, how: Draw) -> Tensor:  # [n, V], [n] -> [n]
    """Inverse CDF at the uniform, or the race of exponentials that engines run instead."""
    if how == "noise":
        return (weights / torch.empty_like(weights).exponential_()).argmax(-1)
    running = weights.cumsum(-1)
    aim = uniform[:, None] * running[:, -1:]
    place = torch.searchsorted(running, aim, right=True).squeeze(1)
    return place.clamp_(max=weights.shape[1] - 1)


def torch_match(x: Inputs, target: Tensor) -> tuple[Tensor, Tensor]:
    """Output ids [B, k + 1], padded with -1, and the number of accepted drafts [B]."""
    target = target.view(x.batch, x.k + 1)
    same = x.guess.view(x.batch, x.k) == target[:, :-1]
    accepted = same.cumprod(1).sum(1)
    depth = torch.arange(x.k + 1, device=target.device)
    return torch.where(depth <= accepted[:, None], target, -1), accepted


def torch_reject(x: Inputs, probs: Tensor, how: Draw) -> tuple[Tensor, Tensor]:
    """Leviathan et al.: as torch_match, the last token from the residual or the bonus row."""
    target = probs.view(x.batch, x.k + 1, -1)
    proposed = x.draft_probs.view(x.batch, x.k, -1)
    draft = x.draft.view(x.batch, x.k)
    target_prob = target[:, :-1].gather(2, draft[..., None]).squeeze(2)
    draft_prob = proposed.gather(2, draft[..., None]).squeeze(2)
    accepted = (x.coins.view(x.batch, x.k) * draft_prob < target_prob).cumprod(1).sum(1)
    request = torch.arange(x.batch, device=probs.device)
    taken = proposed[request, accepted.clamp(max=x.k - 1)]
    rejected = (accepted < x.k)[:, None]
    residual = (target[request, accepted] - torch.where(rejected, taken, 0)).clamp_(min=0)
    uniform = x.uniform.view(x.batch, x.k + 1).gather(1, accepted[:, None]).squeeze(1)
    token = torch_draw(residual, uniform, how)
    depth = torch.arange(x.k + 1, device=probs.device)
    padded = torch.cat([draft, draft[:, :1]], 1)
    output = torch.where(depth < accepted[:, None], padded, -1)
    return output.scatter_(1, accepted[:, None], token[:, None]), accepted


def torch_peers(case: Case) -> dict[str, Peer]:
    """Both ways to draw; the faster one counts. One op alone has no peer."""
    if case.method is None:
        return {}
    if case.method == "greedy":
        return {"torch": lambda x: torch_match(x, x.logits.argmax(-1))}

    def of(how: Draw) -> Peer:
        def run(x: Inputs) -> Any:
            probs = torch_probs(x, case.cuts)
            if case.method == "rejection":
                return torch_reject(x, probs, how)
            return torch_match(x, torch_draw(probs, x.uniform, how))

        return run

    # Gumbel noise is a race of exponentials; torch has none that is keyed by position.
    hows: tuple[Draw, ...] = ("noise",) if case.method == "coupled" else ("cumsum", "noise")
    return {f"torch, {how}": of(how) for how in hows}


def flashinfer_peer(case: Case, ops: Any) -> Peer | None:
    """With `ops` = flashinfer.sampling; None where it has nothing.

    min_p is left out: flashinfer cannot renormalise by it, and so does less here than the others.
    Seeds are tensors, as graphs need.
    """
    if case.method in (None, "greedy", "coupled"):
        return None

    def probs(x: Inputs) -> Tensor:
        probs: Tensor = ops.softmax(x.logits, temperature=x.temperature)
        return ops.top_k_renorm_probs(probs, TOP_K) if case.cuts else probs

    def match(x: Inputs) -> Any:
        keys = {"seed": x.seed[:1], "offset": x.position[:1]}
        if case.cuts:
            target = ops.top_p_sampling_from_probs(probs(x), TOP_P, **keys)
        else:
            scaled = x.logits / x.temperature[:, None]
            target = ops.sampling_from_logits(scaled, **keys)
        return torch_match(x, target)

    def reject(x: Inputs) -> Any:
        law = probs(x)
        if case.cuts:
            law = ops.top_p_renorm_probs(law, TOP_P)
        return ops.chain_speculative_sampling(
            x.draft_probs.view(x.batch, x.k, -1),
            x.draft.view(x.batch, x.k).int(),
            law.view(x.batch, x.k + 1, -1),
            seed=x.seed[:1],
            offset=x.position[:1],
        )

    return reject if case.method == "rejection" else match


def load_flashinfer(device: torch.device) -> tuple[Any, str]:
    """(flashinfer.sampling, its version), or (None, why not). Compiles it, which takes a minute."""
    if device.type != "cuda" or torch.version.hip:
        return None, "flashinfer needs CUDA"
    try:
        ops = importlib.import_module("flashinfer.sampling")
        ops.top_k_renorm_probs(torch.full((1, 128), 1 / 128, device=device), 8)
        torch.cuda.synchronize(device)
    except Exception as e:  # whatever a compiler, a loader or a device can raise
        lines = f"flashinfer: {type(e).__name__}: {e}".strip().splitlines()
        return None, lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"[:500]
    return ops, str(importlib.import_module("flashinfer").__version__)
