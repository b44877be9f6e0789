"""The preconditioner forward and backward: a program goes through all tokens of BD channels of a
head, BT at a time, backward from the last. MATH.md has the formulas.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.elementwise.inputs import CENTRE
from slipstream.kernels.elementwise.inputs import PreconditionerInputs as Inputs
from slipstream.kernels.primitives.sequences import tokens_of
from slipstream.runtime.backends import INTERPRETED, device_of
from slipstream.runtime.launch_cache import cached

# tokens and channels at a time
TILE = (8, 16) if INTERPRETED else (64, 16)


@triton.jit
def _load(p, m):
    return tl.load(p, mask=m, other=0.0).to(tl.float32)


@triton.jit
def _channels(K: tl.constexpr, BD: tl.constexpr):
    """The sequence, the head, the channels, and which of the channels exist."""
    i_d, tiles = tl.program_id(1), tl.cdiv(K, BD)
    o_k = i_d % tiles * BD + tl.arange(0, BD)
    return tl.program_id(0), i_d // tiles, o_k, o_k < K


@triton.jit
def _then(a, x, b, y):
    """z -> a z + x, followed by z -> b z + y, as one map: its factor and its summand."""
    return a * b, b * x + y


@triton.jit
def _factors(b_s, b_c, log_x, eps):
    """m, and (1 + |r|)^2."""
    b_r = tl.log(b_s + eps) - b_c
    b_d = 1.0 + tl.abs(b_r)
    return tl.exp(-log_x * b_r / b_d), b_d * b_d


@triton.jit(do_not_specialize=["T", "log_x", "eps", "centre", "tokens", "H"])
def precondition_kernel(
    k_ptr,  # [tokens, H, K]; so are y, by, sums, dy, dby, dk
    g_ptr,  # [tokens, H]; so is beta
    beta_ptr,
    centre_ptr,  # [H], or none: `centre`
    s_in_ptr,  # [N, H, K], or none
    s_out_ptr, y_ptr,
    by_ptr,  # 1 / the factors, or none
    sums_ptr,  # A, for backward, or none
    dy_ptr,  # none forward; so are those that follow
    dby_ptr,  # or none
    ds_out_ptr,  # [N, H, K], or none
    dk_ptr,
    dg_ptr,  # [ceil(K / BD), tokens, H]: shares; so is dbeta
    dbeta_ptr,
    dcentre_ptr,  # [N, H, K]: shares
    ds_in_ptr,
    cu_ptr,  # [N + 1]
    log_x, eps, centre, T,
    tokens,  # of dg's shares
    H,
    K: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """grid (N, H * ceil(K / BD)): writes y, by and sums; with dy the gradients instead."""
    i_n, i_h, o_k, m_k = _channels(K, BD)
    if dy_ptr is None:
        begin, count = tokens_of(cu_ptr, i_n, T)
        p_s = (i_n.to(tl.int64) * H + i_h) * K + o_k
        b_s = tl.zeros((BD,), tl.float32)
        if s_in_ptr is not None:
            b_s += _load(s_in_ptr + p_s, m_k)
        b_c = centre
        if centre_ptr is not None:
            b_c = tl.load(centre_ptr + i_h).to(tl.float32)
        o_r = tl.arange(0, BT)
        for start in range(0, count, BT):
            m_t = start + o_r < count
            p_h = (begin + start + o_r) * H + i_h
            b_a = tl.exp(_load(g_ptr + p_h, m_t))[:, None]
            b_beta = _load(beta_ptr + p_h, m_t)[:, None]
            p, m = p_h[:, None] * K + o_k[None, :], m_t[:, None] & m_k[None, :]
            b_k = _load(k_ptr + p, m)
            b_x = b_beta * b_k * b_k
            b_x += tl.where((o_r > 0)[:, None], 0.0, b_a * b_s[None, :])
            b_a = tl.broadcast_to(b_a, (BT, BD))
            _, b_sums = tl.associative_scan((b_a, b_x), 0, _then)
            b_m, _ = _factors(b_sums, b_c, log_x, eps)
            tl.store(y_ptr + p, (b_k * b_m).to(y_ptr.dtype.element_ty), mask=m)
            if by_ptr is not None:
                tl.store(by_ptr + p, (1.0 / b_m).to(by_ptr.dtype.element_ty), mask=m)
            if sums_ptr is not None:
                tl.store(sums_ptr + p, b_sums, mask=m)
            last = (o_r == tl.minimum(count - start, BT) - 1)[:, None]
            b_s = tl.sum(tl.where(last, b_sums, 0.0), 0)
        tl.store(s_out_ptr + p_s, b_s, mask=m_k)
    else:
        i_share = tl.program_id(1) % tl.cdiv(K, BD)
        begin, count = tokens_of(cu_ptr, i_n, T)
        p_s = (i_n.to(tl.int64) * H + i_h) * K + o_k
        b_first, b_d = tl.zeros((BD,), tl.float32), tl.zeros((BD,), tl.float32)
        if s_in_ptr is not None:
            b_first += _load(s_in_ptr + p_s, m_k)
        if ds_out_ptr is not None:
            b_d += _load(ds_out_ptr + p_s, m_k)
        b_c = centre
        if centre_ptr is not None:
            b_c = tl.load(centre_ptr + i_h).to(tl.float32)
        b_dc = tl.zeros((BD,), tl.float32)
        o_r = tl.arange(0, BT)
        for start in range(0, count, BT):
            o_t = count - 1 - start - o_r
            m_t, m_later = o_t >= 0, (o_t >= 0) & (o_r > 0)
            p_h = (begin + o_t) * H + i_h
            p, m = p_h[:, None] * K + o_k[None, :], m_t[:, None] & m_k[None, :]
            b_k, b_dy, b_sums = _load(k_ptr + p, m), _load(dy_ptr + p, m), _load(sums_ptr + p, m)
            b_m, b_square = _factors(b_sums, b_c, log_x, eps)
            b_e = b_dy * b_k * b_m
            if dby_ptr is not None:
                b_e -= _load(dby_ptr + p, m) / b_m
            b_e = b_e * log_x / b_square
            b_dc += tl.sum(tl.where(m, b_e, 0.0), 0)
            b_x = tl.where(m, -b_e / (b_sums + eps), 0.0)
            b_x += tl.where((o_r > 0)[:, None], 0.0, b_d[None, :])
            b_a = tl.exp(_load(g_ptr + p_h + H, m_later))[:, None]
            _, b_ds = tl.associative_scan((tl.broadcast_to(b_a, (BT, BD)), b_x), 0, _then)
            b_a = tl.exp(_load(g_ptr + p_h, m_t))[:, None]
            b_beta = _load(beta_ptr + p_h, m_t)[:, None]
            b_dk = b_dy * b_m + 2.0 * b_beta * b_k * b_ds
            tl.store(dk_ptr + p, b_dk.to(dk_ptr.dtype.element_ty), mask=m)
            b_before = _load(sums_ptr + p - H * K, m & (o_t > 0)[:, None])
            b_before = tl.where((o_t == 0)[:, None], b_first[None, :], b_before)
            p_h += i_share.to(tl.int64) * tokens * H
            tl.store(dbeta_ptr + p_h, tl.sum(b_k * b_k * b_ds, 1), mask=m_t)
            tl.store(dg_ptr + p_h, tl.sum(b_a * b_before * b_ds, 1), mask=m_t)
            last = (o_r == tl.minimum(count - start, BT) - 1)[:, None]
            b_d = tl.sum(tl.where(last, b_a * b_ds, 0.0), 0)
        tl.store(dcentre_ptr + p_s, b_dc, mask=m_k)
        tl.store(ds_in_ptr + p_s, b_d, mask=m_k)


def forward(inputs: Inputs, keep: bool, inverse: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, A after the last token, 1 / the factors if wanted, and A of each token if kept."""
    k = inputs.k
    y, by = torch.empty_like(k), k.new_empty(k.shape if inverse else (0,))
    final = k.new_empty(inputs.sequences, *k.shape[2:], dtype=torch.float32)
    sums = k.new_empty(k.shape if keep else (0,), dtype=torch.float32)
    _run(
        inputs, y_ptr=y, s_out_ptr=final, by_ptr=by if inverse else None,
        sums_ptr=sums if keep else None,
    )  # fmt: skip
    return y, final, by, sums


def backward(
    inputs: Inputs, sums: Tensor, dy: Tensor, dfinal: Tensor | None, dby: Tensor | None
) -> list[Tensor]:
    """Gradients of k, g, beta, and of centre and state if they are given."""
    k, g, beta, centre, state, *_ = inputs
    dfinal, dby = (None if x is None else x.contiguous() for x in (dfinal, dby))
    # of no elements where forward made no factors
    dby = None if dby is None or dby.numel() == 0 else dby
    (B, T, H, K), N = k.shape, inputs.sequences
    dk = torch.empty_like(k)
    dg, dbeta = (k.new_empty(-(-K // TILE[1]), B, T, H, dtype=torch.float32) for _ in range(2))
    dcentre, dstate = (k.new_empty(N, H, K, dtype=torch.float32) for _ in range(2))
    _run(
        inputs, sums_ptr=sums, dy_ptr=dy.contiguous(), dby_ptr=dby, ds_out_ptr=dfinal, dk_ptr=dk,
        dg_ptr=dg, dbeta_ptr=dbeta, dcentre_ptr=dcentre, ds_in_ptr=dstate,
    )  # fmt: skip
    grads = [dk, dg.sum(0).to(g.dtype), dbeta.sum(0).to(beta.dtype)]
    if centre is not None:
        grads.append(dcentre.sum((0, 2)).to(centre.dtype))
    if state is not None:
        grads.append(dstate.to(state.dtype))
    return grads


def _run(inputs: Inputs, **tensors: Tensor | None) -> None:
    """None what is not among the tensors."""
    B, T, H, K = inputs.k.shape
    BT, BD = TILE
    names = ("s_out_ptr", "y_ptr", "by_ptr", "sums_ptr", "dy_ptr", "dby_ptr", "ds_out_ptr",
             "dk_ptr", "dg_ptr", "dbeta_ptr", "dcentre_ptr", "ds_in_ptr")  # fmt: skip
    with device_of(inputs.k.device):
        cached(precondition_kernel)[inputs.sequences, H * -(-K // BD)](
            k_ptr=inputs.k, g_ptr=inputs.g, beta_ptr=inputs.beta, centre_ptr=inputs.centre,
            s_in_ptr=inputs.state, **(dict.fromkeys(names) | tensors), cu_ptr=inputs.cu_seqlens,
            log_x=math.log(inputs.x), eps=inputs.eps, centre=CENTRE, T=T,
            tokens=None if tensors.get("dy_ptr") is None else B * T, H=H, K=K, BT=BT, BD=BD,
            num_warps=8,
        )  # fmt: skip
