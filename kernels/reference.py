"""The specification of every op in plain torch, and what runs on CPU. Works on any device.

float32 inside, float64 where the logits are float64 (exactness tests).
"""

from spectrue.kernels.philox import gumbel, uniform
from spectrue.kernels.reference_attention import paged_attention
from spectrue.kernels.reference_draw import (
    draw_gumbel,
    draw_inverse_cdf,
    record_law,
    sample_rows,
)
from spectrue.kernels.reference_layers import (
    add_rms_norm,
    linear,
    rms_norm,
    rope_write_kv,
    swiglu,
)
from spectrue.kernels.reference_process import process_logits
from spectrue.kernels.reference_rows import (
    argmax_lowest,
    logsumexp_rows,
    row_statistics,
    valid_rows,
)
from spectrue.kernels.reference_slots import advance_slots, place_tokens
from spectrue.kernels.reference_verify import verify_match, verify_rejection

__all__ = [
    "add_rms_norm",
    "advance_slots",
    "argmax_lowest",
    "draw_gumbel",
    "draw_inverse_cdf",
    "gumbel",
    "linear",
    "logsumexp_rows",
    "paged_attention",
    "place_tokens",
    "process_logits",
    "record_law",
    "rms_norm",
    "rope_write_kv",
    "row_statistics",
    "sample_rows",
    "swiglu",
    "uniform",
    "valid_rows",
    "verify_match",
    "verify_rejection",
]
