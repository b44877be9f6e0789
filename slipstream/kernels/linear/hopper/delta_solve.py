"""Delta rule, no decay or one a token, on sm_90: the inverses of all chunks' triangles.

    L[i, j] = [i = j] + [i > j] (k_i . k_j) exp(G_i - G_j) beta_j        R = L^-1        [C, C]

by the steps of the portable delta_solve.py: blocks of 16 rows on the diagonal by substitution, then
X - X M X twice, with M those blocks of L that join pairs. X has blocks on its diagonal alone, so
that X M is the same blocks of X L. Here the rows of a block lie in a thread and the columns in
lanes, so that a step of the substitution exchanges one number a thread; products take both halves
of their operands, and those on the right of a level are in shared memory before its first product.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportUnboundVariable=false

from slipstream.kernels.gluon import (
    fence_async_shared,
    gl,
    gluon,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from slipstream.kernels.linear.hopper.parts import place

LOG2E = gl.constexpr(1.4426950408889634)
LOWEST = gl.constexpr(-128.0)


@gluon.jit
def halves(b):
    """b cut to bf16, and the rest of it, rounded."""
    high = (b.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
    return high.to(gl.bfloat16), (b - high).to(gl.bfloat16)


@gluon.jit
def product(left_high, left_low, right_high, right_low, b, ADD: gl.constexpr):
    """Left by right in float32, but for 2^-16 of it or less; on top of b if ADD."""
    b = warpgroup_mma(left_high, right_low, b, use_acc=ADD, is_async=True)
    b = warpgroup_mma(left_low, right_high, b, is_async=True)
    b = warpgroup_mma(left_high, right_high, b, is_async=True)
    return warpgroup_mma_wait(0, deps=(b,))


@gluon.jit
def invert_blocks(b_a, block, NB: gl.constexpr, BASE: gl.constexpr):
    """Inverses of the blocks of BASE rows on the diagonal of I + b_a, in their place."""
    wide: gl.constexpr = gl.BlockedLayout(
        [1, BASE // 2, NB, 1], [1, 2, 1, BASE], [4, 1, 1, 1], [3, 2, 1, 0]
    )
    xl: gl.constexpr = gl.SliceLayout(2, wide)  # [NB, row, column]
    row_layout: gl.constexpr = gl.SliceLayout(2, xl)
    o_block = gl.arange(0, NB, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, wide))))
    o_other = gl.arange(0, NB, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, wide))))
    own = o_block[:, None, None, None] == o_other[None, None, :, None]
    b_d = gl.convert_layout(gl.reshape(b_a, [NB, BASE, NB, BASE]), wide)
    b_d = gl.sum(gl.where(own, b_d, 0.0), 2)
    block.store(gl.permute(b_d, (1, 0, 2)))
    gl.thread_barrier()
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    rows = block._reinterpret(gl.float32, [BASE, NB, BASE], flat)  # the same, to be indexed
    o_row = gl.arange(0, BASE, gl.SliceLayout(0, gl.SliceLayout(2, xl)))[None, :, None]
    o_column = gl.arange(0, BASE, gl.SliceLayout(0, gl.SliceLayout(1, xl)))[None, None, :]
    b_x = gl.where(o_row == o_column, 1.0, gl.zeros([NB, BASE, BASE], gl.float32, xl))
    for i in gl.static_range(1, BASE):
        b_row = rows.index(i).load(row_layout)  # [NB, BASE]
        b_new = gl.sum(b_row[:, :, None] * b_x, 1)
        b_x = gl.where(o_row == i, b_x - b_new[:, None, :], b_x)
    b_x = gl.where(own, b_x[:, :, None, :], 0.0)
    return gl.convert_layout(gl.reshape(b_x, [NB * BASE, NB * BASE]), b_a.type.layout)


@gluon.jit(do_not_specialize=["T", "N", "HV", "H"])
def delta_solve_sm90_kernel(
    k_ptr,  # [tokens, H, K]
    g_ptr,  # [tokens, HV]
    beta_ptr,  # [tokens, HV]
    r_ptr,  # [tokens, HV, C]
    rows_ptr,  # [chunks, HV, 1 + HAS_GATE, C]: beta, G of base 2
    cu_ptr,  # [N + 1]
    T,
    N,
    HV,
    H,
    K: gl.constexpr,
    C: gl.constexpr,
    HAS_GATE: gl.constexpr,
    PACKED: gl.constexpr,
):
    """grid (chunks * HV,), 4 warps: one program inverts one chunk of one value head."""
    BASE: gl.constexpr = 16
    al: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    aa: gl.constexpr = gl.DotOperandLayout(0, al, 2)
    rl: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    dtype: gl.constexpr = k_ptr.dtype.element_ty
    k_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], dtype)
    m_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0])
    ks = gl.allocate_shared_memory(dtype, [C, K], k_shared)
    ms = gl.allocate_shared_memory(gl.bfloat16, [4, C, C], m_shared)
    block = gl.allocate_shared_memory(gl.float32, [BASE, C // BASE, BASE], plain)
    pid = gl.program_id(0)
    i_h = pid % HV
    # a chunk is a segment of C tokens
    row, left, _ = place(cu_ptr, pid // HV, T, N, C, C, PACKED, True)
    o_t = gl.arange(0, C, gl.SliceLayout(1, rl))
    o_k = gl.arange(0, K, gl.SliceLayout(0, rl))
    p_k = k_ptr + (row.to(gl.int64) * H + i_h // (HV // H)) * K
    p_k += o_t[:, None] * (H * K) + o_k[None, :]
    ks.store(gl.load(p_k, mask=(o_t < left)[:, None], other=0.0))
    o_i = gl.arange(0, C, gl.SliceLayout(1, al))
    o_j = gl.arange(0, C, gl.SliceLayout(0, al))
    p_rows = rows_ptr + pid.to(gl.int64) * ((1 + HAS_GATE) * C)
    token = row.to(gl.int64) * HV + i_h
    b_beta = gl.load(beta_ptr + token + o_j * HV, mask=o_j < left, other=0.0).to(gl.float32)
    gl.store(p_rows + o_j, b_beta)
    zero = gl.zeros([C, C], gl.float32, al)
    fence_async_shared()
    gl.thread_barrier()
    b_a = warpgroup_mma(ks, ks.permute((1, 0)), zero, use_acc=False, is_async=True)
    if HAS_GATE:
        b_g = gl.load(g_ptr + token + o_j * HV, mask=o_j < left, other=0.0).to(gl.float32)
        b_g = gl.where(b_g < LOWEST, LOWEST, b_g) * LOG2E
        G_i = gl.sum(gl.where(o_i[:, None] >= o_j[None, :], b_g[None, :], 0.0), 1)
        G_j = gl.convert_layout(G_i, gl.SliceLayout(0, al))
        gl.store(p_rows + C + o_i, G_i)
    b_a = warpgroup_mma_wait(0, deps=(b_a,))
    seen = o_i[:, None] > o_j[None, :]
    if HAS_GATE:
        b_a = b_a * gl.exp2(gl.where(seen, G_i[:, None] - G_j[None, :], float("-inf")))
    b_a = gl.where(seen, b_a * b_beta[None, :], 0.0)
    a_high, a_low = halves(b_a)
    ms.index(0).store(a_high)
    ms.index(1).store(a_low)
    b_x = invert_blocks(b_a, block, C // BASE, BASE)
    for level in gl.static_range(2):
        r_block = (o_i // (BASE << level))[:, None]
        below = (r_block == (o_j // (BASE << level))[None, :] + 1) & (r_block % 2 == 1)
        x_high, x_low = halves(b_x)
        gl.thread_barrier()
        ms.index(2).store(x_high)
        ms.index(3).store(x_low)
        fence_async_shared()
        gl.thread_barrier()
        b_p = product(
            gl.convert_layout(x_high, aa), gl.convert_layout(x_low, aa),
            ms.index(0), ms.index(1), zero, False,
        )  # fmt: skip
        p_high, p_low = halves(gl.where(below, -b_p, 0.0))
        b_x = product(
            gl.convert_layout(p_high, aa), gl.convert_layout(p_low, aa),
            ms.index(2), ms.index(3), b_x, True,
        )  # fmt: skip
    o_c = gl.arange(0, C, gl.SliceLayout(0, rl))
    p_r = r_ptr + token * C + o_t[:, None] * (HV * C) + o_c[None, :]
    b_r = gl.convert_layout(b_x.to(r_ptr.dtype.element_ty), rl)
    gl.store(p_r, b_r, mask=(o_t < left)[:, None])
