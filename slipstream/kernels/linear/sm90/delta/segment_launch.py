"""Delta rule on sm_90, sequences in segments: what a segment makes of the state that it meets, and
the launches of that and of the state that each begins with. They depend on no device values.

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

Delta rule on sm_90, sequences in segments: the state that each segment meets
(segment_launch.py).

    S = s_in        S <- M S + E        back from the last segment:        dS <- M^T dS + dE

A segment begins at the nearest one before it whose M counts as zero, and goes on from that one's E:
where states decay within a segment that is the one before. V as the rows, in float32.

One rank has s_in in E of the first segment, whose M counts as zero. Where sequences go on at other
ranks s_in comes later, so that E and M of all segments are their own, and what sequences end with
is wanted, too.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.linear import backend, delta, inputs
from slipstream.kernels.linear.segments import CHUNK, TILE_V, Segments, delta_grid, sequence_args
from slipstream.kernels.linear.sm90.common import PoolRefs, alloc_mbarriers, token_tiles
from slipstream.kernels.linear.sm90.delta import chunk_dstate, chunk_fwd, delta_device
from slipstream.kernels.linear.triton.delta.solve_tril import tile_product
from slipstream.kernels.linear.triton.scalar_decay.device import locate_chunk
from slipstream.kernels.primitives.sm90 import gl, gluon, uniform
from slipstream.runtime.launch_cache import cached


@triton.jit(do_not_specialize=["T", "N", "HV", "segment"])
def delta_state_passing_sm90_kernel(
    e_ptr,  # [segments, HV, K, E_WIDTH]: E and what is beside it; back dE
    m_ptr,  # [segments, HV, K, M_WIDTH]: M and what is beside it
    m_is_zero_ptr,  # [segments, HV]
    s_in_ptr,  # [N, HV, K, V]
    entry_ptr,  # [segments, HV, K, V]
    s_out_ptr,  # [N, HV, K, V]: what sequences end with; back, begin with
    cu_ptr,  # [N + 1]
    T, N, HV, segment,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, E_WIDTH: tl.constexpr,
    M_WIDTH: tl.constexpr, BACK: tl.constexpr, HAS_S_IN: tl.constexpr, HAS_S_OUT: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """grid (V / BV * HV * segments,), with HAS_S_OUT (V / BV * HV * (N + segments),): the first
    are of s_out, each as if it were of the segment after the last."""
    NV: tl.constexpr = V // BV
    pid = tl.program_id(0)
    i_h = (pid // NV) % HV
    i_seg = pid // NV // HV
    is_end = False
    if HAS_S_OUT:
        is_end = i_seg < N
        first = _first_segment(cu_ptr, tl.minimum(i_seg, N - 1), T, segment, PACKED)
        i_seg = tl.where(is_end, first, i_seg - N)
    begin, length, i_s = locate_chunk(cu_ptr, i_seg, T, N, segment, PACKED)
    if PACKED:
        i_n = i_seg - i_s - begin // segment
    else:
        i_n = i_seg // tl.cdiv(T, segment)
    count = tl.cdiv(length, segment)
    step = 1 if BACK else -1
    # how many segments come before, and where they end
    before = count - 1 - i_s if BACK else i_s
    if HAS_S_OUT:
        before = tl.where(is_end, count, before)
        i_seg += tl.where(is_end, -1 if BACK else count, 0)
    o_k = tl.arange(0, K)
    o_v = (pid % NV) * BV + tl.arange(0, BV)
    o_s = o_k[None, :] * V + o_v[:, None]
    o_e = o_k[None, :] * E_WIDTH + o_v[:, None]
    if BACK:
        o_m = o_k[:, None] * M_WIDTH + o_k[None, :]
    else:
        o_m = o_k[None, :] * M_WIDTH + o_k[:, None]
    o_n = (i_n.to(tl.int64) * HV + i_h) * (K * V)
    steps = 0  # whose M counts
    p_zero = m_is_zero_ptr + i_seg * HV + i_h
    # without s_in nothing meets the first segment's M
    most = before if HAS_S_IN else before - 1
    while tl.load(p_zero + (steps + 1) * step * HV, mask=steps < most, other=1) == 0:
        steps += 1
    if steps < before:
        at = (i_seg + (steps + 1) * step).to(tl.int64) * HV + i_h
        b_s = tl.load(e_ptr + at * (K * E_WIDTH) + o_e)
    else:
        b_s = tl.zeros((BV, K), tl.float32)
        if HAS_S_IN:
            b_s = tl.load(s_in_ptr + o_n + o_s).to(tl.float32)
    for i in range(steps):
        at = (i_seg + (steps - i) * step).to(tl.int64) * HV + i_h
        b_m = tl.load(m_ptr + at * (K * M_WIDTH) + o_m)
        b_s = tile_product(b_s, b_m, "halves") + tl.load(e_ptr + at * (K * E_WIDTH) + o_e)
    if HAS_S_OUT and is_end:
        tl.store(s_out_ptr + o_n + o_s, b_s)
    else:
        tl.store(entry_ptr + (i_seg.to(tl.int64) * HV + i_h) * (K * V) + o_s, b_s)


@triton.jit
def _first_segment(cu_ptr, i_n, T, segment, PACKED: tl.constexpr):
    """The number of the first segment of sequence i_n. Of a sequence without segments it is a
    number that locate_chunk gives to none."""
    if PACKED:
        begin = tl.maximum(tl.load(cu_ptr + i_n).to(tl.int64), 0)
        first = (begin // segment).to(tl.int32) + i_n
    else:
        first = i_n * tl.cdiv(T, segment)
    return first


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
    ks, vs, rs, gs = delta_device.alloc_stages(k_desc, v_desc, r_desc, HAS_GATE, K, BV, C, ST)
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
        v_row = gl.where(of_m, delta_device.OOB_ROW, row)
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


BASE = 16  # rows of the blocks that the inverse begins with
SCAN: dict[str, Any] = {"BV": TILE_V, "C": CHUNK, "ST": 3, "num_warps": 4}
_OPTIONS = SCAN | {"BLOCKS": CHUNK // BASE, "maxnreg": 168}  # of 12 warps


def segment_transition(
    terms: inputs.LinearInputs,
    wy: delta.WYFactors,
    s_in: Tensor | None,
    segments: Segments,
    alone: bool = False,
    every: bool = False,
) -> tuple[Tensor, Tensor]:
    """E and M of segments [count, HV, K, V + K], or M alone [count, HV, K, K], and where M counts
    as zero [count, HV]; with every, of a sequence's first and last segment too."""
    (HV, V), K = terms.v.shape[2:], terms.q.shape[-1]
    wide = K if alone else V + K
    transition = wy.beta_gate.new_empty(segments.count, HV, K, wide)
    m_is_zero = transition.new_empty(segments.count, HV, dtype=torch.int32)
    launch: Any = cached(delta_segment_transition_sm90_kernel)[
        (wide // TILE_V * HV * segments.count,)
    ]
    launch(
        lognorm_ptr=wy.transition_lognorm,
        transition_ptr=transition,
        m_is_zero_ptr=m_is_zero,
        **_transition_args(terms, wy, segments, s_in, None) | {"V": wide - K, "EVERY": every},
    )
    return transition, m_is_zero


def states_before(
    terms: inputs.LinearInputs, wy: delta.WYFactors, segments: Segments, s_out: Tensor | None
) -> Tensor:
    """The state before each segment [count, HV, K, V], of one scan; s_out gets the last ones."""
    (HV, V), K = terms.v.shape[2:], terms.q.shape[-1]
    states = wy.beta_gate.new_empty(segments.count, HV, K, V)
    launch: Any = cached(delta_segment_transition_sm90_kernel)[delta_grid(terms, None)]
    launch(
        lognorm_ptr=None,
        transition_ptr=None,
        m_is_zero_ptr=None,
        states_ptr=states,
        **_transition_args(terms, wy, segments, terms.initial_state, s_out),
    )
    return states


def _transition_args(
    terms: inputs.LinearInputs,
    wy: delta.WYFactors,
    segments: Segments,
    s_in: Tensor | None,
    s_out: Tensor | None,
) -> dict[str, Any]:
    args = delta.delta_args(terms, segments, s_in, s_out) | _OPTIONS
    del args["SPLIT"]
    return args | {
        "k_desc": token_tiles(terms.k, terms.k.shape[-1]),
        "v_desc": token_tiles(terms.v, TILE_V),
        "r_desc": token_tiles(wy.r, CHUNK),
        "beta_gates_ptr": wy.beta_gate,
    }


def segment_transition_bwd(
    terms: inputs.LinearInputs,
    do: Tensor,
    wy: delta.WYFactors,
    scale: float,
    s_in: Tensor | None,
    segments: Segments,
    every: bool = False,
) -> Tensor:
    """dE of segments [count, HV, K, V]; with every, of a sequence's first segment too."""
    (HV, V), K = terms.v.shape[2:], terms.q.shape[-1]
    dE = wy.beta_gate.new_empty(segments.count, HV, K, V)
    launch: Any = cached(chunk_dstate.delta_chunk_dstate_sm90_kernel)[delta_grid(terms, segments)]
    launch(
        q_desc=token_tiles(terms.q, K),
        k_desc=token_tiles(terms.k, K),
        do_desc=token_tiles(do, TILE_V),
        r_desc=token_tiles(wy.r, CHUNK),
        beta_gates_ptr=wy.beta_gate,
        dv_desc=None,
        states_desc=None,
        dv_ptr=None,
        lognorm_ptr=wy.transition_lognorm,
        scale=scale,
        EVERY=every,
        **delta.delta_args(terms, segments, s_in, dE),
        **_OPTIONS,
    )
    return dE


def entry_dstates(
    terms: inputs.LinearInputs,
    do: Tensor,
    wy: delta.WYFactors,
    scale: float,
    dfinal: Tensor | None,
    segments: Segments,
    exchange: backend.Exchange,
) -> Tensor:
    """The gradient of the state after each segment [count, HV, K, V], once the exchange has said
    what dfinal has from other ranks."""
    M, m_is_zero = segment_transition(terms, wy, None, segments, alone=True, every=True)
    dE = segment_transition_bwd(terms, do, wy, scale, None, segments, every=True)
    return state_passing(terms, dE, M, m_is_zero, dfinal, segments, exchange, reverse=True)


def state_passing(
    terms: inputs.LinearInputs,
    E: Tensor,
    M: Tensor,
    m_is_zero: Tensor,
    s_in: Tensor | None,
    segments: Segments,
    exchange: backend.Exchange | None = None,
    reverse: bool = False,
    s_out: Tensor | None = None,
) -> Tensor:
    """The state before each segment [count, HV, K, V]; reverse: the gradient of that after it.

    Args:
        E, M: [count, HV, K, V] and [count, HV, K, K]; there may be others beside their rows.
        s_in, s_out: before and after all, or the other way round; s_out is written.
        exchange: says what other ranks have of s_in. E and M are then of every segment.
    """
    HV, V = terms.v.shape[2:]
    K = terms.q.shape[-1]
    entry = E.new_empty(segments.count, HV, K, V)

    def run(states: Tensor, s_out: Tensor | None) -> None:
        ends = 0 if s_out is None else terms.sequences
        programs = V // TILE_V * HV * (segments.count + ends)
        launch: Any = cached(delta_state_passing_sm90_kernel)[(programs,)]
        launch(
            e_ptr=E,
            m_ptr=M,
            m_is_zero_ptr=m_is_zero,
            s_in_ptr=s_in,
            entry_ptr=states,
            s_out_ptr=s_out,
            segment=segments.tokens,
            **sequence_args(terms),
            K=K,
            V=V,
            BV=TILE_V,
            E_WIDTH=E.stride(2),
            M_WIDTH=M.stride(2),
            BACK=reverse,
            HAS_S_IN=s_in is not None,
            HAS_S_OUT=s_out is not None,
            num_warps=4,
            num_stages=1,
        )

    def transition() -> Tensor:
        return torch.where(m_is_zero[..., None, None] == 0, M, 0.0)

    backend.pass_states(run, entry, s_out, terms, segments, transition, exchange, reads_others=True)
    return entry
