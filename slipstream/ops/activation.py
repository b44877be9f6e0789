"""Activations, most of them of a gate beside what it lets through; alone, or with the linear layer
that follows.

On CUDA each is one kernel forward and one backward, computed in float32 and rounded once; `impl`
None chooses, and "eager", "triton" or "reference" is used or refused. torch.compile makes its own
kernel of them and of what is around them, unless "triton" is asked for.
"""

from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.elementwise import glu as linear
from slipstream.kernels.elementwise.glu import glu

# name: the function, and whether an up belongs to it
ACTIVATIONS = {
    "swiglu": ("silu", True),
    "geglu": ("gelu", True),
    "sigmoid_glu": ("sigmoid", True),
    "squared_relu": ("relu2", False),
}


@checks.operator
def swiglu(gate: Tensor, up: Tensor, *, impl: str | None = None) -> Tensor:
    """silu(gate) * up, of two tensors of one shape and dtype.

    Source: Shazeer, GLU Variants Improve Transformer, 2020, eq. 5.
    """
    _check(gate, up)
    return glu(gate, up, "silu", impl)


@checks.operator
def geglu(gate: Tensor, up: Tensor, *, impl: str | None = None) -> Tensor:
    """gelu(gate) * up, of two tensors of one shape and dtype; gelu by its tanh form.

    Source: Shazeer, GLU Variants Improve Transformer, 2020, eq. 5.
    """
    _check(gate, up)
    return glu(gate, up, "gelu", impl)


@checks.operator
def sigmoid_glu(gate: Tensor, up: Tensor, *, impl: str | None = None) -> Tensor:
    """sigmoid(gate) * up, of two tensors of one shape and dtype.

    Source: Dauphin et al., Language Modeling with Gated Convolutional Networks, 2016, eq. 1.
    """
    _check(gate, up)
    return glu(gate, up, "sigmoid", impl)


@checks.operator
def squared_relu(x: Tensor, *, impl: str | None = None) -> Tensor:
    """max(x, 0)^2.

    Source: So et al., Primer, 2021, section 4.2.
    """
    checks.expect_floating({"x": x})
    return glu(x, None, "relu2", impl)


@checks.operator
def glu_linear(
    gate: Tensor,
    up: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "swiglu",
    impl: str | None = None,
) -> Tensor:
    """An activation and the linear layer after it, keeping only gate and up for the backward.

        h = f(gate) * up        y = h weight^T + bias

    Args:
        gate: [..., F], any floating dtype.
        up: shape and dtype of gate; None for "squared_relu", whose up is 1.
        weight: [D, F], gate's dtype.
        bias: [D], gate's dtype; None is 0.
        activation: "swiglu", "geglu", "sigmoid_glu" or "squared_relu", as the functions above.
        impl: of the activation: None chooses; "eager", "triton" or "reference" is used or refused.

    Returns:
        y [..., D] in gate's dtype, or autocast's.

    Raises:
        ValueError: shapes do not fit, or the activation is unknown. TypeError: dtypes.

    Cost: 2 T F D flops, twice that backward. Memory for the backward: gate and up; two operators
        keep h as well. h is computed again there, one pass over gate and up.
    """
    if activation not in ACTIVATIONS:
        known = ", ".join(repr(name) for name in ACTIVATIONS)
        raise ValueError(f"activation: want one of {known}, got {activation!r}")
    f, gated = ACTIVATIONS[activation]
    if gate.dim() == 0:
        raise ValueError("gate: want at least one dimension [..., F], got a scalar")
    if (up is not None) != gated:
        wanted = "a tensor" if gated else "None"
        raise ValueError(f"up: want {wanted} for {activation!r}, got {type(up).__name__}")
    if up is not None:
        checks.expect_shape("up", up, gate.shape)
    checks.expect_rank("weight", weight, 2, "[D, F]")
    checks.expect_shape("weight", weight, (weight.shape[0], gate.shape[-1]))
    if bias is not None:
        checks.expect_shape("bias", bias, weight.shape[:1])
    given = {"gate": gate, "up": up, "weight": weight, "bias": bias}
    checks.expect_floating(given)
    checks.expect_one_device(given)
    if (dtype := checks.autocast_dtype(gate)) is None:
        checks.expect_one_dtype(given)
        return linear.glu_linear(gate, up, weight, bias, f, impl)
    cast = [None if x is None else x.to(dtype) for x in (up, bias)]
    return linear.glu_linear(gate.to(dtype), cast[0], weight.to(dtype), cast[1], f, impl)


def _check(gate: Tensor, up: Tensor) -> None:
    checks.expect_shape("up", up, gate.shape)
    checks.expect_one_dtype({"gate": gate, "up": up})
    checks.expect_one_device({"gate": gate, "up": up})
