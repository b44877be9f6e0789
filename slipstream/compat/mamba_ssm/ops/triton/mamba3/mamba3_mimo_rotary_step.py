"""mamba_ssm.ops.triton.mamba3.mamba3_mimo_rotary_step: turns B and C of one token of Mamba-3."""

import math

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.compat.missing import missing_names
from slipstream.ops._fp32 import widen


@checks.operator
def apply_rotary_qk_inference_fwd(
    q: Tensor,
    k: Tensor,
    angle_state: Tensor,
    angle_proj: Tensor,
    dt: Tensor,
    bias_q: Tensor | None = None,
    bias_k: Tensor | None = None,
    inplace: bool = False,
    conjugate: bool = False,
    rotate_pairwise: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k with their biases, turned by angle_state + pi dt tanh(angle_proj); plain torch.

    Args:
        q, k: [B, R, H, N]. angle_state, angle_proj: [B, H, A], A at most N / 2. dt: [B, H].
        bias_q, bias_k: [R, H, N]; none if None.
        inplace: write to q, k and angle_state.
        conjugate: turn the other way.
        rotate_pairwise: pair channels 2 i and 2 i + 1, else i and i + N / 2.

    Returns:
        q, k, and the new angles.

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.
    """
    checks.expect_layouts(
        q=(q, "B R H N"), k=(k, "B R H N"), angle_state=(angle_state, "B H A"),
        angle_proj=(angle_proj, "B H A"), dt=(dt, "B H"), bias_q=(bias_q, "R H N"),
        bias_k=(bias_k, "R H N"),
    )  # fmt: skip
    N, A = q.shape[-1], angle_state.shape[-1]
    if N % 2 or 2 * A > N:
        raise ValueError(f"q: want an even N of at least 2 A = {2 * A} channels, got {N}")
    theta = widen(angle_state) + math.pi * widen(dt)[..., None] * torch.tanh(widen(angle_proj))
    cos, sin = theta.cos()[:, None], (-theta if conjugate else theta).sin()[:, None]
    found = []
    for x, bias in ((q, bias_q), (k, bias_k)):
        wide = widen(x) if bias is None else widen(x) + widen(bias)
        pairs = wide.unflatten(-1, (-1, 2) if rotate_pairwise else (2, -1))
        pairs = pairs if rotate_pairwise else pairs.mT  # [B, R, H, N / 2, 2]
        first, second = pairs[..., :A, :].unbind(-1)
        turned = torch.stack([first * cos - second * sin, first * sin + second * cos], -1)
        pairs = torch.cat([turned, pairs[..., A:, :]], -2)
        found.append((pairs if rotate_pairwise else pairs.mT).flatten(-2).to(x.dtype))
    found.append(theta.to(angle_state.dtype))
    if inplace:
        for x, y in zip((q, k, angle_state), found):
            x.copy_(y)
        return q, k, angle_state
    return found[0], found[1], found[2]


__getattr__ = missing_names(__name__, ("apply_rotary_qk_inference_reference",))
