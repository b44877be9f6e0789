"""Launches of the step (decode.py): one each, no copy of an input that has its heads in a row.

The tile depends on widths alone, so a sequence's result is the same bits in every batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.triton.decode import linear_decode_kernel
from slipstream.kernels.linear.triton.scalar_decay.tiles import power_of_two
from slipstream.runtime import backends, launch_cache


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
