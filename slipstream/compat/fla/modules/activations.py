"""fla.modules.activations: activations, and those that gate a linear layer."""

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.ops import activation as ops
from slipstream.ops._fp32 import widen


def sigmoid(x: Tensor) -> Tensor:
    return torch.sigmoid(x)


def elu_p1(x: Tensor) -> Tensor:
    """elu(x) + 1."""
    return F.elu(x) + 1


def logsigmoid(x: Tensor, temperature: float = 1.0) -> Tensor:
    """log(sigmoid(x)) / temperature."""
    return F.logsigmoid(x) / temperature


def swish(x: Tensor) -> Tensor:
    """x sigmoid(x)."""
    return F.silu(x)


def sqrelu(x: Tensor) -> Tensor:
    """max(x, 0)^2."""
    return ops.squared_relu(x)


def fast_gelu_impl(x: Tensor) -> Tensor:
    """gelu(x) by its tanh form."""
    return F.gelu(x, approximate="tanh")


def bias_gelu_impl(x: Tensor, bias: Tensor) -> Tensor:
    """gelu(x + bias) by its tanh form."""
    return F.gelu(x + bias, approximate="tanh")


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    """silu(x) y."""
    return ops.swiglu(x, y)


def swiglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(silu(x) y) weight^T + bias; the product is computed again in the backward."""
    return ops.glu_linear(x, y, weight, bias, activation="swiglu")


def sigmoidglu(x: Tensor, y: Tensor) -> Tensor:
    """sigmoid(x) y."""
    return ops.sigmoid_glu(x, y)


def sigmoidglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(sigmoid(x) y) weight^T + bias; the product is computed again in the backward."""
    return ops.glu_linear(x, y, weight, bias, activation="sigmoid_glu")


def powglu(x: Tensor, y: Tensor, power: float = 3.0) -> Tensor:
    """f(x) y, where f(x) = x^(power / (sqrt(x) + 1)) sigmoid(x) above 0, and x sigmoid(x) below."""
    wide = widen(x)
    # where x <= 0 the branch that is not taken must not make gradients of NaN
    positive = torch.where(wide > 0, wide, 1.0)
    raised = positive ** (power / (positive.sqrt() + 1))
    gate = torch.where(wide > 0, raised, wide) * wide.sigmoid()
    return (gate * y).to(x.dtype)


def powglu_linear(
    x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, power: float = 3.0
) -> Tensor:
    """powglu(x, y) weight^T + bias."""
    return F.linear(powglu(x, y, power), weight, bias)


ACT2FN = {
    "relu": F.relu,
    "sigmoid": sigmoid,
    "logsigmoid": logsigmoid,
    "silu": swish,
    "swish": swish,
    "sqrelu": sqrelu,
    "gelu": fast_gelu_impl,
    "bias_gelu": bias_gelu_impl,
}
