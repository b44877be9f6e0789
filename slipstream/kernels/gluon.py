# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""The one place that imports Gluon: its names differ between Triton's releases.

As in Triton 3.6: gl.thread_barrier is gl.barrier from 3.7 on; copy_in, copy_out are async_load,
async_store from 3.9 on. Import this only where a kernel is wanted: it imports Triton.
"""

from triton.experimental import gluon as gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# a tile between global and shared memory by TMA
copy_in = getattr(tma, "async_copy_global_to_shared", None) or tma.async_load
copy_out = getattr(tma, "async_copy_shared_to_global", None) or tma.async_store
store_wait = tma.store_wait
if not hasattr(gl, "thread_barrier"):
    gl.thread_barrier = gl.barrier

__all__ = [
    "TensorDescriptor",
    "copy_in",
    "copy_out",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "store_wait",
    "tma",
    "warpgroup_mma",
    "warpgroup_mma_init",
    "warpgroup_mma_wait",
]
