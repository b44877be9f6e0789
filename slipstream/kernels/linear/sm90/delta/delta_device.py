"""Shared by the scans of the delta rule on sm_90: a program's place, and its loads."""

from typing import Any, NamedTuple

from slipstream.kernels.linear.sm90.common import locate_segment, longest_first
from slipstream.kernels.linear.triton.scalar_decay.device import LOG2E, MIN_CROSSED
from slipstream.kernels.primitives.sm90 import gl, gluon

# M is 0 once it has decayed by 2^-32
NEGLIGIBLE_LOG2 = gl.constexpr(32.0)
OOB_ROW = gl.constexpr(1 << 30)  # past all rows of a descriptor


class StateRefs(NamedTuple):
    """The states at a program's ends, in global memory; None where there is none."""

    in_ptr: Any
    out_ptr: Any
    in_offset: Any
    out_offset: Any


class Queries(NamedTuple):
    """q [2, C, K], and the barriers of its two stages."""

    q: Any
    full: Any
    empty: Any


class Checkpoints(NamedTuple):
    """Where output_partition leaves S for backward."""

    desc: Any
    chunk: Any  # the first before which S is left
    interval: Any  # chunks
    row: Any  # of the first, in desc
    row_step: Any


@gluon.jit
def strong_gates(p_gates, o_i):
    """Where nothing crosses the gate. p_gates: G of a chunk."""
    p = p_gates + o_i
    return gl.load(p) - gl.load(p + -1, mask=o_i > 0, other=0.0) < MIN_CROSSED * LOG2E


@gluon.jit
def program_coords(
    cu_ptr, T, N, HV, segment, TILES: gl.constexpr, BV: gl.constexpr, C: gl.constexpr,
    PACKED: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Coordinates of a program that scans one of TILES tiles of BV columns of a head: the first
    column, the head and the segment; its first token, tokens and chunks, and where the first of
    them is among those of all heads; the sequence, the segment's number in it, whether it is the
    last. With BV 1 the first column is the tile's number.
    """
    # tiles of a head are neighbours: they read the same k, from L2
    pid = gl.program_id(0)
    i_v = (pid % TILES) * BV
    i_h = (pid // TILES) % HV
    i_seg = longest_first(cu_ptr, pid // TILES // HV, N, TILES * HV, PACKED and not SPLIT)
    row, length, first, i_n, i_s, last = locate_segment(
        cu_ptr, i_seg, T, N, segment, C, PACKED, SPLIT
    )
    n = gl.cdiv(length, C)
    # a sequence of no tokens may have a first chunk past the last one
    chunk = gl.where(n > 0, first, 0) * HV + i_h
    return i_v, i_h, i_seg, row, length, n, chunk, i_n, i_s, last


@gluon.jit
def effective_chunks(
    beta_gates_ptr, lognorm_ptr, chunk, HV, n,
    C: gl.constexpr, BLOCKS: gl.constexpr, BACK: gl.constexpr,
):  # fmt: skip
    """Chunks, of n, that a state at the end comes from (back, at the start); whether it is so."""
    wide: gl.constexpr = gl.BlockedLayout([1, 32], [16, 2], [4, 1], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    CHUNKS: gl.constexpr = 64  # of which the gates are looked at
    o = gl.arange(0, CHUNKS, flat)
    at = chunk + gl.where(o < n, o if BACK else n - 1 - o, 0) * HV
    b = gl.load(beta_gates_ptr + at.to(gl.int64) * (2 * C) + (2 * C - 1))
    for i in gl.static_range(BLOCKS):
        b += gl.load(lognorm_ptr + at * BLOCKS + i)
    b = gl.convert_layout(b, gl.SliceLayout(0, wide))
    o_i = gl.arange(0, CHUNKS, gl.SliceLayout(1, wide))
    o_j = gl.arange(0, CHUNKS, gl.SliceLayout(0, wide))
    b = gl.sum(gl.where(o_i[:, None] >= o_j[None, :], b[None, :], 0.0), 1)
    need = gl.min(gl.where((b < -NEGLIGIBLE_LOG2) & (o_i < n), o_i + 1, OOB_ROW), 0)
    return gl.minimum(need, n), need < OOB_ROW


@gluon.jit
def beta_gate_ptr(beta_gates_ptr, chunk, HV, C: gl.constexpr, HAS_GATE: gl.constexpr):
    """beta and G of a chunk of one head, and how far it is to the next chunk's."""
    ROWS: gl.constexpr = 1 + HAS_GATE
    return beta_gates_ptr + chunk.to(gl.int64) * (ROWS * C), HV * (ROWS * C)


@gluon.jit
def state_offset(i_seg, i_h, HV, K: gl.constexpr, V: gl.constexpr):
    """Where a head's state begins, of [segments, HV, K, V]."""
    # in 64 bits: segments x heads x K V passes 2^31
    return (i_seg * gl.full([], 1, gl.int64) * HV + i_h) * (K * V)


@gluon.jit
def checkpoint_index(i_n, row, T, every, C: gl.constexpr, PACKED: gl.constexpr):
    """Where S before a sequence's first token is, of S before `every` chunks of all of them; row:
    that token."""
    number = i_n * gl.cdiv(T, every * C)
    if PACKED:
        number = row // (every * C) + i_n
    return number


@gluon.jit
def checkpoints_of(
    desc, i_n, i_s, i_h, i_v, row, T, segment, every, HV,
    V: gl.constexpr, C: gl.constexpr, PACKED: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Where a program with columns from i_v on leaves S."""
    before = 0  # chunks of the sequence
    if SPLIT:
        before = i_s * (segment // C)
        # that of the sequence: checkpoints are counted from its first token
        row -= i_s * segment
    number = gl.cdiv(before, every)
    marked = number * every - before
    number += checkpoint_index(i_n, row, T, every, C, PACKED)
    return Checkpoints(desc, marked, every, (number * HV + i_h) * V + i_v, HV * V)


@gluon.jit
def load_state(state_refs, b_s, o_k, o_v, V: gl.constexpr, HAS_S_IN: gl.constexpr):
    """The state that a scan begins with, as rows o_v and columns o_k; b_s where there is none."""
    if HAS_S_IN:
        o_in = state_refs.in_offset + o_k[None, :] * V + o_v[:, None]
        b_s = gl.load(state_refs.in_ptr + o_in).to(gl.float32)
    return b_s


@gluon.jit
def store_state(state_refs, b_s, none, o_k, o_v, V: gl.constexpr, HAS_S_OUT: gl.constexpr):
    """The state that a scan ends with, to where it is wanted.

    none: 0, which no compiler knows: the loop would keep what it has in common with o_in.
    """
    if HAS_S_OUT:
        o_out = state_refs.out_offset + none + o_k[None, :] * V + o_v[:, None]
        gl.store(state_refs.out_ptr + o_out, b_s.to(state_refs.out_ptr.dtype.element_ty))


@gluon.jit
def alloc_stages(
    k_desc, v_desc, r_desc, HAS_GATE: gl.constexpr, K: gl.constexpr, BV: gl.constexpr,
    C: gl.constexpr, ST: gl.constexpr,
):  # fmt: skip
    """Shared memory for ST chunks of k, a tile of v, R, beta and, if HAS_GATE, G."""
    dtype: gl.constexpr = k_desc.dtype
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    ks = gl.allocate_shared_memory(dtype, [ST, C, K], k_desc.layout)
    vs = gl.allocate_shared_memory(dtype, [ST, C, BV], v_desc.layout)
    rs = gl.allocate_shared_memory(dtype, [ST, C, C], r_desc.layout)
    gs = gl.allocate_shared_memory(gl.float32, [ST, (1 + HAS_GATE) * C], plain)
    return ks, vs, rs, gs
