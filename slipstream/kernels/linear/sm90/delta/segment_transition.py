"""Delta rule on sm_90, sequences in segments: what a segment makes of the state that it meets.

    S <- M S + E        back, to the gradients of states:        dS <- M^T dS' + dE

E is the scan's end from a state of zero, the columns of M those from the unit matrix without v; dE
is the scan's end backward. Where a state decays a segment needs not be scanned whole. A token's
exp(g) (I - beta k k^T) makes no state longer than by exp(g) max(1, |beta k.k - 1|), the growths
of solve_tril.py. Once the product of these over a segment's last chunks is below 2^-FAR, M is
taken as zero, and E from those chunks alone (back from the first ones): what is left out is below
float32's rounding of what was there. The gates decide that on the device, for each head.

The partitions are those of chunk_fwd.py, and back of chunk_dstate.py, without their outputs:

    load_partition, 1 warp       wy_partition, 4         state_partition, 4
      k, v, R, beta, G -- full -->  -W = -R diag(exp(G)) k   S from 0, or from the unit matrix
      back q and do too             back W and Z             back dS from 0
                                    -- w_full, p_full -->
                                    <-- w_empty, p_empty   arrives at empty
      <-- empty

    buffers                      stages  arrivals a phase: full / empty
    k, v (q, do), R, beta, G     ST      2 (TMA, and the warp that stores beta and G) / 1
    W [C, K] (Z [C, C])          2       1 / 1: they have been read once their product is there

The first segment's E starts at the sequence's own state, and no M of the first or the last is ever
wanted: these count as M = 0, which `m_is_zero` says of each segment and head. state_passing.py
joins them. Where a sequence goes on at other ranks (context.py) EVERY segment's are wanted.

With states_ptr the same program scans a whole sequence and leaves S before each segment, bit for
bit what chunk_fwd.py's scan has there: segments then change no bits. Without outputs a chunk takes
0.6 of the time, since a multiprocessor's shared memory moves half as much.
"""

from typing import Any, NamedTuple

from slipstream.kernels.linear.sm90.common.device import PoolRefs, alloc_mbarriers
from slipstream.kernels.linear.sm90.delta import chunk_dstate, chunk_fwd
from slipstream.kernels.linear.sm90.delta.device import (
    StateRefs,
    alloc_stages,
    beta_gate_ptr,
    program_coords,
    state_offset,
)
from slipstream.kernels.primitives.gluon_compat import gl, gluon, uniform

state_partition = chunk_fwd.state_partition
wy_partition = chunk_fwd.wy_partition
load_partition = chunk_fwd.load_partition
bwd_state_partition = chunk_dstate.state_partition
bwd_wy_partition = chunk_dstate.wy_partition
bwd_load_partition = chunk_dstate.load_partition

# M is 0 once it has decayed by 2^-32, as in dplr/chunk_fwd.py
NEGLIGIBLE_LOG2 = gl.constexpr(32.0)
MAX_WINDOW_CHUNKS = gl.constexpr(64)  # chunks of which the gates are looked at
OOB_ROW = gl.constexpr(1 << 30)  # past all rows of a descriptor


class EntryStates(NamedTuple):
    """Where the states before segments go."""

    ptr: Any  # of the program's tile of the first one
    rows: Any  # None
    size: Any  # from one to the next
    every: Any  # chunks


@gluon.jit
def effective_chunks(
    beta_gates_ptr,
    lognorm_ptr,
    chunk,
    HV,
    n,
    C: gl.constexpr,
    BLOCKS: gl.constexpr,
    BACK: gl.constexpr,
):
    """Chunks, of n, that a state at the end comes from (back, at the start); whether it is so."""
    wide: gl.constexpr = gl.BlockedLayout([1, 32], [16, 2], [4, 1], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    o = gl.arange(0, MAX_WINDOW_CHUNKS, flat)
    at = chunk + gl.where(o < n, o if BACK else n - 1 - o, 0) * HV
    b = gl.load(beta_gates_ptr + at.to(gl.int64) * (2 * C) + (2 * C - 1))
    for i in gl.static_range(BLOCKS):
        b += gl.load(lognorm_ptr + at * BLOCKS + i)
    b = gl.convert_layout(b, gl.SliceLayout(0, wide))
    o_i = gl.arange(0, MAX_WINDOW_CHUNKS, gl.SliceLayout(1, wide))
    o_j = gl.arange(0, MAX_WINDOW_CHUNKS, gl.SliceLayout(0, wide))
    b = gl.sum(gl.where(o_i[:, None] >= o_j[None, :], b[None, :], 0.0), 1)
    need = gl.min(gl.where((b < -NEGLIGIBLE_LOG2) & (o_i < n), o_i + 1, OOB_ROW), 0)
    return gl.minimum(need, n), need < OOB_ROW


@gluon.jit(do_not_specialize=["T", "N", "HV", "H", "segment"])
def delta_segment_transition_sm90_kernel(
    k_desc,  # [tokens, H * K] by [C, K]
    v_desc,  # [tokens, HV * V] by [C, BV]
    r_desc,  # [tokens, HV * C] by [C, C]
    beta_gates_ptr,  # [chunks, HV, 1 + HAS_GATE, C]: beta and G
    lognorm_ptr,  # [chunks, HV, BLOCKS]
    s_in_ptr,  # [N, HV, K, V]
    transition_ptr,  # [segments, HV, K, V + K]: E and M
    m_is_zero_ptr,  # [segments, HV]
    cu_ptr,  # [N + 1]
    T,
    N,
    HV,
    H,
    segment,
    K: gl.constexpr,
    V: gl.constexpr,
    BV: gl.constexpr,
    C: gl.constexpr,
    ST: gl.constexpr,
    BLOCKS: gl.constexpr,
    HAS_GATE: gl.constexpr,
    HAS_S_IN: gl.constexpr,
    PACKED: gl.constexpr,
    EVERY: gl.constexpr = False,
    HAS_S_OUT: gl.constexpr = False,
    states_ptr=None,  # [segments, HV, K, V], before them; none of segments past a sequence's end
    s_out_ptr=None,  # [N, HV, K, V], with states_ptr
):
    """grid ((V + K) / BV * HV * segments,), 4 warps: BV columns of E, or of M after those; with V 0
    of M alone. EVERY: no segment counts as first or last. With states_ptr: grid (V / BV * HV * N,).
    """
    dtype: gl.constexpr = k_desc.dtype
    NV: gl.constexpr = V // BV
    ks, vs, rs, gs = alloc_stages(k_desc, v_desc, r_desc, 1, 1 + HAS_GATE, K, BV, C, ST)
    ws = gl.allocate_shared_memory(dtype, [2, C, K], k_desc.layout)
    full = alloc_mbarriers(2, ST)
    empty = alloc_mbarriers(1, ST)
    w_full = alloc_mbarriers(1, 2)
    w_empty = alloc_mbarriers(1, 2)
    SCAN: gl.constexpr = states_ptr is not None
    tile, i_h, i_seg, row, length, n, chunk, i_n, i_s, last = program_coords(
        cu_ptr, T, N, HV, T if SCAN else segment, NV if SCAN else NV + K // BV, 1, C, PACKED,
        not SCAN,
    )  # fmt: skip
    if SCAN:
        first = row // segment + i_seg if PACKED else i_seg * gl.cdiv(T, segment)
        at = state_offset(i_seg, i_h, HV, K, V) + tile * BV
        state_refs = StateRefs(s_in_ptr, s_out_ptr, at, at)
        starts = EntryStates(
            states_ptr + (state_offset(first, i_h, HV, K, V) + tile * BV),
            None,
            state_offset(1, 0, HV, K, V),
            segment // C,
        )
        width: gl.constexpr = V
        reads, unit, v_row, v_col = True, K, row, i_h * V + tile * BV
    else:
        of_m = tile >= NV
        begins = i_s == 0
        need = n
        if EVERY:
            begins = i_s < 0
            last = begins
        m_is_zero = begins | last
        if HAS_GATE:
            need, decayed = effective_chunks(
                beta_gates_ptr, lognorm_ptr, chunk, HV, n, C, BLOCKS, False
            )
            m_is_zero = m_is_zero | decayed
        gl.store(m_is_zero_ptr + (i_seg * HV + i_h), m_is_zero.to(gl.int32), mask=tile == 0)
        # chunks before these change the end by less than float32 rounds
        skip = n - need
        # what no segment asks for is not scanned: the last one's E, and an M that counts as zero
        n = uniform(gl.where(last | (of_m & m_is_zero), 0, need))
        chunk += skip * HV
        row += skip * C
        length -= skip * C
        v_col = i_h * V + gl.where(of_m, 0, tile * BV)
        o_in = state_offset(i_n, i_h, HV, K, V) + tile * BV
        o_out = state_offset(i_seg, i_h, HV, K, V + K) + tile * BV
        unit = gl.where(of_m, (tile - NV) * BV, K)
        v_row = gl.where(of_m, OOB_ROW, row)
        reads = begins & (skip == 0) & (tile < NV)
        state_refs = StateRefs(s_in_ptr, transition_ptr, o_in, o_out)
        starts = PoolRefs(None, None, None)
        width: gl.constexpr = V + K
    k_col = i_h // (HV // H) * K
    p_beta_gate, stride = beta_gate_ptr(beta_gates_ptr, chunk, HV, C, HAS_GATE)
    tiles = chunk_fwd.Tiles(ks, vs, rs, gs, ws)
    barriers = chunk_fwd.Barriers(full, empty, w_full, w_empty, w_empty)
    gl.warp_specialize(
        [
            (state_partition, (
                tiles, chunk_fwd.Copies(ws, ws), barriers, state_refs, starts, width, reads, True,
                unit, n,
                K, V, BV, C, ST, HAS_GATE, HAS_S_IN, HAS_S_OUT or not SCAN, False, True)),
            (wy_partition, (tiles, barriers, length, n, K, BV, C, ST, HAS_GATE)),
            (load_partition, (
                k_desc, k_desc, v_desc, r_desc, tiles, barriers, barriers, p_beta_gate, stride, row,
                v_row, n,
                k_col, v_col, i_h * C, C, ST, HAS_GATE, False)),
        ],
        [4, 1],
        [152, 24],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["scale", "T", "N", "HV", "H", "segment"])
def delta_segment_transition_bwd_sm90_kernel(
    q_desc,  # [tokens, H * K] by [C, K]
    k_desc,
    do_desc,  # [tokens, HV * V] by [C, BV]
    r_desc,  # [tokens, HV * C] by [C, C]
    beta_gates_ptr,  # [chunks, HV, 1 + HAS_GATE, C]: beta and G
    lognorm_ptr,  # [chunks, HV, BLOCKS]
    s_in_ptr,  # [N, HV, K, V]: gradient of the state after the sequence
    transition_ptr,  # [segments, HV, K, V]: dE
    cu_ptr,  # [N + 1]
    scale,
    T,
    N,
    HV,
    H,
    segment,
    K: gl.constexpr,
    V: gl.constexpr,
    BV: gl.constexpr,
    C: gl.constexpr,
    ST: gl.constexpr,
    BLOCKS: gl.constexpr,
    HAS_GATE: gl.constexpr,
    HAS_S_IN: gl.constexpr,
    PACKED: gl.constexpr,
    EVERY: gl.constexpr = False,
):
    """grid (V / BV * HV * segments,), 4 warps: BV columns of dE. EVERY: as above."""
    dtype: gl.constexpr = k_desc.dtype
    qs = gl.allocate_shared_memory(dtype, [ST, C, K], q_desc.layout)
    ks, ds, rs, gs = alloc_stages(k_desc, do_desc, r_desc, 1, 1 + HAS_GATE, K, BV, C, ST)
    ws = gl.allocate_shared_memory(dtype, [2, C, K], k_desc.layout)
    zs = gl.allocate_shared_memory(dtype, [2, C, C], r_desc.layout)
    full = alloc_mbarriers(2, ST)
    empty = alloc_mbarriers(1, ST)
    p_full = alloc_mbarriers(1, 2)
    p_empty = alloc_mbarriers(1, 2)
    i_v, i_h, i_seg, row, length, n, chunk, i_n, i_s, last = program_coords(
        cu_ptr, T, N, HV, segment, V // BV, BV, C, PACKED, True
    )
    whole = n
    if HAS_GATE:
        n, _ = effective_chunks(beta_gates_ptr, lognorm_ptr, chunk, HV, n, C, BLOCKS, True)
    first = i_s == 0
    if EVERY:
        first = i_s < 0
        last = first
    reads = last & (n == whole)
    length = gl.minimum(length, n * C)
    n = uniform(gl.where(first, 0, n))
    k_col = i_h // (HV // H) * K
    p_beta_gate, stride = beta_gate_ptr(beta_gates_ptr, chunk, HV, C, HAS_GATE)
    o_in = state_offset(i_n, i_h, HV, K, V) + i_v
    o_out = state_offset(i_seg, i_h, HV, K, V) + i_v
    tiles = chunk_dstate.Tiles(qs, ks, ds, rs, gs, ws, zs)
    copies = chunk_dstate.Copies(ws, ws, p_full, p_full, p_full, p_full)  # not there
    barriers = chunk_dstate.Barriers(full, empty, p_full, p_empty)
    state_refs = StateRefs(s_in_ptr, transition_ptr, o_in, o_out)
    gl.warp_specialize(
        [
            (bwd_state_partition, (
                tiles, copies, barriers, state_refs, reads, True, n, scale,
                K, V, BV, C, ST, HAS_GATE, HAS_S_IN, True, True)),
            (bwd_wy_partition, (tiles, barriers, length, n, scale, K, BV, C, ST, HAS_GATE)),
            (bwd_load_partition, (
                q_desc, k_desc, do_desc, r_desc, tiles, barriers, p_beta_gate, stride, row, n,
                k_col, i_h * V + i_v, i_h * C, C, ST, HAS_GATE)),
        ],
        [4, 1],
        [200, 24],
    )  # fmt: skip
