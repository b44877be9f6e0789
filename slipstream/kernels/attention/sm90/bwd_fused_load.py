"""The warp of bwd_fused.py that loads."""

from typing import Any, NamedTuple

from slipstream.kernels.attention.sm90.bwd_dq_accumulate import tile_of_sequence
from slipstream.kernels.attention.sm90.common import (
    Sizes,
    fetch,
    locate_tile,
    opaque,
    tile_coords,
    visible_query_tiles,
    wait_empty,
)
from slipstream.kernels.attention.sm90.tile_scheduler import program_id_volatile
from slipstream.kernels.primitives.gluon_compat import copy_in, gl, gluon, mbarrier


class LoadBuffers(NamedTuple):
    """Those of bwd_fused.Buffers that this warp fills."""

    k: Any
    v: Any
    q: Any
    do: Any
    base: Any
    delta: Any


class LoadFull(NamedTuple):
    """Their barriers: base comes with q, delta with do."""

    kv: Any
    q: Any
    do: Any


@gluon.jit
def fetch_both(desc, row, col, buffer, desc_rows, at, rows, full):
    """Starts to load a tile and a number for each of its rows, under one barrier."""
    mbarrier.expect(full, desc.block_type.nbytes + desc_rows.block_type.nbytes)
    copy_in(desc, [row, col], full, buffer)
    copy_in(desc_rows, [at], full, rows)


@gluon.jit
def load_partition(descs, buffers, full, empty_x, offsets, sizes, window, strides,
                    BM: gl.constexpr, ST: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    """The producer warp: k and v, then q with base and do with delta, the last queries first."""
    desc_q, desc_k, desc_v, desc_do, desc_base, desc_delta = descs
    strides_q, strides_k, strides_v, strides_do = strides
    units = sizes.units
    unit = program_id_volatile(units)
    i_step = unit >> 31  # an opaque zero
    group = Sizes(*opaque(sizes, i_step)).group
    loc = locate_tile(unit, offsets, sizes, 128, True, FLAGS)
    bounds = opaque(window, i_step)
    visible = visible_query_tiles(loc.row, loc.queries, loc.keys, bounds, BM, 128, FLAGS, 0)
    row_k, col_k = tile_coords(strides_k, loc.i_kb, loc.i_h, loc.begin_k + loc.row)
    row_v, col_v = tile_coords(strides_v, loc.i_kb, loc.i_h, loc.begin_k + loc.row)
    fetch(desc_k, row_k, col_k, full.kv.index(0), buffers.k.index(0))
    fetch(desc_v, row_v, col_v, full.kv.index(1), buffers.v.index(0))
    for i_g in range(group):
        i_h = loc.i_h * group + i_g
        row_q, col_q = tile_coords(
            opaque(strides_q, i_step), loc.i_b, i_h, loc.begin + visible.first
        )
        row_do, col_do = tile_coords(
            opaque(strides_do, i_step), loc.i_b, i_h, loc.begin + visible.first
        )
        i_r = (
            tile_of_sequence(
                loc.i_b, i_h, loc.i_n, loc.begin, Sizes(*opaque(sizes, i_step)), BM, FLAGS
            )
            * BM
            + visible.first
        )
        for i in range(visible.num_tiles):
            stage = i_step % ST
            on = (visible.num_tiles - 1 - i) * BM
            wait_empty(empty_x, i_step, ST)
            fetch_both(desc_q, row_q + on, col_q, buffers.q.index(stage), desc_base, i_r + on,
                        buffers.base.index(stage), full.q.index(stage))  # fmt: skip
            fetch_both(desc_do, row_do + on, col_do, buffers.do.index(stage), desc_delta, i_r + on,
                        buffers.delta.index(stage), full.do.index(stage))  # fmt: skip
            i_step += 1
