"""Delta rule on sm_90, sequences in segments: what a segment makes of the state that it meets.

    S <- M S + E        back, to the gradients of states:        dS <- M^T dS' + dE

E is the scan's end from a state of zero, the columns of M those from the unit matrix without v; dE
is the scan's end backward, by chunk_dstate.py. Where a state decays a segment needs not be scanned
whole. A token's exp(g) (I - beta k k^T) makes no state longer than by exp(g) max(1, |beta k.k -
1|), the growths of solve_tril.py. Once the product of these over a segment's last chunks is below
2^-NEGLIGIBLE_LOG2, M is taken as zero, and E from those chunks alone (back from the first ones):
what is left out is below float32's rounding of what was there. The gates decide that on the device,
for each head.

The partitions are those of chunk_fwd.py without their outputs:

    load_partition, 1 warp       wy_partition, 4         state_partition, 4
      k, v, R, beta, G -- full -->  -W = -R diag(exp(G)) k   S from 0, or from the unit matrix
                                    -- w_full, p_full -->
                                    <-- w_empty, p_empty   arrives at empty
      <-- empty

    buffers                      stages  arrivals a phase: full / empty
    k, v, R, beta, G             ST      2 (TMA, and the warp that stores beta and G) / 1
    W [C, K]                     2       1 / 1: it has been read once its product is there

The first segment's E starts at the sequence's own state, and no M of the first or the last is ever
wanted: these count as M = 0, which `m_is_zero` says of each segment and head. state_passing.py
joins them. Where a sequence goes on at other ranks (context.py) EVERY segment's are wanted.

With states_ptr the same program scans a whole sequence and leaves S before each segment, bit for
bit what chunk_fwd.py's scan has there: segments then change no bits. Without outputs a chunk takes
0.6 of the time, since a multiprocessor's shared memory moves half as much.
"""

from typing import Any, NamedTuple

from slipstream.kernels.linear.sm90.common.device import PoolRefs, alloc_mbarriers
from slipstream.kernels.linear.sm90.delta import chunk_fwd, delta_device
from slipstream.kernels.linear.sm90.delta.delta_device import OOB_ROW
from slipstream.kernels.primitives.sm90 import gl, gluon, uniform

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
    T, N, HV, H, segment,
    K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, C: gl.constexpr, ST: gl.constexpr,
    BLOCKS: gl.constexpr, HAS_GATE: gl.constexpr, HAS_S_IN: gl.constexpr, PACKED: gl.constexpr,
    EVERY: gl.constexpr = False,
    HAS_S_OUT: gl.constexpr = False,
    states_ptr=None,  # [segments, HV, K, V], before them; none of segments past a sequence's end
    s_out_ptr=None,  # [N, HV, K, V], with states_ptr
):  # fmt: skip
    """grid ((V + K) / BV * HV * segments,), 4 warps: BV columns of E, or of M after those; with V 0
    of M alone. EVERY: no segment counts as first or last. With states_ptr: grid (V / BV * HV * N,).
    """
    dtype: gl.constexpr = k_desc.dtype
    NV: gl.constexpr = V // BV
    ks, vs, rs, gs = delta_device.alloc_stages(
        k_desc, v_desc, r_desc, 1, 1 + HAS_GATE, K, BV, C, ST
    )
    ws = gl.allocate_shared_memory(dtype, [2, C, K], k_desc.layout)
    full = alloc_mbarriers(2, ST)
    empty = alloc_mbarriers(1, ST)
    w_full = alloc_mbarriers(1, 2)
    w_empty = alloc_mbarriers(1, 2)
    SCAN: gl.constexpr = states_ptr is not None
    tile, i_h, i_seg, row, length, n, chunk, i_n, i_s, last = delta_device.program_coords(
        cu_ptr, T, N, HV, T if SCAN else segment, NV if SCAN else NV + K // BV, 1, C, PACKED,
        not SCAN,
    )  # fmt: skip
    if SCAN:
        first = row // segment + i_seg if PACKED else i_seg * gl.cdiv(T, segment)
        at = delta_device.state_offset(i_seg, i_h, HV, K, V) + tile * BV
        state_refs = delta_device.StateRefs(s_in_ptr, s_out_ptr, at, at)
        starts = EntryStates(
            states_ptr + (delta_device.state_offset(first, i_h, HV, K, V) + tile * BV),
            None,
            delta_device.state_offset(1, 0, HV, K, V),
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
            need, decayed = delta_device.effective_chunks(
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
        o_in = delta_device.state_offset(i_n, i_h, HV, K, V) + tile * BV
        o_out = delta_device.state_offset(i_seg, i_h, HV, K, V + K) + tile * BV
        unit = gl.where(of_m, (tile - NV) * BV, K)
        v_row = gl.where(of_m, OOB_ROW, row)
        reads = begins & (skip == 0) & (tile < NV)
        state_refs = delta_device.StateRefs(s_in_ptr, transition_ptr, o_in, o_out)
        starts = PoolRefs(None, None, None)
        width: gl.constexpr = V + K
    k_col = i_h // (HV // H) * K
    p_beta_gate, stride = delta_device.beta_gate_ptr(beta_gates_ptr, chunk, HV, C, HAS_GATE)
    tiles = chunk_fwd.Tiles(ks, vs, rs, gs, ws)
    barriers = chunk_fwd.Barriers(full, empty, w_full, w_empty, w_empty)
    c: gl.constexpr = chunk_fwd.Constants(
        K, V, BV, C, ST, HAS_GATE, HAS_S_IN, HAS_S_OUT or not SCAN, False, False, True
    )
    gl.warp_specialize(
        [
            (state_partition, (
                tiles, chunk_fwd.Copies(ws, ws), barriers, state_refs, starts, width, reads, True,
                unit, n, c)),
            (wy_partition, (tiles, barriers, length, n, c)),
            (load_partition, (
                (k_desc, k_desc, v_desc, r_desc), tiles, barriers, barriers, p_beta_gate,
                stride, row, v_row, n, k_col, v_col, i_h * C, c, False)),
        ],
        [4, 1],
        [152, 24],
    )  # fmt: skip
