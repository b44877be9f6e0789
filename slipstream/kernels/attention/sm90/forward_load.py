"""The warp of the attention forward that loads: queries, keys and values of unit after unit."""

from slipstream.kernels.attention.sm90.common import (
    fetch,
    keys_seen,
    locate_tile,
    tile_coords,
    wait_empty,
)
from slipstream.kernels.attention.sm90.tile_scheduler import fetch_next_tile, program_id_volatile
from slipstream.kernels.primitives.gluon_compat import copy_in, gl, gluon, mbarrier


@gluon.constexpr_function
def panels(D):
    """In how many parts TMA loads rows of q and k: they are to be powers of two."""
    return 3 if D == 192 else 1


@gluon.jit
def _fetch(desc, row, col, full, bufs, slot, PANELS: gl.constexpr):
    """Starts to load a tile of q or k."""
    mbarrier.expect(full, desc.block_type.nbytes * PANELS)
    for i in gl.static_range(PANELS):
        at = bufs.index(slot * PANELS + i)
        copy_in(desc, [row, col + i * desc.block_type.shape[1]], full, at)


@gluon.jit
def load_units(descs, buffers, full, empty, offsets, sizes, window, ats, board, NC: gl.constexpr,
          BN: gl.constexpr, D: gl.constexpr, ST: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    desc_q, desc_k, desc_v = descs
    bufs_q, bufs_k, bufs_v = buffers
    full_q, full_k, full_v = full
    empty_q, empty_k, empty_v = empty
    at_q, at_k, at_v = ats
    PANELS: gl.constexpr = panels(D)
    ROOM: gl.constexpr = bufs_q.shape[0] // (NC * PANELS)
    group, units = sizes[4], sizes[8]
    turn = units * 0
    mine = units * 0
    unit = program_id_volatile(turn)
    while unit < units:
        i_h, i_b, begin, queries, i_kb, begin_k, keys, _, row, _ = locate_tile(
            unit, offsets, sizes, 64 * NC, False, FLAGS
        )
        low, count, _, _ = keys_seen(row, queries, keys, window, 64 * NC, BN, FLAGS)
        row_q, col_q = tile_coords(at_q, i_b, i_h, begin + row)
        row_k, col_k = tile_coords(at_k, i_kb, i_h // group, begin_k + low)
        row_v, col_v = tile_coords(at_v, i_kb, i_h // group, begin_k + low)
        wait_empty(empty_k, turn, ST)
        _fetch(desc_k, row_k, col_k, full_k.index(turn % ST), bufs_k, turn % ST, PANELS)
        for c in gl.static_range(NC):
            slot_q = mine % ROOM * NC + c
            mbarrier.wait(empty_q.index(slot_q), ((mine // ROOM) & 1) ^ 1)
            _fetch(desc_q, row_q + c * 64, col_q, full_q.index(slot_q), bufs_q, slot_q, PANELS)
        for i in range(1, count):
            slot = (turn + i) % ST
            wait_empty(empty_k, turn + i, ST)
            _fetch(desc_k, row_k + i * BN, col_k, full_k.index(slot), bufs_k, slot, PANELS)
            slot = (turn + i - 1) % ST
            wait_empty(empty_v, turn + i - 1, ST)
            fetch(desc_v, row_v + (i - 1) * BN, col_v, full_v.index(slot), bufs_v.index(slot))
        turn += count
        slot = (turn - 1) % ST
        wait_empty(empty_v, turn - 1, ST)
        fetch(desc_v, row_v + (count - 1) * BN, col_v, full_v.index(slot), bufs_v.index(slot))
        unit = fetch_next_tile(unit, board, mine, FLAGS)
        mine += 1
