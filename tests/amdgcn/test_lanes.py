"""Instructions between lanes, packed and mixed arithmetic, matrix instructions, 8 bit floats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from .coverage import TESTED, covers
from .faults import Unsupported
from .mfma import FORMS
from .snippet import run
from .test_valu import assert_lanes, fma16, fma32, values

Array = NDArray[Any]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


LANES = np.arange(64, dtype=np.uint32)
ON = 0xFFFF_0FFF_FFFF_FFF7  # lanes 3 and 44 to 47 are off


def on(mask: int) -> list[bool]:
    return [bool(mask >> k & 1) for k in range(64)]


# control -> the lane that lane k reads, or None
DPP: dict[str, Callable[[int], int | None]] = {
    "quad_perm:[1,0,3,2]": lambda k: k ^ 1,
    "quad_perm:[3,3,0,1]": lambda k: (k & ~3) + (3, 3, 0, 1)[k & 3],
    "row_shr:1": lambda k: k - 1 if k % 16 >= 1 else None,
    "row_shr:8": lambda k: k - 8 if k % 16 >= 8 else None,
    "row_shl:3": lambda k: k + 3 if k % 16 < 13 else None,
    "row_ror:4": lambda k: k // 16 * 16 + (k - 4) % 16,
    "row_mirror": lambda k: k // 16 * 16 + 15 - k % 16,
    "row_half_mirror": lambda k: k // 8 * 8 + 7 - k % 8,
    "row_bcast:15": lambda k: k // 16 * 16 - 1 if k >= 16 else None,
    "row_bcast:31": lambda k: 31 if k >= 32 else None,
    "row_newbcast:5": lambda k: k // 16 * 16 + 5,
    "wave_shr:1": lambda k: k - 1 if k else None,
    "wave_shl:1": lambda k: k + 1 if k < 63 else None,
    "wave_ror:1": lambda k: (k - 1) % 64,
    "wave_rol:1": lambda k: (k + 1) % 64,
}


@pytest.mark.parametrize("control", DPP)
@pytest.mark.parametrize("mask", [(1 << 64) - 1, ON])
@pytest.mark.parametrize("bound", ["", " bound_ctrl:1"])
@pytest.mark.parametrize("masks", [(15, 15), (10, 15), (15, 3)])
def test_dpp(control: str, mask: int, bound: str, masks: tuple[int, int]) -> None:
    rows, banks = masks
    code = f"v_add_u32_dpp v3, v1, v2 {control} row_mask:{rows:#x} bank_mask:{banks:#x}{bound}"
    old = LANES + 5000
    out = run(code, v={1: LANES + 100, 2: LANES * 1000, 3: old}, exec_mask=mask).v(3)
    lanes_on = on(mask)
    for k in range(64):
        source = DPP[control](k)
        valid = source is not None and lanes_on[source]
        written = lanes_on[k] and rows >> (k // 16) & 1 and banks >> (k % 16 // 4) & 1
        if written and (valid or bound):
            wanted = (source + 100 if valid and source is not None else 0) + 1000 * k
        else:
            wanted = int(old[k])
        assert out[k] == wanted, k


def test_sdwa() -> None:
    a = np.array([0x80FF7F01 + k for k in range(64)], np.uint32)
    b = np.array([0x12345678 * (k + 1) & 0xFFFFFFFF for k in range(64)], np.uint32)
    old = np.full(64, 0xAABBCCDD, np.uint32)
    code = "v_add_u32_sdwa v3, v1, v2 dst_sel:BYTE_2 dst_unused:{} src0_sel:WORD_1 src1_sel:BYTE_3"
    out = run(code.format("UNUSED_PRESERVE"), v={1: a, 2: b, 3: old}).v(3)
    byte = ((a >> 16) + (b >> 24)) & 255
    assert (out == (0xAA00CCDD | byte << 16)).all()
    out = run(code.format("UNUSED_PAD"), v={1: a, 2: b, 3: old}).v(3)
    assert (out == byte << 16).all()
    out = run("v_mov_b32_sdwa v3, sext(v1) dst_sel:DWORD src0_sel:BYTE_2", v={1: a}).v(3, np.int32)
    assert (out == (a >> 16).astype(np.uint8).view(np.int8)).all()
    out2 = run("v_cmp_eq_u16_sdwa s[2:3], v1, v2 src0_sel:BYTE_0 src1_sel:DWORD", v={1: a, 2: 5})
    assert list(out2.mask(2)) == list((a & 255) == 5)
    out = run("v_cvt_f32_f16_sdwa v3, v1 src0_sel:WORD_1", v={1: a}).v(3, np.float32)
    assert_lanes(out, [float(x) for x in (a >> 16).astype(np.uint16).view(np.float16)], "f32")


@covers("v_readfirstlane_b32", "v_readlane_b32", "v_writelane_b32")
@covers("v_mbcnt_lo_u32_b32", "v_mbcnt_hi_u32_b32")
def test_lanes_and_scalars() -> None:
    out = run(
        "v_readfirstlane_b32 s1, v1\nv_readlane_b32 s2, v1, 63\nv_readlane_b32 s3, v1, s4\n"
        "v_writelane_b32 v2, s5, 7\nv_mbcnt_lo_u32_b32 v3, -1, 0\nv_mbcnt_hi_u32_b32 v3, -1, v3\n"
        "v_mbcnt_lo_u32_b32 v6, 5, 100",
        v={1: LANES + 10, 2: LANES, 3: 0, 6: 0},
        s={4: 64 + 9, 5: 77},
        exec_mask=ON & ~7,
    )
    assert (out.s(1), out.s(2), out.s(3)) == (14, 73, 19)
    assert out.v(2)[7] == 77
    assert out.v(2)[8] == 8
    lanes_on = np.array(on(ON & ~7))
    assert (out.v(3)[lanes_on] == LANES[lanes_on]).all()
    assert (out.v(6)[lanes_on] == 102).all()


@covers("v_permlane16_swap_b32", "v_permlane32_swap_b32")
def test_permlane_swap() -> None:
    out = run("v_permlane32_swap_b32_e32 v1, v2", v={1: LANES, 2: LANES + 100}, arch="gfx950")
    assert list(out.v(1)) == [*range(32), *range(100, 132)]
    assert list(out.v(2)) == [*range(32, 64), *range(132, 164)]
    out = run("v_permlane16_swap_b32_e32 v1, v2", v={1: LANES, 2: LANES + 100}, arch="gfx950")
    row = [list(range(16 * r, 16 * r + 16)) for r in range(4)]
    other = [[x + 100 for x in r] for r in row]
    assert list(out.v(1)) == row[0] + other[0] + row[2] + other[2]
    assert list(out.v(2)) == row[1] + other[1] + row[3] + other[3]


@covers("ds_bpermute_b32", "ds_permute_b32", "ds_swizzle_b32")
def test_exchanges() -> None:
    target = (LANES * 7 + 3) % 64
    lanes_on = np.array(on(ON))
    out = run("ds_bpermute_b32 v3, v1, v2", v={1: target * 4, 2: LANES + 1, 3: 0}, exec_mask=ON)
    wanted = np.where(lanes_on[target], target + 1, 0)
    assert (out.v(3)[lanes_on] == wanted[lanes_on]).all()
    out = run(
        "ds_permute_b32 v3, v1, v2", v={1: target * 4 + 256, 2: LANES + 1, 3: 0}, exec_mask=ON
    )
    wanted = np.zeros(64, np.uint32)
    for k in range(64):
        if lanes_on[k]:
            wanted[target[k]] = k + 1
    assert (out.v(3)[lanes_on] == wanted[lanes_on]).all()
    patterns: list[tuple[str, Callable[[int], int]]] = [
        ("swizzle(SWAP,4)", lambda k: k ^ 4),
        ("swizzle(REVERSE,8)", lambda k: k ^ 7),
        ("swizzle(BROADCAST,8,3)", lambda k: k & ~7 | 3),
        ("swizzle(QUAD_PERM,3,2,0,0)", lambda k: (k & ~3) + (3, 2, 0, 0)[k & 3]),
        ('swizzle(BITMASK_PERM,"01pi0")', lambda k: k & 32 | 8 | k & 4 | ~k & 2),
        ("0x041f", lambda k: k ^ 1),
    ]
    for text, source in patterns:
        out = run(f"ds_swizzle_b32 v3, v2 offset:{text}", v={2: LANES + 1})
        assert [int(x) - 1 for x in out.v(3)] == [source(k) for k in range(64)], text


def floats(seed: int) -> tuple[Array, list[float]]:
    column = values("f32", seed)
    return np.array(column, np.float32), column


@covers("v_pk_add_f32", "v_pk_mul_f32", "v_pk_fma_f32", "v_pk_mov_b32")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_packed_floats() -> None:
    columns = [floats(k) for k in range(6)]
    v = {k + 2: column for k, (column, _) in enumerate(columns)}
    a0, a1, b0, b1, c0, c1 = (x for _, x in columns)
    out = run("v_pk_add_f32 v[20:21], v[2:3], v[4:5] neg_lo:[0,1] neg_hi:[1,0]", v=v)
    assert_lanes(out.v(20, np.float32), [x - y for x, y in zip(a0, b0, strict=True)], "f32")
    assert_lanes(out.v(21, np.float32), [y - x for x, y in zip(a1, b1, strict=True)], "f32")
    out = run(
        "v_pk_mul_f32 v[20:21], v[2:3], s[4:5] op_sel:[1,0] op_sel_hi:[0,0]", v=v, s={4: 0x40000000}
    )
    assert_lanes(out.v(20, np.float32), [2 * x for x in a1], "f32")
    assert_lanes(out.v(21, np.float32), [2 * x for x in a0], "f32")
    out = run("v_pk_fma_f32 v[2:3], v[2:3], v[4:5], v[6:7] op_sel:[0,1,0]", v=v)
    assert_lanes(out.v(2, np.float32), [fma32(*x) for x in zip(a0, b1, c0, strict=True)], "f32")
    assert_lanes(out.v(3, np.float32), [fma32(*x) for x in zip(a1, b1, c1, strict=True)], "f32")
    out = run("v_pk_mov_b32 v[2:3], v[4:5], v[2:3] op_sel:[1,0]", v=v)
    assert_lanes(out.v(2, np.float32), b1, "f32")
    assert_lanes(out.v(3, np.float32), a0, "f32")


def half(x: float) -> float:
    return float(np.float16(x))


PACKED16: dict[str, tuple[str, Callable[..., Any]]] = {
    "v_pk_add_f16": ("f16", lambda a, b: half(a + b)),
    "v_pk_mul_f16": ("f16", lambda a, b: half(a * b)),
    "v_pk_max_f16": ("f16", lambda a, b: b if a != a else a if b != b or a > b else b),
    "v_pk_min_f16": ("f16", lambda a, b: b if a != a else a if b != b or a < b else b),
    "v_pk_fma_f16": ("f16", fma16),
    "v_pk_add_u16": ("u16", lambda a, b: a + b),
    "v_pk_sub_u16": ("u16", lambda a, b: a - b),
    "v_pk_add_i16": ("i16", lambda a, b: a + b),
    "v_pk_sub_i16": ("i16", lambda a, b: a - b),
    "v_pk_mul_lo_u16": ("u16", lambda a, b: a * b),
    "v_pk_max_u16": ("u16", max),
    "v_pk_min_u16": ("u16", min),
    "v_pk_max_i16": ("i16", max),
    "v_pk_min_i16": ("i16", min),
    "v_pk_lshlrev_b16": ("u16", lambda a, b: b << (a & 15)),
    "v_pk_lshrrev_b16": ("u16", lambda a, b: b >> (a & 15)),
    "v_pk_ashrrev_i16": ("i16", lambda a, b: b >> (a & 15)),
    "v_pk_mad_u16": ("u16", lambda a, b, c: a * b + c),
    "v_pk_mad_i16": ("i16", lambda a, b, c: a * b + c),
}
TESTED.update(PACKED16)


@pytest.mark.parametrize("mnemonic", PACKED16)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_packed_halves(mnemonic: str) -> None:
    kind, reference = PACKED16[mnemonic]
    dtype = {"f16": np.float16, "u16": np.uint16, "i16": np.int16}[kind]
    count = 3 if "fma" in mnemonic or "mad" in mnemonic else 2
    columns = [[values(kind, 2 * k + h) for h in (0, 1)] for k in range(count)]
    if "max" in mnemonic or "min" in mnemonic:  # the order of zeros is tested elsewhere
        columns = [[[abs(x) if x == 0 else x for x in h] for h in c] for c in columns]
    words = [
        np.stack([np.array(h, dtype).view(np.uint16) for h in c], 1).view(np.uint32)[:, 0]
        for c in columns
    ]
    operands = ", ".join(f"v{k + 1}" for k in range(count))
    for text, low, high in (
        ("", [0] * count, [1] * count),
        (
            f" op_sel:[1{',0' * (count - 1)}] op_sel_hi:[0{',1' * (count - 1)}]",
            [1] + [0] * (count - 1),
            [0] + [1] * (count - 1),
        ),
    ):
        out = run(f"{mnemonic} v9, {operands}{text}", v={k + 1: w for k, w in enumerate(words)}).v(
            9
        )
        for part, select in ((out & 0xFFFF, low), (out >> 16, high)):
            inputs = [columns[k][select[k]] for k in range(count)]
            wanted = [reference(*x) for x in zip(*inputs, strict=True)]
            assert_lanes(part.astype(np.uint16).view(dtype), wanted, kind, inputs)


def test_packed_saturation() -> None:
    a = np.array([0x0005_FFF0 + k for k in range(64)], np.uint32)
    out = run(
        "v_pk_sub_u16 v3, v1, v2 clamp\nv_pk_add_u16 v4, v1, v2 clamp", v={1: a, 2: 0x0006_0010}
    )
    for k in range(64):
        low, high = int(a[k]) & 65535, int(a[k]) >> 16
        assert out.v(3)[k] == max(0, low - 16) | max(0, high - 6) << 16
        assert out.v(4)[k] == min(65535, low + 16) | (high + 6) << 16


@covers("v_fma_mix_f32", "v_fma_mixlo_f16", "v_fma_mixhi_f16")
def test_mixed() -> None:
    h = np.linspace(-2, 2, 128, dtype=np.float16).reshape(64, 2)
    x = np.linspace(3, 5, 64, dtype=np.float32)
    v = {1: np.ascontiguousarray(h).view(np.uint32)[:, 0], 2: x, 3: 0x11112222}
    code = "v_fma_mix_f32 v4, v1, -v2, |v1| op_sel:[1,0,0] op_sel_hi:[1,0,1]"
    low, high = h[:, 0].astype(np.float64), h[:, 1].astype(np.float64)
    wanted = (high * -x.astype(np.float64) + np.abs(low)).astype(np.float32)
    assert (run(code, v=v).v(4, np.float32) == wanted).all()
    code = "v_fma_mix_f32 v4, v1, 2.0, v1 op_sel:[0,0,1] op_sel_hi:[1,1,1]"
    assert (run(code, v=v).v(4, np.float32) == (2 * low + high).astype(np.float32)).all()
    code = "v_fma_mix_f32 v4, v1, v1, neg(0) op_sel_hi:[1,1,0]"  # -0.0: a product stays as it is
    assert (run(code, v=v).v(4, np.float32) == (low * low).astype(np.float32)).all()
    zero = run(code, v={1: np.full(64, 0x8000, np.uint32)}).v(4, np.uint32)
    assert (zero == 0).all()  # -0 * -0 - 0 is +0
    for name, shift in (("lo", 0), ("hi", 16)):
        out = run(f"v_fma_mix{name}_f16 v3, v1, v2, v2 op_sel_hi:[1,0,0]", v=v).v(3)
        exact = (low * x + x).astype(np.float32).astype(np.float16)
        assert ((out >> shift & 0xFFFF).astype(np.uint16).view(np.float16) == exact).all()
        assert (out >> (16 - shift) & 0xFFFF == (0x1111 if shift == 0 else 0x2222)).all()


@covers("v_dot2_f32_f16", "v_dot2_f32_bf16", "v_dot2c_f32_f16", "v_dot2c_f32_bf16")
def test_dot2() -> None:
    a, b = torch.randn(64, 2), torch.randn(64, 2)
    c = torch.randn(64)
    for name, dtype in (("f16", torch.float16), ("bf16", torch.bfloat16)):
        x, y = a.to(dtype), b.to(dtype)
        words = [t.view(torch.int16).numpy().copy().view(np.uint32)[:, 0] for t in (x, y)]
        wanted = ((x.double() * y.double()).sum(1) + c.double()).float()
        v = {1: words[0], 2: words[1], 3: c.numpy()}
        for code in (f"v_dot2_f32_{name} v3, v1, v2, v3", f"v_dot2c_f32_{name} v3, v1, v2"):
            out = run(code, v=v, arch="gfx950").v(3, np.float32)
            assert torch.equal(torch.from_numpy(out), wanted)


@covers("v_bitop3_b32", "v_bitop3_b16")
def test_bitop3() -> None:
    a, b, c = (np.array(values("u32", k), np.uint32) for k in range(3))
    for table, wanted in (
        (0x6C, None),
        (0xF8, a | b & c),
        (0x96, a ^ b ^ c),
        (0xCA, a & b | ~a & c),
    ):
        out = run(f"v_bitop3_b32 v4, v1, v2, v3 bitop3:{table:#x}", v={1: a, 2: b, 3: c}).v(4)
        if wanted is None:
            bits = [(a >> k & 1) * 4 + (b >> k & 1) * 2 + (c >> k & 1) for k in range(32)]
            total = sum(
                (table >> x & 1).astype(np.uint64) << np.uint64(k) for k, x in enumerate(bits)
            )
            wanted = np.asarray(total).astype(np.uint32)
        assert (out == wanted).all()
        half = run(f"v_bitop3_b16 v4, v1, v2, v3 bitop3:{table:#x}", v={1: a, 2: b, 3: c})
        assert (half.v(4) & 0xFFFF == wanted & 0xFFFF).all()


FP8 = {
    ("gfx942", "fp8"): torch.float8_e4m3fnuz,
    ("gfx942", "bf8"): torch.float8_e5m2fnuz,
    ("gfx950", "fp8"): torch.float8_e4m3fn,
    ("gfx950", "bf8"): torch.float8_e5m2,
}
for _t in ("fp8", "bf8"):
    TESTED.update((f"v_cvt_pk_{_t}_f32", f"v_cvt_pk_f32_{_t}", f"v_cvt_f32_{_t}"))
    TESTED.update((f"v_cvt_scalef32_pk_{_t}_f32", f"v_cvt_scalef32_pk_f32_{_t}"))
    TESTED.update((f"v_cvt_scalef32_pk_f16_{_t}", f"v_cvt_scalef32_pk_bf16_{_t}"))


@pytest.mark.parametrize(("arch", "name"), FP8)
def test_fp8(arch: str, name: str) -> None:
    dtype = FP8[arch, name]
    a = torch.cat(
        [torch.randn(40), torch.tensor([0.0, -0.0, 1e-9, -1e-3, 2**-9, 300.0, 1e6, -1e6] * 3)]
    )
    b = torch.linspace(-500, 500, 64)
    octets = [x.to(dtype).view(torch.uint8).int() for x in (a, b)]
    wanted = (octets[0] | octets[1] << 8).numpy()
    scaled = (("", ""), ("scalef32_", ", 1.0")) if arch == "gfx950" else (("", ""),)
    for infix, scale in scaled:
        zeros = "0,0,0" if scale else "0,0"
        code = f"v_cvt_{infix}pk_{name}_f32 v3, v1, v2{scale} op_sel:[{zeros},1]"
        out = run(code, v={1: a.numpy(), 2: b.numpy(), 3: 0x1234}, arch=arch).v(3)
        assert (out == (wanted.astype(np.uint32) << 16 | 0x1234)).all()
        clamp = "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1\n"
        code = f"{clamp}v_cvt_{infix}pk_{name}_f32 v3, v1, v2{scale}"
        out = run(code, v={1: a.numpy(), 2: b.numpy(), 3: 0}, arch=arch).v(3)
        limit = torch.finfo(dtype).max
        near = a.clamp(-limit, limit).to(dtype).view(torch.uint8).numpy()
        assert (out & 255 == near).all()
        with pytest.raises(Unsupported, match="infinity"):
            run(code, v={1: np.float32(np.inf), 2: 0, 3: 0}, arch=arch)
        # and back, for all bytes
        every = np.arange(64, dtype=np.uint32)
        for high in range(4):
            octet = every + 64 * high
            words = octet | (255 - octet) << 8
            wide = [
                torch.from_numpy(x.astype(np.uint8)).view(dtype).float().numpy()
                for x in (octet, 255 - octet)
            ]
            code = f"v_cvt_{infix}pk_f32_{name} v[4:5], v1{scale}"
            out2 = run(code, v={1: words}, arch=arch)
            for k in (0, 1):
                assert_lanes(out2.v(4 + k, np.float32), [float(x) for x in wide[k]], "f32")
            if scale:
                out2 = run(f"v_cvt_scalef32_pk_f16_{name} v4, v1, 1.0", v={1: words}, arch=arch)
                for k in (0, 1):
                    part = (out2.v(4) >> 16 * k & 0xFFFF).astype(np.uint16).view(np.float16)
                    assert_lanes(part, [float(x) for x in wide[k]], "f16")
                code = f"v_cvt_scalef32_pk_bf16_{name} v1, v1, 1.0 op_sel:[1,0,0]"
                packed = run(code, v={1: words << 16}, arch=arch).v(1)
                for k in (0, 1):
                    part = (packed << 16 * (1 - k) & 0xFFFF0000).astype(np.uint32)
                    assert_lanes(part.view(np.float32), [float(x) for x in wide[k]], "f32")
            else:
                code = f"v_cvt_f32_{name}_sdwa v4, v1 src0_sel:BYTE_1\n"
                code += f"v_cvt_pk_f32_{name}_sdwa v[6:7], v2 src0_sel:WORD_1"
                out2 = run(code, v={1: words, 2: words << 16}, arch=arch)
                assert_lanes(out2.v(4, np.float32), [float(x) for x in wide[1]], "f32")
                assert_lanes(out2.v(7, np.float32), [float(x) for x in wide[1]], "f32")


TESTED.update(FORMS)
TORCH = {"f32": torch.float32, "xf32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


@pytest.mark.parametrize("mnemonic", FORMS)
def test_matrix(mnemonic: str) -> None:
    """The layout written out element by element, as the ISA documents give it."""
    form = FORMS[mnemonic]
    arch = form.archs[0]
    m, per_lane = form.m, form.per_lane
    kinds = ["fp8", "bf8"] if form.element == "chosen" else form.element.split("_")
    kinds = kinds * 2 if len(kinds) == 1 else kinds
    exact_tf32 = form.element == "xf32"
    dtypes = [TORCH.get(k) or FP8[arch, k] for k in kinds]
    blocks = form.blocks
    a = torch.randn(blocks, m, form.k).to(dtypes[0])
    b = torch.randn(blocks, form.k, m).to(dtypes[1])
    if exact_tf32:  # values that have 10 bits of mantissa
        a, b = a.bfloat16().float(), b.bfloat16().float()
    c = torch.randn(blocks, m, m)
    count = m * m * blocks // 64
    registers: list[dict[int, Any]] = [{}, {}, {}]
    lanes_a = torch.empty(64, per_lane, dtype=dtypes[0])
    lanes_b = torch.empty(64, per_lane, dtype=dtypes[1])
    lanes_c = torch.empty(count, 64)

    def place(lane: int, r: int) -> tuple[int, int, int]:
        if m == 4:
            return lane // 4, r, lane % 4
        if m == 16:
            return 0, 4 * (lane // 16) + r, lane % 16
        return 0, 8 * (r // 4) + 4 * (lane // 32) + r % 4, lane % 32

    for lane in range(64):
        for i in range(per_lane):
            block = lane // 4 if m == 4 else 0
            k = i if m == 4 else lane // m * per_lane + i
            lanes_a[lane, i] = a[block, lane % m, k]
            lanes_b[lane, i] = b[block, k, lane % m]
        for r in range(count):
            lanes_c[r, lane] = c[place(lane, r)]
    words = [
        np.ascontiguousarray(x.view(torch.uint8).numpy()).view(np.uint32).T
        for x in (lanes_a, lanes_b)
    ]
    size = len(words[0])
    for k in range(size):
        registers[0][k] = np.ascontiguousarray(words[0][k])
        registers[0][8 + k] = np.ascontiguousarray(words[1][k])
    accumulator = {k: lanes_c[k].numpy() for k in range(count)}
    last_a, last_b = (f"v[0:{size - 1}]", f"v[8:{7 + size}]") if size > 1 else ("v0", "v8")
    text = f"{mnemonic} v[20:{19 + count}], {last_a}, {last_b}, a[0:{count - 1}]"
    if form.element == "chosen":
        text += " cbsz:0 blgp:1"
    out = run(text, v=registers[0], a=accumulator, arch=arch)
    exact = torch.bmm(a.double(), b.double()) + c.double()
    for r in range(count):
        found = out.v(20 + r, np.float32)
        wanted = [float(exact[place(lane, r)].float()) for lane in range(64)]
        assert np.allclose(found, wanted, rtol=1e-6, atol=1e-6), r
