"""Simulated acceptance, for benchmarks: how many drafts a step accepts is drawn from given rates.

With dummy weights or an untrained head real acceptance says nothing about speed. The real step
still runs whole; only what its walk compares is replaced (`workers/sampler.py`): the target's token
by the draft where one shall be accepted, the draft by no token where none shall. What comes out is
not the model's text, so it is a `Decision`, a warning, and a flag on every output. SGLang
(SGLANG_SIMULATE_ACC_LEN) and vLLM (`synthetic_acceptance_rates`) have the like.
"""

from __future__ import annotations

from collections.abc import Sequence

from spectrue.workers.config import SpeculativeConfig


def rates_of(config: SpeculativeConfig) -> tuple[float, ...]:
    """The rates a configuration asks for, one a draft: P(at least i drafts are accepted)."""
    if config.simulated_accept_length is not None:
        return rates_for(config.simulated_accept_length, config.max_draft_tokens)
    return config.simulated_acceptance


def rates_for(accept_length: float, k: int) -> tuple[float, ...]:
    """Rates a, a^2, .. a^k with 1 + their sum = accept_length, which is in [1, k + 1].

    A draft is then accepted with the same chance a whichever its position, given those before.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        a = (low + high) / 2
        if 1 + sum(a**i for i in range(1, k + 1)) < accept_length:
            low = a
        else:
            high = a
    return tuple(high**i for i in range(1, k + 1))


def num_simulated(rates: Sequence[float], uniform: float, num_drafts: int) -> int:
    """How many drafts are accepted. One uniform decides, so that the i-th rate is met exactly
    whatever the others are."""
    return sum(uniform < rate for rate in rates[:num_drafts])  # they do not rise
