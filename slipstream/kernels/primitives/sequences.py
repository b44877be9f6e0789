"""Where a sequence is: a row of the batch, or a part of packed tokens."""

import triton
import triton.language as tl


@triton.jit
def tokens_of(cu_ptr, i_n, T):
    """First token of sequence n among all, and how many it has. Offsets that are wrong read and
    write nothing outside of the T tokens."""
    if cu_ptr is not None:
        begin = tl.maximum(tl.load(cu_ptr + i_n).to(tl.int64), 0)
        end = tl.minimum(tl.load(cu_ptr + i_n + 1).to(tl.int64), T)
        count = tl.maximum(end - begin, 0).to(tl.int32)
    else:
        count = T
        begin = i_n.to(tl.int64) * T
    return begin, count
