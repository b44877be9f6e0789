"""The warp of bwd_fused.py that loads, and the names of that kernel's buffers and barriers."""

from typing import Any, NamedTuple

from slipstream.kernels.linear.sm90.common.device import load_beta_gate
from slipstream.kernels.linear.sm90.delta.bwd_fused_dqk import (
    CHECKPOINT,
    CHUNK,
    CHUNKS,
    HEAD,
    K_COL,
    ROW,
    WORKSPACE,
)
from slipstream.kernels.linear.sm90.delta.bwd_fused_recompute import square
from slipstream.kernels.linear.sm90.delta.device import beta_gate_ptr
from slipstream.kernels.primitives.gluon_compat import copy_in, gl, gluon, mbarrier
from slipstream.kernels.primitives.semaphore import proxy_fence
from slipstream.kernels.primitives.smem_scalars import load_scalar


class Tiles(NamedTuple):
    """Buffers of what load_partition reads: ST stages of the first four, one of the others."""

    q: Any  # then dq; on the way to a block's end R
    k: Any  # then dk
    do: Any  # on the way to a block's end v
    beta_gate: Any
    r: Any
    w: Any
    state: Any
    a: Any  # scale tril(q k^T decay), of state_partition alone


class Buffers(NamedTuple):
    """Buffers that state_partition fills for dqk_partition, and sums of dqk_partition alone."""

    dstate: Any
    dv: Any
    b: Any
    m: Any
    diagonal: Any
    token_sums: Any
    state_products: Any


class Barriers(NamedTuple):
    """Barriers of the tiles, and of the buffers that state_partition fills."""

    full: Any  # q, k, do and beta_gate
    empty: Any
    r_full: Any
    r_empty: Any
    w_full: Any
    state_full: Any
    pairs_full: Any  # dstate, dv, b, m and diagonal of a chunk
    w_empty: Any  # of w and dstate
    state_empty: Any  # of state, dv, b, m and diagonal
    grads_full: Any  # dq and dk
    entry_full: Any  # S before a block
    recomputed: Any  # S and w of a block's chunks, in global memory


@gluon.jit
def locate_checkpoint_block(i, n, every):
    """The part that is next after i of n chunks have been gone back through: its first chunk, and
    how many it has."""
    first = gl.maximum(n - 1 - i, 0) // every * every
    return first, n - i - first


@gluon.jit
def load_partition(
    descs, beta_gates_ptr, tiles, barriers, pad, HV, every,
    V: gl.constexpr, C: gl.constexpr, ST: gl.constexpr, HAS_GATE: gl.constexpr,
):  # fmt: skip
    q_desc, k_desc, v_desc, do_desc, r_desc, w_desc, states_desc, checkpoints_desc = descs
    nbytes: gl.constexpr = k_desc.block_type.nbytes + do_desc.block_type.nbytes
    row = load_scalar(pad, ROW, 1)
    n = load_scalar(pad, CHUNKS, 1)
    head = load_scalar(pad, HEAD, 1)
    k_col = load_scalar(pad, K_COL, 1)
    v_col = head * V
    r_col = head * C
    p_beta_gate, stride = beta_gate_ptr(
        beta_gates_ptr, load_scalar(pad, CHUNK, 1) * HV + head, HV, C, HAS_GATE
    )
    # where this program has S before the second chunk of a part
    scratch = load_scalar(pad, WORKSPACE, 1) * ((every - 2) * V)
    m_step = HV * V  # from S before a part to that before the next
    num_blocks = gl.maximum(gl.cdiv(n, every), 1)
    checkpoint = load_scalar(pad, CHECKPOINT, 1) + (num_blocks - 1) * m_step
    i = 0
    for block in range(num_blocks):
        first, count = locate_checkpoint_block(i, n, every)
        for at in range(2 * count):
            j = 2 * i + at
            s = j % ST
            back = at >= count
            c = gl.where(back, first + 2 * count - 1 - at, first + at)
            t = row + c * C
            b_beta_gate = load_beta_gate(p_beta_gate + c * stride, C, HAS_GATE)
            mbarrier.wait(barriers.empty.index(s), ((j // ST) & 1) ^ 1)
            if back:
                mbarrier.expect(barriers.full.index(s), nbytes + q_desc.block_type.nbytes)
                copy_in(k_desc, [t, k_col], barriers.full.index(s), tiles.k.index(s))
                copy_in(q_desc, [t, k_col], barriers.full.index(s), tiles.q.index(s))
                copy_in(do_desc, [t, v_col], barriers.full.index(s), tiles.do.index(s))
            else:
                b_r = square(tiles.q.index(s), tiles.r.index(0), C)
                mbarrier.expect(barriers.full.index(s), nbytes + r_desc.block_type.nbytes)
                copy_in(k_desc, [t, k_col], barriers.full.index(s), tiles.k.index(s))
                copy_in(v_desc, [t, v_col], barriers.full.index(s), tiles.do.index(s))
                copy_in(r_desc, [t, r_col], barriers.full.index(s), b_r)
            tiles.beta_gate.index(s).store(b_beta_gate)
            mbarrier.arrive(barriers.full.index(s), count=1)
            if at == 0:
                mbarrier.wait(barriers.state_empty.index(0), (i & 1) ^ 1)
                mbarrier.expect(barriers.entry_full.index(0), checkpoints_desc.block_type.nbytes)
                copy_in(
                    checkpoints_desc,
                    [checkpoint, 0],
                    barriers.entry_full.index(0),
                    tiles.state.index(0),
                )
            before = ((i + at - count) & 1) ^ 1
            if back:
                mbarrier.wait(barriers.r_empty.index(0), before)
                mbarrier.expect(barriers.r_full.index(0), r_desc.block_type.nbytes)
                copy_in(r_desc, [t, r_col], barriers.r_full.index(0), tiles.r.index(0))
            if at > count:  # those of the last chunk are there
                if at == count + 1:
                    mbarrier.wait(barriers.recomputed.index(0), block & 1)
                    proxy_fence()
                mbarrier.wait(barriers.w_empty.index(0), before)
                mbarrier.expect(barriers.w_full.index(0), w_desc.block_type.nbytes)
                copy_in(w_desc, [t, v_col], barriers.w_full.index(0), tiles.w.index(0))
                mbarrier.wait(barriers.state_empty.index(0), before)
                mbarrier.expect(barriers.state_full.index(0), states_desc.block_type.nbytes)
                if c == first:
                    copy_in(
                        checkpoints_desc,
                        [checkpoint, 0],
                        barriers.state_full.index(0),
                        tiles.state.index(0),
                    )
                else:
                    s_row = scratch + (c - first - 1) * V
                    copy_in(
                        states_desc, [s_row, 0], barriers.state_full.index(0), tiles.state.index(0)
                    )
        i += count
        checkpoint -= m_step
