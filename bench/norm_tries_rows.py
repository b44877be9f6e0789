# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportAssignmentType=false
"""Kernels of norm_tries.py in Triton: rows of bf16 that are read two features a word.

    norm   y = x rstd w f(gate)       rstd = 1 / sqrt(mean(x^2) + eps), f(gate) = silu or none
    l2     dx = r (d - u sum(d u))    u = x r, r = 1 / sqrt(sum(x^2) + eps)

A row is kept as it was loaded, in half of the registers that its float32 would take, and is
unpacked twice: before the sums and after them. A 0 that is only known when the sums are keeps the
compiler from doing it once. Another one, `none`, makes something seem to need what is loaded ahead:
ptxas loads late what is wanted late. Sizes are those of the benchmark: no masks but for the walk's
end.

Symbols: BR rows of a tile, D2 words of a row, LOAD and STORE what caches are told.
"""

import triton
import triton.language as tl


@triton.jit
def _zero(b_x):
    """0, which nobody knows before the float32 x > 0."""
    return b_x.to(tl.int32, bitcast=True) >> 31


@triton.jit
def _pair(b_v, zero):
    """The two features of each word."""
    low, high = b_v << (16 + zero), b_v & (-65536 ^ zero)
    return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)


@triton.jit
def _word(b_low, b_high):
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [b_low, b_high], tl.int32, True, 1
    )


@triton.jit
def _load(ptr, o, m, LOAD: tl.constexpr):
    EVICT: tl.constexpr = "evict_first" if LOAD == "first" else ""
    CACHE: tl.constexpr = ".cg" if LOAD == "cg" else ""
    return tl.load(ptr + o, mask=m, cache_modifier=CACHE, eviction_policy=EVICT)


@triton.jit
def _store(ptr, o, b_v, STORE: tl.constexpr):
    EVICT: tl.constexpr = "evict_first" if STORE == "first" else ""
    CACHE: tl.constexpr = ".wt" if STORE == "wt" else ""
    tl.store(ptr + o, b_v, cache_modifier=CACHE, eviction_policy=EVICT)


@triton.jit
def _rstd(b_v, N, eps):
    b_low, b_high = _pair(b_v, 0)
    return tl.rsqrt(tl.sum(b_low * b_low + b_high * b_high, 1) / N + eps)


@triton.jit
def _normed(b_v, b_g, b_w, b_rstd, zero):
    """y of a tile, as words."""
    b_low, b_high = _pair(b_v, zero)
    w_low, w_high = _pair(b_w, zero)
    b_low, b_high = b_low * b_rstd[:, None] * w_low, b_high * b_rstd[:, None] * w_high
    if b_g is not None:
        g_low, g_high = _pair(b_g, zero)
        b_low, b_high = (
            b_low * g_low * tl.sigmoid(g_low), b_high * g_high * tl.sigmoid(g_high)
        )  # fmt: skip
    return _word(b_low, b_high)


@triton.jit(do_not_specialize=["none"])
def norm_rows_kernel(
    x_ptr, g_ptr, w_ptr, y_ptr, none, eps, D2: tl.constexpr, BR: tl.constexpr, EARLY: tl.constexpr,
    LEAN: tl.constexpr, APART: tl.constexpr, LOAD: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """Grid (R / BR). EARLY: w is loaded before the sums. LEAN: rows are kept as words. APART: rows
    that are worked on together lie so many shares of the tensor apart."""
    i = tl.program_id(0)
    if APART > 1:
        i = i % APART * (tl.num_programs(0) // APART) + i // APART
    o_d = tl.arange(0, D2)[None, :]
    o, place = tl.arange(0, BR)[:, None] * D2 + o_d, i.to(tl.int64) * BR * D2
    b_v, b_g = _load(x_ptr + place, o, None, LOAD), None
    b_sum = b_v
    if g_ptr is not None:
        b_g = _load(g_ptr + place, o, None, LOAD)
        b_sum ^= b_g & none
    if EARLY:
        b_w = tl.load(w_ptr + o_d)
        b_sum ^= b_w & none
    b_rstd = _rstd(b_sum, 2 * D2, eps)
    if not EARLY:
        b_w = tl.load(w_ptr + o_d)
    zero = _zero(b_rstd)[:, None] if LEAN else 0
    _store(y_ptr + place, o, _normed(b_v, b_g, b_w, b_rstd, zero), STORE)


@triton.jit(do_not_specialize=["R"])
def norm_walk_kernel(
    x_ptr, g_ptr, w_ptr, y_ptr, R, eps, D2: tl.constexpr, BR: tl.constexpr,
    BLOCKED: tl.constexpr, LOAD: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """Grid (P). A program's next tile is on its way while this one is summed; w stays in
    registers. BLOCKED: a program's rows are neighbours, else every P-th tile."""
    o_d = tl.arange(0, D2)[None, :]
    o = tl.arange(0, BR)[:, None] * D2 + o_d
    b_w = tl.load(w_ptr + o_d)
    count, i_p, P = R // BR, tl.program_id(0), tl.num_programs(0)
    first, end, step = i_p, count, P
    if BLOCKED:
        first, end, step = i_p * count // P, (i_p + 1) * count // P, 1
    place = first.to(tl.int64) * BR * D2
    b_v, b_g = _load(x_ptr + place, o, None, LOAD), None
    if g_ptr is not None:
        b_g = _load(g_ptr + place, o, None, LOAD)
    for i in tl.range(first, end, step, num_stages=1):
        m, place = i + step < end, tl.cast(i + step, tl.int64) * BR * D2
        next_v, next_g = _load(x_ptr + place, o, m, LOAD), None
        if g_ptr is not None:
            next_g = _load(g_ptr + place, o, m, LOAD)
        b_rstd = _rstd(b_v, 2 * D2, eps)
        b_y = _normed(b_v, b_g, b_w, b_rstd, _zero(b_rstd)[:, None])
        _store(y_ptr + tl.cast(i, tl.int64) * BR * D2, o, b_y, STORE)
        b_v, b_g = next_v, next_g


@triton.jit
def _l2_grad(b_v, b_dv, b_r):
    """dx of a tile, as words."""
    b_low, b_high = _pair(b_v, 0)
    d_low, d_high = _pair(b_dv, 0)
    b_low, b_high = b_low * b_r[:, None], b_high * b_r[:, None]
    b_sum = tl.sum(b_low * d_low + b_high * d_high, 1)[:, None]
    d_low, d_high = d_low - b_low * b_sum, d_high - b_high * b_sum
    return _word(d_low * b_r[:, None], d_high * b_r[:, None])


@triton.jit
def l2_rows_kernel(
    x_ptr, dy_ptr, r_ptr, dx_ptr, eps, D2: tl.constexpr, BR: tl.constexpr, AGAIN: tl.constexpr,
    LOAD: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """Grid (R / BR). AGAIN: r is made of x, not read."""
    first, o_r = tl.program_id(0).to(tl.int64) * BR, tl.arange(0, BR)
    o, place = o_r[:, None] * D2 + tl.arange(0, D2)[None, :], first * D2
    b_v, b_dv = _load(x_ptr + place, o, None, LOAD), _load(dy_ptr + place, o, None, LOAD)
    b_r = _rstd(b_v, 1, eps) if AGAIN else tl.load(r_ptr + first + o_r)
    _store(dx_ptr + place, o, _l2_grad(b_v, b_dv, b_r), STORE)


@triton.jit(do_not_specialize=["none"])
def l2_pairs_kernel(
    x_ptr, dy_ptr, dx_ptr, none, eps, D2: tl.constexpr, BR: tl.constexpr, LOAD: tl.constexpr,
    STORE: tl.constexpr,
):  # fmt: skip
    """Grid (R / 2 BR): two tiles a program, both on their way at once."""
    place = tl.program_id(0).to(tl.int64) * (2 * BR) * D2
    o = tl.arange(0, BR)[:, None] * D2 + tl.arange(0, D2)[None, :]
    later = o + BR * D2
    b_v, b_dv = _load(x_ptr + place, o, None, LOAD), _load(dy_ptr + place, o, None, LOAD)
    next_v = _load(x_ptr + place, later, None, LOAD)
    next_d = _load(dy_ptr + place, later, None, LOAD)
    b_v ^= (next_v | next_d) & none
    _store(dx_ptr + place, o, _l2_grad(b_v, b_dv, _rstd(b_v, 1, eps)), STORE)
    _store(dx_ptr + place, later, _l2_grad(next_v, next_d, _rstd(next_v, 1, eps)), STORE)
