"""Sums in global memory that programs add to one after another: who is next, and the addition.

A warp that is alone in its partition takes these steps with all of its threads together; several
say `landed` and meet at a barrier before one of them says that its turn is done.
"""

from triton._C.libtriton import ir
from triton.experimental.gluon.language._core import builtin

from slipstream.kernels.primitives.sm90 import gl, gluon


@builtin
def tma_reduce_add(desc, coord, src, _semantic=None):
    """Starts to add a tile in shared memory to one in global memory."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)  # pyright: ignore[reportOptionalMemberAccess]
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, desc.handle, coord, src.handle)  # pyright: ignore[reportOptionalMemberAccess]


@gluon.jit
def semaphore_acquire(ptr):
    """How many have added, and what they have added is there."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1]; fence.proxy.async;",
        "=r,l,~{memory}",
        [ptr.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def semaphore_release(ptr, value):
    """Waits until what was added is there, and says so."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; "
        "st.release.gpu.global.b32 [$1], $2; mov.b32 $0, $2;",
        "=r,l,r,~{memory}",
        [ptr.to(gl.int64), value],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def wait_bulk_stores():
    """Waits until what these threads have stored and added by TMA is there."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, $1;",
        "=r,r,~{memory}",
        [gl.program_id(0)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def proxy_fence():
    """After a barrier at which another part of this program came once its stores by TMA had
    `landed`: copies by TMA from here on find what those left."""
    gl.inline_asm_elementwise(
        "fence.proxy.async; mov.b32 $0, $1;",
        "=r,r,~{memory}",
        [gl.program_id(0)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def lock_workspace(ptr, first, count):
    """One of `count` slots that no program has, looked for from `first` on."""
    workspace = first
    while gl.atomic_cas(ptr + workspace, 0, 1, sem="acquire") != 0:
        workspace += 1
        workspace = gl.where(workspace == count, 0, workspace)
    return workspace


@gluon.jit
def unlock_workspace(ptr):
    """All parts are done with it."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; "
        "@p st.release.gpu.global.b32 [$1], 0; mov.b32 $0, t; }",
        "=r,l,~{memory}",
        [ptr.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
