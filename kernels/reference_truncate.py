"""top_k, top_p and min_p: which tokens of a row stay, without sorting it where that can be helped.

Rows hold `(logit - max) / temperature`, so their maximum is 0. Equal values stay in the order of
their token ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spectrue.kernels.reference_rows import in_chunks, row_sums

# Lengths of the sorted prefix from which top_k is cut; beyond them the row is sorted.
_PREFIXES = (64, 1024)
_PREFIX_CHUNK = 64
_BINS = 2048  # of the histogram that finds a nucleus longer than the first prefix
_NEG_INF = float("-inf")


def truncate(
    scaled: Tensor,  # [R, V], changed in place
    rows: Tensor,  # [n] int64
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
) -> None:
    """Cut rows to their top tokens: how many follows from a sorted prefix as short as will do."""
    vocab_size = scaled.shape[1]
    limit = torch.full_like(rows, vocab_size)
    if top_k is not None:
        wanted = top_k[rows].to(torch.int64)
        limit = torch.where(wanted > 0, wanted.clamp(max=vocab_size), limit)
    mass = torch.ones(rows.shape[0], dtype=scaled.dtype, device=scaled.device)
    if top_p is not None:
        mass = top_p[rows].to(scaled.dtype)
    floor = None if min_p is None else min_p[rows].to(scaled.dtype).log()

    for size in (*(p for p in _PREFIXES if p < vocab_size), vocab_size):
        # A prefix shorter than the row must show the first token that is cut, to see a tie there.
        ready = (limit < size) | (limit == vocab_size) | (size == vocab_size)
        if not ready.any():
            continue
        here = ready.nonzero().squeeze(1)
        kept = _take(scaled, rows[here])
        values, tokens = _prefix(kept, size)
        lowest = None if floor is None else floor[here]
        count = _count(kept, values, limit[here], mass[here], lowest)
        done = (count < size) | (size == vocab_size)
        cut = (rows[here], kept, values, tokens, count)
        _keep_top(scaled, *(cut if done.all() else (part[done] for part in cut)))
        for row, top, low in zip(
            rows[here[~done]].tolist(),
            mass[here[~done]],
            [None] * here.numel() if lowest is None else lowest[~done],
            strict=False,
        ):
            _cut_nucleus(scaled[row], top, low)
        pending = torch.ones_like(ready)
        pending[here] = False
        rows, limit, mass = rows[pending], limit[pending], mass[pending]
        floor = None if floor is None else floor[pending]
        if not rows.numel():
            return


def _take(scaled: Tensor, rows: Tensor) -> Tensor:
    """The rows (distinct, ascending); not copied if they are all."""
    return scaled if rows.shape[0] == scaled.shape[0] else scaled.index_select(0, rows)


def _prefix(kept: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The largest `size` values in order, and their token ids; ties in any order."""
    vocab_size = kept.shape[1]
    if size == vocab_size:
        return kept.sort(dim=1, descending=True)
    if vocab_size < 2 * size * _PREFIX_CHUNK:
        return kept.topk(size, dim=1)
    # They lie in the `size` chunks with the largest maxima.
    chunks = in_chunks(kept, _PREFIX_CHUNK, _NEG_INF)
    chunk = chunks.amax(2).topk(size, dim=1, sorted=False).indices
    few = chunks.gather(1, chunk[:, :, None].expand(-1, -1, _PREFIX_CHUNK)).flatten(1)
    values, place = few.topk(size, dim=1)
    return values, chunk.gather(1, place // _PREFIX_CHUNK) * _PREFIX_CHUNK + place % _PREFIX_CHUNK


def _count(
    kept: Tensor,  # [n, V]
    values: Tensor,  # [n, size] descending
    limit: Tensor,  # [n] int64, top_k or V
    mass: Tensor,  # [n], top_p
    floor: Tensor | None,  # [n], log min_p
) -> Tensor:  # [n] int64 in [1, limit]; size or more where the prefix is too short to tell
    """How many tokens stay in each row."""
    vocab_size, size = kept.shape[1], values.shape[1]
    count = limit
    nucleus = mass < 1
    if nucleus.any():
        running = values.exp().cumsum(1)
        total = running.gather(1, (limit.clamp(max=size) - 1)[:, None]).squeeze(1)
        whole = ((limit == vocab_size) & nucleus).nonzero().squeeze(1)
        if whole.numel():
            total[whole] = row_sums(_take(kept, whole).exp())
        reached = (running < (mass * total)[:, None]).sum(1) + 1
        count = torch.where(nucleus, reached.minimum(limit), limit)
    if floor is not None:
        above = (values >= floor[:, None]).sum(1)
        # All of a prefix above the floor says nothing about the rest of the row.
        count = torch.where(above < size, count.minimum(above), count)
    return count


def _keep_top(
    scaled: Tensor,  # [R, V], changed in place
    rows: Tensor,  # [n] int64
    kept: Tensor,  # [n, V], the rows before the cut
    values: Tensor,  # [n, size] descending
    tokens: Tensor,  # [n, size]
    count: Tensor,  # [n] int64, 1 to size
) -> None:
    """Write -inf over all but the `count` largest entries of a row, equal ones by token id."""
    if not rows.numel():
        return
    size = values.shape[1]
    pivot = values.gather(1, (count - 1)[:, None])
    following = values.gather(1, count.clamp(max=size - 1)[:, None])
    tied = ((following == pivot) & (count < size)[:, None] & (pivot > _NEG_INF)).squeeze(1)
    stays = torch.arange(size, device=rows.device) < count[:, None]
    if not tied.any():
        _write(scaled, rows, tokens, torch.where(stays, values, _NEG_INF))
        return
    # The equal entries may reach beyond the prefix: find them all, keep the first few.
    stays &= ~tied[:, None] | (values > pivot)
    which = tied.nonzero().squeeze(1)
    missing = (count - stays.sum(1))[which]
    row, token = (_take(kept, which) == pivot[which]).nonzero(as_tuple=True)  # by row, by token
    first = torch.searchsorted(row, torch.arange(which.shape[0], device=rows.device))
    rank = torch.arange(row.shape[0], device=rows.device) - first[row]
    chosen = rank < missing[row]
    row, token = which[row[chosen]], token[chosen]
    _write(scaled, rows, tokens, torch.where(stays, values, _NEG_INF))
    scaled[rows[row], token] = pivot[row, 0]


def _write(scaled: Tensor, rows: Tensor, tokens: Tensor, values: Tensor) -> None:
    """-inf everywhere in the rows but for the values at the tokens."""
    if rows.shape[0] == scaled.shape[0]:
        scaled.fill_(_NEG_INF)
    else:
        scaled.index_fill_(0, rows, _NEG_INF)
    scaled[rows[:, None], tokens] = values


def cut_below(row: Tensor, floor: Tensor) -> None:
    """-inf where row [V] < floor []."""
    minus_inf = torch.full_like(floor, _NEG_INF)
    torch.threshold_(row, float(floor.nextafter(minus_inf)), _NEG_INF)


def _cut_nucleus(
    row: Tensor,  # [V], changed in place
    top_p: Tensor,  # []
    floor: Tensor | None,  # [], log min_p
) -> None:
    """top_p for a row whose nucleus is long: by a histogram, then a sort of the bin at its edge."""
    vocab_size = row.shape[0]
    weights = row.exp()
    total = row_sums(weights[None])[0]
    aim = top_p * total
    # Tokens below the lowest weigh less than 1 - top_p together; all of them share the last bin.
    lowest = ((1 - top_p) * total / vocab_size).log()
    bins = (row * (_BINS / lowest)).clamp_(max=_BINS).to(torch.int64)
    mass = weights.new_zeros(_BINS + 1).scatter_add_(0, bins, weights)
    running = mass.cumsum(0)
    edge = (running < aim).sum().clamp(max=_BINS)
    before = torch.where(edge > 0, running[edge - 1], 0)
    member = (bins == edge).nonzero().squeeze(1)
    values, order = row[member].sort(descending=True, stable=True)
    count = int((before + values.exp().cumsum(0) < aim).sum()) + 1
    row.masked_fill_(bins >= edge, _NEG_INF)
    row[member[order[:count]]] = values[:count]
    if floor is not None:
        cut_below(row, floor)
