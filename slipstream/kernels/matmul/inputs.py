"""The options of a matmul, besides its two factors.

z = (a b) * scale_a * scale_b + bias        out = f(z) + residual
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda z: z,
    "relu": F.relu,
    "squared_relu": lambda z: F.relu(z).square(),
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
}
ACTIVATIONS = (*_FUNCTIONS,)[1:]
# of products of float32: by TensorFloat32 once or three times, or by fused multiply-adds
PRECISIONS = ("tf32", "tf32x3", "ieee")
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
HALVES = (torch.float16, torch.bfloat16)


class MatmulInputs(NamedTuple):
    """a [M, K], b [K, N], bias [N], residual [M, N], scale_a [M] or [], scale_b [N] or [].

    activation "" is none.
    """

    a: Tensor
    b: Tensor
    bias: Tensor | None
    residual: Tensor | None
    scale_a: Tensor | None
    scale_b: Tensor | None
    activation: str
    precision: str
    out_dtype: torch.dtype


def scaled(z: Tensor, scale_a: Tensor | None, scale_b: Tensor | None) -> Tensor:
    """z [M, N] times the factors of its rows and columns."""
    if scale_a is not None:
        z = z * (scale_a[:, None] if scale_a.dim() else scale_a).to(z.dtype)
    return z if scale_b is None else z * scale_b.to(z.dtype)


def activated(z: Tensor, name: str) -> Tensor:
    return _FUNCTIONS[name](z)


def epilogue(t: MatmulInputs) -> tuple[dict[str, Tensor | None], dict[str, int]]:
    """Arguments of kernels: what is done to the sums, with adjacent elements, and its strides."""
    residual = t.residual
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    sa, sb = (None if x is None else x.float().contiguous() for x in (t.scale_a, t.scale_b))
    bias = None if t.bias is None else t.bias.contiguous()
    return {"bias_ptr": bias, "r_ptr": residual, "sa_ptr": sa, "sb_ptr": sb}, {
        "r_stride": 0 if residual is None else residual.stride(0),
        "sa_stride": 0 if sa is None else sa.dim(),
        "sb_stride": 0 if sb is None else sb.dim(),
    }


def row_by_row(x: Tensor) -> bool:
    """Whether TMA can read x's rows."""
    step = x.stride(0) * x.element_size()
    return x.stride(1) == 1 and step > 0 and step % 16 == 0


def tma_swaps(t: MatmulInputs) -> bool:
    """Whether the sm_90 kernel multiplies b^T a^T: its right factor of 32 bits goes along K."""
    a, b = t.a, t.b
    return a.element_size() == 4 and row_by_row(a) and row_by_row(b) and not row_by_row(b.t())
