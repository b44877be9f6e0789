"""Delta rule, no decay or one a token, on sm_90: the inverses of all chunks' triangles.

    L[i, j] = [i = j] + [i > j] (k_i . k_j) exp(G_i - G_j) beta_j        R = L^-1        [C, C]

by ../common.py. A diagonal of beta k . k says how much longer than 1 the products of 16
tokens' I - beta k k^T make a state at most: 0, as log2, for keys of norm 1 and beta up to 2. What
gates leave of a state is bounded by that.
"""

from slipstream.kernels.linear.sm90 import common
from slipstream.kernels.linear.triton.scalar_decay.device import LOG2E, LOWEST_GATE
from slipstream.kernels.primitives import sm90
from slipstream.kernels.primitives.sm90 import gl, gluon, mbarrier, warpgroup_mma


@gluon.jit
def add(x, y):
    return x + y


@gluon.jit
def fast_exp2(b):
    """0 where that is not a normal number: four instructions less."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=r,r", [b], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit(do_not_specialize=["T", "N", "HV", "H"])
def delta_solve_tril_sm90_kernel(
    k_desc,  # [tokens, H * K] by [C, K]
    r_desc,  # [tokens, HV * C] by [C, C]
    r_ptr,
    g_ptr,  # [tokens, HV]
    beta_ptr,  # [tokens, HV]
    beta_gates_ptr,  # [chunks, HV, 1 + HAS_GATE, C]: beta, G of base 2
    lognorm_ptr,  # [chunks, HV, C // BASE], if there are gates
    cu_ptr,  # [N + 1]
    T, N, HV, H,
    K: gl.constexpr, C: gl.constexpr, BASE: gl.constexpr, HAS_GATE: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    """grid (chunks * HV,), 4 warps: one program inverts one chunk of one value head."""
    al: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    line: gl.constexpr = gl.BlockedLayout([C // 32], [32], [4], [0])
    ks = gl.allocate_shared_memory(k_desc.dtype, [C, K], k_desc.layout)
    betas = gl.allocate_shared_memory(gl.float32, [C], flat)
    bar = common.alloc_mbarriers(1, 1)
    pid = gl.program_id(0)
    i_h = pid % HV
    # a chunk is a segment of C tokens
    row, num_rows, _ = common.locate_sequence(cu_ptr, pid // HV, T, N, C, C, PACKED, True)
    if PACKED and num_rows <= 0:
        return
    mbarrier.expect(bar.index(0), k_desc.block_type.nbytes)
    sm90.copy_in(k_desc, [row, i_h // (HV // H) * K], bar.index(0), ks)
    o_t = gl.arange(0, C, line)
    p_beta_gate = beta_gates_ptr + pid.to(gl.int64) * ((1 + HAS_GATE) * C)
    o_x = (row + o_t).to(gl.int64) * HV + i_h
    b_x = gl.load(beta_ptr + o_x, mask=o_t < num_rows, other=0.0).to(gl.float32)
    betas.store(b_x)
    gl.store(p_beta_gate + o_t, b_x)
    if HAS_GATE:
        sums = gl.allocate_shared_memory(gl.float32, [C], flat)
        b_g = gl.load(g_ptr + o_x, mask=o_t < num_rows, other=0.0).to(gl.float32)
        b_G = gl.associative_scan(gl.where(b_g < LOWEST_GATE, LOWEST_GATE, b_g) * LOG2E, 0, add)
        sums.store(b_G)
        gl.store(p_beta_gate + C + o_t, b_G)
    gl.thread_barrier()
    mbarrier.wait(bar.index(0), 0)
    if num_rows < C:
        common.zero_tail_rows(ks, num_rows, C, K)
        sm90.fence_async_shared()
        gl.thread_barrier()
    zero = gl.zeros([C, C], gl.float32, al)
    b_a = warpgroup_mma(ks, ks.permute((1, 0)), zero, use_acc=False, is_async=True)
    b_beta = betas.load(gl.SliceLayout(0, al))[None, :]
    if HAS_GATE:
        G_i = sums.load(gl.SliceLayout(1, al))
        G_j = sums.load(gl.SliceLayout(0, al))
        b_beta *= fast_exp2(G_i[:, None] - G_j[None, :])
    b_a = sm90.warpgroup_mma_wait(0, deps=(b_a,))
    b_r, b_diag = common.inverse(b_a * b_beta)
    if HAS_GATE:
        b_grow = gl.sum(gl.log2(gl.maximum(gl.abs(b_diag - 1.0), 1.0)), 1)
        o_b = gl.arange(0, C // BASE, b_grow.type.layout)
        gl.store(lognorm_ptr + pid * (C // BASE) + o_b, b_grow)
    out = gl.allocate_shared_memory(r_desc.dtype, [C, C], r_desc.layout)
    out.store(b_r.to(r_desc.dtype))
    sm90.fence_async_shared()
    gl.thread_barrier()
    common.store_tile(r_desc, r_ptr, out, row, i_h * C, HV * C, num_rows, C, C)
    common.invalidate_mbarriers(bar)
    sm90.store_wait(0)
