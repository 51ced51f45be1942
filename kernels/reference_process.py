"""Every sampling parameter applied to a batch of logits rows, in one order (docs/sampling.md)."""

from __future__ import annotations

import torch
from torch import Tensor

from spectrue.kernels.reference_truncate import cut_below, truncate
from spectrue.kernels.row_law import RowLaw

_NEG_INF = float("-inf")


def process_logits(
    logits: Tensor,  # [R, V] floating, not changed
    *,
    temperature: Tensor,  # [R] floating; 0 is greedy
    top_k: Tensor | None = None,  # [R] integer; <= 0 keeps all
    top_p: Tensor | None = None,  # [R] floating in (0, 1]
    min_p: Tensor | None = None,  # [R] floating in [0, 1]
    penalties: tuple[Tensor, Tensor, Tensor] | None = None,  # row [N], token [N], output count [N]
    repetition: Tensor | None = None,  # [R]
    presence: Tensor | None = None,  # [R]
    frequency: Tensor | None = None,  # [R]
    bias: tuple[Tensor, Tensor, Tensor] | None = None,  # row [N], token [N], value [N]
    mask: tuple[Tensor, Tensor] | None = None,  # row [N], token [N]
) -> RowLaw:
    """The law of each row: `(logit - max) / temperature` in the support, nothing outside.

    In this order: repetition penalty (as Hugging Face: a positive logit is divided by it, another
    multiplied; every entry of `penalties`, which are the distinct tokens of prompt and output),
    presence and frequency penalties (as OpenAI: entries with an output count > 0), `bias` (entries
    add up), `mask`, temperature, top_k (exactly k tokens), top_p (the smallest set whose mass,
    among the top_k, reaches it), min_p (against the row's maximum). Equal logits are taken in the
    order of their token ids. At least one token always stays.

    A temperature-0 row keeps its values after the mask and is not truncated: it is decided by
    its argmax. A row that holds NaN or +inf, or -inf only, is still refused by `valid_rows`.
    float32 inside, float64 for float64 logits.

    Raises ValueError for penalties without the three strengths.
    """
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    logits = _edit(logits.to(dtype), logits, penalties, repetition, presence, frequency, bias, mask)
    peak = logits.amax(1)
    temperature = temperature.to(dtype)
    sampled = temperature > 0
    shift = torch.where(sampled, peak, 0)
    scaled = logits - shift[:, None]
    scaled /= torch.where(sampled, temperature, 1)[:, None]

    vocab_size = logits.shape[1]
    judged = sampled & peak.isfinite()  # NaN rows are left as they are, to be seen
    cut = torch.zeros_like(judged)
    if top_k is not None:
        cut |= (top_k > 0) & (top_k < vocab_size)
    if top_p is not None:
        cut |= top_p < 1
    cut &= judged
    if cut.any():
        truncate(scaled, cut.nonzero().squeeze(1), top_k, top_p, min_p)
    if min_p is not None:
        rows = ((min_p > 0) & judged & ~cut).nonzero().squeeze(1)
        floor = min_p[rows].to(dtype).log()
        for row, low in zip(rows.tolist(), floor, strict=True):
            cut_below(scaled[row], low)
    return RowLaw(scaled)


def _edit(
    logits: Tensor,
    original: Tensor,
    penalties: tuple[Tensor, Tensor, Tensor] | None,
    repetition: Tensor | None,
    presence: Tensor | None,
    frequency: Tensor | None,
    bias: tuple[Tensor, Tensor, Tensor] | None,
    mask: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Penalties, bias and mask: they change single entries, of a copy if there are any."""
    if penalties is None and bias is None and mask is None:
        return logits
    if logits is original:
        logits = logits.clone()
    if penalties is not None:
        if repetition is None or presence is None or frequency is None:
            raise ValueError("penalties need repetition, presence and frequency")
        row, token, count = penalties
        value = logits[row, token]
        strength = repetition.to(logits.dtype)[row]
        value = torch.where(value > 0, value / strength, value * strength)
        count = count.to(logits.dtype)
        additive = presence.to(logits.dtype)[row] + frequency.to(logits.dtype)[row] * count
        logits[row, token] = value - torch.where(count > 0, additive, 0)
    if bias is not None:
        row, token, value = bias
        logits.index_put_((row, token), value.to(logits.dtype), accumulate=True)
    if mask is not None:
        # Added, not written: a NaN or +inf under a mask gives NaN and is still seen.
        row, token = mask
        minus_inf = torch.full((), _NEG_INF, dtype=logits.dtype, device=logits.device)
        logits.index_put_((row, token), minus_inf.expand(row.shape[0]), accumulate=True)
    return logits
