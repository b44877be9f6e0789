# pyright: reportCallIssue=false, reportIndexIssue=false, reportMissingImports=false
# pyright: reportArgumentType=false
"""Launch of the matmul for sm_90: no synchronisation.

Memory beyond the result: a copy of a factor that TMA or wgmma cannot take as it is: one that does
not begin at 16 bytes, or of 8 or 32 bits whose rows of a, or columns of b, are not adjacent.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.gluon import TensorDescriptor, gl
from slipstream.kernels.kept import kept
from slipstream.kernels.launching import on, processors
from slipstream.kernels.matmul.config import TMA_BYTES, MatmulConfig
from slipstream.kernels.matmul.hopper.matmul import matmul_sm90_kernel
from slipstream.kernels.matmul.terms import Terms, row_by_row

_GLUON = {
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float32: gl.float32,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
}
# of 12 warps, of which the compiler takes 9; the two warpgroups then take 240, the loads 24
REGISTERS = 168


def matmul(t: Terms, c: MatmulConfig) -> Tensor:
    """out [M, N]."""
    (M, K), N = t.a.shape, t.b.shape[1]
    out = torch.empty(M, N, dtype=t.out_dtype, device=t.a.device)
    # rows of both as memory has them: a [M, K] or its transpose, b's transpose [N, K] or b
    a, a_t = _placed(t.a)
    b, b_rows = _placed(t.b.t())
    residual, bias = t.residual, t.bias
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    sa, sb = (None if x is None else x.float().contiguous() for x in (t.scale_a, t.scale_b))
    BN, BK = c.block_n, c.block_k
    columns = TMA_BYTES // out.element_size()
    tiles = -(-M // 128) * -(-N // BN)
    with on(out.device):
        kept(matmul_sm90_kernel)[(min(tiles, processors(out.get_device())),)](
            _descriptor(a, (BK, 64) if a_t else (64, BK)),
            _descriptor(b, (BK, BN) if b_rows else (BN, BK)),
            _descriptor(out, (64, min(BN, columns))),
            None if bias is None else bias.contiguous(), residual, sa, sb, M, N, K,
            0 if residual is None else residual.stride(0),
            0 if sa is None else sa.dim(), 0 if sb is None else sb.dim(),
            BN, BK, c.group_m, c.num_stages, a_t, not b_rows, t.activation,
            max((BN // columns).bit_length() - 1, 0),
            num_warps=4, maxnreg=REGISTERS,
        )  # fmt: skip
    return out


def _placed(x: Tensor) -> tuple[Tensor, bool]:
    """x [rows, K] as its rows, or as its columns [K, rows] if wgmma takes them so; and which."""
    if not row_by_row(x) and x.element_size() == 2 and row_by_row(x.t()):
        x, turned = x.t(), True
    else:
        turned = False
    if not row_by_row(x) or x.data_ptr() % 16:
        # not .contiguous(), which leaves alone what is contiguous but badly placed
        x = x.clone(memory_format=torch.contiguous_format)
    return x, turned


def _descriptor(x: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    return TensorDescriptor(x, x.shape, x.stride(), list(block), _layout(x.dtype, block))


@cache
def _layout(dtype: torch.dtype, block: tuple[int, int]) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(block), _GLUON[dtype])
