"""Activations, most of them of a gate beside what it lets through.

On CUDA each is one kernel forward and one backward, computed in float32 and rounded once; `impl`
None chooses, and "eager", "triton" or "reference" is used or refused.
"""

from torch import Tensor

from slipstream.core import checks
from slipstream.kernels.pointwise.activation import glu


def swiglu(gate: Tensor, up: Tensor, *, impl: str | None = None) -> Tensor:
    """silu(gate) * up, of two tensors of one shape and dtype.

    Source: Shazeer, GLU Variants Improve Transformer, 2020, eq. 5.
    """
    _check(gate, up)
    return glu(gate, up, "silu", impl)


def geglu(gate: Tensor, up: Tensor, *, impl: str | None = None) -> Tensor:
    """gelu(gate) * up, of two tensors of one shape and dtype; gelu by its tanh form.

    Source: Shazeer, GLU Variants Improve Transformer, 2020, eq. 5.
    """
    _check(gate, up)
    return glu(gate, up, "gelu", impl)


def sigmoid_glu(gate: Tensor, up: Tensor, *, impl: str | None = None) -> Tensor:
    """sigmoid(gate) * up, of two tensors of one shape and dtype.

    Source: Dauphin et al., Language Modeling with Gated Convolutional Networks, 2016, eq. 1.
    """
    _check(gate, up)
    return glu(gate, up, "sigmoid", impl)


def squared_relu(x: Tensor, *, impl: str | None = None) -> Tensor:
    """max(x, 0)^2.

    Source: So et al., Primer, 2021, section 4.2.
    """
    checks.expect_tensor("x", x)
    checks.expect_floating({"x": x})
    return glu(x, None, "relu2", impl)


def _check(gate: Tensor, up: Tensor) -> None:
    checks.expect_tensor("gate", gate)
    checks.expect_shape("up", up, gate.shape)
    checks.expect_one_dtype({"gate": gate, "up": up})
    checks.expect_one_device({"gate": gate, "up": up})
