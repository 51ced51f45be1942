"""8 bit floats in Triton's interpreter, whose own conversions lose carries, subnormals and NaN.

Values go through torch's types. What is tested of a kernel is then all but the instruction.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

FP8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e4b8: torch.float8_e4m3fnuz}
TYPES = FP8 | {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
}
_convert_float = interpreter._convert_float


@contextmanager
def torch_fp8() -> Iterator[None]:
    with mock.patch.object(interpreter, "_convert_float", _convert):
        yield


def _convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
    if source not in FP8 and target not in FP8:
        return _convert_float(values, source, target, rounding)
    bits = np.ascontiguousarray(values).view(f"u{source.primitive_bitwidth // 8}")
    exact = torch.from_numpy(bits).view(TYPES[source]).float()
    result = exact.to(TYPES[target])
    return result.view({1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[result.itemsize]).numpy()
