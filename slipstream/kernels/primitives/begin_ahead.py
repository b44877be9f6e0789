"""Launches that are there before the one in front of them has ended (sm_90 and later).

Such a kernel may first prefetch into the L2 cache what it is going to read, which reads no value.
Then it waits until all launches in front of it have ended, before its first load or store, and only
then lets the next launch begin. So loads and stores are in the order of launches one after the
other, and a kernel behind it, a user's too, begins when all in front of this one have ended.
"""

import triton
import triton.language as tl

# Tokens of a step up to which a launch prefetches: of the step's time without it 0.95 to 1.01 at 1
# token, 1.01 to 1.08 at 8 to 64, where this delays what is read.
PREFETCH_ROWS = 1


@triton.jit
def wait_for_earlier(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(pointers, size):
    """Asks for `size` bytes behind each of up to 32 pointers to be in the L2 cache; pointers and
    size are multiples of 16. The first warp alone asks."""
    tl.inline_asm_elementwise(
        """
        {
        .reg .pred %p;
        .reg .u32 %t;
        mov.u32 %t, %tid.x;
        setp.lt.u32 %p, %t, 32;
        @%p cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }
        """,
        "=r,l,r",
        [pointers.to(tl.uint64, bitcast=True), tl.full(pointers.shape, size, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
