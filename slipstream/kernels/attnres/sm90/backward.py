"""The backward of attention over the depth for sm_90: formulas in ../triton/attnres.py.

A program works on one row at a time. Its L residuals lie in shared memory between their two uses,
do . v_l and dv_l, so that each is read once and the sum o is not needed from forward: do . o is the
sum of p_l do . v_l. As soon as a residual's gradient is written, that of the next row is on its way
to its place, by the threads that have just read it.
A row is PIECES of BD channels. With an output's norm there are more vectors of a row's width than
registers: a and dwo are in shared memory, where a thread reads what it has written.
"""

# of this kernel alone; what gluon_compat has is part of every family's digest
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from slipstream.kernels.attnres.triton.streams import stream
from slipstream.kernels.primitives.gluon_compat import gl, gluon

# 3.9 has the new name alone, 3.6 the old one
copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def _channels(BD: gl.constexpr, VEC: gl.constexpr, WARPS: gl.constexpr, p: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([VEC], [32], [WARPS], [0])
    return p * BD + gl.arange(0, BD, layout)


@gluon.jit
def _load(
    ptr, m, D: gl.constexpr, BD: gl.constexpr, PIECES: gl.constexpr, VEC: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """The pieces of a row, as they are; zeros unless m."""
    found = ()
    for p in gl.static_range(PIECES):
        o = _channels(BD, VEC, WARPS, p)
        found = found + (gl.load(ptr + o, mask=(o < D) & m, other=0.0),)
    return found


@gluon.jit
def _direction(
    q_ptr, w_ptr, scale, D: gl.constexpr, BD: gl.constexpr, PIECES: gl.constexpr,
    VEC: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """a = scale q w."""
    q = _load(q_ptr, True, D, BD, PIECES, VEC, WARPS)
    w = _load(w_ptr, True, D, BD, PIECES, VEC, WARPS)
    a = ()
    for p in gl.static_range(PIECES):
        a = a + (q[p].to(gl.float32) * w[p].to(gl.float32) * scale,)
    return a


@gluon.jit
def _read(buffer, PIECES: gl.constexpr, VEC: gl.constexpr, WARPS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([VEC], [32], [WARPS], [0])
    found = ()
    for p in gl.static_range(PIECES):
        found = found + (buffer.index(p).load(layout),)
    return found


@gluon.jit
def _copy(
    rows, v_ptr, n, r, R, D: gl.constexpr, BD: gl.constexpr, PIECES: gl.constexpr,
    VEC: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Residual n of row r on its way to shared memory."""
    first = r.to(gl.int64) * D
    for p in gl.static_range(PIECES):
        o = _channels(BD, VEC, WARPS, p)
        copy_to_shared(rows.index(n * PIECES + p), v_ptr + first + o, mask=(o < D) & (r < R))


@gluon.jit
def _copy_numbers(
    vectors, at, s_ptr, rstd_ptr, r, R, L: gl.constexpr, LP: gl.constexpr, WARPS: gl.constexpr
):
    """s and rstd of row r to vectors 2 at and 2 at + 1."""
    o = gl.arange(0, LP, gl.BlockedLayout([1], [32], [WARPS], [0]))
    m = (o < L) & (r < R)
    copy_to_shared(vectors.index(2 * at), s_ptr + o * R + r, mask=m)
    copy_to_shared(vectors.index(2 * at + 1), rstd_ptr + o * R + r, mask=m)


@gluon.jit
def _number(pad, at, WARPS: gl.constexpr):
    """One that all threads want."""
    return gl.max(pad.index(at).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def _add2(a, b, c, d):
    return a + c, b + d


@gluon.jit
def _of_norm(
    do, rows, numbers, at, lse, wo, dwo, D: gl.constexpr, PIECES: gl.constexpr, BD: gl.constexpr,
    VEC: gl.constexpr, WARPS: gl.constexpr, L: gl.constexpr, eps,
):  # fmt: skip
    """The gradient of o from that of its norm; dwo has this row's added."""
    layout: gl.constexpr = gl.BlockedLayout([VEC], [32], [WARPS], [0])
    b_o = ()
    for _ in gl.static_range(PIECES):
        b_o = b_o + (gl.zeros([BD], gl.float32, layout),)
    for n in range(L):
        b_p = gl.exp(_number(numbers, at + n, WARPS) - lse)
        found = ()
        for p in gl.static_range(PIECES):
            b_v = rows.index(n * PIECES + p).load(layout).to(gl.float32)
            found = found + (b_o[p] + b_p * b_v,)
        b_o = found
    b_square, b_along = gl.zeros([BD], gl.float32, layout), gl.zeros([BD], gl.float32, layout)
    for p in gl.static_range(PIECES):
        b_square += b_o[p] * b_o[p]
        b_along += do[p] * wo[p].to(gl.float32) * b_o[p]
    b_square, b_along = gl.reduce((b_square, b_along), 0, _add2)
    b_rstd = gl.rsqrt(b_square / D + eps)
    b_c = b_rstd * b_rstd * b_along / D
    found = ()
    for p in gl.static_range(PIECES):
        here = dwo.index(p)
        here.store(here.load(layout) + do[p] * b_o[p] * b_rstd)
        found = found + (b_rstd * (do[p] * wo[p].to(gl.float32) - b_c * b_o[p]),)
    return found


@gluon.jit(do_not_specialize=["R"])
def attnres_bwd_sm90_kernel(
    v0_ptr, v1_ptr, v2_ptr, v3_ptr, v4_ptr, v5_ptr, v6_ptr, v7_ptr,
    v8_ptr, v9_ptr, v10_ptr, v11_ptr, v12_ptr, v13_ptr, v14_ptr, v15_ptr,
    d0_ptr, d1_ptr, d2_ptr, d3_ptr, d4_ptr, d5_ptr, d6_ptr, d7_ptr,
    d8_ptr, d9_ptr, d10_ptr, d11_ptr, d12_ptr, d13_ptr, d14_ptr, d15_ptr,
    q_ptr, w_ptr, wo_ptr, dy_ptr, s_ptr, rstd_ptr, lse_ptr, da_ptr, dwo_ptr,
    R, eps, scale,
    L: gl.constexpr, LP: gl.constexpr, D: gl.constexpr, BD: gl.constexpr, PIECES: gl.constexpr,
    VEC: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Grid (P). v, dy, d [R, D], of which d are the gradients of v; s, rstd [L, R]; lse [R]; da,
    dwo [P, D] sums over a program's rows. LP: a power of two, L or more."""
    layout: gl.constexpr = gl.BlockedLayout([VEC], [32], [WARPS], [0])
    one: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = dy_ptr.dtype.element_ty
    rows = gl.allocate_shared_memory(dtype, [L * PIECES, BD], plain)
    # s and rstd twice: those of the next row arrive while this row's are read
    vectors = gl.allocate_shared_memory(gl.float32, [4, LP], plain)
    # the same memory, one number at a time
    numbers = vectors._reinterpret(gl.float32, [4 * LP, 1], plain)
    dots = gl.allocate_shared_memory(gl.float32, [L, 1], plain)
    pid, step = gl.program_id(0), gl.num_programs(0)
    a = _direction(q_ptr, w_ptr, scale, D, BD, PIECES, VEC, WARPS)
    da = ()
    for _ in gl.static_range(PIECES):
        da = da + (gl.zeros([BD], gl.float32, layout),)
    # a and dwo have no room in registers beside da, do and the weight of the norm
    if wo_ptr is not None:
        shared_a = gl.allocate_shared_memory(gl.float32, [PIECES, BD], plain)
        dwo = gl.allocate_shared_memory(gl.float32, [PIECES, BD], plain)
        for p in gl.static_range(PIECES):
            shared_a.index(p).store(a[p])
            dwo.index(p).store(da[p])
    # the first row's residuals, all on their way at once
    for n in range(L):
        v_ptr = stream(
            v0_ptr, v1_ptr, v2_ptr, v3_ptr, v4_ptr, v5_ptr, v6_ptr, v7_ptr,
            v8_ptr, v9_ptr, v10_ptr, v11_ptr, v12_ptr, v13_ptr, v14_ptr, v15_ptr, n, L,
        )  # fmt: skip
        _copy(rows, v_ptr, n, pid, R, D, BD, PIECES, VEC, WARPS)
    first, at = pid.to(gl.int64) * D, pid * 0
    _copy_numbers(vectors, at, s_ptr, rstd_ptr, pid, R, L, LP, WARPS)
    async_copy.commit_group()
    dy = _load(dy_ptr + first, pid < R, D, BD, PIECES, VEC, WARPS)
    next_lse = gl.load(lse_ptr + pid, mask=pid < R, other=0.0)
    for r in range(pid, R, step):
        if wo_ptr is not None:
            wo = _load(wo_ptr, True, D, BD, PIECES, VEC, WARPS)
        # s and rstd are read by threads that have not copied them: the barrier shows them to all
        async_copy.wait_group(0)
        gl.thread_barrier()
        lse, here, after = next_lse, 2 * LP * at, r + step
        do = ()
        for p in gl.static_range(PIECES):
            do = do + (dy[p].to(gl.float32),)
        if wo_ptr is not None:
            do = _of_norm(do, rows, numbers, here, lse, wo, dwo, D, PIECES, BD, VEC, WARPS, L, eps)
        # all p add up to 1 except for lse's rounding, which is not small beside scores of 100
        b_along, b_all = lse * 0.0, lse * 0.0
        for n in range(L):
            b_dot = gl.zeros([BD], gl.float32, layout)
            for p in gl.static_range(PIECES):
                b_dot += do[p] * rows.index(n * PIECES + p).load(layout).to(gl.float32)
            b_t = gl.sum(b_dot, 0)
            b_p = gl.exp(_number(numbers, here + n, WARPS) - lse)
            b_along += b_p * b_t
            b_all += b_p
            dots.index(n).store(gl.full([1], b_t, gl.float32, one))
        b_delta = b_along / b_all
        # the next row's, before the stores below, which no load may pass
        dy = _load(dy_ptr + after.to(gl.int64) * D, after < R, D, BD, PIECES, VEC, WARPS)
        next_lse = gl.load(lse_ptr + after, mask=after < R, other=0.0)
        _copy_numbers(vectors, 1 - at, s_ptr, rstd_ptr, after, R, L, LP, WARPS)
        if wo_ptr is not None:
            a = _read(shared_a, PIECES, VEC, WARPS)
        for n in range(L):
            v_ptr = stream(
                v0_ptr, v1_ptr, v2_ptr, v3_ptr, v4_ptr, v5_ptr, v6_ptr, v7_ptr,
                v8_ptr, v9_ptr, v10_ptr, v11_ptr, v12_ptr, v13_ptr, v14_ptr, v15_ptr, n, L,
            )  # fmt: skip
            d_ptr = stream(
                d0_ptr, d1_ptr, d2_ptr, d3_ptr, d4_ptr, d5_ptr, d6_ptr, d7_ptr,
                d8_ptr, d9_ptr, d10_ptr, d11_ptr, d12_ptr, d13_ptr, d14_ptr, d15_ptr, n, L,
            )  # fmt: skip
            b_s, b_rstd = _number(numbers, here + n, WARPS), _number(numbers, here + LP + n, WARPS)
            b_p = gl.exp(b_s - lse)
            b_ds = b_p * (_number(dots, n, WARPS) - b_delta) * b_rstd
            # through the norm of v_l: what lies along v_l does not change its score
            b_c = b_ds * b_s * b_rstd / D
            added = ()
            for p in gl.static_range(PIECES):
                o = _channels(BD, VEC, WARPS, p)
                b_v = rows.index(n * PIECES + p).load(layout).to(gl.float32)
                b_dv = b_ds * a[p] + b_p * do[p] - b_c * b_v
                gl.store(d_ptr + first + o, b_dv.to(dtype), mask=o < D)
                added = added + (da[p] + b_ds * b_v,)
            da = added
            # a thread refills the places that it alone has read: no barrier
            _copy(rows, v_ptr, n, after, R, D, BD, PIECES, VEC, WARPS)
        async_copy.commit_group()
        first += step.to(gl.int64) * D
        at = 1 - at
    # a program must not end while copies to its shared memory are under way
    async_copy.wait_group(0)
    for p in gl.static_range(PIECES):
        o = _channels(BD, VEC, WARPS, p)
        gl.store(da_ptr + pid.to(gl.int64) * D + o, da[p], mask=o < D)
        if wo_ptr is not None:
            gl.store(dwo_ptr + pid.to(gl.int64) * D + o, dwo.index(p).load(layout), mask=o < D)
