"""Decays per channel, or free a and b, on sm_90: from a chunk's scores to its U and W.

R = (I + b_a)^-1        W = -R beta A or R A        U^T = v^T (R beta)^T or v^T (R ak)^T
"""

from collections import namedtuple

from slipstream.kernels.linear.sm90 import common
from slipstream.kernels.primitives import sm90
from slipstream.kernels.primitives.sm90 import gl, gluon, warpgroup_mma

# a chunk's v, how much of it is written, W, U and R
ChunkRefs = namedtuple("ChunkRefs", "v write w_out u_out r")

# The inverse's columns of a chunk's first half are 2^HEADROOM of what they are, and the others
# 2^(HEADROOM - 2 APART), which is what both halves of A differ by: the latter have to stay normal.
HEADROOM = gl.constexpr(4.0)


@gluon.jit
def split(b, dtype: gl.constexpr):
    """b rounded to dtype, and the rest of it, rounded too."""
    high = b.to(dtype)
    return high, (b - high.to(gl.float32)).to(dtype)


@gluon.jit
def ready():
    """Makes writes to shared memory visible to products of all warps."""
    sm90.fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def scores(lhs, rhs, NK: gl.constexpr, zero, none=0):
    """Rows of some tiles by rows of others, [64, 64]. none: as put has it."""
    b = zero
    for n in gl.static_range(NK):
        b_r = rhs.index(none + n).permute((1, 0))
        b = warpgroup_mma(lhs.index(none + n), b_r, b, use_acc=n > 0, is_async=True)
    return sm90.warpgroup_mma_wait(0, deps=(b,))


@gluon.jit
def put(p, b, N: gl.constexpr, rows: gl.constexpr, none=0):
    """A tile [64, 64] at p, in rows of N, coalesced.

    none: 0; in a loop one that no compiler knows, or offsets would take registers all the time.
    """
    o_r = gl.arange(0, 64, gl.SliceLayout(1, rows)) + none
    o_c = gl.arange(0, 64, gl.SliceLayout(0, rows))
    p = p + o_r[:, None] * N + o_c[None, :]
    gl.store(p, gl.convert_layout(b, rows))


@gluon.jit
def put_late(p, b, N: gl.constexpr, rows: gl.constexpr):
    """As put, but only rows of the second half and columns of the first of a tile [64, 64]."""
    o_r = gl.arange(0, 64, gl.SliceLayout(1, rows))[:, None]
    o_c = gl.arange(0, 64, gl.SliceLayout(0, rows))[None, :]
    gl.store(p + o_r * N + o_c, gl.convert_layout(b, rows), mask=(o_r >= 32) & (o_c < 32))


@gluon.jit
def written(b_v, p_w, m):
    """v times how much of it is written, rounded."""
    b_w = gl.load(p_w, mask=m, other=0.0)
    return (b_v.to(gl.float32) * b_w.to(gl.float32)).to(b_v.dtype)


@gluon.jit
def solve(b_a, aks, reads, middles, beta_ptr, refs, keep, num_rows, token_heads, c, none=0):
    """W and U of a chunk, and R if keep, from I + b_a [64, 64].

    reads: tiles [64, 64] of A, if APART relative to middles [NK, 64], m of wy.py, or to -APART
    where that is None. aks: ak, of dplr.
    write_ptr: of v, gated delta, which has no beta.
    Pointers are those of the chunk. none: as put has it.
    """
    C: gl.constexpr = 64
    NK: gl.constexpr = c.K // 64
    NV: gl.constexpr = (c.V + 63) // 64
    act: gl.constexpr = reads.dtype
    al: gl.constexpr = b_a.type.layout
    aa: gl.constexpr = gl.DotOperandLayout(0, al, 2)
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], act)
    o_i = gl.arange(0, 64, gl.SliceLayout(1, al)) + none
    o_j = gl.arange(0, 64, gl.SliceLayout(0, al)) + none
    zero = gl.zeros([64, 64], gl.float32, al)
    o_r = gl.arange(0, 64, gl.SliceLayout(1, rows))[:, None] + none
    o_v = gl.arange(0, 64, gl.SliceLayout(0, rows))[None, :]
    p_v = refs.v + o_r * (token_heads * c.V) + o_v
    # early, so that v arrives while the inverse is made
    b_v0 = gl.load(p_v, mask=o_r < num_rows, other=0.0)
    if NV > 1:
        b_v1 = gl.load(p_v + 64, mask=o_r < num_rows, other=0.0)
    b_r, _ = common.inverse(b_a)
    if keep != 0:
        put(refs.r, b_r.to(act), C, rows, none)
    if beta_ptr is not None:
        b_beta = gl.load(beta_ptr + o_j * token_heads, mask=o_j < num_rows, other=0.0)
        b_r = b_r * b_beta.to(gl.float32)[None, :]
    if c.APART > 0:
        b_r *= gl.where(o_j < 32, 2.0**HEADROOM, 2.0 ** (HEADROOM - 2 * c.APART))[None, :]
    # R in two parts of 16 bits: else its rounding would be in W and U
    r_high, r_low = split(b_r, act)
    # from registers as left operands, which takes no shared memory
    lhs_high = gl.convert_layout(r_high, aa)
    lhs_low = gl.convert_layout(r_low, aa)
    for n in gl.static_range(NK):
        # the small part first, so that it is not lost beside the large one
        b_w = warpgroup_mma(lhs_low, reads.index(none + n), zero, use_acc=False, is_async=True)
        b_w = warpgroup_mma(lhs_high, reads.index(none + n), b_w, is_async=True)
        b_w = sm90.warpgroup_mma_wait(0, deps=(b_w,))
        if c.APART > 0:
            b_back = 2.0**-HEADROOM
            if middles is not None:
                b_m = middles.index(none + n).load(gl.SliceLayout(0, al))
                b_back = common.exp2_of_whole(b_m + (c.APART - HEADROOM))[None, :]
            b_w = b_w * b_back
        if c.DELTA:
            b_w = -b_w
        put(refs.w_out + n * 64, b_w.to(act), c.K, rows, none)
    if c.APART > 0:
        b_back = gl.where(o_j < 32, 2.0**-HEADROOM, 2.0 ** (2 * c.APART - HEADROOM))[None, :]
        r_high = (r_high * b_back).to(act)
        r_low = (r_low * b_back).to(act)
    if not c.DELTA:
        lhs_high = gl.convert_layout(r_high, aa)
        lhs_low = gl.convert_layout(r_low, aa)
        b_r = warpgroup_mma(lhs_low, aks, zero, use_acc=False, is_async=True)
        b_r = warpgroup_mma(lhs_high, aks, b_r, is_async=True)
        b_r = sm90.warpgroup_mma_wait(0, deps=(b_r,))
        r_high, r_low = split(b_r, act)
    if refs.write is not None:  # this late, or it would be on the stack
        p_w = refs.write + o_r * (token_heads * c.V) + o_v
        b_v0 = written(b_v0, p_w, o_r < num_rows)
        if NV > 1:
            b_v1 = written(b_v1, p_w + 64, o_r < num_rows)
    # what is allocated here may come where other warps still read
    gl.thread_barrier()
    rs = gl.allocate_shared_memory(act, [2, 64, 64], tile)
    vs = gl.allocate_shared_memory(act, [NV, 64, 64], tile)
    rs.index(none).store(r_high)
    rs.index(none + 1).store(r_low)
    vs.index(none).store(b_v0)
    if NV > 1:
        vs.index(none + 1).store(b_v1)
    ready()
    p_u = refs.u_out + o_i[:, None] * C + o_j[None, :]
    for n in gl.static_range(NV):
        b_v = vs.index(none + n).permute((1, 0))
        right = rs.index(none + 1).permute((1, 0))
        b_u = warpgroup_mma(b_v, right, zero, use_acc=False, is_async=True)
        right = rs.index(none).permute((1, 0))
        b_u = warpgroup_mma(b_v, right, b_u, is_async=True)
        b_u = sm90.warpgroup_mma_wait(0, deps=(b_u,))
        # float32: the scan adds W S to it, which may nearly cancel it
        gl.store(p_u + n * (64 * C), b_u)
