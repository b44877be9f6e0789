"""mamba_ssm.ops.selective_scan_interface: the scan of Mamba-1, and its layer in one function."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from slipstream.common import checks
from slipstream.compat.fixed import fixed
from slipstream.integrations import linear_mixers
from slipstream.kernels.selective_scan.eager import selective_scan_reference
from slipstream.kernels.selective_scan.inputs import ScanInputs
from slipstream.ops.causal_conv1d import causal_conv1d_fn
from slipstream.ops.norm import rms_norm


def _selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    *,
    reference: bool,
) -> Any:
    """slipstream.ops.selective_scan with channels before tokens.

    Args:
        u, delta, z: [B, D, T]. A: [D, N], real. B, C: [B, N, T], or [B, G, N, T] of G groups of
            channels; or [D, N], the same for all tokens, at the cost of D groups. D, delta_bias:
            [D].
        return_last_state: also return h after the last token, which has a gradient here.

    Returns:
        y [B, D, T]; or y, h [B, D, N].

    Raises:
        NotImplementedError: complex states.
    """
    B, C = _check_scan(u, delta, A, B, C, D, z, delta_bias)
    if not reference:
        terms = u, delta, A, B, C, D, z, delta_bias
        return linear_mixers.selective_scan_fn(*terms, delta_softplus, return_last_state)
    B, C = (x.permute(0, 3, 1, 2) for x in (B, C))
    z = None if z is None else z.mT
    inputs = ScanInputs(u.mT, delta.mT, A, B, C, D, z, delta_bias, None, None)
    y, state = selective_scan_reference(inputs, delta_softplus)
    return (y.mT, state) if return_last_state else y.mT


selective_scan_fn = checks.operator(fixed(_selective_scan, "selective_scan_fn", reference=False))
selective_scan_ref = checks.operator(
    fixed(
        _selective_scan, "selective_scan_ref", "selective_scan_fn token by token.", reference=True
    )
)


def _mamba_inner(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
    b_rms_weight: Tensor | None = None,
    c_rms_weight: Tensor | None = None,
    dt_rms_weight: Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
    *,
    reference: bool,
) -> Tensor:
    """A layer of Mamba-1 after its first projection: convolution, scan, gate, last projection.

    Args:
        xz: [B, 2 D, T], the inputs of the scan and its gates. conv1d_weight: [D, 1, W].
        x_proj_weight: [R + 2 N, D], of delta's R numbers, B and C, without what is given.
        delta_proj_weight: [D, R].
        out_proj_weight: [M, D]. A: [D, N]. B, C: as selective_scan_fn; None is out of x_proj.
        b_rms_weight, c_rms_weight, dt_rms_weight: norms of B, C and delta, as FalconMamba has
            them.
        checkpoint_lvl: no effect: what backward reads is kept, as autograd has it.

    Returns:
        [B, T, M].
    """
    checks.expect_layouts(
        xz=(xz, "B E T"),
        conv1d_weight=(conv1d_weight, "D 1 W"),
        conv1d_bias=(conv1d_bias, "D"),
        x_proj_weight=(x_proj_weight, "J D"),
        delta_proj_weight=(delta_proj_weight, "D R"),
        out_proj_weight=(out_proj_weight, "M D"),
        out_proj_bias=(out_proj_bias, "M"),
        A=(A, "D N"),
        B_proj_bias=(B_proj_bias, "N"),
        C_proj_bias=(C_proj_bias, "N"),
        b_rms_weight=(b_rms_weight, "N"),
        c_rms_weight=(c_rms_weight, "N"),
        dt_rms_weight=(dt_rms_weight, "D"),
    )
    rank, N, (channels, _, width) = delta_proj_weight.shape[1], A.shape[-1], conv1d_weight.shape
    if xz.shape[1] != 2 * channels:
        raise ValueError(f"xz: want {2 * channels} channels, got {xz.shape[1]}")
    x, z = xz.chunk(2, dim=1)
    if reference:
        x = F.pad(x, (width - 1, 0))
        x = F.silu(F.conv1d(x, conv1d_weight, conv1d_bias, groups=channels))
    else:
        x = causal_conv1d_fn(x, conv1d_weight.squeeze(1), conv1d_bias, activation="silu")
    projected = F.linear(x.mT, x_proj_weight)  # [B, T, R + 2 N]
    low, b, c = projected[..., :rank], projected[..., rank : rank + N], projected[..., -N:]
    delta = F.linear(low, delta_proj_weight)
    if B is None:
        b = b if B_proj_bias is None else b + B_proj_bias.to(b.dtype)
        B = b if b_rms_weight is None else rms_norm(b, b_rms_weight, eps=b_c_dt_rms_eps)
        B = B.mT
    if C is None:
        c = c if C_proj_bias is None else c + C_proj_bias.to(c.dtype)
        C = c if c_rms_weight is None else rms_norm(c, c_rms_weight, eps=b_c_dt_rms_eps)
        C = C.mT
    if dt_rms_weight is not None:
        delta = rms_norm(delta, dt_rms_weight, eps=b_c_dt_rms_eps)
    scan = selective_scan_ref if reference else selective_scan_fn
    y = scan(x, delta.mT, A, B, C, D, z, delta_bias, delta_softplus)
    bias = None if out_proj_bias is None else out_proj_bias.to(y.dtype)
    return F.linear(y.mT, out_proj_weight.to(y.dtype), bias)


mamba_inner_fn = checks.operator(fixed(_mamba_inner, "mamba_inner_fn", reference=False))
mamba_inner_ref = checks.operator(
    fixed(
        _mamba_inner,
        "mamba_inner_ref",
        "mamba_inner_fn token by token.",
        order="xz conv1d_weight conv1d_bias x_proj_weight delta_proj_weight out_proj_weight "
        "out_proj_bias A B C D delta_bias B_proj_bias C_proj_bias delta_softplus",
        reference=True,
    )
)


def _check_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """B and C [B, G, N, T], of each channel where one is the same for all tokens."""
    checks.expect_layouts(
        u=(u, "B D T"),
        delta=(delta, "B D T"),
        A=(A, "D N"),
        D=(D, "D"),
        z=(z, "B D T"),
        delta_bias=(delta_bias, "D"),
    )
    if A.is_complex():
        raise NotImplementedError("complex A, and complex states with it")
    batch, channels, T = u.shape
    sizes = [batch, A.shape[1], T]
    found = []
    for name, x in {"B": B, "C": C}.items():
        if x.shape == A.shape:
            x = x[None, :, :, None].expand(batch, channels, A.shape[1], T)
        if x.dim() not in (3, 4) or [x.shape[0], *x.shape[-2:]] != sizes:
            raise ValueError(
                f"{name}: want {sizes}, or groups between its first two sizes, or "
                f"{list(A.shape)}, got shape {tuple(x.shape)}"
            )
        found.append(x if x.dim() == 4 else x[:, None])
    if A.shape in (B.shape, C.shape):
        found = [x.repeat_interleave(channels // x.shape[1], 1) for x in found]
    return found[0], found[1]
