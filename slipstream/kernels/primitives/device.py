"""Device functions that the portable kernels of several families share."""

from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from slipstream.runtime import backends, launch_cache

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# float32 beside it are whole numbers, which its last bits are
WHOLE = tl.constexpr(1.5 * 2.0**23)


class Names(tl.constexpr):
    """Numbers by name, in order: Names("ROW", "LENGTH").LENGTH is 1, or as many more as `first`;
    with `bits` powers of two."""

    def __init__(self, *names: str, first: int = 0, bits: bool = False) -> None:
        numbers = [tl.constexpr(1 << n if bits else n) for n in range(first, first + len(names))]
        super().__init__(namedtuple("Names", names)(*numbers))

    def __getattr__(self, name: str) -> Any:
        # Triton compiles a name as one of `value`, but looks for what a kernel reads in this
        if name.startswith("__") or name == "value":
            raise AttributeError(name)
        return getattr(self.value, name)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), as exact for small results as for large ones."""
    e = tl.exp(-tl.abs(x))
    # log of 1 + e, rounded to u, is wrong by as much as u - 1 is of e
    u = 1.0 + e
    d = u - 1.0
    log = tl.where(d == 0.0, e, tl.log(u) * (e / tl.where(d == 0.0, 1.0, d)))
    return tl.maximum(x, 0.0) + log


@triton.jit
def tokens_of(cu_ptr, i_n, T):
    """First token of sequence n among all, and how many it has. Offsets that are wrong read and
    write nothing outside of the T tokens."""
    # offsets are data, which no host has looked at when a kernel is launched
    if cu_ptr is not None:
        begin = tl.maximum(tl.load(cu_ptr + i_n).to(tl.int64), 0)
        end = tl.minimum(tl.load(cu_ptr + i_n + 1).to(tl.int64), T)
        count = tl.maximum(end - begin, 0).to(tl.int32)
    else:
        count = T
        begin = i_n.to(tl.int64) * T
    return begin, count


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


# Partial sums added at once: more than there mostly are, so that it waits for memory but once.
ROWS, COLUMNS = 512, 32


@triton.jit(do_not_specialize=["P", "D", "stride_p", "stride_m"])
def partial_sums_kernel(
    partial_ptr, out0_ptr, out1_ptr, out2_ptr, out3_ptr, out4_ptr, P, D, stride_p, stride_m,
    M: tl.constexpr, BP: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Grid (D / BD, M). partial [P, M, D] by strides; out_m [D], or None: the sum over P."""
    o_d = tl.program_id(0) * BD + tl.arange(0, BD)
    outs = (out0_ptr, out1_ptr, out2_ptr, out3_ptr, out4_ptr)
    # unrolled: each output has a pointer and a dtype of its own, and a program takes one branch
    for i in tl.static_range(M):
        if tl.program_id(1) == i:
            p_partial = partial_ptr + i * tl.cast(stride_m, tl.int64) + o_d[None, :]
            b_sum = tl.zeros([BP, BD], tl.float32)
            # a thread adds up its own elements, and all threads once, at the end
            for p in range(0, P, BP):
                o_p = p + tl.arange(0, BP)
                m = (o_p < P)[:, None] & (o_d < D)[None, :]
                b_sum += tl.load(p_partial + o_p[:, None] * stride_p, mask=m, other=0.0)
            if outs[i] is not None:
                b_out = tl.sum(b_sum, 0).to(outs[i].dtype.element_ty)
                tl.store(outs[i] + o_d, b_out, mask=o_d < D)


def add_partial_sums(partial: Tensor, outs: Sequence[Tensor | None]) -> None:
    """Writes the sum over P of partial [P, M, D], float32, to each of M contiguous tensors of D
    elements that is given; at most five."""
    P, M, D = partial.shape
    pointers = {f"out{i}_ptr": outs[i] if i < M else None for i in range(5)}
    with backends.device_of(partial.device):
        launch_cache.cached(partial_sums_kernel)[(-(-D // COLUMNS), M)](
            partial_ptr=partial,
            **pointers,
            P=P,
            D=D,
            stride_p=partial.stride(0),
            stride_m=partial.stride(1),
            M=M,
            BP=ROWS,
            BD=COLUMNS,
            num_warps=16,
        )
