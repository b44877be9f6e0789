"""The two warps of bwd_fused.py that add tiles of dq to float32 sums in global memory, alternating.

Each waits for its semaphore (all earlier keys have added to this tile of queries) and for full.dq,
starts the TMA copies, waits until they are done, and releases buffer and semaphore. Two warps, so
that one waits for memory while the other waits for its semaphore.

Tiles of queries are numbered by head and sequence; a packed sequence begins at tile
cu_q[n] / BM + n of its head.
"""

from slipstream.kernels.attention.sm90.common import (
    LEFT,
    PACKED_Q,
    Sizes,
    locate_tile,
    opaque,
    visible_query_tiles,
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
    """The number of the first tile of a sequence's queries."""
    T, H, N = sizes.T, sizes.H, sizes.N
    if FLAGS & PACKED_Q:
        first = i_h * (T // BM + N) + begin // BM + i_n
    else:
        first = (i_b * H + i_h) * gl.cdiv(T, BM)
    return first


@gluon.jit
def _add(parity: gl.constexpr, desc_dq, semaphores_ptr, buffers, full, empty, offsets, sizes,
         window, BM: gl.constexpr, D: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    """Stores or adds every second tile of dq, in the order of the keys."""
    group, units = sizes.group, sizes.units
    unit = program_id_volatile(units)
    i_step = unit >> 31  # an opaque zero
    loc = locate_tile(unit, offsets, sizes, 128, True, FLAGS)
    bounds = opaque(window, i_step)
    visible = visible_query_tiles(loc.row, loc.queries, loc.keys, bounds, BM, 128, FLAGS, 0)
    for i_g in range(group):
        opaque_sizes = Sizes(*opaque(sizes, i_step))
        first = tile_of_sequence(
            loc.i_b, loc.i_h * group + i_g, loc.i_n, loc.begin, opaque_sizes, BM, FLAGS
        )
        for i in range(visible.num_tiles):
            if i_step % 2 == parity:
                query = visible.first + (visible.num_tiles - 1 - i) * BM
                tile = first + query // BM
                rank = loc.row // 128
                # rank: tiles of keys before this one, with a left bound from the first that is seen
                if FLAGS & LEFT:
                    rank -= gl.maximum(query + loc.keys - loc.queries - bounds[0], 0) // 128
                while semaphore_acquire(semaphores_ptr + tile) < rank:
                    pass
                wait_full(full, i_step, 2)
                for c in gl.static_range(2):
                    to = [tile * BM, c * (D // 2)]
                    if rank == 0:
                        copy_out(desc_dq, to, buffers.index(2 * parity + c))
                    else:
                        tma_reduce_add(desc_dq, to, buffers.index(2 * parity + c))
                # global memory has it: the buffer is free, and the next tile of keys may add
                store_wait(0)
                mbarrier.arrive(empty.index(parity))
                semaphore_release(semaphores_ptr + tile, rank + 1)
            i_step += 1


@gluon.jit
def add_even(desc_dq, semaphores_ptr, buffers, full, empty, offsets, sizes, window,
             BM: gl.constexpr, D: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    _add(0, desc_dq, semaphores_ptr, buffers, full, empty, offsets, sizes, window, BM, D, FLAGS)


@gluon.jit
def add_odd(desc_dq, semaphores_ptr, buffers, full, empty, offsets, sizes, window, BM: gl.constexpr,
            D: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    _add(1, desc_dq, semaphores_ptr, buffers, full, empty, offsets, sizes, window, BM, D, FLAGS)
