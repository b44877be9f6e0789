"""mamba_ssm.ops.triton.mamba3.mamba3_siso_combined: Mamba-3 with one input and output a token."""

import math
from typing import Any

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.ops import _fp32, mamba


@checks.operator
def mamba3_siso_combined(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    ADT: Tensor,
    DT: Tensor,
    Trap: Tensor,
    Q_bias: Tensor,
    K_bias: Tensor,
    Angles: Tensor,
    D: Tensor | None = None,
    Z: Tensor | None = None,
    Input_States: Any = None,
    chunk_size: int = 64,
    return_final_states: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Any:
    """Mamba-3 SISO by slipstream.ops.chunk_mamba3, in the dtype of V.

    Args:
        Q, K: [B, T, G, N], G a divisor of H. V, Z: [B, T, H, P]. ADT, DT, Trap: [B, H, T], Trap
            before its sigmoid. Q_bias, K_bias: [H, N]. Angles: [B, T, H, A], before tanh. D: [H].
        Input_States: None, or (angles [S, H, A], states [S, H, P, N], keys [S, H, N],
            values [S, H, P]).
        chunk_size: no effect: the kernels choose it.
        return_final_states: also return such states after the last token.
        cu_seqlens: offsets [S + 1] of the sequences packed in B = 1.

    Returns:
        y [B, T, H, P], or (y, angles, states, keys, values), with angles in [0, 2 pi).

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.
    """
    checks.expect_layouts(
        Q=(Q, "B T G N"), K=(K, "B T G N"), V=(V, "B T H P"), ADT=(ADT, "B H T"),
        DT=(DT, "B H T"), Trap=(Trap, "B H T"), Q_bias=(Q_bias, "H N"), K_bias=(K_bias, "H N"),
        Angles=(Angles, "B T H A"), D=(D, "H"), Z=(Z, "B T H P"),
    )  # fmt: skip
    checks.expect_multiple("H", V.shape[2], "G", Q.shape[2])
    group, dt = V.shape[2] // Q.shape[2], _fp32.widen(DT).mT
    q, k = (
        (x.repeat_interleave(group, dim=2) + bias).to(V.dtype)[:, :, :, None]
        for x, bias in ((Q, Q_bias), (K, K_bias))
    )
    states = None
    if Input_States is not None:
        theta, S, key, value = Input_States
        states = S.mT, key[:, :, None], value[:, :, None], theta
    o, after = mamba.chunk_mamba3(
        q=q, k=k, v=V[:, :, :, None], g=_fp32.widen(ADT).mT, dt=dt,
        trap=torch.sigmoid(_fp32.widen(Trap)).mT,
        angles=math.pi * dt[..., None] * torch.tanh(_fp32.widen(Angles)),
        initial_state=states, output_final_state=return_final_states, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    y = o[:, :, :, 0]
    y = y if D is None else (y + D[:, None] * V).to(V.dtype)
    y = y if Z is None else y * torch.nn.functional.silu(Z)
    if after is None:
        return y
    S, key, value, theta = after
    return y, torch.remainder(theta, 2 * math.pi), S.mT, key[:, :, 0], value[:, :, 0]
