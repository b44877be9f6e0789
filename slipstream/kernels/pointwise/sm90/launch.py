"""Launch of a gated MLP's products for sm_90: no synchronisation, no memory beyond results."""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.pointwise.sm90.glu_products import glu_products_sm90_kernel
from slipstream.kernels.primitives.gluon_compat import TensorDescriptor, gl
from slipstream.runtime.backends import device_of, sm_count
from slipstream.runtime.launch_cache import cached

_GLUON = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
# K at a time, how many of these are loaded ahead, and rows of tiles that share what they read
BK, STAGES, GROUP = 64, 4, 8
# of 12 warps, of which the compiler takes 9; the two warpgroups then take 240, the loads 24
REGISTERS = 168


def products(x: Tensor, gate_weight: Tensor, up_weight: Tensor, f: str) -> tuple[Tensor, ...]:
    """gate, up, h: [M, F]."""
    (M, K), N = x.shape, gate_weight.shape[0]
    gate, up, h = (torch.empty(M, N, dtype=x.dtype, device=x.device) for _ in range(3))
    tiles = -(-M // 128) * -(-N // 128)
    with device_of(x.device):
        cached(glu_products_sm90_kernel)[(min(tiles, sm_count(x.get_device())),)](
            x_desc=_descriptor(x, (64, BK)),
            gate_w_desc=_descriptor(gate_weight, (128, BK)),
            up_w_desc=_descriptor(up_weight, (128, BK)),
            gate_desc=_descriptor(gate, (64, 64)),
            up_desc=_descriptor(up, (64, 64)),
            h_desc=_descriptor(h, (64, 64)),
            M=M,
            N=N,
            K=K,
            BK=BK,
            GROUP=GROUP,
            STAGES=STAGES,
            ACTIVATION=f,
            num_warps=4,
            maxnreg=REGISTERS,
        )
    return gate, up, h


def _descriptor(x: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    layout: Any = gl.NVMMASharedLayout.get_default_for(list(block), _GLUON[x.dtype])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), layout)
