"""The matmul in plain torch: as a formula, and by the library's product and float32 after it.

float32 products have the precision that torch is set to; float8 ones are taken to float32.
"""

import torch
from torch import Tensor

from slipstream.common.checks import cast
from slipstream.kernels.matmul.config import FP8, MatmulInputs, activated, scaled


def matmul(t: MatmulInputs) -> Tensor:
    """out [M, N]."""
    if t.a.dtype in FP8 or t.a.dtype == torch.float64:
        return matmul_reference(t)
    plain = (t.scale_a, t.scale_b, t.bias, t.residual) == (None,) * 4 and not t.activation
    z = torch.mm(t.a, t.b)
    if plain:
        return cast(z, t.out_dtype)
    z = scaled(z.float(), t.scale_a, t.scale_b)
    z = activated(z if t.bias is None else z.add_(t.bias), t.activation)
    return cast(z if t.residual is None else z.add_(t.residual), t.out_dtype)


def matmul_reference(t: MatmulInputs) -> Tensor:
    """out [M, N], the oracle of the tests: each factor is taken to float64 or float32 first."""
    compute_dtype = torch.float64 if torch.float64 in (t.a.dtype, t.out_dtype) else torch.float32
    z = scaled(t.a.to(compute_dtype) @ t.b.to(compute_dtype), t.scale_a, t.scale_b)
    z = activated(z if t.bias is None else z + t.bias.to(compute_dtype), t.activation)
    return (z if t.residual is None else z + t.residual.to(compute_dtype)).to(t.out_dtype)
