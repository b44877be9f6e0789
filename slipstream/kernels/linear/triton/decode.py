"""The whole linear family token by token, in one launch: decoding, and short sequences.

    S <- exp(g_t) S exp(gv_t)                        g_t a number or [K], down the rows; gv_t [V]
    x_t = v_t, or beta_t (v_t - k_t^T S), or with p: beta_t (v_t - p_t^T S_{t-1})
    S <- S + b_t (a_t^T S_{t-1}) + k_t x_t^T
    o_t = scale * q_t^T S, or with a bonus u: scale * (q_t^T S_{t-1} + (q_t . u k_t) x_t)

The columns of S never meet, so a program has BV of them in registers, and all its sums run down
them. Nothing here is a matrix product: one token does 4 to 8 flops for 8 bytes of state, and the
state's way to memory and back is all the time there is.

A term that is not given is None, and its lines are not compiled.

There is one launch, and no copy of an input that has its heads in a row. The tile depends on widths
alone, so a sequence's result is the same bits in every batch.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.triton.scalar_decay.tiles import power_of_two
from slipstream.runtime import backends, launch_cache


@triton.jit
def _row(p, o, m):
    return tl.load(p + o, mask=m, other=0.0).to(tl.float32)


@triton.jit
def _unit(b_x):
    """x / sqrt(sum x^2 + 1e-6)."""
    return b_x * tl.rsqrt(tl.sum(b_x * b_x, 0) + 1e-6)


# The strides of states are left out: whether 16 divides them decides how wide their loads are.
_SIZES = ["T", "H", "HV", "cache_slots", *(f"row_{x}" for x in "qkvgpab"), "row_gv", "row_beta"]


@triton.jit(do_not_specialize=_SIZES)
def linear_decode_kernel(
    q_ptr,  # [tokens, H, K]; so are k, p, a, b
    k_ptr,
    v_ptr,  # [tokens, HV, V]; so is gv
    g_ptr,  # [tokens, HV], or [tokens, HV, K] if PER_CHANNEL
    gv_ptr,
    beta_ptr,  # [tokens, HV], or [tokens, HV, V] if PER_COLUMN
    p_ptr, a_ptr, b_ptr,
    u_ptr,  # [HV, K]
    o_ptr,  # [tokens, HV, V]
    s_in_ptr,  # [cache slots, HV, K, V], or [cache slots, HV, V, K] if IN_V_FIRST
    s_out_ptr,  # the same, and may be the same memory
    cu_ptr,  # [N + 1]
    index_ptr,  # [N]: the slot of each sequence; n if None
    scale,
    T: tl.int64,
    H: tl.int32,
    HV: tl.int32,
    cache_slots: tl.int64,
    row_q: tl.int64,  # from one token to the next
    row_k: tl.int64,
    row_v: tl.int64,
    row_g: tl.int64,
    row_gv: tl.int64,
    row_beta: tl.int64,
    row_p: tl.int64,
    row_a: tl.int64,
    row_b: tl.int64,
    stride_in, in_head, stride_out, out_head,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PER_CHANNEL: tl.constexpr,
    PER_COLUMN: tl.constexpr, IN_V_FIRST: tl.constexpr, OUT_V_FIRST: tl.constexpr,
    L2_NORM: tl.constexpr,
):  # fmt: skip
    """grid (ceil(V / BV) * HV * N,): one program takes BV columns of one head and sequence."""
    pid = tl.program_id(0)
    NV: tl.constexpr = (V + BV - 1) // BV
    i_h = (pid // NV) % HV
    i_n = (pid // NV // HV).to(tl.int64)
    i_k = (i_h // (HV // H)) * K
    o_k = tl.arange(0, BK)
    o_v = (pid % NV) * BV + tl.arange(0, BV)
    m_k = o_k < K
    m_v = o_v < V
    cache_slot = i_n
    if index_ptr is not None:
        cache_slot = tl.load(index_ptr + i_n).to(tl.int64)
    live = (cache_slot >= 0) & (cache_slot < cache_slots)
    m_s = m_k[:, None] & m_v[None, :] & live
    if cu_ptr is not None:
        begin = tl.maximum(tl.load(cu_ptr + i_n).to(tl.int64), 0)
        end = tl.minimum(tl.load(cu_ptr + i_n + 1).to(tl.int64), T)
    else:
        begin = i_n * T
        end = begin + T
    # not a sum with 0, which would wait for the state before the first token's loads are issued
    if s_in_ptr is not None:
        o_s = o_v[None, :] * K + o_k[:, None] if IN_V_FIRST else o_k[:, None] * V + o_v[None, :]
        p_s = s_in_ptr + cache_slot * stride_in + i_h.to(tl.int64) * in_head + o_s
        b_s = tl.load(p_s, mask=m_s, other=0.0).to(tl.float32)
    else:
        b_s = tl.zeros((BK, BV), tl.float32)
    for t in range(begin, end):
        b_q = _row(q_ptr + t * row_q + i_k, o_k, m_k)
        b_k = _row(k_ptr + t * row_k + i_k, o_k, m_k)
        b_x = _row(v_ptr + t * row_v + i_h * V, o_v, m_v)
        if L2_NORM:
            b_q = _unit(b_q)
            b_k = _unit(b_k)
        if a_ptr is not None:
            b_a = _row(a_ptr + t * row_a + i_k, o_k, m_k)
            b_b = _row(b_ptr + t * row_b + i_k, o_k, m_k)
            b_read = tl.sum(b_a[:, None] * b_s, 0)  # [BV]
        if p_ptr is not None:
            b_p = _row(p_ptr + t * row_p + i_k, o_k, m_k)
            if L2_NORM:
                b_p = _unit(b_p)
            b_x -= tl.sum(b_p[:, None] * b_s, 0)
        if u_ptr is not None:
            b_u = _row(u_ptr + i_h * K, o_k, m_k)
            b_o = tl.sum(b_q[:, None] * b_s, 0)
        if g_ptr is not None:
            if PER_CHANNEL:
                b_s *= tl.exp(_row(g_ptr + t * row_g + i_h * K, o_k, m_k))[:, None]
            else:
                b_s *= tl.exp(tl.load(g_ptr + t * row_g + i_h).to(tl.float32))
        if gv_ptr is not None:
            b_s *= tl.exp(_row(gv_ptr + t * row_gv + i_h * V, o_v, m_v))[None, :]
        if beta_ptr is not None:
            if p_ptr is None:
                b_x -= tl.sum(b_k[:, None] * b_s, 0)
            if PER_COLUMN:
                b_x *= _row(beta_ptr + t * row_beta + i_h * V, o_v, m_v)
            else:
                b_x *= tl.load(beta_ptr + t * row_beta + i_h).to(tl.float32)
        if a_ptr is not None:
            b_s += b_b[:, None] * b_read[None, :]
        b_s += b_k[:, None] * b_x[None, :]
        if u_ptr is not None:
            b_o += tl.sum(b_q * b_u * b_k, 0) * b_x
        else:
            b_o = tl.sum(b_q[:, None] * b_s, 0)
        b_o = tl.where(live, b_o * scale, 0.0)
        p_o = o_ptr + (t * HV + i_h) * V + o_v
        tl.store(p_o, b_o.to(o_ptr.dtype.element_ty), mask=m_v)
    o_s = o_v[None, :] * K + o_k[:, None] if OUT_V_FIRST else o_k[:, None] * V + o_v[None, :]
    p_s = s_out_ptr + cache_slot * stride_out + i_h.to(tl.int64) * out_head + o_s
    tl.store(p_s, b_s.to(s_out_ptr.dtype.element_ty), mask=m_s)


@dataclass(frozen=True)
class DecodeTile:
    """BV columns of the state a program, at most."""

    BV: int
    warps: int


# BK -> tile. 32 columns are 128 bytes of a row of the state; 32 numbers a thread.
TILES = {
    16: DecodeTile(32, 1),
    32: DecodeTile(32, 1),
    64: DecodeTile(32, 2),
    128: DecodeTile(32, 4),
    256: DecodeTile(32, 8),
    512: DecodeTile(32, 16),
    1024: DecodeTile(16, 16),
}


def forward(terms: LinearInputs, scale: float) -> tuple[Tensor, Tensor]:
    """o [B, T, HV, V] in q's dtype and the final state [N, HV, K, V], float32."""
    final = terms.v.new_empty(terms.state_shape, dtype=torch.float32)
    state = terms.initial_state
    if state is not None and not (_rows_first(state) or _rows_first(state.mT)):
        state = state.contiguous()
    return _launch(terms, scale, state, final, None, False), final


def update(
    terms: LinearInputs, state: Tensor, indices: Tensor | None, scale: float, l2_norm: bool
) -> Tensor:
    """o; sequence n's state [K, V], state[indices[n]] or state[n], becomes that after its tokens.

    state [slots, HV, K, V] has rows or columns in a row. Where an index is not a slot nothing is
    read or written, and o is 0.
    """
    return _launch(terms, scale, state, state, indices, l2_norm)


def _rows_first(state: Tensor) -> bool:
    """Whether each [K, V] has its rows one after the other."""
    return state.stride(3) == 1 and state.stride(2) == state.shape[3]


def _rows(x: Tensor | None, B: int, T: int) -> tuple[Tensor | None, int]:
    """x [B, T, ...] with what belongs to a token in a row, and the way to the next token."""
    if x is None:
        return None, 0
    if not x.is_contiguous():
        size = 1
        for n, stride in zip(reversed(x.shape[2:]), reversed(x.stride()[2:])):
            if n != 1 and stride != size:
                x = x.contiguous()
                break
            size *= n
    if T == 1:
        return x, x.stride(0)
    if B == 1 or x.stride(0) == T * x.stride(1):
        return x, x.stride(1)
    x = x.contiguous()
    return x, x.stride(1)


def _launch(
    terms: LinearInputs,
    scale: float,
    s_in: Tensor | None,
    s_out: Tensor,
    indices: Tensor | None,
    l2_norm: bool,
) -> Tensor:
    B, T, H, K = terms.q.shape
    HV, V = terms.v.shape[2:]
    o = torch.empty_like(terms.v, dtype=terms.q.dtype, memory_format=torch.contiguous_format)
    q, row_q = _rows(terms.q, B, T)
    k, row_k = _rows(terms.k, B, T)
    v, row_v = _rows(terms.v, B, T)
    g, row_g = _rows(terms.g, B, T)
    gv, row_gv = _rows(terms.gv, B, T)
    beta, row_beta = _rows(terms.beta, B, T)
    p, row_p = _rows(terms.p, B, T)
    a, row_a = _rows(terms.a, B, T)
    b, row_b = _rows(terms.b, B, T)
    cu, u = terms.cu_seqlens, terms.u
    BK = power_of_two(K)
    tile = TILES[BK]
    BV = min(tile.BV, power_of_two(V))
    stride_out, out_head = s_out.stride()[:2]
    out_v_first = not _rows_first(s_out)
    stride_in, in_head, in_v_first = stride_out, out_head, out_v_first
    if s_in is not s_out:
        stride_in, in_head = (0, 0) if s_in is None else s_in.stride()[:2]
        in_v_first = s_in is not None and not _rows_first(s_in)
    with backends.device_of(o.device):
        launch_cache.cached(linear_decode_kernel)[-(-V // BV) * HV * terms.sequences,](
            q_ptr=q,
            k_ptr=k,
            v_ptr=v,
            g_ptr=g,
            gv_ptr=gv,
            beta_ptr=beta,
            p_ptr=p,
            a_ptr=a,
            b_ptr=b,
            u_ptr=None if u is None else u.contiguous(),
            o_ptr=o,
            s_in_ptr=s_in,
            s_out_ptr=s_out,
            cu_ptr=None if cu is None else cu.contiguous(),
            index_ptr=None if indices is None else indices.contiguous(),
            scale=scale,
            T=T,
            H=H,
            HV=HV,
            cache_slots=s_out.shape[0],
            row_q=row_q,
            row_k=row_k,
            row_v=row_v,
            row_g=row_g,
            row_gv=row_gv,
            row_beta=row_beta,
            row_p=row_p,
            row_a=row_a,
            row_b=row_b,
            stride_in=stride_in,
            in_head=in_head,
            stride_out=stride_out,
            out_head=out_head,
            K=K,
            V=V,
            BK=BK,
            BV=BV,
            PER_CHANNEL=terms.decay == "channel",
            PER_COLUMN=beta is not None and beta.dim() == 4,
            IN_V_FIRST=in_v_first,
            OUT_V_FIRST=out_v_first,
            L2_NORM=l2_norm,
            num_warps=tile.warps,
        )
    return o
