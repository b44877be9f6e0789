"""Parts of persistent products on sm_90: the order of their tiles, the ring of slices that one
warp loads and two warpgroups multiply, and how a tile is written.

Slice i_step, counted over all tiles of a program, is in stage i_step % STAGES of the ring. A phase
of `full` is a slice that is there, one of `empty` a slice that both warpgroups have read.
"""

from slipstream.kernels.primitives import sm90
from slipstream.kernels.primitives.sm90 import gl, gluon, mbarrier


@gluon.jit
def locate_tile(i, m_tiles, n_tiles, GROUP: gl.constexpr):
    """Row and column of tile i: in groups of GROUP rows of tiles, column by column, so that those
    at work at one time share what they read in the L2 cache."""
    group = GROUP * n_tiles
    first = i // group * GROUP
    rows = gl.minimum(m_tiles - first, GROUP)
    return first + i % group % rows, i % group // rows


@gluon.jit
def alloc_ring_barriers(STAGES: gl.constexpr):
    """full, of one arrival, and empty, of two."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)  # both warpgroups have read it
    return full, empty


@gluon.jit
def begin_slice(full, empty, i_step, STAGES: gl.constexpr, nbytes: gl.constexpr):
    """Waits until the stage of slice i_step is free; returns it and the barrier of its nbytes."""
    stage = i_step % STAGES
    mbarrier.wait(empty.index(stage), ((i_step // STAGES) & 1) ^ 1)
    bar = full.index(stage)
    mbarrier.expect(bar, nbytes)
    return stage, bar


@gluon.jit
def wait_for_slice(full, i_step, STAGES: gl.constexpr):
    """The stage of a slice, once it is there."""
    stage = i_step % STAGES
    mbarrier.wait(full.index(stage), (i_step // STAGES) & 1)
    return stage


@gluon.jit
def free_slice_before(empty, i_step, STAGES: gl.constexpr, pred=True):
    """Says that a warpgroup has read the slice before i_step."""
    mbarrier.arrive(empty.index((i_step + STAGES - 1) % STAGES), count=1, pred=pred)


@gluon.jit
def halves(b_x):
    """The left and the right columns; registers stay where they are."""
    # split takes the last of the dimensions, so that the one of the halves goes there
    rows: gl.constexpr = b_x.shape[0]
    half: gl.constexpr = b_x.shape[1] // 2
    return gl.split(gl.permute(gl.reshape(b_x, (rows, 2, half)), (0, 2, 1)))


@gluon.jit
def write_tile(b_x, desc, buffer, row, col):
    """By TMA, through one of two buffers of a warpgroup."""
    # all of this warpgroup's stores but the last have left their buffer
    sm90.store_wait(1)
    buffer.store(b_x.to(desc.dtype))
    sm90.fence_async_shared()
    sm90.copy_out(desc, [row, col], buffer)
