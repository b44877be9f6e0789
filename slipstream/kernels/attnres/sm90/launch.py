"""Launch of the backward for sm_90: no memory beyond results but 4 or 8 bytes a channel and program
for sums over rows."""

import torch
from torch import Tensor

from slipstream.kernels.attnres.inputs import AttnresInputs, ForwardSums
from slipstream.kernels.attnres.sm90 import plan
from slipstream.kernels.attnres.sm90.backward import attnres_bwd_sm90_kernel
from slipstream.kernels.attnres.triton.streams import named
from slipstream.runtime import backends, launch_cache


def backward(inputs: AttnresInputs, dy: Tensor, sums: ForwardSums) -> list[Tensor]:
    """As triton/attnres.py's, without the sums o and rest."""
    (query, _, weight, output_weight, eps, scale), (_, _, s, rstd, lse) = inputs, sums
    # its asynchronous copies, of 4 bytes or more, do not compile for views that begin elsewhere
    residuals = [x.clone() if x.data_ptr() % 16 else x for x in inputs.residuals]
    first, L = residuals[0], len(residuals)
    R, D = first.shape
    dy, grads = dy.contiguous(), [torch.empty_like(x) for x in residuals]
    normed = output_weight is not None
    tile = plan.tile(L, D, normed)
    programs = min(R, plan.programs(L, tile, normed) * backends.sm_count(first.get_device()))
    da = first.new_empty(programs, D, dtype=torch.float32)
    dwo = torch.empty_like(da) if normed else None
    if R > 0:
        with backends.device_of(first.device):
            launch_cache.cached(attnres_bwd_sm90_kernel)[(programs,)](
                **named("v", residuals),
                **named("d", grads),
                q_ptr=query,
                w_ptr=weight,
                wo_ptr=output_weight,
                dy_ptr=dy,
                s_ptr=s,
                rstd_ptr=rstd,
                lse_ptr=lse,
                da_ptr=da,
                dwo_ptr=dwo,
                R=R,
                eps=eps,
                scale=scale,
                L=L,
                LP=1 << (L - 1).bit_length(),
                D=D,
                **tile._asdict(),
                num_warps=tile.WARPS,
            )
    return [da.sum(0), da.new_empty(0) if dwo is None else dwo.sum(0), *grads]
