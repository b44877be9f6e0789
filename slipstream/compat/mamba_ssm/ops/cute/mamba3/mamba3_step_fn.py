"""mamba_ssm.ops.cute.mamba3.mamba3_step_fn: one token of Mamba-3, SISO (R = 1) or MIMO."""

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.common import checks
from slipstream.compat.missing import missing_names
from slipstream.ops._fp32 import widen


@checks.operator
def mamba3_step_fn(
    state: Tensor,
    Bstate: Tensor,
    Xstate: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    x: Tensor,
    dt: Tensor,
    trap: Tensor,
    xproj: Tensor,
    outproj: Tensor | None = None,
    state_out: Tensor | None = None,
    out: Tensor | None = None,
    z: Tensor | None = None,
    zproj: Tensor | None = None,
    tile_D: int = 64,
    num_warps: int = 2,
) -> None:
    """One token: what it and the one before write, and what it reads; plain torch.

    Args:
        state: [N, H, P, S]; updated in place, or the new one is written to state_out.
        Bstate, Xstate: B [N, R, H, S] and x [N, H, P] of the token before.
        A, dt, trap: [N, H]; A below 0, trap in (0, 1). B, C: [N, R, H, S], turned, with biases.
        D: [H]. x, z: [N, H, P]. xproj, zproj, outproj: [R, H, P].
        out: written: [N, H, P], or [N, R, H, P] if outproj is None.
        tile_D, num_warps: no effect.

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.
    """
    checks.expect_layouts(
        state=(state, "N H P S"), Bstate=(Bstate, "N R H S"), Xstate=(Xstate, "N H P"),
        A=(A, "N H"), B=(B, "N R H S"), C=(C, "N R H S"), D=(D, "H"), x=(x, "N H P"),
        dt=(dt, "N H"), trap=(trap, "N H"), xproj=(xproj, "R H P"), outproj=(outproj, "R H P"),
        state_out=(state_out, "N H P S"), z=(z, "N H P"), zproj=(zproj, "R H P"),
        out=(out, "N R H P" if outproj is None else "N H P"),
    )  # fmt: skip
    if out is None:
        raise TypeError("out: want a torch.Tensor to write to, got None")
    if (z is None) != (zproj is None):
        raise ValueError("z: wants zproj too, or neither")
    step, share, project = widen(dt), widen(trap), widen(xproj)
    decay = torch.exp(widen(A) * step)
    values = widen(x)[:, None] * project  # [N, R, H, P]
    before = widen(Xstate)[:, None] * project
    own, other = ((y * step)[:, None, :, None] for y in (share, (1 - share) * decay))
    written = torch.cat([other * before, own * values], 1)
    keys = torch.cat([widen(Bstate), widen(B)], 1)
    new = widen(state) * decay[..., None, None] + torch.einsum("nrhp,nrhs->nhps", written, keys)
    y = torch.einsum("nhps,nrhs->nrhp", new, widen(C)) + widen(D)[:, None] * values
    if z is not None and zproj is not None:
        y = y * F.silu(widen(z)[:, None] * widen(zproj))
    out.copy_(y if outproj is None else (y * widen(outproj)).sum(1))
    (state if state_out is None else state_out).copy_(new)


__getattr__ = missing_names(__name__, ("selective_state_update_fused_ref_v2",))
