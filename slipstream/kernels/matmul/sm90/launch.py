"""Launch of the matmul for sm_90: no synchronisation.

Memory beyond the result: a copy of a factor that TMA or wgmma cannot take as it is: one that does
not begin at 16 bytes, one of 8 bits that is not adjacent along K, and one if neither is of 32.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.matmul import config, inputs
from slipstream.kernels.matmul.sm90.matmul import matmul_sm90_kernel
from slipstream.kernels.primitives.sm90 import TensorDescriptor, gl
from slipstream.runtime import backends, launch_cache

_GLUON = {
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float32: gl.float32,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
}
# of 12 warps, of which the compiler takes 9; the two warpgroups then take 240, the loads 24
REGISTERS = 168


def matmul(t: inputs.MatmulInputs, c: config.MatmulConfig) -> Tensor:
    """out [M, N]."""
    (M, K), N = t.a.shape, t.b.shape[1]
    out = torch.empty(M, N, dtype=t.out_dtype, device=t.a.device)
    # the left factor [M, K] and the right one's transpose [N, K], or what is their transpose
    lhs, rhs, swapped = t.a, t.b.t(), inputs.tma_swaps(t)
    if swapped:
        lhs, rhs, M, N = rhs, lhs, N, M
    size = lhs.element_size()
    lhs, lhs_t = _align_for_tma(lhs, size in (2, 4))
    rhs, rhs_t = _align_for_tma(rhs, size == 2)
    tensors, strides = inputs.epilogue(t)
    BN, BK = c.block_n, c.block_k
    levels = config.column_levels(BN, out.element_size())
    out_block = (BN >> levels, 64) if swapped else (64, BN >> levels)
    tiles = -(-M // 128) * -(-N // BN)
    with backends.device_of(out.device):
        launch_cache.cached(matmul_sm90_kernel)[(min(tiles, backends.sm_count(out.get_device())),)](
            a_desc=_descriptor(lhs, (BK, 64) if lhs_t else (64, BK)),
            b_desc=_descriptor(rhs, (BK, BN) if rhs_t else (BN, BK)),
            out_desc=_descriptor(out, out_block),
            **tensors,
            M=M,
            N=N,
            K=K,
            **strides,
            BN=BN,
            BK=BK,
            GROUP=c.group_m,
            STAGES=c.num_stages,
            A_T=lhs_t,
            B_T=not rhs_t,
            OUT_T=swapped,
            ACTIVATION=t.activation,
            LEVELS=levels,
            num_warps=4,
            maxnreg=REGISTERS,
        )
    return out


def _align_for_tma(x: Tensor, may_transpose: bool) -> tuple[Tensor, bool]:
    """x [rows, K] as its rows, or if it may be as its columns [K, rows]; and which."""
    transposed = may_transpose and not inputs.row_by_row(x) and inputs.row_by_row(x.t())
    if transposed:
        x = x.t()
    if not inputs.row_by_row(x) or x.data_ptr() % 16:
        # not .contiguous(), which leaves alone what is contiguous but badly placed
        x = x.clone(memory_format=torch.contiguous_format)
    return x, transposed


def _descriptor(x: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    layout = _layout(x.dtype, block)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), layout)


@launch_cache.cache
def _layout(dtype: torch.dtype, block: tuple[int, int]) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(block), _GLUON[dtype])
