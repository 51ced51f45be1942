"""Matrix instructions, v_mfma_*: D = A * B + C over the registers of a whole wave.

Layouts, with lane l and element i of a lane's operand (one block; M = N is 16 or 32):
    A: row l % M, column k = (l // M) * per_lane + i
    B: column l % N, row k as for A
    C, D: column l % N; with M = 16, row 4 * (l // 16) + r for register r; with M = 32,
          row 8 * (r // 4) + 4 * (l // 32) + r % 4
and with several blocks (4x4x4: 16 of them) block b is l // 4, with k = i.
EXEC is ignored by hardware; here lanes that are off are refused.

The sum is taken exactly as float64 does, then rounded once: hardware's order of additions and its
inner precision are not documented.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .fp8 import TYPES, decode
from .numerics import bf16_value, round_half_even_bits
from .operands import Layout, Operand, parse_operand
from .parser import Instruction
from .wave import LANE, LANES, U32, Array, Wave

Run = Callable[[Wave], None]


@dataclass(frozen=True)
class Form:
    """M, N, K of one block, the element type, and the architectures that have it."""

    m: int
    k: int
    element: str  # f32, f16, bf16, fp8_fp8 ...
    blocks: int
    archs: tuple[str, ...]

    @property
    def per_lane(self) -> int:
        """Elements of A (and of B) in one lane."""
        return self.m * self.k * self.blocks // LANES


_ALL, _NEW, _LAST = ("gfx90a", "gfx942", "gfx950"), ("gfx942", "gfx950"), ("gfx950",)
FORMS: dict[str, Form] = {
    "v_mfma_f32_16x16x4f32": Form(16, 4, "f32", 1, ("gfx90a",)),
    "v_mfma_f32_32x32x2f32": Form(32, 2, "f32", 1, ("gfx90a",)),
    "v_mfma_f32_16x16x16f16": Form(16, 16, "f16", 1, ("gfx90a",)),
    "v_mfma_f32_32x32x8f16": Form(32, 8, "f16", 1, ("gfx90a",)),
    "v_mfma_f32_4x4x4f16": Form(4, 4, "f16", 16, ("gfx90a",)),
    "v_mfma_f32_16x16x16bf16_1k": Form(16, 16, "bf16", 1, ("gfx90a",)),
    "v_mfma_f32_32x32x8bf16_1k": Form(32, 8, "bf16", 1, ("gfx90a",)),
    "v_mfma_f32_4x4x4bf16_1k": Form(4, 4, "bf16", 16, ("gfx90a",)),
    "v_mfma_f32_16x16x4_f32": Form(16, 4, "f32", 1, _NEW),
    "v_mfma_f32_32x32x2_f32": Form(32, 2, "f32", 1, _NEW),
    "v_mfma_f32_16x16x16_f16": Form(16, 16, "f16", 1, _NEW),
    "v_mfma_f32_32x32x8_f16": Form(32, 8, "f16", 1, _NEW),
    "v_mfma_f32_4x4x4_16b_f16": Form(4, 4, "f16", 16, _NEW),
    "v_mfma_f32_16x16x16_bf16": Form(16, 16, "bf16", 1, _NEW),
    "v_mfma_f32_32x32x8_bf16": Form(32, 8, "bf16", 1, _NEW),
    "v_mfma_f32_4x4x4_16b_bf16": Form(4, 4, "bf16", 16, _NEW),
    "v_mfma_f32_16x16x32_f16": Form(16, 32, "f16", 1, _LAST),
    "v_mfma_f32_32x32x16_f16": Form(32, 16, "f16", 1, _LAST),
    "v_mfma_f32_16x16x32_bf16": Form(16, 32, "bf16", 1, _LAST),
    "v_mfma_f32_32x32x16_bf16": Form(32, 16, "bf16", 1, _LAST),
}
FORMS["v_mfma_f32_16x16x8_xf32"] = Form(16, 8, "xf32", 1, ("gfx942",))
FORMS["v_mfma_f32_32x32x4_xf32"] = Form(32, 4, "xf32", 1, ("gfx942",))
for _a in ("fp8", "bf8"):
    for _b in ("fp8", "bf8"):
        FORMS[f"v_mfma_f32_16x16x32_{_a}_{_b}"] = Form(16, 32, f"{_a}_{_b}", 1, _NEW)
        FORMS[f"v_mfma_f32_32x32x16_{_a}_{_b}"] = Form(32, 16, f"{_a}_{_b}", 1, _NEW)
# The formats of A and B are modifiers here, cbsz and blgp: 0 is fp8, 1 is bf8. How k is spread over
# lanes is irrelevant to a product as long as both operands have formats of the same width.
FORMS["v_mfma_f32_16x16x128_f8f6f4"] = Form(16, 128, "chosen", 1, _LAST)
FORMS["v_mfma_f32_32x32x64_f8f6f4"] = Form(32, 64, "chosen", 1, _LAST)
_BYTES = {"f32": 4, "xf32": 4, "f16": 2, "bf16": 2}


def _elements(words: Array, element: str, per_lane: int, arch: str) -> Array:
    """Registers (words, 64) -> float64 of shape (64, per_lane)."""
    raw = np.ascontiguousarray(words.T)
    if element == "f32":
        values: Array = raw.view(np.float32)
    elif element == "xf32":  # 10 bits of mantissa; how hardware rounds to them is not documented
        near = round_half_even_bits(raw.view(np.uint32), 13) << np.uint32(13)
        values = near.view(np.float32)
    elif element == "f16":
        values = raw.view(np.float16)
    elif element == "bf16":
        values = bf16_value(raw.view(np.uint16))
    else:
        octets = raw.view(np.uint8)
        dtype = TYPES[arch, element]
        values = np.stack([decode(octets[:, i], dtype) for i in range(octets.shape[1])], 1)
    assert values.shape == (LANES, per_lane)
    return values.astype(np.float64)


def _accumulator_places(form: Form) -> tuple[Array, Array, Array]:
    """For (register, lane): block, row and column of C and D."""
    registers = form.m * form.m * form.blocks // LANES
    r, lane = np.arange(registers)[:, None], LANE[None, :]
    if form.m == 4:
        block, row = lane // 4 + 0 * r, r + 0 * lane
    elif form.m == 16:
        block, row = 0 * (r + lane), 4 * (lane // 16) + r
    else:
        block, row = 0 * (r + lane), 8 * (r // 4) + 4 * (lane // 32) + r % 4
    return block, row, lane % form.m + 0 * r


def _rows(ins: Instruction, layout: Layout, operand: Operand, words: int) -> slice:
    if not operand.vector or not operand.plain or operand.count != words:
        raise ins.refuse(f"'{operand.text}' is no vector operand of {words} words")
    layout.row(operand, U32, words - 1)
    first = layout.row(operand, U32)
    return slice(first, first + words)


def decode_mfma(ins: Instruction, layout: Layout) -> Run:
    form = FORMS[ins.mnemonic]
    if ins.arch not in form.archs:
        raise ins.refuse(f"not on {ins.arch}")
    ins.accept("cbsz", "abid", "blgp")
    chosen = form.element == "chosen"
    for modifier in ("cbsz", "abid", "blgp"):
        if ins.number(modifier) > (1 if chosen and modifier != "abid" else 0):
            raise ins.refuse(f"this {modifier} is not implemented")
    target, a, b, c = (parse_operand(o) for o in ins.operands)
    element = form.element
    if chosen:
        kinds = [("fp8", "bf8")[ins.number(modifier)] for modifier in ("cbsz", "blgp")]
    else:
        kinds = element.split("_") if "8" in element else [element] * 2
    words = form.per_lane * _BYTES.get(element, 1) // 4
    rows_a, rows_b = (_rows(ins, layout, o, words) for o in (a, b))
    block, row, column = _accumulator_places(form)
    rows_d = _rows(ins, layout, target, len(row))
    rows_c = None if c.constant else _rows(ins, layout, c, len(row))
    constant = np.float64(c.real if c.kind == "float" else 0)
    if c.kind == "int" and c.number != 0:
        raise ins.refuse("an integer as addend")
    m, blocks = form.m, form.blocks

    def matrix(w: Wave, rows: slice, kind: str) -> Array:
        """(block, row or column, k)"""
        values = _elements(w.vectors[rows], kind, form.per_lane, ins.arch)
        if blocks > 1:
            return values.reshape(blocks, m, form.per_lane)
        return (
            values.reshape(1, LANES // m, m, form.per_lane)
            .transpose(0, 2, 1, 3)
            .reshape(1, m, form.k)
        )

    def run(w: Wave) -> None:
        if w.where is not True:
            raise ins.refuse("with lanes off")
        product = matrix(w, rows_a, kinds[0]) @ matrix(w, rows_b, kinds[1]).transpose(0, 2, 1)
        total = product[block, row, column]
        total = total + (constant if rows_c is None else w.vectors[rows_c].view(np.float32))
        w.vectors[rows_d].view(np.float32)[:] = total

    return run


Decoder = Callable[[Instruction, Layout], Run]
DECODERS: dict[str, Decoder] = dict.fromkeys(FORMS, decode_mfma)
