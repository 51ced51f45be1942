"""The specification of every op in plain torch, and what runs on CPU. Works on any device.

float32 inside, float64 where the logits are float64 (exactness tests).
"""

from spectrue.kernels.philox import gumbel, uniform
from spectrue.kernels.reference_draw import draw_gumbel, draw_inverse_cdf
from spectrue.kernels.reference_process import process_logits
from spectrue.kernels.reference_rows import argmax_lowest, logsumexp_rows, valid_rows
from spectrue.kernels.reference_verify import verify_match, verify_rejection

__all__ = [
    "argmax_lowest",
    "draw_gumbel",
    "draw_inverse_cdf",
    "gumbel",
    "logsumexp_rows",
    "process_logits",
    "uniform",
    "valid_rows",
    "verify_match",
    "verify_rejection",
]
