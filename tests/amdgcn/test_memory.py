"""Loads, stores, atomics and LDS, one instruction at a time; bounds and races."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from .coverage import TESTED, covers
from .faults import Fault, Unsupported
from .snippet import run

Array = NDArray[Any]
ON = 0x0F0F_FFFF_FFFF_0FF0
LANES_ON = np.array([ON >> k & 1 for k in range(64)], bool)
ORDER = np.random.default_rng(0).permutation(64)
OLD = np.full(64, 0x5555AAAA, np.uint32)
WIDTH = {"dword": 1, "dwordx2": 2, "dwordx3": 3, "dwordx4": 4}
# suffix -> element, shift of the result and bits that are kept
NARROW: dict[str, tuple[str, int, int]] = {
    "ubyte": ("u1", 0, 0),
    "sbyte": ("i1", 0, 0),
    "ushort": ("u2", 0, 0),
    "sshort": ("i2", 0, 0),
    "ubyte_d16": ("u1", 0, 0xFFFF0000),
    "ubyte_d16_hi": ("u1", 16, 0xFFFF),
    "sbyte_d16": ("i1", 0, 0xFFFF0000),
    "sbyte_d16_hi": ("i1", 16, 0xFFFF),
    "short_d16": ("u2", 0, 0xFFFF0000),
    "short_d16_hi": ("u2", 16, 0xFFFF),
}
STORES = {"byte": (1, 0), "short": (2, 0), "byte_d16_hi": (1, 2), "short_d16_hi": (2, 2)}
SPACES = ("global", "flat", "buffer")
TESTED.update(f"{s}_load_{k}" for s in SPACES for k in (*WIDTH, *NARROW))
TESTED.update(f"{s}_store_{k}" for s in SPACES for k in (*WIDTH, *STORES))


def access(
    space: str, base: int, offsets: Array
) -> tuple[str, str, dict[int, Any], dict[int, int]]:
    """Operand text of the address, modifiers, and the registers that hold it."""
    if space == "buffer":
        scalars = {
            8: (base - 12) & 0xFFFFFFFF,
            9: base - 12 >> 32,
            10: 0x7FFFFFFE,
            11: 0x27000,
            3: 4,
        }
        return "v30, s[8:11], s3", "offen offset:8", {30: offsets.astype(np.uint32)}, scalars
    if space == "flat":
        return "v[30:31]", "offset:8", {30: (offsets + base - 8).astype(np.uint64)}, {}
    return "v30, s[8:9]", "offset:-8", {30: offsets.astype(np.uint32)}, {8: base + 8}


def written(kept: int, result: Array, shift: int) -> Array:
    return (OLD & np.uint32(kept)) | (result << np.uint32(shift) & np.uint32(~kept & 0xFFFFFFFF))


@pytest.mark.parametrize("space", SPACES)
def test_loads(space: str) -> None:
    data = np.random.default_rng(1).integers(0, 2**32, 1024, np.uint32)
    base = int(data.ctypes.data)
    for suffix, words in WIDTH.items():
        for step in (4 * words, 4 * words + 1, 2):  # aligned, and not
            text, modifiers, v, s = access(space, base, ORDER * step)
            target = f"v[2:{1 + words}]" if words > 1 else "v2"
            code = f"{space}_load_{suffix} {target}, {text} {modifiers}"
            out = run(code, v=v | dict.fromkeys(range(2, 6), OLD), s=s, exec_mask=ON, memory=[data])
            raw = data.view(np.uint8)
            for lane in range(64):
                row = raw[ORDER[lane] * step :][: 4 * words].copy().view(np.uint32)
                for k in range(words):
                    assert out.v(2 + k)[lane] == (row[k] if LANES_ON[lane] else OLD[0])
    for suffix, (element, shift, kept) in NARROW.items():
        size = int(element[1])
        text, modifiers, v, s = access(space, base, ORDER * size)
        code = f"{space}_load_{suffix} v2, {text} {modifiers}"
        out = run(code, v=v | {2: OLD}, s=s, exec_mask=ON, memory=[data])
        column = data.view(np.uint8)[: 64 * size].view(element)[ORDER]
        result = column.astype(np.int32).view(np.uint32)
        assert (out.v(2) == np.where(LANES_ON, written(kept, result, shift), OLD)).all(), suffix


@pytest.mark.parametrize("space", SPACES)
def test_stores(space: str) -> None:
    source = np.random.default_rng(2).integers(0, 2**32, (4, 64), np.uint32)
    for suffix in (*WIDTH, *STORES):
        words = WIDTH.get(suffix, 1)
        size, first = (4 * words, 0) if suffix in WIDTH else STORES[suffix]
        data = np.full(64 * size, 0xEE, np.uint8)
        text, modifiers, v, s = access(space, int(data.ctypes.data), ORDER * size)
        registers = f"v[2:{1 + words}]" if words > 1 else "v2"
        operands = [registers, text] if space == "buffer" else [text.split(", ")[0], registers]
        if space == "global":
            operands.append("s[8:9]")
        code = f"{space}_store_{suffix} {', '.join(operands)} {modifiers}"
        v |= {2 + k: source[k] for k in range(4)}
        run(code, v=v, s=s, exec_mask=ON, memory=[data])
        for lane in range(64):
            row = np.ascontiguousarray(source[:words, lane]).view(np.uint8)[first : first + size]
            found = data[ORDER[lane] * size :][:size]
            assert (found == (row if LANES_ON[lane] else 0xEE)).all(), (suffix, lane)


def test_buffer_range() -> None:
    """Lanes that Triton masks off read 0 and write nothing; other offsets out there are faults."""
    data = np.arange(64, dtype=np.uint32)
    offsets = np.where(ORDER < 20, 1 << 31, 4 * ORDER).astype(np.uint32)
    base = int(data.ctypes.data)
    s = {8: base & 0xFFFFFFFF, 9: base >> 32, 10: 0x7FFFFFFE, 11: 0x27000}
    out = run(
        "buffer_load_dword v1, v2, s[8:11], 0 offen", v={1: 9, 2: offsets}, s=s, memory=[data]
    )
    assert (out.v(1) == np.where(ORDER < 20, 0, ORDER)).all()
    code = "buffer_store_dword v1, v2, s[8:11], 0 offen"
    run(code, v={1: 7, 2: offsets}, s=s, memory=[data])
    assert (data == np.where(np.arange(64) < 20, np.arange(64), 7)).all()
    with pytest.raises(Fault, match="not a masked lane's"):
        run(code, v={1: 7, 2: np.uint32(0xFFFFFFFC)}, s=s, memory=[data])
    with pytest.raises(Fault, match="stride"):
        run(code, v={1: 7, 2: 0}, s=s | {9: base >> 32 | 1 << 20}, memory=[data])


def test_bounds() -> None:
    data, other = np.zeros(64, np.uint32), np.zeros(64, np.uint32)
    base = int(data.ctypes.data)
    offsets = np.arange(64, dtype=np.uint32) * 4
    offsets[41] = 256
    for code in ("global_load_dword v2, v1, s[2:3]", "global_store_dword v1, v2, s[2:3]"):
        with pytest.raises(Fault, match=r"out of bounds.*256 bytes into array 0 of 256.*lane 41"):
            run(code, v={1: offsets, 2: 0}, s={2: base}, memory=[data])
        # A lane that is off may point anywhere.
        run(code, v={1: offsets, 2: 0}, s={2: base}, memory=[data], exec_mask=0xFFFF)
    with pytest.raises(Fault, match="out of bounds"):
        run("s_load_dwordx2 s[4:5], s[2:3], 0xfc", s={2: base}, memory=[data])
    # One instruction may reach two tensors.
    both = np.where(np.arange(64) % 2, base, int(other.ctypes.data)).astype(np.uint64)
    data[0], other[0] = 3, 4
    out = run("global_load_dword v2, v[4:5], off", v={4: both, 2: 0}, memory=[data, other])
    assert list(out.v(2)[:4]) == [4, 3, 4, 3]


def test_conflicting_lanes() -> None:
    data = np.zeros(64, np.uint32)
    lanes = np.arange(64, dtype=np.uint32)
    s = {2: int(data.ctypes.data)}
    run("global_store_dword v1, v2, s[2:3]", v={1: 0, 2: 5}, s=s, memory=[data])
    with pytest.raises(Fault, match="different values"):
        run("global_store_dword v1, v2, s[2:3]", v={1: 0, 2: lanes}, s=s, memory=[data])
    with pytest.raises(Fault, match="different values"):
        run("ds_write_b32 v1, v2", v={1: 0, 2: lanes})


@covers("s_load_dword", "s_load_dwordx2", "s_load_dwordx4", "s_load_dwordx8", "s_load_dwordx16")
def test_scalar_loads() -> None:
    data = np.arange(100, 164, dtype=np.uint32)
    s = {2: int(data.ctypes.data), 5: 8}
    for n in (1, 2, 4, 8, 16):
        target = f"s[16:{15 + n}]" if n > 1 else "s16"
        name = f"s_load_dword{'' if n == 1 else f'x{n}'}"
        out = run(f"{name} {target}, s[2:3], 0x10", s=s, memory=[data], exec_mask=0)
        assert [out.s(16 + k) for k in range(n)] == list(range(104, 104 + n))
        out = run(f"{name} {target}, s[2:3], s5", s=s, memory=[data])
        assert out.s(16) == 102


ATOMICS: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "swap": ("u4", lambda old, x: x),
    "add": ("u4", lambda old, x: old + x),
    "sub": ("u4", lambda old, x: old - x),
    "smin": ("i4", min),
    "umin": ("u4", min),
    "smax": ("i4", max),
    "umax": ("u4", max),
    "and": ("u4", lambda old, x: old & x),
    "or": ("u4", lambda old, x: old | x),
    "xor": ("u4", lambda old, x: old ^ x),
    "add_f32": ("f4", lambda old, x: old + x),
    "swap_x2": ("u8", lambda old, x: x),
    "add_x2": ("u8", lambda old, x: old + x),
    "sub_x2": ("u8", lambda old, x: old - x),
    "smin_x2": ("i8", min),
    "umin_x2": ("u8", min),
    "smax_x2": ("i8", max),
    "umax_x2": ("u8", max),
    "and_x2": ("u8", lambda old, x: old & x),
    "or_x2": ("u8", lambda old, x: old | x),
    "xor_x2": ("u8", lambda old, x: old ^ x),
    "add_f64": ("f8", lambda old, x: old + x),
    "min_f64": ("f8", min),
    "max_f64": ("f8", max),
}
TESTED.update(f"{s}_atomic_{k}" for s in SPACES for k in ATOMICS)
LDS_ATOMICS: dict[str, tuple[str, str]] = {
    "add_u32": ("u4", "add"),
    "sub_u32": ("u4", "sub"),
    "min_i32": ("i4", "smin"),
    "max_i32": ("i4", "smax"),
    "min_u32": ("u4", "umin"),
    "max_u32": ("u4", "umax"),
    "and_b32": ("u4", "and"),
    "or_b32": ("u4", "or"),
    "xor_b32": ("u4", "xor"),
    "add_f32": ("f4", "add_f32"),
    "min_f32": ("f4", "smin"),
    "max_f32": ("f4", "smax"),
    "add_u64": ("u8", "add_x2"),
    "add_f64": ("f8", "add_f64"),
}


def operands(dtype: str, cells: int, seed: int) -> tuple[Array, Array, Array]:
    """Initial cells, one operand a lane, and the cell that each lane hits (several hit one)."""
    generator = np.random.default_rng(seed)
    if dtype[0] == "f":  # small integers: sums do not depend on their order
        numbers = generator.integers(-50, 50, cells + 64).astype(dtype)
    else:
        numbers = generator.integers(0, 2**31, cells + 64).astype(dtype)
        numbers = numbers * np.array(3, dtype) ** np.array(20, dtype)
    return numbers[:cells], numbers[cells:], generator.integers(0, cells, 64)


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("name", ATOMICS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_atomics(space: str, name: str) -> None:
    dtype, function = ATOMICS[name]
    size = int(dtype[1])
    for cells in (64, 9):
        data, x, place = operands(dtype, cells, cells)
        if cells == 64:
            place = np.arange(64)[::-1].copy()
        wanted, olds = data.copy(), np.zeros(64, dtype)
        for lane in range(64):
            if LANES_ON[lane]:
                olds[lane] = wanted[place[lane]]
                wanted[place[lane]] = function(wanted[place[lane]], x[lane])
        text, modifiers, v, s = access(space, int(data.ctypes.data), place * size)
        value = "v[2:3]" if size == 8 else "v2"
        if space == "buffer":
            code = f"buffer_atomic_{name} {value}, {text} {modifiers}"
        else:
            rest = [text.split(", ")[0], value] + ["s[8:9]"] * (space == "global")
            result = "v[6:7]" if size == 8 else "v6"
            code = f"{space}_atomic_{name} {result}, {', '.join(rest)} {modifiers} sc0"
        out = run(code, v=v | {2: x}, s=s, memory=[data], exec_mask=ON)
        assert (data == wanted).all()
        if space != "buffer":
            dtype_bits = np.uint64 if size == 8 else np.uint32
            found = out.v(6, dtype_bits)[LANES_ON]
            assert (found == olds.view(dtype_bits)[LANES_ON]).all()


@covers(*[f"{s}_atomic_cmpswap{x}" for s in SPACES for x in ("", "_x2")])
def test_compare_and_swap() -> None:
    for space in SPACES:
        for suffix, dtype in (("", np.uint32), ("_x2", np.uint64)):
            data = np.array([5, 6, 7, 8], dtype)
            place = np.array([0, 0, 1, 3] + [2] * 60)
            new = np.array([50, 51, 60, 80] + [70] * 60, dtype)
            expected = np.array([5, 5, 99, 8] + [7] * 60, dtype)
            size = data.itemsize
            text, modifiers, v, s = access(space, int(data.ctypes.data), place * size)
            v |= {2: new, 2 + size // 4: expected}
            value = "v[2:5]" if size == 8 else "v[2:3]"
            if space == "buffer":
                code = f"buffer_atomic_cmpswap{suffix} {value}, {text} {modifiers}"
            else:
                rest = [text.split(", ")[0], value] + ["s[8:9]"] * (space == "global")
                code = f"{space}_atomic_cmpswap{suffix} {', '.join(rest)} {modifiers}"
            run(code, v=v, s=s, memory=[data])
            assert list(data) == [50, 6, 70, 80]


@covers(*[f"{s}_atomic_pk_add_{t}" for s in SPACES for t in ("f16", "bf16")])
def test_packed_atomics() -> None:
    for space in SPACES:
        for name, one, three in (("f16", 0x3C00, 0x4200), ("bf16", 0x3F80, 0x4040)):
            data = np.array([one << 16], np.uint32)  # (0, 1)
            text, modifiers, v, s = access(space, int(data.ctypes.data), np.zeros(64, int))
            rest = [text.split(", ")[0], "v2"] + ["s[8:9]"] * (space == "global")
            joined = f"v2, {text}" if space == "buffer" else ", ".join(rest)
            code = f"{space}_atomic_pk_add_{name} {joined} {modifiers}"
            run(code, v=v | {2: one << 16 | one}, s=s, memory=[data], exec_mask=3)
            assert data[0] == three << 16 | {0x3C00: 0x4000, 0x3F80: 0x4000}[one]


TESTED.update(f"ds_{k.replace('_', '_rtn_') if r else k}" for k in LDS_ATOMICS for r in (0, 1))


@pytest.mark.parametrize("name", LDS_ATOMICS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_lds_atomics(name: str) -> None:
    dtype, operation = LDS_ATOMICS[name]
    function = ATOMICS[operation][1]
    size = int(dtype[1])
    data, x, place = operands(dtype, 9, 5)
    wanted, olds = data.copy(), np.zeros(64, dtype)
    for lane in range(64):
        if LANES_ON[lane]:
            olds[lane] = wanted[place[lane]]
            wanted[place[lane]] = function(wanted[place[lane]], x[lane])
    value, result = ("v[2:3]", "v[6:7]") if size == 8 else ("v2", "v6")
    v = {2: x, 1: (place * size).astype(np.uint32)}
    code = f"ds_{name.replace('_', '_rtn_')} {result}, v1, {value}"
    bits = np.uint64 if size == 8 else np.uint32
    out = run(code, v=v, lds=data, exec_mask=ON)
    assert (out.machine.lds.data[: data.nbytes].view(dtype) == wanted).all()
    assert (out.v(6, bits)[LANES_ON] == olds.view(bits)[LANES_ON]).all()
    out = run(f"ds_{name} v1, {value}", v=v, lds=data, exec_mask=ON)
    assert (out.machine.lds.data[: data.nbytes].view(dtype) == wanted).all()


@covers("ds_wrxchg_rtn_b32")
def test_lds_exchange() -> None:
    lanes = np.arange(64, dtype=np.uint32)
    out = run(
        "ds_wrxchg_rtn_b32 v3, v1, v2", v={1: lanes * 4, 2: lanes + 7}, lds=lanes[::-1].copy()
    )
    assert (out.v(3) == lanes[::-1]).all()
    assert (out.machine.lds.words[:64] == lanes + 7).all()


for _n in (32, 64, 96, 128):
    TESTED.update((f"ds_read_b{_n}", f"ds_write_b{_n}"))
for _n in (32, 64):
    TESTED.update(f"ds_{op}2{st}_b{_n}" for op in ("read", "write") for st in ("", "st64"))


@pytest.mark.parametrize("size", [4, 8, 12, 16])
def test_lds_words(size: int) -> None:
    lds = np.random.default_rng(3).integers(0, 2**32, 8192, np.uint32)
    words = size // 4
    address = (ORDER * size).astype(np.uint32)
    target = f"v[2:{1 + words}]" if words > 1 else "v2"
    v: dict[int, Any] = {1: address} | dict.fromkeys(range(2, 12), OLD)
    out = run(f"ds_read_b{8 * size} {target}, v1 offset:16", v=v, lds=lds, exec_mask=ON)
    for k in range(words):
        wanted = lds[4 + ORDER * words + k]
        assert (out.v(2 + k) == np.where(LANES_ON, wanted, OLD)).all()
    source = np.random.default_rng(4).integers(0, 2**32, (8, 64), np.uint32)
    v = {1: address} | {20 + k: source[k] for k in range(8)}
    value = f"v[20:{19 + words}]" if words > 1 else "v20"
    out = run(f"ds_write_b{8 * size} v1, {value} offset:16", v=v, lds=lds, exec_mask=ON)
    expected = lds.copy()
    for lane in np.nonzero(LANES_ON)[0]:
        expected[4 + ORDER[lane] * words :][:words] = source[:words, lane]
    assert (out.machine.lds.words[:8192] == expected).all()
    if size > 8:
        return
    for st64, step, far in (("", words, 64), ("st64", 64 * words, 16)):
        code = f"ds_read2{st64}_b{8 * size} v[2:{1 + 2 * words}], v1 offset0:3 offset1:1"
        out = run(code, v={1: address} | dict.fromkeys(range(2, 12), OLD), lds=lds, exec_mask=ON)
        for j, offset in enumerate((3, 1)):
            for k in range(words):
                wanted = lds[offset * step + ORDER * words + k]
                assert (out.v(2 + j * words + k) == np.where(LANES_ON, wanted, OLD)).all()
        second = f"v[24:{23 + words}]" if words > 1 else "v24"
        code = f"ds_write2{st64}_b{8 * size} v1, {value}, {second} offset1:{far}"
        out = run(code, v=v, lds=lds, exec_mask=ON)
        expected = lds.copy()
        for j, offset in enumerate((0, far)):
            for lane in np.nonzero(LANES_ON)[0]:
                place = offset * step + ORDER[lane] * words
                expected[place : place + words] = source[4 * j : 4 * j + words, lane]
        assert (out.machine.lds.words[:8192] == expected).all()


LDS_NARROW = {
    "u8": NARROW["ubyte"],
    "i8": NARROW["sbyte"],
    "u16": NARROW["ushort"],
    "i16": NARROW["sshort"],
    "u8_d16": NARROW["ubyte_d16"],
    "u8_d16_hi": NARROW["ubyte_d16_hi"],
    "i8_d16": NARROW["sbyte_d16"],
    "i8_d16_hi": NARROW["sbyte_d16_hi"],
    "u16_d16": NARROW["short_d16"],
    "u16_d16_hi": NARROW["short_d16_hi"],
}
TESTED.update(f"ds_read_{k}" for k in LDS_NARROW)


@covers("ds_write_b8", "ds_write_b16", "ds_write_b8_d16_hi", "ds_write_b16_d16_hi")
def test_lds_narrow() -> None:
    lds = np.random.default_rng(5).integers(0, 2**32, 64, np.uint32)
    for suffix, (element, shift, kept) in LDS_NARROW.items():
        size = int(element[1])
        v = {1: (ORDER * size).astype(np.uint32), 2: OLD}
        out = run(f"ds_read_{suffix} v2, v1", v=v, lds=lds, exec_mask=ON)
        column = lds.view(np.uint8)[: 64 * size].view(element)[ORDER]
        result = column.astype(np.int32).view(np.uint32)
        assert (out.v(2) == np.where(LANES_ON, written(kept, result, shift), OLD)).all(), suffix
    source = np.random.default_rng(6).integers(0, 2**32, 64, np.uint32)
    for suffix, size, first in (
        ("b8", 1, 0),
        ("b16", 2, 0),
        ("b8_d16_hi", 1, 2),
        ("b16_d16_hi", 2, 2),
    ):
        v = {1: (ORDER * size).astype(np.uint32), 2: source}
        out = run(f"ds_write_{suffix} v1, v2", v=v, lds=lds)
        raw = source.view(np.uint8).reshape(64, 4)[:, first : first + size]
        for lane in range(64):
            assert (out.machine.lds.data[ORDER[lane] * size :][:size] == raw[lane]).all()


@covers("ds_read_b64_tr_b16", "ds_read_b64_tr_b8")
def test_lds_transpose() -> None:
    lds = np.arange(65536 // 2, dtype=np.uint16)
    v = {1: np.arange(64, dtype=np.uint32) * 8}
    out = run("ds_read_b64_tr_b16 v[2:3], v1", v=v, lds=lds, arch="gfx950")
    for lane in range(64):
        group, column = lane // 16, lane % 16
        found = [int(out.v(2)[lane]) & 65535, int(out.v(2)[lane]) >> 16]
        found += [int(out.v(3)[lane]) & 65535, int(out.v(3)[lane]) >> 16]
        assert found == [64 * group + 16 * r + column for r in range(4)]
    octets = (np.arange(65536) * 7 % 251).astype(np.uint8)
    out = run("ds_read_b64_tr_b8 v[2:3], v1", v=v, lds=octets, arch="gfx950")
    for lane in range(64):
        group, column = lane // 16, lane % 16
        found = [
            *int(out.v(2)[lane]).to_bytes(4, "little"),
            *int(out.v(3)[lane]).to_bytes(4, "little"),
        ]
        assert found == [octets[128 * group + 16 * r + column] for r in range(8)]
    with pytest.raises(Unsupported):
        run("ds_read_b64_tr_b16 v[2:3], v1", v=v, lds=lds, arch="gfx942")


@covers("global_load_lds_dword", "global_load_lds_dwordx3", "global_load_lds_dwordx4")
def test_load_to_lds() -> None:
    data = np.random.default_rng(7).integers(0, 2**32, 256, np.uint32)
    base = int(data.ctypes.data)
    for name, words in (("dword", 1), ("dwordx3", 3), ("dwordx4", 4)):
        offsets = (ORDER * 4 * words).astype(np.uint32)
        code = f"s_mov_b32 m0, 0x100\nglobal_load_lds_{name} v1, s[2:3] offset:16"
        data2 = np.concatenate([np.zeros(4, np.uint32), data])
        s = {2: int(data2.ctypes.data)}
        out = run(code, v={1: offsets}, s=s, memory=[data2], arch="gfx950", exec_mask=ON)
        found = out.machine.lds.words[64 + 4 :][: 64 * words].reshape(64, words)
        wanted = data[: 64 * words].reshape(64, words)[ORDER]
        assert (found[LANES_ON] == wanted[LANES_ON]).all()
        assert (found[~LANES_ON] == 0xFFF7A5A5).all()
        masked = np.where(ORDER < 5, 1 << 31, offsets).astype(np.uint32)
        s = {8: base & 0xFFFFFFFF, 9: base >> 32, 10: 0x7FFFFFFE, 11: 0x27000}
        code = f"s_mov_b32 m0, 0\nbuffer_load_{name} v1, s[8:11], 0 offen lds"
        out = run(code, v={1: masked}, s=s, memory=[data], arch="gfx950")
        found = out.machine.lds.words[: 64 * words].reshape(64, words)
        assert (found == np.where(ORDER[:, None] < 5, 0, wanted)).all()


def test_lds_bounds() -> None:
    lanes = np.arange(64, dtype=np.uint32) * 4
    for code in ("ds_read_b32 v2, v1", "ds_write_b32 v1, v2", "ds_add_u32 v1, v2"):
        run(code, v={1: lanes, 2: 0}, lds_size=256)
        with pytest.raises(Fault, match=r"LDS .* out of bounds at 252.*lane 63"):
            run(code, v={1: lanes, 2: 0}, lds_size=252)
