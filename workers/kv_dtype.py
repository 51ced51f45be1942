"""What the KV cache holds: `kv_cache_dtype`, resolved by the model and the architecture."""

from __future__ import annotations

import torch

from spectrue.kernels.dispatch import fp8_of
from spectrue.workers.errors import ConfigError
from spectrue.workers.policy import Decision
from spectrue.workers.weights import DTYPES


def architecture(device: torch.device) -> str:
    """ "cpu", "gfx942", "sm_90", ..."""
    if device.type == "cpu":
        return "cpu"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).partition(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def resolve_kv_dtype(
    name: str,  # the setting
    model_dtype: torch.dtype,
    arch: str,
    decisions: list[Decision],
) -> torch.dtype:
    """Raises ConfigError for fp8 where the architecture cannot convert it."""
    if name in DTYPES:
        return DTYPES[name]
    if name == "auto":
        dtype, reason = model_dtype, "as the model computes"
    else:
        found = fp8_of(arch)
        if found is None:
            raise ConfigError(
                f"kv_cache_dtype: fp8 needs a GPU that converts it (any of AMD's; NVIDIA's from "
                f"sm_89, Ada, on), not {arch}; set kv_cache_dtype: auto"
            )
        fnuz = found is torch.float8_e4m3fnuz
        dtype, reason = found, f"fp8 of {arch} is {'fnuz' if fnuz else 'OCP'} e4m3"
    decisions.append(Decision("kv_cache_dtype", str(dtype).removeprefix("torch."), reason))
    return dtype
