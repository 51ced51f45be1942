"""Conversions of 8 bit floats: fnuz formats on gfx942, OCP formats on gfx950.

The values come from torch's own types, so that no table of ours can be wrong.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from .operands import Layout, parse_operand
from .parser import Instruction
from .wave import F16, F16H, F32, LANES, U16, U16H, U32, Array, Wave

Run = Callable[[Wave], None]
TYPES = {
    ("gfx942", "fp8"): torch.float8_e4m3fnuz,
    ("gfx942", "bf8"): torch.float8_e5m2fnuz,
    ("gfx950", "fp8"): torch.float8_e4m3fn,
    ("gfx950", "bf8"): torch.float8_e5m2,
}


def _dtype(ins: Instruction) -> torch.dtype:
    name = "bf8" if "bf8" in ins.mnemonic else "fp8"
    if (ins.arch, name) not in TYPES:
        raise ins.refuse(f"no such conversion on {ins.arch or 'an unknown architecture'}")
    return TYPES[ins.arch, name]


def encode(ins: Instruction, values: Array, dtype: torch.dtype, clamp: bool) -> Array:
    """float32 -> bytes, in 32 bit words. Beyond the range: the largest number if `clamp`."""
    values = np.array(np.broadcast_to(values, (LANES,)), np.float32)
    if clamp:
        if np.isinf(values).any():
            raise ins.refuse("infinity, with overflow clamped: what hardware does is not known")
        limit = torch.finfo(dtype).max
        values = np.clip(values, -limit, limit)
    encoded = torch.from_numpy(values).to(dtype).view(torch.uint8)
    return encoded.numpy().astype(np.uint32)


def decode(bits: Array, dtype: torch.dtype) -> Array:
    raw = torch.from_numpy(np.array(np.broadcast_to(bits, (LANES,)), np.uint8))
    values: Array = raw.view(dtype).float().numpy()
    return values


def _scale_of_one(ins: Instruction, text: str) -> None:
    operand = parse_operand(text)
    if operand.kind != "float" or operand.real != 1.0 or not operand.plain:
        raise ins.refuse("only a scale of 1.0 is implemented")


def decode_pack(ins: Instruction, layout: Layout) -> Run:
    """Two floats to two bytes, in the half of the target that op_sel names."""
    ins.accept("op_sel")
    dtype = _dtype(ins)
    scaled = "scalef32" in ins.mnemonic
    if scaled:
        _scale_of_one(ins, ins.operands[3])
    target, *sources = (parse_operand(o) for o in ins.operands[:3])
    *of_sources, of_target = ins.bits("op_sel", len(ins.operands), 0)
    if any(of_sources):
        raise ins.refuse("op_sel of a source")
    half = U16H if of_target else U16
    readers = [layout.reader(ins, s, F32) for s in sources]
    layout.writer(ins, target, U32, keep_high=True)
    d = layout.row(target, U32)

    def run(w: Wave) -> None:
        clamp = w.fp16_overflow_clamps
        low, high = (encode(ins, read(w), dtype, clamp) for read in readers)
        both = (low | (high << np.uint32(8))).astype(np.uint16)
        np.copyto(w.rows[half][d], both, where=w.where)

    return run


def decode_unpack(ins: Instruction, layout: Layout) -> Run:
    """Two bytes of the half that op_sel or src0_sel names, to two floats."""
    scaled = "scalef32" in ins.mnemonic
    ins.accept(*(("src0_sel",) if ins.encoding == "sdwa" else ("op_sel",)))
    dtype = _dtype(ins)
    target, source, *rest = (parse_operand(o) for o in ins.operands)
    if scaled:
        _scale_of_one(ins, ins.operands[2])
    elif rest:
        raise ins.refuse("operands")
    select = ins.bits("op_sel", 2, 0)
    word = {"WORD_0": 0, "WORD_1": 1, "DWORD": 0}.get(ins.modifiers.get("src0_sel", "DWORD"))
    if word is None or select[1] or not source.plain or source.constant or source.count != 1:
        raise ins.refuse("source")
    half = U16H if word or select[0] else U16
    row = layout.row(source, U32)
    wide = "pk_f32" in ins.mnemonic
    if target.kind != "v" or target.count != (2 if wide else 1):
        raise ins.refuse("target")
    d, last = layout.row(target, U32), layout.row(target, U32, 1 if wide else 0)

    def run(w: Wave) -> None:
        bits = w.rows[half][row]
        low, high = decode(bits & np.uint16(255), dtype), decode(bits >> np.uint16(8), dtype)
        places = ((F32, d), (F32, last)) if wide else ((F16, d), (F16H, d))
        if "pk_bf16" in ins.mnemonic:  # exact: bfloat16 is the upper half of float32
            places = ((U16, d), (U16H, d))
            low, high = (v.view(np.uint32) >> np.uint32(16) for v in (low, high))
        for (kind, place), value in zip(places, (low, high), strict=True):
            np.copyto(w.rows[kind][place], value, where=w.where, casting="same_kind")

    return run


def decode_byte(ins: Instruction, layout: Layout) -> Run:
    """One byte, chosen by SDWA, to a float."""
    ins.accept("src0_sel")
    dtype = _dtype(ins)
    target, source = (parse_operand(o) for o in ins.operands)
    name = ins.modifiers.get("src0_sel", "BYTE_0")
    if name not in ("BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3") or not source.plain:
        raise ins.refuse("source")
    shift = np.uint32(8 * int(name[-1]))
    read = layout.reader(ins, source, U32)
    write = layout.writer(ins, target, F32, keep_high=False)
    return lambda w: write(w, decode((read(w) >> shift) & np.uint32(255), dtype))


Decoder = Callable[[Instruction, Layout], Run]
DECODERS: dict[str, Decoder] = {
    **{f"v_cvt_{s}pk_{t}_f32": decode_pack for s in ("", "scalef32_") for t in ("fp8", "bf8")},
    **{f"v_cvt_{s}pk_f32_{t}": decode_unpack for s in ("", "scalef32_") for t in ("fp8", "bf8")},
    **{
        f"v_cvt_scalef32_pk_{half}_{t}": decode_unpack
        for half in ("f16", "bf16")
        for t in ("fp8", "bf8")
    },
    **{f"v_cvt_f32_{t}": decode_byte for t in ("fp8", "bf8")},
}
