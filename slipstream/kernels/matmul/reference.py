"""The matmul as a formula, in float64 or float32: the oracle of the tests."""

import torch
from torch import Tensor

from slipstream.kernels.matmul.inputs import MatmulInputs, activated, scaled


def matmul_reference(t: MatmulInputs) -> Tensor:
    """out [M, N]: every factor is taken to the wide dtype first."""
    compute_dtype = torch.float64 if torch.float64 in (t.a.dtype, t.out_dtype) else torch.float32
    z = scaled(t.a.to(compute_dtype) @ t.b.to(compute_dtype), t.scale_a, t.scale_b)
    z = activated(z if t.bias is None else z + t.bias.to(compute_dtype), t.activation)
    return (z if t.residual is None else z + t.residual.to(compute_dtype)).to(t.out_dtype)
