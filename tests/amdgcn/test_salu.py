"""Scalar instructions against plain Python on edge values."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from .coverage import TESTED, covers
from .snippet import run

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
EDGES32 = [0, 1, 2, 5, 31, 32, 63, 0x7FFF, 0x8000, 0x7FFFFFFF, 0x80000000, 0x80000001, M32 - 1, M32]
EDGES64 = [0, 1, 31, 63, M32, M32 + 1, 1 << 63, (1 << 63) - 1, M64, M64 - 1, 0x123456789ABCDEF0]


def signed(x: int, n: int = 32) -> int:
    x &= (1 << n) - 1
    return x - (1 << n) if x >> (n - 1) else x


def overflow(x: int) -> int:
    return int(x != signed(x))


def field(a: int, b: int, n: int) -> int:
    """Bits of a: offset in b's low bits, width in bits 16 to 22."""
    return a >> (b & (n - 1)) & ((1 << (b >> 16 & 127)) - 1)


def signed_field(a: int, b: int, n: int) -> int:
    width = min(b >> 16 & 127, n - (b & (n - 1)))
    return signed(field(a, b, n), width) if width else 0


Pair = tuple[int, int]
# mnemonic -> (widths of sources, width of result, reference of sources and SCC giving the result
# and SCC)
CASES: dict[str, tuple[tuple[int, ...], int, Callable[..., Pair]]] = {}


def nonzero(function: Callable[..., int], n: int) -> Callable[..., Pair]:
    def reference(*x: int) -> Pair:
        r = function(*x[:-1]) & ((1 << n) - 1)
        return r, int(r != 0)

    return reference


def keeps(function: Callable[..., int]) -> Callable[..., Pair]:
    return lambda *x: (function(*x[:-1]), x[-1])


for _n in (32, 64):
    for _name, _f in {
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
        "andn2": lambda a, b: a & ~b,
        "orn2": lambda a, b: a | ~b,
        "nand": lambda a, b: ~(a & b),
        "nor": lambda a, b: ~(a | b),
        "xnor": lambda a, b: ~(a ^ b),
    }.items():
        CASES[f"s_{_name}_b{_n}"] = ((_n, _n), _n, nonzero(_f, _n))
    CASES[f"s_lshl_b{_n}"] = ((_n, 32), _n, nonzero(lambda a, b, n=_n: a << b % n, _n))
    CASES[f"s_lshr_b{_n}"] = ((_n, 32), _n, nonzero(lambda a, b, n=_n: a >> b % n, _n))
    CASES[f"s_ashr_i{_n}"] = ((_n, 32), _n, nonzero(lambda a, b, n=_n: signed(a, n) >> b % n, _n))
    CASES[f"s_bfe_u{_n}"] = ((_n, 32), _n, nonzero(lambda a, b, n=_n: field(a, b, n), _n))
    CASES[f"s_bfe_i{_n}"] = ((_n, 32), _n, nonzero(lambda a, b, n=_n: signed_field(a, b, n), _n))
    CASES[f"s_bfm_b{_n}"] = ((32, 32), _n, keeps(lambda a, b, n=_n: (2 ** (a % n) - 1) << b % n))
    CASES[f"s_mov_b{_n}"] = ((_n,), _n, keeps(lambda a: a))
    CASES[f"s_not_b{_n}"] = ((_n,), _n, nonzero(lambda a: ~a, _n))
    CASES[f"s_brev_b{_n}"] = ((_n,), _n, keeps(lambda a, n=_n: int(f"{a:0{n}b}"[::-1], 2)))
    CASES[f"s_bcnt1_i32_b{_n}"] = ((_n,), 32, nonzero(lambda a: bin(a).count("1"), 32))
    CASES[f"s_ff1_i32_b{_n}"] = (
        (_n,),
        32,
        keeps(lambda a: next((k for k in range(64) if a >> k & 1), -1)),
    )
    CASES[f"s_flbit_i32_b{_n}"] = ((_n,), 32, keeps(lambda a, n=_n: n - len(f"{a:b}") if a else -1))
    CASES[f"s_cselect_b{_n}"] = ((_n, _n), _n, lambda a, b, scc: (a if scc else b, scc))
CASES |= {
    "s_add_u32": ((32, 32), 32, lambda a, b, scc: (a + b, a + b >> 32)),
    "s_addc_u32": ((32, 32), 32, lambda a, b, scc: (a + b + scc, a + b + scc >> 32)),
    "s_sub_u32": ((32, 32), 32, lambda a, b, scc: (a - b, int(b > a))),
    "s_subb_u32": ((32, 32), 32, lambda a, b, scc: (a - b - scc, int(b + scc > a))),
    "s_add_i32": ((32, 32), 32, lambda a, b, scc: (a + b, overflow(signed(a) + signed(b)))),
    "s_sub_i32": ((32, 32), 32, lambda a, b, scc: (a - b, overflow(signed(a) - signed(b)))),
    "s_mul_i32": ((32, 32), 32, keeps(lambda a, b: a * b)),
    "s_mul_hi_u32": ((32, 32), 32, keeps(lambda a, b: a * b >> 32)),
    "s_mul_hi_i32": ((32, 32), 32, keeps(lambda a, b: signed(a) * signed(b) >> 32)),
    "s_min_i32": (
        (32, 32),
        32,
        lambda a, b, scc: (min(a, b, key=signed), int(signed(a) < signed(b))),
    ),
    "s_max_i32": (
        (32, 32),
        32,
        lambda a, b, scc: (max(a, b, key=signed), int(signed(a) > signed(b))),
    ),
    "s_min_u32": ((32, 32), 32, lambda a, b, scc: (min(a, b), int(a < b))),
    "s_max_u32": ((32, 32), 32, lambda a, b, scc: (max(a, b), int(a > b))),
    "s_abs_i32": ((32,), 32, nonzero(lambda a: abs(signed(a)), 32)),
    "s_absdiff_i32": ((32, 32), 32, nonzero(lambda a, b: abs(signed(a) - signed(b)), 32)),
    "s_sext_i32_i16": ((32,), 32, keeps(lambda a: signed(a, 16))),
    "s_sext_i32_i8": ((32,), 32, keeps(lambda a: signed(a, 8))),
    "s_pack_ll_b32_b16": ((32, 32), 32, keeps(lambda a, b: a % 65536 + (b % 65536 << 16))),
    "s_pack_lh_b32_b16": ((32, 32), 32, keeps(lambda a, b: a % 65536 + (b >> 16 << 16))),
    "s_pack_hh_b32_b16": ((32, 32), 32, keeps(lambda a, b: (a >> 16) + (b >> 16 << 16))),
}
for _k in (1, 2, 3, 4):
    CASES[f"s_lshl{_k}_add_u32"] = (
        (32, 32),
        32,
        lambda a, b, scc, k=_k: ((a << k) + b, int((a << k) + b > M32)),
    )
TESTED.update(CASES)


@pytest.mark.parametrize("mnemonic", CASES)
def test_scalar(mnemonic: str) -> None:
    widths, width, reference = CASES[mnemonic]
    source = random.Random(mnemonic)
    lines, scalars, wanted = [], {}, []
    for trial in range(40):
        inputs = [
            source.choice((EDGES64 if n == 64 else EDGES32) + [source.getrandbits(n)])
            for n in widths
        ]
        scc = trial & 1
        registers = {10 + 2 * k: x for k, x in enumerate(inputs)}
        operands = [
            f"s[{10 + 2 * k}:{11 + 2 * k}]" if n == 64 else f"s{10 + 2 * k}"
            for k, n in enumerate(widths)
        ]
        target = "s[2:3]" if width == 64 else "s2"
        lines = [f"{mnemonic} {target}, {', '.join(operands)}"]
        scalars = dict(registers)
        for k, n in enumerate(widths):
            if n == 64:
                scalars[11 + 2 * k] = 0
        out = run("\n".join(lines), s=dict(sorted(scalars.items(), reverse=True)), scc=scc)
        result, new_scc = reference(*inputs, scc)
        found = out.s64(2) if width == 64 else out.s(2)
        wanted = [result & ((1 << width) - 1), new_scc]
        assert [found, out.wave.scc] == wanted, (inputs, scc)


COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}
TESTED.update(f"s_cmp_{op}_{t}32" for op in COMPARE for t in "iu")
TESTED.update(f"s_cmpk_{op}_{t}32" for op in COMPARE for t in "iu")
TESTED.update(("s_cmp_eq_u64", "s_cmp_lg_u64"))


@pytest.mark.parametrize("op", COMPARE)
def test_compare(op: str) -> None:
    for a in EDGES32:
        for b in (0, 1, 0x7FFF, 0x8000, 0xFFFF, M32, 0x80000000):
            for t in "iu":
                wanted = COMPARE[op](*((signed(a), signed(b)) if t == "i" else (a, b)))
                assert run(f"s_cmp_{op}_{t}32 s1, s2", s={1: a, 2: b}).wave.scc == wanted
                if b <= 0xFFFF:
                    right = signed(b, 16) if t == "i" else b
                    wanted = COMPARE[op](signed(a) if t == "i" else a, right)
                    assert run(f"s_cmpk_{op}_{t}32 s1, {b:#x}", s={1: a}).wave.scc == wanted
    if op in ("eq", "lg"):
        for a in EDGES64:
            out = run(f"s_cmp_{op}_u64 s[2:3], s[4:5]", s={2: a, 3: 0, 4: 1 << 63, 5: 1 << 31})
            del out
            out = run(f"s_cmp_{op}_u64 s[2:3], -1", s={2: a} if a > M32 else {3: 0, 2: a})
            assert out.wave.scc == COMPARE[op](a, M64)


@covers("s_bitcmp0_b32", "s_bitcmp1_b32", "s_bitcmp0_b64", "s_bitcmp1_b64")
@covers("s_bitset0_b32", "s_bitset1_b32")
def test_bits() -> None:
    for bit in (0, 5, 31, 32, 37):
        value = 0x123456789ABCDEF0
        for n in (32, 64):
            source = "s[2:3]" if n == 64 else "s2"
            is_set = value >> bit % n & 1
            for wanted in (0, 1):
                out = run(f"s_bitcmp{wanted}_b{n} {source}, {bit}", s={2: value})
                assert out.wave.scc == (is_set == wanted)
        assert run(f"s_bitset1_b32 s1, {bit}", s={1: 0}).s(1) == 1 << bit % 32
        assert run(f"s_bitset0_b32 s1, {bit}", s={1: M32}).s(1) == M32 - (1 << bit % 32)


@covers("s_movk_i32", "s_addk_i32", "s_mulk_i32", "s_cmov_b32", "s_cmov_b64")
def test_immediates() -> None:
    assert run("s_movk_i32 s1, 0x8000").s(1) == 0xFFFF8000
    out = run("s_addk_i32 s1, 0x7fff", s={1: 0x7FFFFFFF})
    assert (out.s(1), out.wave.scc) == (0x80007FFE, 1)
    assert run("s_addk_i32 s1, 0xffff", s={1: 5}, scc=1).s(1) == 4
    assert run("s_mulk_i32 s1, 0xfffe", s={1: 3}).s(1) == M32 - 5
    for scc in (0, 1):
        out = run("s_cmov_b32 s1, 7\ns_cmov_b64 s[2:3], -1", s={1: 1, 2: 2, 3: 0}, scc=scc)
        assert (out.s(1), out.s64(2)) == ((7, M64) if scc else (1, 2))


SAVEEXEC: dict[str, Callable[[int, int], int]] = {
    "and": lambda a, e: a & e,
    "or": lambda a, e: a | e,
    "xor": lambda a, e: a ^ e,
    "andn2": lambda a, e: a & ~e,
    "orn2": lambda a, e: a | ~e,
    "nand": lambda a, e: ~(a & e),
    "nor": lambda a, e: ~(a | e),
    "xnor": lambda a, e: ~(a ^ e),
}
TESTED.update(f"s_{op}_saveexec_b64" for op in SAVEEXEC)


@pytest.mark.parametrize("op", SAVEEXEC)
def test_saveexec(op: str) -> None:
    source, mask = 0xFFFF0000FFFF00FF, 0x00FF00FF00FF0F0F
    out = run(
        f"s_{op}_saveexec_b64 s[4:5], s[2:3]\nv_mov_b32_e32 v1, 1",
        s={2: source},
        v={1: 0},
        exec_mask=mask,
    )
    wanted = SAVEEXEC[op](source, mask) & M64
    assert (out.s64(4), out.wave.exec, out.wave.scc) == (mask, wanted, 1)
    assert [int(x) for x in out.v(1)] == [wanted >> k & 1 for k in range(64)]


@covers("s_branch", "s_cbranch_scc0", "s_cbranch_scc1", "s_cbranch_vccz", "s_cbranch_vccnz")
@covers("s_cbranch_execz", "s_cbranch_execnz", "s_endpgm")
@pytest.mark.parametrize(
    ("condition", "taken"),
    [
        ("s_branch", True),
        ("s_cbranch_scc0", False),
        ("s_cbranch_scc1", True),
        ("s_cbranch_vccz", True),
        ("s_cbranch_vccnz", False),
        ("s_cbranch_execz", False),
        ("s_cbranch_execnz", True),
    ],
)
def test_branches(condition: str, taken: bool) -> None:
    code = f"s_mov_b32 s1, 1\n{condition} .there\ns_mov_b32 s1, 2\n.there:\ns_add_u32 s1, s1, 4"
    assert run(code, s={106: 0, 107: 0}, scc=1).s(1) == (5 if taken else 6)


def test_loop() -> None:
    code = (
        ".top:\ns_add_u32 s1, s1, s0\ns_sub_u32 s0, s0, 1\ns_cmp_lg_u32 s0, 0\ns_cbranch_scc1 .top"
    )
    assert run(code, s={0: 10, 1: 0}).s(1) == 55


@covers("s_nop", "s_waitcnt", "s_waitcnt_depctr", "s_setprio", "s_sleep", "s_sched_barrier")
@covers("s_dcache_wb", "s_dcache_inv", "s_icache_inv", "buffer_inv", "buffer_wbl2")
@covers("buffer_wbinvl1", "buffer_wbinvl1_vol", "s_setreg_imm32_b32")
def test_no_effect() -> None:
    code = """
    s_nop 1
    s_waitcnt vmcnt(0) lgkmcnt(0)
    s_waitcnt_depctr 0xffe3
    s_setprio 1
    s_sleep 1
    s_sched_barrier 0
    s_dcache_wb
    s_dcache_inv
    s_icache_inv
    buffer_inv sc1
    buffer_wbl2 sc1
    buffer_wbinvl1
    buffer_wbinvl1_vol
    s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 3
    s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1
    """
    lanes = np.arange(64, dtype=np.uint32)
    out = run(code, v={1: lanes}, s={5: 7}, scc=1)
    assert (out.v(1) == lanes).all()
    assert (out.s(5), out.wave.scc, out.wave.fp16_overflow_clamps) == (7, 1, True)
