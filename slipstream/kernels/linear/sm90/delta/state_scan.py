"""The states before the segments of sequences of the delta rule, by the partitions of chunk_fwd.py
that carry S: bit for bit what its scan has there.

    load_partition, 1 warp       wy_partition, 4         state_partition, 4
      k, v, R, beta, G -- full -->  R diag(exp(G)) k       R v - W S
                                    -W -- w_full ----->    S, kept before a segment's first chunk
                                    <-- w_empty            arrives at empty
      <-- empty

    buffers               stages  arrivals a phase: full / empty
    k, v, R, beta, G      ST      2 (TMA, and the warp that stores beta and G) / 1
    W [C, K]              2       1 / 1: W has been read once w is there

Without outputs a chunk takes 0.6 of the time, since a multiprocessor's shared memory moves half as
much; then chunk_fwd.py begins at every segment at once. So segments change no bits.
"""

from typing import Any, NamedTuple

from slipstream.kernels.linear.sm90.common.device import alloc_mbarriers
from slipstream.kernels.linear.sm90.delta import chunk_fwd
from slipstream.kernels.linear.sm90.delta.device import (
    StateRefs,
    alloc_stages,
    beta_gate_ptr,
    program_coords,
    state_offset,
)
from slipstream.kernels.primitives.gluon_compat import gl, gluon

state_partition = chunk_fwd.state_partition
wy_partition = chunk_fwd.wy_partition
load_partition = chunk_fwd.load_partition


class EntryStates(NamedTuple):
    """Where the states before segments go."""

    ptr: Any  # of the program's tile of the first one
    rows: Any  # None
    size: Any  # from one to the next
    every: Any  # chunks


@gluon.jit(do_not_specialize=["T", "N", "HV", "H", "segment"])
def delta_state_scan_sm90_kernel(
    k_desc,  # [tokens, H * K] by [C, K]
    v_desc,  # [tokens, HV * V] by [C, BV]
    r_desc,  # [tokens, HV * C] by [C, C]
    beta_gates_ptr,  # [chunks, HV, 1 + HAS_GATE, C]: beta and G
    s_in_ptr,  # [N, HV, K, V]
    s_out_ptr,  # [N, HV, K, V]
    states_ptr,  # [segments, HV, K, V], before them; none of segments past a sequence's end
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
    HAS_GATE: gl.constexpr,
    HAS_S_IN: gl.constexpr,
    HAS_S_OUT: gl.constexpr,
    PACKED: gl.constexpr,
):
    """grid (V / BV * HV * N,), 4 warps: BV columns of V of one head and sequence."""
    dtype: gl.constexpr = k_desc.dtype
    ks, vs, rs, gs = alloc_stages(k_desc, v_desc, r_desc, 1, 1 + HAS_GATE, K, BV, C, ST)
    ws = gl.allocate_shared_memory(dtype, [2, C, K], k_desc.layout)
    full = alloc_mbarriers(2, ST)
    empty = alloc_mbarriers(1, ST)
    w_full = alloc_mbarriers(1, 2)
    w_empty = alloc_mbarriers(1, 2)
    i_v, i_h, i_n, row, length, n, chunk, _, _, _ = program_coords(
        cu_ptr, T, N, HV, T, V // BV, BV, C, PACKED, False
    )
    first = row // segment + i_n if PACKED else i_n * gl.cdiv(T, segment)
    k_col = i_h // (HV // H) * K
    p_beta_gate, stride = beta_gate_ptr(beta_gates_ptr, chunk, HV, C, HAS_GATE)
    at = state_offset(i_n, i_h, HV, K, V) + i_v
    starts = EntryStates(
        states_ptr + (state_offset(first, i_h, HV, K, V) + i_v),
        None,
        state_offset(1, 0, HV, K, V),
        segment // C,
    )
    tiles = chunk_fwd.Tiles(ks, vs, rs, gs, ws)
    barriers = chunk_fwd.Barriers(full, empty, w_full, w_empty, w_empty)
    gl.warp_specialize(
        [
            (state_partition, (
                tiles, chunk_fwd.Copies(ws, ws), barriers, StateRefs(s_in_ptr, s_out_ptr, at, at),
                starts, V, True, True, K, n,
                K, V, BV, C, ST, HAS_GATE, HAS_S_IN, HAS_S_OUT, False, True)),
            (wy_partition, (tiles, barriers, length, n, K, BV, C, ST, HAS_GATE)),
            (load_partition, (
                k_desc, k_desc, v_desc, r_desc, tiles, barriers, barriers, p_beta_gate, stride, row,
                row, n, k_col, i_h * V + i_v, i_h * C, C, ST, HAS_GATE, False)),
        ],
        [4, 1],
        [152, 24],
    )  # fmt: skip
