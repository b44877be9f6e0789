"""Mixes of one token with the one before in a pool; ../token_mix_step.py has the formula."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.runtime import backends, launch_cache, token_ids


@triton.jit(do_not_specialize=["N", "slots"])
def token_mix_step_kernel(
    x_ptr, mu_ptr, state_ptr, index_ptr, y_ptr, N, slots, row_x, row_state,
    D: tl.constexpr, M: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Grid (N, D / BD). x [N, D], mu [M, D], state [slots, D], index [N], y [M, N, D]."""
    n = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    m_d = o_d < D
    slot = n
    if index_ptr is not None:
        slot = tl.load(index_ptr + n).to(tl.int64)
    live = (slot >= 0) & (slot < slots)
    p_s = state_ptr + slot * row_state + o_d
    # without a slot everything is 0
    x = tl.load(x_ptr + n * row_x + o_d, mask=m_d & live, other=0.0)
    b_before = tl.load(p_s, mask=m_d & live, other=0.0).to(tl.float32)
    b_x = x.to(tl.float32)
    b_delta = b_before - b_x
    # only this program has read these channels; of a pool wider than x another thread of it
    if state_ptr.dtype.element_ty.primitive_bitwidth > x_ptr.dtype.element_ty.primitive_bitwidth:
        tl.debug_barrier()
    tl.store(p_s, x.to(state_ptr.dtype.element_ty), mask=m_d & live)
    for m in tl.static_range(M):
        b_mu = tl.load(mu_ptr + m * D + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_y = (b_x + b_delta * b_mu).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + (m * N.to(tl.int64) + n) * D + o_d, b_y, mask=m_d)


def token_mix_step(x: Tensor, mu: Tensor, state: Tensor, indices: Tensor | None) -> Tensor:
    """y [M, N, D]; the pool is updated."""
    if indices is not None:
        token_ids.expect_unique("state_indices", indices, "slot")
    N, D = x.shape
    y = torch.empty(mu.shape[0], N, D, dtype=x.dtype, device=x.device)
    BD = min(512, max(16, triton.next_power_of_2(D)))
    with backends.device_of(x.device):
        launch_cache.cached(token_mix_step_kernel)[N, triton.cdiv(D, BD)](
            x_ptr=x,
            mu_ptr=mu.contiguous(),
            state_ptr=state,
            index_ptr=None if indices is None else indices.contiguous(),
            y_ptr=y,
            N=N,
            slots=state.shape[0],
            row_x=x.stride(0),
            row_state=state.stride(0),
            D=D,
            M=mu.shape[0],
            BD=BD,
            num_warps=2,
        )
    return y
