"""Small Triton kernels, each about one language feature."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def reductions(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    tl.store(out_ptr + 0, tl.sum(x, 0))
    tl.store(out_ptr + 1, tl.max(x, 0))
    tl.store(out_ptr + 2, tl.min(x, 0))
    tl.store(out_ptr + 3, tl.argmax(x, 0).to(tl.float32))
    tl.store(out_ptr + 4, tl.argmin(x, 0).to(tl.float32))
    tl.store(out_ptr + 5, tl.sum(x.to(tl.float64), 0).to(tl.float32))


@triton.jit
def _logaddexp(a, b):
    m = tl.maximum(a, b)
    return m + tl.log(tl.exp(a - m) + tl.exp(b - m))


@triton.jit
def scans(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    tl.store(out_ptr + i, tl.cumsum(x, 0), mask=i < n)
    tl.store(out_ptr + n + i, tl.associative_scan(x, 0, _logaddexp), mask=i < n)
    tl.store(out_ptr + 2 * n + i, tl.cumsum(x.to(tl.float64), 0).to(tl.float32), mask=i < n)


@triton.jit
def sorting(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.sort(tl.load(x_ptr + i)))


@triton.jit
def counting(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    tl.store(out_ptr + tl.arange(0, 16), tl.histogram(x, 16))
    tl.store(out_ptr + 16 + i, tl.gather(x, (i * 7 + 3) % BLOCK, 0))


@triton.jit
def elementary(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    x = tl.load(x_ptr + i, mask=m, other=1.0)
    a = tl.abs(x) + 1e-3
    tl.store(out_ptr + i, tl.exp(x), mask=m)
    tl.store(out_ptr + n + i, tl.log(a), mask=m)
    tl.store(out_ptr + 2 * n + i, tl.exp2(x), mask=m)
    tl.store(out_ptr + 3 * n + i, tl.log2(a), mask=m)
    tl.store(out_ptr + 4 * n + i, x / a, mask=m)
    tl.store(out_ptr + 5 * n + i, tl.sqrt(a), mask=m)
    tl.store(out_ptr + 6 * n + i, tl.rsqrt(a), mask=m)
    tl.store(out_ptr + 7 * n + i, tl.floor(x) + tl.ceil(x) + tl.sin(x), mask=m)
    tl.store(out_ptr + 8 * n + i, tl.where(x > 0, x, tl.sigmoid(x)), mask=m)


@triton.jit
def integers(x_ptr, out_ptr, scale, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)  # int64
    y = x.to(tl.int32)
    tl.store(out_ptr + i, x * scale + (x >> 3))
    tl.store(out_ptr + BLOCK + i, x // 7)
    tl.store(out_ptr + 2 * BLOCK + i, x % 1000003)
    tl.store(out_ptr + 3 * BLOCK + i, tl.umulhi(y.to(tl.uint32), 0x9E3779B9).to(tl.int64))
    tl.store(out_ptr + 4 * BLOCK + i, (y // 13).to(tl.int64))
    tl.store(out_ptr + 5 * BLOCK + i, tl.sum((x > 0).to(tl.int32), 0) + tl.cumsum(y & 7, 0))


@triton.jit
def random(out_ptr, seed, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    a, b, c, d = tl.randint4x(seed, i)
    tl.store(out_ptr + i, a)
    tl.store(out_ptr + BLOCK + i, b)
    tl.store(out_ptr + 2 * BLOCK + i, c)
    tl.store(out_ptr + 3 * BLOCK + i, d)


@triton.jit
def doubles(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    a = tl.abs(x) + 1e-6
    tl.store(out_ptr + i, x / a + tl.sqrt(a))
    tl.store(out_ptr + BLOCK + i, tl.exp(x))
    tl.store(out_ptr + 2 * BLOCK + i, tl.log(a))
    tl.store(out_ptr + 3 * BLOCK + i, tl.cumsum(x, 0) + tl.max(x, 0) + tl.floor(x))


@triton.jit
def atomics(x_ptr, f_ptr, i_ptr, l_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    tl.atomic_add(f_ptr + (i & 7), x)
    tl.atomic_max(f_ptr + 8 + (i & 3), x)
    tl.atomic_add(i_ptr + (i & 3), i)
    tl.atomic_max(i_ptr + 4 + (i & 0), i)
    tl.atomic_min(i_ptr + 5 + (i & 0), -i)
    tl.atomic_or(i_ptr + 6 + (i & 0), i)
    tl.atomic_add(l_ptr + (i & 1), i.to(tl.int64) << 33)


@triton.jit
def conversions(x_ptr, out_ptr, T: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i).to(T).to(tl.float32))


@triton.jit
def typed_copy(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + i, (x * 2 + 1).to(out_ptr.dtype.element_ty), mask=i < n)


@triton.jit
def shapes(x_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr):
    i, j = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(x_ptr + i[:, None] * N + j[None, :])
    tl.store(out_ptr + j[:, None] * M + i[None, :], tl.trans(x))
    even, odd = tl.split(tl.reshape(x, (M, N // 2, 2)))
    k = tl.arange(0, N // 2)
    joined = tl.reshape(tl.join(odd, even), (M, N))
    tl.store(out_ptr + M * N + i[:, None] * N + j[None, :], joined)
    row = tl.sum(even, 1)
    tl.store(out_ptr + 2 * M * N + i[:, None] * (N // 2) + k[None, :], odd + row[:, None])


@triton.jit
def loops(x_ptr, out_ptr, limit, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    total = tl.sum(tl.abs(tl.load(x_ptr + i)), 0)
    steps = 0
    while total > limit:
        total = total * 0.5
        steps += 1
    tl.store(out_ptr, steps)


@triton.jit
def dot(
    a_ptr,
    b_ptr,
    c_ptr,
    loops,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i, j, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    acc = tl.zeros((M, N), tl.float32)
    for t in range(loops):
        a = tl.load(a_ptr + i[:, None] * K * loops + (k + t * K)[None, :])
        b = tl.load(b_ptr + (k + t * K)[:, None] * N + j[None, :])
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    tl.store(c_ptr + i[:, None] * N + j[None, :], acc)


@triton.jit
def out_of_bounds(x_ptr, out_ptr, n, BLOCK: tl.constexpr, STORE: tl.constexpr):
    i = tl.arange(0, BLOCK)
    if STORE:
        tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i < n, other=0.0), mask=i <= n)
    else:
        tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i <= n, other=0.0), mask=i < n)


@triton.jit
def through_scratch(x_ptr, scratch_ptr, out_ptr, BLOCK: tl.constexpr, BARRIER: tl.constexpr):
    """Data crosses waves through global memory, which needs a barrier."""
    i = tl.arange(0, BLOCK)
    tl.store(scratch_ptr + i, tl.load(x_ptr + i))
    if BARRIER:
        tl.debug_barrier()
    tl.store(out_ptr + i, tl.load(scratch_ptr + BLOCK - 1 - i))


@triton.jit
def wrong_vendor(out_ptr):
    x = tl.inline_asm_elementwise(
        "mov.u32 $0, %laneid;", "=r", [], dtype=tl.int32, is_pure=True, pack=1
    )
    tl.store(out_ptr, x)


@triton.jit
def huge(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    tl.store(out_ptr + i, tl.cumsum(x, 0) + tl.sum(x, 0) * x)
