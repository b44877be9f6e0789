# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportAssignmentType=false
"""A kernel in Gluon that waits at a barrier, and invalidates it or not."""

from slipstream.kernels.primitives.sm90 import gl, gluon, mbarrier


@gluon.jit
def barrier_kernel(o_ptr, ENDED: gl.constexpr):
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.arrive(bar, count=1)
    mbarrier.wait(bar, 0)
    gl.thread_barrier()
    if ENDED:
        mbarrier.invalidate(bar)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    o_x = gl.arange(0, 128, layout)
    gl.store(o_ptr + o_x, o_x.to(gl.float32))
