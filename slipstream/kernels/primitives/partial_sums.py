"""Partial sums of programs, added up in an order that does not depend on the GPU.

A parameter's gradient is a sum over tokens: the programs of a backward leave P partial sums of each
of M parameters, and this adds them up, which takes neither atomic additions nor a second pass of
torch for each parameter.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from slipstream.runtime import backends, launch_cache

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
