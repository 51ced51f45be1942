"""One linear map: by a oneDNN-packed weight where torch has the ops, by F.linear elsewhere."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrue.kernels import dispatch

logger = logging.getLogger(__name__)

PACKABLE = (torch.bfloat16, torch.float32)
# Rows that the packed layout is made for. Measured the same from 1 to 512 rows for 1, 32 and None.
PACK_ROWS = 1


# Of the row counts that sum alike the fastest: 4 rows take 11.4 ms where 2 take 12.7.
MIN_ROWS = 4


@functools.cache
def packing_ops(
    dtype: torch.dtype,
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]] | None:
    """(pack, linear, linear + binary) of oneDNN, which inductor's freezing uses; None if absent.

    Tried for each dtype: a CPU without AVX-512 has them for float32 and not for bfloat16.
    """
    if not torch.backends.mkldnn.is_available():
        return None
    ops = torch.ops.mkldnn
    try:
        found = (
            ops._reorder_linear_weight.default,
            ops._linear_pointwise.default,
            ops._linear_pointwise.binary,
        )
        row = torch.ones(1, 16, dtype=dtype)
        weight = found[0](torch.ones(16, 16, dtype=dtype), PACK_ROWS)
        found[1](row, weight, None, "none", [], "")
        found[2](row, row, weight, None, "add")
    except (AttributeError, RuntimeError, TypeError) as error:
        logger.warning("no packed %s linear layers on this CPU (%s): slower", dtype, error)
        return None
    return found


class Linear:
    """x -> x W^T + b, inference only. Packing replaces the weight: it is not held twice.

    A packed layer gives a row the same bits whichever rows are beside it, so that decode, verify
    and every batch agree. Alone it would not: oneDNN sums a single row in another order, so a
    single row is given MIN_ROWS times.
    """

    __slots__ = ("_binary", "_linear", "_weight", "bias", "packed")

    def __init__(
        self,
        weight: Tensor,  # [out, in]
        bias: Tensor | None = None,  # [out]
    ) -> None:
        packable = weight.device.type == "cpu" and weight.dtype in PACKABLE
        ops = packing_ops(weight.dtype) if packable else None
        self.bias = bias
        self.packed = ops is not None
        if ops is not None:
            pack, self._linear, self._binary = ops
            self._weight = pack(weight, PACK_ROWS)
        else:
            self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed:
            if x.shape[0] == 1:
                return self(x.repeat(MIN_ROWS, 1))[:1]
            out: Tensor = self._linear(x, self._weight, self.bias, "none", [], "")
            return out
        if x.is_cuda:
            return dispatch.linear(x, self._weight, self.bias)
        return F.linear(x, self._weight, self.bias)

    def gated(self, x: Tensor) -> Tensor:
        """Of a layer whose outputs are gates, then what they gate: silu(gates) * the others."""
        if x.is_cuda:
            return dispatch.linear(x, self._weight, self.bias, gated=True)
        gate, up = self(x).chunk(2, -1)
        return F.silu(gate).mul_(up)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """self(x) + residual, added before the result is rounded where the op can.

        On a GPU `residual` may be written over.
        """
        if x.is_cuda:
            return dispatch.linear(x, self._weight, self.bias, residual)
        if self.packed:
            if x.shape[0] == 1:
                return self.plus(x.repeat(MIN_ROWS, 1), residual.repeat(MIN_ROWS, 1))[:1]
            out: Tensor = self._binary(x, residual, self._weight, self.bias, "add")
            return out
        return F.linear(x, self._weight, self.bias).add_(residual)
