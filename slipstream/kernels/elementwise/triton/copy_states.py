"""States between a pool and rows, or two pools: one read and one write of each number.

target[target_indices[n]] = source[source_indices[n]]

of states [HV, V, K]. Either may lie K first: a tile is read along the one's rows and written along
the other's.
"""

import triton
import triton.language as tl
from torch import Tensor

from slipstream.runtime import launch_cache


@triton.jit(do_not_specialize=["sources", "targets"])
def copy_states_kernel(
    x_ptr, from_ptr, y_ptr, to_ptr,
    x_state, x_head, x_v, x_k, y_state, y_head, y_v, y_k, sources, targets, HV, V, K,
    BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Grid (N HV, tiles of a state). x [sources, HV, V, K], y [targets, HV, V, K] of any strides;
    from and to [N], or None for 0, 1, ..."""
    # whatever is multiplied by a stride has 64 bits: views of large pools may have long ones
    n = (tl.program_id(0) // HV).to(tl.int64)
    h = (tl.program_id(0) % HV).to(tl.int64)
    across = tl.cdiv(K, BK)
    o_v = (tl.program_id(1) // across * BV + tl.arange(0, BV)).to(tl.int64)
    o_k = (tl.program_id(1) % across * BK + tl.arange(0, BK)).to(tl.int64)
    source, target = n, n
    if from_ptr is not None:
        source = tl.load(from_ptr + n).to(tl.int64)
    if to_ptr is not None:
        target = tl.load(to_ptr + n).to(tl.int64)
    m = (o_v < V)[:, None] & (o_k < K)[None, :]
    # an index past the pool is none: whatever reports it does so in the next call
    m_x = m & (source >= 0) & (source < sources)
    m_y = m & (target >= 0) & (target < targets)
    p_x = x_ptr + source * x_state + h * x_head + (o_v * x_v)[:, None] + (o_k * x_k)[None, :]
    p_y = y_ptr + target * y_state + h * y_head + (o_v * y_v)[:, None] + (o_k * y_k)[None, :]
    tl.store(p_y, tl.load(p_x, mask=m_x & m_y, other=0.0), mask=m_y)


def copy_states(
    source: Tensor, source_indices: Tensor | None, target: Tensor, target_indices: Tensor | None
) -> None:
    """source [.., HV, V, K] and target [.., HV, V, K]; indices [N], None for the first N."""
    indices = target_indices if source_indices is None else source_indices
    N = source.shape[0] if indices is None else indices.shape[0]
    _, HV, V, K = target.shape
    # 32 numbers a thread at most
    BV, BK = (min(64, triton.next_power_of_2(x)) for x in (V, K))
    launch_cache.cached(copy_states_kernel)[(N * HV, -(-V // BV) * -(-K // BK))](
        x_ptr=source,
        from_ptr=None if source_indices is None else source_indices.contiguous(),
        y_ptr=target,
        to_ptr=None if target_indices is None else target_indices.contiguous(),
        **{f"x_{n}": x for n, x in zip(_DIMS, source.stride(), strict=True)},
        **{f"y_{n}": x for n, x in zip(_DIMS, target.stride(), strict=True)},
        sources=source.shape[0],
        targets=target.shape[0],
        HV=HV,
        V=V,
        K=K,
        BV=BV,
        BK=BK,
        num_warps=4,
    )


_DIMS = ("state", "head", "v", "k")
