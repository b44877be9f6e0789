"""Per-channel decay on sm_90: from what the scans left, gradients of scores, v and beta.

As triton/dplr/scores.py, whose results these are:

    dqb = scale do x^T      dab = z x^T      dqk = scale do v^T      dak = z v^T
    dv  = beta y            dbeta = y . v - (dqkg.py)                                  delta
    dv  = (scale qk)^T do + ak^T y + k^ dS'                                                  dplr

A chunk is a program of 4 warps. Two or three of them fit a multiprocessor, so that one loads while
another computes; for that dS' comes into the memory of x and v, once the scores have been made.
Calls that write by channel take Triton's kernel.
"""

from slipstream.kernels.linear.sm90 import common
from slipstream.kernels.linear.sm90.dplr.solve_tril import put, ready
from slipstream.kernels.primitives import sm90
from slipstream.kernels.primitives.sm90 import gl, gluon, mbarrier, warpgroup_mma


@gluon.jit
def write_score(p, b_d, scale, num_rows, act: gl.constexpr):
    """Pairs i > j of the chunk's tokens, times scale, zero elsewhere; the sums of pairs (i, i)."""
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    C: gl.constexpr = b_d.shape[0]
    i = gl.arange(0, C, gl.SliceLayout(1, b_d.type.layout))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, b_d.type.layout))[None, :]
    b_diag = gl.sum(gl.where((i == j) & (i < num_rows), b_d, 0.0), 1) * scale
    put(p, gl.where((i > j) & (i < num_rows), b_d * scale, 0.0).to(act), C, rows)
    return b_diag


@gluon.jit
def write_values(dv_desc, dv_ptr, tile, row, i_h, num_rows, HV, V: gl.constexpr):
    """A tile [C, V] as gradient of v."""
    C: gl.constexpr = tile.shape[0]
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [256 // V, V // 8], [4, 1], [1, 0])
    ready()
    if num_rows >= C:
        sm90.copy_out(dv_desc, [row, i_h * V], tile)
        sm90.store_wait(0)
    else:
        o_c = gl.arange(0, C, gl.SliceLayout(1, rows))
        o_v = gl.arange(0, V, gl.SliceLayout(0, rows))
        p_v = dv_ptr + (row.to(gl.int64) * HV + i_h) * V + o_c[:, None] * (HV * V) + o_v[None, :]
        gl.store(p_v, tile.load(rows), mask=(o_c < num_rows)[:, None])


@gluon.jit(do_not_specialize=["scale", "T", "N", "HV"])
def dplr_scores_sm90_kernel(
    v_desc,  # [tokens, HV * V] by [C, V]
    do_desc,
    x_desc,  # [slots * HV * V, C] by [V, C]
    y_desc,
    k_desc,  # [slots * HV * C, K] by [C, K]: k exp(G_C - G), dplr
    qk_desc,  # [slots * HV * C, C] by [C, C], dplr
    ak_desc,
    dstates_desc,  # [slots * HV * V, K] by [V, K], dplr
    dv_desc,  # [tokens, HV * V] by [C, V]
    dv_ptr,
    beta_ptr,  # [tokens, HV], delta
    dbeta_ptr,  # [1 + NK, tokens, HV], delta: y . v in the first
    dqb_ptr,  # [chunks, HV, C, C]
    dab_ptr,  # for delta without -beta
    dqk_ptr,  # dplr
    dak_ptr,
    diag_ptr,  # [chunks, HV, 2, C]: dqb and dqk of pairs (i, i), which are zero there
    cu_ptr,  # [N + 1]
    scale, T, N, HV,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, DELTA: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """grid (slots * HV,), 4 warps."""
    act: gl.constexpr = do_desc.dtype
    al: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    vl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    n = gl.program_id(0)
    xs = gl.allocate_shared_memory(act, [V, C], x_desc.layout)
    vs = gl.allocate_shared_memory(act, [C, V], v_desc.layout)
    os = gl.allocate_shared_memory(act, [C, V], do_desc.layout)
    ys = gl.allocate_shared_memory(act, [V, C], y_desc.layout)
    full = common.alloc_mbarriers(1, 2)
    ready()
    row, num_rows, _ = common.locate_sequence(cu_ptr, n // HV, T, N, C, C, PACKED, True)
    if PACKED and num_rows <= 0:
        return
    i_h = n % HV
    mbarrier.expect(full.index(0), 4 * do_desc.block_type.nbytes)
    sm90.copy_in(do_desc, [row, i_h * V], full.index(0), os)
    sm90.copy_in(x_desc, [n * V, 0], full.index(0), xs)
    sm90.copy_in(y_desc, [n * V, 0], full.index(0), ys)
    sm90.copy_in(v_desc, [row, i_h * V], full.index(0), vs)
    if not DELTA:
        ks = gl.allocate_shared_memory(act, [C, K], k_desc.layout)
        qks = gl.allocate_shared_memory(act, [C, C], qk_desc.layout)
        aks = gl.allocate_shared_memory(act, [C, C], ak_desc.layout)
        wide: gl.constexpr = dstates_desc.block_type.nbytes + k_desc.block_type.nbytes
        mbarrier.expect(full.index(1), wide + 2 * qk_desc.block_type.nbytes)
        sm90.copy_in(k_desc, [n * C, 0], full.index(1), ks)
        sm90.copy_in(qk_desc, [n * C, 0], full.index(1), qks)
        sm90.copy_in(ak_desc, [n * C, 0], full.index(1), aks)
    o_c = gl.arange(0, C, gl.SliceLayout(1, al))
    zero = gl.zeros([C, C], gl.float32, al)
    i_a = n.to(gl.int64) * (C * C)
    p_diag = diag_ptr + n.to(gl.int64) * (2 * C) + o_c
    if DELTA:
        o_t = (row.to(gl.int64) + gl.arange(0, C, gl.SliceLayout(1, vl))) * HV + i_h
        m_c = gl.arange(0, C, gl.SliceLayout(1, vl)) < num_rows
        b_beta = gl.load(beta_ptr + o_t, mask=m_c, other=0.0).to(gl.float32)

    # by way of what the tokens wrote
    mbarrier.wait(full.index(0), 0)
    b_qb = warpgroup_mma(os, xs, zero, use_acc=False, is_async=True)
    b_ab = warpgroup_mma(ys.permute((1, 0)), xs, zero, use_acc=False, is_async=True)
    if DELTA:
        b_y = ys.permute((1, 0)).load(vl).to(gl.float32)
        b_dbeta = gl.sum(b_y * vs.load(vl).to(gl.float32), 1)
        vs.store((b_y * b_beta[:, None]).to(act))
        gl.store(dbeta_ptr + o_t, b_dbeta, mask=m_c)
        b_qb, b_ab = sm90.warpgroup_mma_wait(0, deps=(b_qb, b_ab))
        write_values(dv_desc, dv_ptr, vs, row, i_h, num_rows, HV, V)
    else:
        values = vs.permute((1, 0))
        b_qk = warpgroup_mma(os, values, zero, use_acc=False, is_async=True)
        b_ak = warpgroup_mma(ys.permute((1, 0)), values, zero, use_acc=False, is_async=True)
        b_qb, b_ab, b_qk, b_ak = sm90.warpgroup_mma_wait(0, deps=(b_qb, b_ab, b_qk, b_ak))
        ready()
        ds = gl.allocate_shared_memory(act, [V, K], dstates_desc.layout)
        sm90.copy_in(dstates_desc, [n * V, 0], full.index(1), ds)
    gl.store(p_diag, write_score(dqb_ptr + i_a, b_qb, scale, num_rows, act))
    write_score(dab_ptr + i_a, b_ab, 1.0, num_rows, act)
    if not DELTA:
        gl.store(p_diag + C, write_score(dqk_ptr + i_a, b_qk, scale, num_rows, act))
        write_score(dak_ptr + i_a, b_ak, 1.0, num_rows, act)

        # gradient of v
        if num_rows < C:
            common.zero_tail_rows(os, num_rows, C, V)
        ready()
        none = gl.zeros([C, V], gl.float32, vl)
        mbarrier.wait(full.index(1), 0)
        b_dv = warpgroup_mma(qks.permute((1, 0)), os, none, use_acc=False, is_async=True)
        b_dv = warpgroup_mma(aks.permute((1, 0)), ys.permute((1, 0)), b_dv, is_async=True)
        b_dv = warpgroup_mma(ks, ds.permute((1, 0)), b_dv, is_async=True)
        b_dv = sm90.warpgroup_mma_wait(0, deps=(b_dv,))
        gl.thread_barrier()
        os.store(b_dv.to(act))
        write_values(dv_desc, dv_ptr, os, row, i_h, num_rows, HV, V)
    common.invalidate_mbarriers(full)
