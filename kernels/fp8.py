"""8 bit floats of the KV cache: which there are, and how a value becomes one.

e4m3 has two encodings. OCP's `float8_e4m3fn` reaches 448; `float8_e4m3fnuz`, of AMD's CDNA 3, gives
the same bits half the value, reaches 240 and has no -0.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


def fp8_of(
    arch: str,  # "cpu", "gfx942", "sm_90", ...
) -> torch.dtype | None:
    """The encoding that an architecture's KV cache has; None: its kernels cannot have one.

    What its instructions convert. Triton converts OCP's in software for AMD GPUs without such
    instructions, and does not for NVIDIA's before Ada (sm_89).
    """
    if arch in ("gfx940", "gfx941", "gfx942"):
        return torch.float8_e4m3fnuz
    if arch.startswith("sm_") and int(arch[3:]) < 89:
        return None
    return torch.float8_e4m3fn


def fp8_max(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).max)


def quantize_fp8(
    x: Tensor,  # floating
    dtype: torch.dtype,  # one of FP8_DTYPES
    inverse_scale: float | Tensor = 1.0,  # broadcast to x; a value is stored * scale
) -> Tensor:  # x's shape, of dtype
    """Finite values beyond the range become its end. What is not finite becomes NaN.

    A cast alone does neither the same way everywhere: on a CPU torch turns infinity to 448, and
    1000 to 448 or to NaN as the encoding goes.
    """
    limit = fp8_max(dtype)
    scaled = x.float() * inverse_scale
    # Infinity times 0 is NaN: an overflow upstream stays to be seen.
    return (scaled.clamp(-limit, limit) + x.float() * 0).to(dtype)
