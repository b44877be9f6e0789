"""The warps of bwd_fused.py that add the tiles of dq, one after another, in global memory.

Tiles of queries of a sequence, by head, are numbered on and on; a packed sequence begins at tile
cu_q[n] / BM + n of its head.
"""

from slipstream.kernels.attention.sm90.common import (
    LEFT,
    PACKED_Q,
    locate_tile,
    opaque,
    queries_seen,
    wait_full,
)
from slipstream.kernels.attention.sm90.tile_scheduler import program_id_volatile
from slipstream.kernels.primitives.gluon_compat import copy_out, gl, gluon, mbarrier, store_wait
from slipstream.kernels.primitives.semaphore import (
    semaphore_acquire,
    semaphore_release,
    tma_reduce_add,
)


@gluon.jit
def tile_of_sequence(i_b, i_h, i_n, begin, sizes, BM: gl.constexpr, FLAGS: gl.constexpr):
    """The first tile of a sequence's queries."""
    T, H, N = sizes[0], sizes[2], sizes[3]
    if FLAGS & PACKED_Q:
        first = i_h * (T // BM + N) + begin // BM + i_n
    else:
        first = (i_b * H + i_h) * gl.cdiv(T, BM)
    return first


@gluon.jit
def _add(parity: gl.constexpr, desc_dq, turns_ptr, buffers, full, empty, offsets, sizes, window,
         BM: gl.constexpr, D: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    """Writes or adds every second tile of dq once all earlier keys' are there."""
    group, units = sizes[4], sizes[8]
    unit = program_id_volatile(units)
    turn = unit >> 31  # 0, but not to a compiler
    i_kv, i_b, begin, queries, _, _, keys, _, row, i_n = locate_tile(
        unit, offsets, sizes, 128, True, FLAGS
    )
    sides = opaque(window, turn)
    low, count, _, _ = queries_seen(row, queries, keys, sides, BM, 128, FLAGS, 0)
    for i_g in range(group):
        there = opaque(sizes, turn)
        first = tile_of_sequence(i_b, i_kv * group + i_g, i_n, begin, there, BM, FLAGS)
        for i in range(count):
            if turn % 2 == parity:
                query = low + (count - 1 - i) * BM
                tile = first + query // BM
                rank = row // 128
                if FLAGS & LEFT:  # the first keys that these queries see
                    rank -= gl.maximum(query + keys - queries - sides[0], 0) // 128
                while semaphore_acquire(turns_ptr + tile) < rank:
                    pass
                wait_full(full, turn, 2)
                for c in gl.static_range(2):
                    to = [tile * BM, c * (D // 2)]
                    if rank == 0:
                        copy_out(desc_dq, to, buffers.index(2 * parity + c))
                    else:
                        tma_reduce_add(desc_dq, to, buffers.index(2 * parity + c))
                store_wait(0)
                mbarrier.arrive(empty.index(parity))
                semaphore_release(turns_ptr + tile, rank + 1)
            turn += 1


@gluon.jit
def add_even(desc_dq, turns_ptr, buffers, full, empty, offsets, sizes, window, BM: gl.constexpr,
             D: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    _add(0, desc_dq, turns_ptr, buffers, full, empty, offsets, sizes, window, BM, D, FLAGS)


@gluon.jit
def add_odd(desc_dq, turns_ptr, buffers, full, empty, offsets, sizes, window, BM: gl.constexpr,
            D: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    _add(1, desc_dq, turns_ptr, buffers, full, empty, offsets, sizes, window, BM, D, FLAGS)
