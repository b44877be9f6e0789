"""Device functions that kernels on sm_90 of several families share.

Scalars are numbers that all threads of a program know, in shared memory: read where they are
wanted, they take no registers in between, and nothing made of them is made before a loop and kept.
"""

from slipstream.kernels.primitives.sm90 import gl, gluon


@gluon.jit
def alloc_scalars(COUNT: gl.constexpr):
    """Shared memory for COUNT numbers."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return gl.allocate_shared_memory(gl.int32, [COUNT, 1], layout)


@gluon.jit
def store_scalars(pad, numbers, FIRST: gl.constexpr, WARPS: gl.constexpr):
    """Writes them down from place FIRST on; a barrier comes before others read them."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    for i in gl.static_range(len(numbers)):
        pad.index(FIRST + i).store(gl.full([1], numbers[i], gl.int32, layout))


@gluon.jit
def load_scalar(pad, AT: gl.constexpr, WARPS: gl.constexpr):
    """The number at a place; WARPS: of those that read it."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.max(pad.index(AT).load(layout), 0)


@gluon.jit
def halves(b):
    """b cut to bf16, and the rest of it, rounded."""
    # cut, not rounded: the rest is exact then, and one instruction does it
    high = (b.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
    return high.to(gl.bfloat16), (b - high).to(gl.bfloat16)
