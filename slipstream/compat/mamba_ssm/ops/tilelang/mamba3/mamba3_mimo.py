"""mamba_ssm.ops.tilelang.mamba3.mamba3_mimo: Mamba-3 with R inputs and outputs a token."""

import math
from typing import Any

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.layers.mamba import mimo_order
from slipstream.ops import _fp32, mamba


@checks.operator
def mamba3_mimo(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    ADT: Tensor,
    DT: Tensor,
    Trap: Tensor,
    Q_bias: Tensor,
    K_bias: Tensor,
    MIMO_V: Tensor,
    MIMO_Z: Tensor | None,
    MIMO_Out: Tensor | None,
    Angles: Tensor,
    D: Tensor | None,
    Z: Tensor | None,
    chunk_size: int,
    rotary_dim_divisor: int,
    dtype: torch.dtype,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    fuse_pregate_headwise_rms_norm: bool = False,
    outproj_norm_weight: Tensor | None = None,
    outproj_norm_eps: float = 1e-5,
) -> Any:
    """Mamba-3 MIMO by slipstream.ops.chunk_mamba3; channel i turns with channel i + N / 2.

    Args:
        Q, K: [B, T, R, G, N], G a divisor of H. V, Z: [B, T, H, P]. ADT, DT, Trap: [B, H, T], Trap
            before its sigmoid. Q_bias, K_bias: [H, R, N]. MIMO_V, MIMO_Z, MIMO_Out: [H, R, P].
            Angles: [B, T, H, A], before tanh. D: [H].
        chunk_size, rotary_dim_divisor: no effect: kernels choose the chunk, and how much turns
            follows from Angles.
        dtype: of Q, K and V in the recurrence.
        return_state: also return (angles [S, H, A], states [S, H, P, N], keys [S, R, H, N],
            values [S, H, P]) after the last token.
        cu_seqlens: offsets [S + 1] of the sequences packed in B = 1.
        fuse_pregate_headwise_rms_norm: y is normalised by heads, times outproj_norm_weight [H, P]
            or [H P], before it is multiplied by silu(Z).

    Returns:
        y [B, T, H, P], or [B, T, R, H, P] if MIMO_Out is None, in V's dtype; or (y, *states).

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.
    """
    checks.expect_layouts(
        Q=(Q, "B T R G N"), K=(K, "B T R G N"), V=(V, "B T H P"), ADT=(ADT, "B H T"),
        DT=(DT, "B H T"), Trap=(Trap, "B H T"), Q_bias=(Q_bias, "H R N"),
        K_bias=(K_bias, "H R N"), MIMO_V=(MIMO_V, "H R P"), MIMO_Z=(MIMO_Z, "H R P"),
        MIMO_Out=(MIMO_Out, "H R P"), Angles=(Angles, "B T H A"), D=(D, "H"), Z=(Z, "B T H P"),
    )  # fmt: skip
    H, N = V.shape[2], Q.shape[-1]
    checks.expect_multiple("H", H, "G", Q.shape[3])
    if N % 2:
        raise ValueError(f"Q: want an even number of channels N, got {N}")
    if Z is not None and MIMO_Z is None:
        raise ValueError("Z: wants MIMO_Z too")
    # chunk_mamba3 turns neighbours: both halves of the channels, in turns
    order = mimo_order(N).to(Q.device)
    q, k = (
        (x.transpose(2, 3).repeat_interleave(H // Q.shape[3], dim=2) + bias)[..., order].to(dtype)
        for x, bias in ((Q, Q_bias), (K, K_bias))
    )
    v = (V[:, :, :, None] * MIMO_V).to(dtype)
    dt = _fp32.widen(DT).mT
    y, after = mamba.chunk_mamba3(
        q=q, k=k, v=v, g=_fp32.widen(ADT).mT, dt=dt, trap=torch.sigmoid(_fp32.widen(Trap)).mT,
        angles=math.pi * dt[..., None] * torch.tanh(_fp32.widen(Angles)),
        output_final_state=return_state, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    y = _fp32.widen(y) if D is None else _fp32.widen(y) + D[:, None, None] * v
    if fuse_pregate_headwise_rms_norm:
        y = y * (y.square().mean(-1, keepdim=True) + outproj_norm_eps).rsqrt()
        if outproj_norm_weight is not None:
            y = y * outproj_norm_weight.view(H, 1, -1)
    if Z is not None and MIMO_Z is not None:
        y = y * torch.nn.functional.silu(_fp32.widen(Z)[:, :, :, None] * MIMO_Z)
    y = y.transpose(2, 3) if MIMO_Out is None else (y * MIMO_Out).sum(3)
    y = y.to(V.dtype)
    if after is None:
        return y
    S, key, _, theta = after
    last = V[:, -1] if cu_seqlens is None else V[0, cu_seqlens[1:].long() - 1]
    states = torch.remainder(theta, 2 * math.pi), S.mT, key.transpose(1, 2), last
    own = order.argsort()
    return y, *(x[..., own].detach() if i in (1, 2) else x.detach() for i, x in enumerate(states))
