"""The producer warp of the attention forward (forward.py): TMA loads of unit after unit.

Order of a unit's loads: k[0], q of each warpgroup, then k[i] and v[i - 1] alternating, v[last].
That is the order in which the warpgroups wait for them: no load delays one needed earlier.
"""

from typing import Any, NamedTuple

from slipstream.kernels.attention.sm90.common import (
    fetch,
    locate_tile,
    tile_coords,
    visible_key_tiles,
    wait_empty,
)
from slipstream.kernels.attention.sm90.tile_scheduler import fetch_next_tile, program_id_volatile
from slipstream.kernels.primitives.gluon_compat import copy_in, gl, gluon, mbarrier


class Buffers(NamedTuple):
    """Tiles in shared memory."""

    q: Any  # one or two stages a warpgroup
    k: Any
    v: Any


class Barriers(NamedTuple):
    """Two for each buffer: it is filled; it may be filled again."""

    q: Any
    k: Any
    v: Any


@gluon.constexpr_function
def panels(D):
    """Boxes by which TMA loads rows of q and k: each is to be a power of two wide."""
    return 3 if D == 192 else 1


@gluon.jit
def _fetch_panels(desc, row, col, full, bufs, stage, PANELS: gl.constexpr):
    """Starts to load a tile of q or k."""
    mbarrier.expect(full, desc.block_type.nbytes * PANELS)
    for i in gl.static_range(PANELS):
        buffer = bufs.index(stage * PANELS + i)
        copy_in(desc, [row, col + i * desc.block_type.shape[1]], full, buffer)


@gluon.jit
def load_partition(descs, buffers, full, empty, offsets, sizes, window, strides, scheduler,
                   NC: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, ST: gl.constexpr,
                   FLAGS: gl.constexpr):  # fmt: skip
    desc_q, desc_k, desc_v = descs
    strides_q, strides_k, strides_v = strides
    PANELS: gl.constexpr = panels(D)
    Q_STAGES: gl.constexpr = buffers.q.shape[0] // (NC * PANELS)
    group, units = sizes.group, sizes.units
    i_step = units * 0
    units_done = units * 0
    unit = program_id_volatile(i_step)
    while unit < units:
        loc = locate_tile(unit, offsets, sizes, 64 * NC, False, FLAGS)
        visible = visible_key_tiles(loc.row, loc.queries, loc.keys, window, 64 * NC, BN, FLAGS)
        row_q, col_q = tile_coords(strides_q, loc.i_b, loc.i_h, loc.begin + loc.row)
        row_k, col_k = tile_coords(
            strides_k, loc.i_kb, loc.i_h // group, loc.begin_k + visible.first
        )
        row_v, col_v = tile_coords(
            strides_v, loc.i_kb, loc.i_h // group, loc.begin_k + visible.first
        )
        # the first tile of keys before q, whose buffer the last unit's o may still leave
        wait_empty(empty.k, i_step, ST)
        _fetch_panels(
            desc_k, row_k, col_k, full.k.index(i_step % ST), buffers.k, i_step % ST, PANELS
        )
        for c in gl.static_range(NC):
            stage_q = units_done % Q_STAGES * NC + c
            mbarrier.wait(empty.q.index(stage_q), ((units_done // Q_STAGES) & 1) ^ 1)
            _fetch_panels(
                desc_q, row_q + c * 64, col_q, full.q.index(stage_q), buffers.q, stage_q, PANELS
            )
        for i in range(1, visible.num_tiles):
            stage = (i_step + i) % ST
            wait_empty(empty.k, i_step + i, ST)
            _fetch_panels(
                desc_k, row_k + i * BN, col_k, full.k.index(stage), buffers.k, stage, PANELS
            )
            stage = (i_step + i - 1) % ST
            wait_empty(empty.v, i_step + i - 1, ST)
            fetch(desc_v, row_v + (i - 1) * BN, col_v, full.v.index(stage), buffers.v.index(stage))
        i_step += visible.num_tiles
        stage = (i_step - 1) % ST
        wait_empty(empty.v, i_step - 1, ST)
        fetch(
            desc_v,
            row_v + (visible.num_tiles - 1) * BN,
            col_v,
            full.v.index(stage),
            buffers.v.index(stage),
        )
        # after all loads of this unit are on their way: the counter's latency is hidden
        unit = fetch_next_tile(unit, scheduler, units_done, FLAGS)
        units_done += 1
