"""The one place that imports Gluon: its names differ between Triton's releases, 3.6 to 3.9.

Kernels use the names of Triton 3.6; what a later release calls otherwise gets its old name here.
Import this only where a kernel is wanted: it imports Triton.
"""

import triton
from triton.experimental import gluon as gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper as _hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as TensorDescriptor

mbarrier, tma, fence_async_shared = _hopper.mbarrier, _hopper.tma, _hopper.fence_async_shared
warpgroup_mma, warpgroup_mma_wait = _hopper.warpgroup_mma, _hopper.warpgroup_mma_wait
# a tile between global and shared memory by TMA; 3.9 has the new names alone, 3.6 the old ones
copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
copy_out = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
store_wait = tma.store_wait
# from 3.7 on
if not hasattr(gl, "thread_barrier"):
    gl.thread_barrier = gl.barrier
# from 3.9 on
if not hasattr(gl.shared_memory_descriptor, "_reinterpret"):
    gl.shared_memory_descriptor._reinterpret = gl.shared_memory_descriptor.reinterpret
_BEFORE_3_8 = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8)
# Whether `_reinterpret` takes a shape that is larger than the tile; 3.8 refuses it.
LARGER_VIEWS = gl.constexpr(_BEFORE_3_8)
# Whether threads come together before each wait for an mbarrier and each product that reads shared
# memory without being asked to; 3.8 leaves many of these barriers out.
IMPLICIT_BARRIERS = gl.constexpr(_BEFORE_3_8)


@gluon.jit
def threads_together():
    """gl.thread_barrier, but where Triton has one by itself."""
    if not IMPLICIT_BARRIERS:
        gl.thread_barrier()


@gluon.jit
def uniform(n):
    """n, which is the same in all threads, so that ptxas knows it. Without the implicit barriers it
    otherwise takes a loop of n turns for divergent, and serialises its products."""
    if not IMPLICIT_BARRIERS:
        n = gl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;",
            "=r,r",
            [n],
            dtype=gl.int32,
            is_pure=True,
            pack=1,
        )
    return n
