"""Drafts as engines verify them: a kernel that leaves the state after each token, and one that
copies the state after the last accepted token to where the next call begins."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BV, WARPS = 32, 4


@triton.jit
def verify_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, o_ptr, state_ptr, slots_ptr, kept_ptr, scale,
    T: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """grid (K / BV * HV * N,): the gated delta rule of T tokens, q and k normed to 1."""
    pid = tl.program_id(0)
    i_v, i_h, i_n = pid % (K // BV), pid // (K // BV) % HV, (pid // (K // BV) // HV).to(tl.int64)
    o_k, o_v = tl.arange(0, K), i_v * BV + tl.arange(0, BV)
    o_s = o_k[:, None] * K + o_v[None, :]
    slot = tl.load(slots_ptr + i_n).to(tl.int64)
    b_s = tl.load(state_ptr + (slot * HV + i_h) * K * K + o_s)
    for t in range(T):
        i_t = i_n * T + t
        i_q = (i_t * H + i_h // (HV // H)) * K
        b_q = tl.load(q_ptr + i_q + o_k).to(tl.float32)
        b_k = tl.load(k_ptr + i_q + o_k).to(tl.float32)
        b_q *= tl.rsqrt(tl.sum(b_q * b_q, 0) + 1e-6)
        b_k *= tl.rsqrt(tl.sum(b_k * b_k, 0) + 1e-6)
        b_s *= tl.exp(tl.load(g_ptr + i_t * HV + i_h))
        b_v = tl.load(v_ptr + (i_t * HV + i_h) * K + o_v).to(tl.float32)
        b_v -= tl.sum(b_k[:, None] * b_s, 0)
        b_s += b_k[:, None] * (b_v * tl.load(beta_ptr + i_t * HV + i_h))[None, :]
        b_o = tl.sum(b_q[:, None] * b_s, 0) * scale
        tl.store(o_ptr + (i_t * HV + i_h) * K + o_v, b_o.to(o_ptr.dtype.element_ty))
        tl.store(kept_ptr + (i_t * HV + i_h) * K * K + o_s, b_s)


@triton.jit
def accept_kernel(
    state_ptr, slots_ptr, kept_ptr, accepted_ptr, size, T: tl.constexpr, BLOCK: tl.constexpr
):
    """grid (size / BLOCK, N)"""
    i_n = tl.program_id(1).to(tl.int64)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + i_n).to(tl.int64)
    last = i_n * T + tl.load(accepted_ptr + i_n) - 1
    tl.store(state_ptr + slot * size + offsets, tl.load(kept_ptr + last * size + offsets))


def verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    state: Tensor,
    slots: Tensor,
    kept: Tensor,
) -> Tensor:
    """q, k [N, T, H, K], v [N, T, HV, K], g, beta [N, T, HV]; state [slots, HV, K, K] is read,
    kept [N, T, HV, K, K] written -> o [N, T, HV, K]."""
    N, T, H, K = q.shape
    HV, o = v.shape[2], torch.empty_like(v)
    grid = (K // BV * HV * N,)
    args = q, k, v, g, beta, o, state, slots, kept, K**-0.5
    verify_kernel[grid](*args, T=T, H=H, HV=HV, K=K, BV=BV, num_warps=WARPS)
    return o


def accept(state: Tensor, slots: Tensor, kept: Tensor, accepted: Tensor) -> None:
    """The states after the accepted tokens [N], 1 to T, become those of the slots."""
    N, T = kept.shape[:2]
    size, block = state[0].numel(), 4096
    accept_kernel[(size // block, N)](
        state, slots, kept, accepted, size, T=T, BLOCK=block, num_warps=4
    )
