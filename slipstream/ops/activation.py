"""Activations, most of them of a gate beside what it lets through."""

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.core import checks


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, of two tensors of one shape and dtype.

    Source: Shazeer, GLU Variants Improve Transformer, 2020, eq. 5.
    """
    _check(gate, up)
    return F.silu(gate) * up


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up, of two tensors of one shape and dtype; gelu by its tanh form.

    Source: Shazeer, GLU Variants Improve Transformer, 2020, eq. 5.
    """
    _check(gate, up)
    return F.gelu(gate, approximate="tanh") * up


def sigmoid_glu(gate: Tensor, up: Tensor) -> Tensor:
    """sigmoid(gate) * up, of two tensors of one shape and dtype.

    Source: Dauphin et al., Language Modeling with Gated Convolutional Networks, 2016, eq. 1.
    """
    _check(gate, up)
    return torch.sigmoid(gate) * up


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2.

    Source: So et al., Primer, 2021, section 4.2.
    """
    checks.expect_tensor("x", x)
    checks.expect_floating({"x": x})
    return F.relu(x).square()


def _check(gate: Tensor, up: Tensor) -> None:
    checks.expect_tensor("gate", gate)
    checks.expect_shape("up", up, gate.shape)
    checks.expect_one_dtype({"gate": gate, "up": up})
    checks.expect_one_device({"gate": gate, "up": up})
