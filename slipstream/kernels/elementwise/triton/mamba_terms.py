"""Mamba-2's terms, forward and backward; mamba_terms.py has the formula.

    du = dv step + dskip D          dD = sum dskip u
    dstep = sum_P dv u - exp(A_log) dg          dA_log = sum dg g
    dz = dstep sigmoid(z), 0 where a limit holds          ddt = dz          ddt_bias = sum dz

R tokens of H heads of P channels. A program has every NP-th tile of BR tokens and BH whole heads,
so that a head's sums stay within it; primitives/device.py adds up what programs sum over tokens.
Each number is read once and written once.

Memory beyond results: backward, two numbers a head and one a channel for each of NP programs.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.primitives import device
from slipstream.runtime import backends, launch_cache


@triton.jit
def _of_heads(p, o_h, m_h):
    return tl.load(p + o_h, mask=m_h, other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["R", "H", "low", "high"])
def mamba_terms_kernel(
    dv_ptr, dskip_ptr, dg_ptr, u_ptr, dt_ptr, a_ptr, bias_ptr, d_ptr, v_ptr, skip_ptr, g_ptr,
    du_ptr, ddt_ptr, heads_ptr, channels_ptr, R, H, low, high,
    P: tl.constexpr, BR: tl.constexpr, BH: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Grid (NP, H / BH). u, dv, dskip, v, skip, du [R, H, P], dt, dg, g, ddt [R, H], a, bias [H],
    d [H, P]. Writes v, skip if there is d, and g; or with dv du, ddt, heads [NP, 2, H]: of ddt_bias
    and dA_log, and channels [NP, 1, H P]: of dD."""
    i_p, NP = tl.program_id(0), tl.num_programs(0)
    o_h, o_p = tl.program_id(1) * BH + tl.arange(0, BH), tl.arange(0, BP)
    m_h = o_h < H
    m_c = m_h[:, None] & (o_p < P)[None, :]
    o_c = o_h[:, None] * P + o_p[None, :]
    b_rate = tl.exp(_of_heads(a_ptr, o_h, m_h))
    b_bias = _of_heads(bias_ptr, o_h, m_h)
    if d_ptr is not None:
        b_d = tl.load(d_ptr + o_c, mask=m_c, other=0.0).to(tl.float32)[None]
    # each thread adds up its own elements, and all of them once, at the end
    b_da, b_dbias = tl.zeros([BR, BH], tl.float32), tl.zeros([BR, BH], tl.float32)
    b_dd = tl.zeros([BR, BH, BP], tl.float32)
    for i in range(i_p, tl.cdiv(R, BR), NP):
        # tokens times channels may be more than 32 bits
        o_r = (i * BR + tl.arange(0, BR)).to(tl.int64)
        m_r = (o_r < R)[:, None] & m_h[None, :]
        m = (o_r < R)[:, None, None] & m_c[None]
        o_g = o_r[:, None] * H + o_h[None, :]
        o = o_r[:, None, None] * H * P + o_c[None]
        # in float32 throughout: v, g and the gradients are rounded once
        b_u = tl.load(u_ptr + o, mask=m, other=0.0).to(tl.float32)
        b_z = tl.load(dt_ptr + o_g, mask=m_r, other=0.0).to(tl.float32) + b_bias
        b_free = device.softplus(b_z)
        b_step = tl.minimum(tl.maximum(b_free, low), high)
        if dv_ptr is None:
            tl.store(v_ptr + o, (b_u * b_step[:, :, None]).to(v_ptr.dtype.element_ty), mask=m)
            tl.store(g_ptr + o_g, -b_rate * b_step, mask=m_r)
            if d_ptr is not None:
                tl.store(skip_ptr + o, (b_u * b_d).to(skip_ptr.dtype.element_ty), mask=m)
        else:
            b_dv = tl.load(dv_ptr + o, mask=m, other=0.0).to(tl.float32)
            b_du = b_dv * b_step[:, :, None]
            if d_ptr is not None:
                b_dskip = tl.load(dskip_ptr + o, mask=m, other=0.0).to(tl.float32)
                b_du += b_dskip * b_d
                b_dd += b_dskip * b_u
            tl.store(du_ptr + o, b_du.to(du_ptr.dtype.element_ty), mask=m)
            b_dg = tl.load(dg_ptr + o_g, mask=m_r, other=0.0).to(tl.float32) * b_rate
            b_da -= b_dg * b_step
            # softplus' derivative; a step at a limit has none
            b_dz = (tl.sum(b_dv * b_u, 2) - b_dg) * tl.sigmoid(b_z)
            b_dz = tl.where((b_free >= low) & (b_free <= high), b_dz, 0.0)
            b_dbias += b_dz
            tl.store(ddt_ptr + o_g, b_dz.to(ddt_ptr.dtype.element_ty), mask=m_r)
    if dv_ptr is not None:
        p_heads = heads_ptr + i_p * 2 * H + o_h
        tl.store(p_heads, tl.sum(b_dbias, 0), mask=m_h)
        tl.store(p_heads + H, tl.sum(b_da, 0), mask=m_h)
        if d_ptr is not None:
            tl.store(channels_ptr + i_p.to(tl.int64) * H * P + o_c, tl.sum(b_dd, 0), mask=m_c)


def forward(
    u: Tensor, dt: Tensor, A_log: Tensor, dt_bias: Tensor, D: Tensor | None, low: float, high: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    v, g = torch.empty_like(u), torch.empty_like(dt, dtype=torch.float32)
    skip = None if D is None else torch.empty_like(u)
    _run((u, dt, A_log, dt_bias, D), low, high, None, v_ptr=v, skip_ptr=skip, g_ptr=g)
    return v, skip, g


def backward(
    dv: Tensor, dskip: Tensor, dg: Tensor, u: Tensor, dt: Tensor, *others: Any
) -> list[Tensor | None]:
    """du, ddt, dA_log, ddt_bias and, if there is D, dD. others: those of forward after dt."""
    *parameters, low, high = others
    inputs = u, dt, *parameters
    D = parameters[-1]
    du, ddt, dA, dbias, dD = (None if x is None else torch.empty_like(x) for x in inputs)
    H, P = u.shape[2:]
    # four at a time on each multiprocessor
    NP = max(backends.sm_count(u.get_device()) * 4 // -(-H // _tile(P)["BH"]), 1)
    NP = min(-(-dt.numel() // H // _tile(P)["BR"]), NP)
    wide: dict[str, Any] = {"dtype": torch.float32, "device": u.device}
    heads = torch.empty(NP, 2, H, **wide)
    channels = torch.empty(NP, 1, 0 if D is None else H * P, **wide)
    dys = {"dv_ptr": dv, "dskip_ptr": None if D is None else dskip, "dg_ptr": dg}
    cotangents = {name: None if x is None else x.contiguous() for name, x in dys.items()}
    grads = {"du_ptr": du, "ddt_ptr": ddt, "heads_ptr": heads, "channels_ptr": channels}
    _run(inputs, low, high, NP, **cotangents, **grads)
    device.add_partial_sums(heads, [dbias, dA])
    if dD is not None:
        device.add_partial_sums(channels, [dD])
    return [du, ddt, dA, dbias, dD]


def _tile(P: int) -> dict[str, int]:
    """2048 elements, 16 a thread of four warps, of 512 channels or a head's."""
    BP = triton.next_power_of_2(P)
    BH = max(512 // BP, 1)
    return {"BR": max(2048 // (BH * BP), 1), "BH": BH, "BP": BP}


def _run(
    inputs: tuple[Any, ...], low: float, high: float, programs: int | None, **others: Tensor | None
) -> None:
    """All contiguous; None what is not among the others. programs: of a block of heads; None: one
    for each tile."""
    (B, T, H, P), names = inputs[0].shape, ("dv", "dskip", "dg", "v", "skip", "g", "du", "ddt")
    tile, named = _tile(P), ("u_ptr", "dt_ptr", "a_ptr", "bias_ptr", "d_ptr")
    tensors = dict.fromkeys(f"{x}_ptr" for x in (*names, "heads", "channels")) | others
    grid = programs or -(-B * T // tile["BR"]), -(-H // tile["BH"])
    launch_cache.cached(mamba_terms_kernel)[grid](
        **dict(zip(named, inputs)),
        **tensors,
        R=B * T,
        H=H,
        low=low,
        high=high,
        P=P,
        **tile,
        num_warps=4,
    )
