"""Linear layers: alone with what follows in one pass, several of one input, gated in pairs, and the
embedding."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from slipstream.common.checks import autocast_dtype, expect_tensor
from slipstream.kernels.matmul.config import activated
from slipstream.nn.consistent import step_products
from slipstream.nn.hooks import is_hooked as is_hooked
from slipstream.ops.activation import geglu, glu_linear, sigmoid_glu, swiglu
from slipstream.ops.embedding import embedding
from slipstream.ops.matmul import matmul
from slipstream.runtime import autograd, backends
from slipstream.runtime.consistent import consistent_scope

GATES = {"swiglu": swiglu, "geglu": geglu, "sigmoid_glu": sigmoid_glu}


class Linear(nn.Linear):
    """y = f(x weight^T + bias) + residual, as torch.nn.Linear, in one pass.

    Args:
        activation: f, as ops.matmul; None is none.
        precision: of float32 products, as ops.matmul.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        activation: str | None = None,
        precision: str = "tf32x3",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation, self.precision = activation, precision

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """input [..., in_features] and residual [..., out_features]."""
        expect_tensor("input", input)
        # as DTensor, whose shards the kernel does not take
        if is_traceable_wrapper_subclass(self.weight):
            y = activated(F.linear(input, self.weight, self.bias), self.activation or "")
            return y if residual is None else y + residual
        rows = input if input.dim() > 1 else input[None]
        if residual is not None and input.dim() == 1:
            residual = residual[None]
        y = matmul(
            rows,
            self.weight.t(),
            bias=self.bias,
            activation=self.activation,
            residual=residual,
            precision=self.precision,
        )
        return y if input.dim() > 1 else y[0]


class Embedding(nn.Embedding):
    """Rows of a table, as torch.nn.Embedding with no options; an id outside of it is a ValueError
    (ops.embedding), never a read out of bounds."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, *, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, device=device, dtype=dtype)

    def forward(self, input: Tensor) -> Tensor:
        return embedding(input, self.weight)


class GatedMLP(nn.Module):
    """y = (f(x W_gate) * x W_up) W_down, which keeps x, gate and up for the backward, no product.

    Args:
        size: D. inner: F.
        activation: "swiglu", "geglu" or "sigmoid_glu", which name f.
        bias: whether the three layers have one.
        linear: what makes them, called as torch.nn.Linear.
    """

    def __init__(
        self,
        size: int,
        inner: int,
        activation: str = "swiglu",
        bias: bool = False,
        linear: Any = nn.Linear,
    ) -> None:
        super().__init__()
        if activation not in GATES:
            raise ValueError(f"activation: want one of {tuple(GATES)}, got {activation!r}")
        self.activation = activation
        self.gate_proj = linear(size, inner, bias=bias)
        self.up_proj = linear(size, inner, bias=bias)
        self.down_proj = linear(inner, size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        expect_tensor("x", x)
        down = self.down_proj
        gate, up = linears(x, (self.gate_proj, self.up_proj))
        # without gradients nothing is kept
        if not torch.is_grad_enabled() or not plain_linear(down):
            return down(GATES[self.activation](gate, up))
        return glu_linear(gate, up, down.weight, down.bias, activation=self.activation)


class SwiGLU(GatedMLP):
    """y = (silu(x W_gate) * x W_up) W_down."""

    def __init__(self, size: int, inner: int, bias: bool = False, linear: Any = nn.Linear) -> None:
        super().__init__(size, inner, "swiglu", bias, linear)


class GEGLU(GatedMLP):
    """y = (gelu(x W_gate) * x W_up) W_down."""

    def __init__(self, size: int, inner: int, bias: bool = False, linear: Any = nn.Linear) -> None:
        super().__init__(size, inner, "geglu", bias, linear)


def linears(x: Tensor, layers: Sequence[nn.Module | None]) -> list[Any]:
    """layer(x) of each, None for those that are None. The backward adds up x's gradient within the
    products instead of one tensor after the other.

    Modules that are no linear layers, or more than that (plain_linear), are called as they are.
    """
    given = [layer for layer in layers if layer is not None]
    parts = iter(_linears(x, given))
    return [None if layer is None else next(parts) for layer in layers]


def _linears(x: Tensor, layers: Sequence[Any]) -> Sequence[Tensor]:
    if consistent_scope.step is not None and (found := step_products(x, layers)) is not None:
        return found
    if len(layers) > 1 and _adds_up(x, layers):
        weights = [layer.weight for layer in layers]
        if autograd.needs_autograd(x, *weights):
            return _Linears.apply(x, *weights)
    return [layer(x) for layer in layers]


def linear_in_parts(x: Tensor, layer: nn.Module, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Splits layer(x) into tensors of `sizes` features. In training each is a product of its own:
    what follows then reads it without a copy, and gradients are not joined."""
    own: Any = layer
    if _adds_up(x, [layer]) and autograd.needs_autograd(x, own.weight):
        return _Linears.apply(x, *own.weight.split(sizes))
    return layer(x).split(sizes, dim=-1)


def _adds_up(x: Tensor, layers: Sequence[Any]) -> bool:
    """Whether a Function may multiply x by the layers' weights in the place of their calls."""
    return (
        (type(x) is Tensor or backends.TRACING)
        and not autograd.by_operation()
        and autocast_dtype(x) is None
        and all(
            type(y).forward is nn.Linear.forward
            and plain_linear(y)
            and y.bias is None
            and y.weight.dtype == x.dtype
            for y in layers
        )
    )


class _Linears(autograd.Function):
    """Products of x [..., D] with each weight [F, D]."""

    operator = "slipstream.nn.linears"

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        needs_x, *needed = ctx.needs_input_grad
        autograd.save(ctx, x if any(needed) else None, *(w if needs_x else None for w in weights))
        ctx.set_materialize_grads(False)
        ctx.shape = x.shape
        return tuple(autograd.as_base(F.linear(x, w)) for w in weights)

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx: Any, saved: autograd.Saved, *dys: Any) -> tuple[Tensor | None, ...]:
        x, *weights = saved
        needs_x, *needed = ctx.needs_input_grad
        rows = None if x is None else x.reshape(-1, x.shape[-1])
        dx: Any = None
        dweights: list[Any] = [None] * len(dys)
        # the narrowest first: adding to dx costs a narrow product more than a wide one
        given = [i for i, dy in enumerate(dys) if dy is not None]
        for i in sorted(given, key=lambda i: dys[i].shape[-1]):
            dy = dys[i].reshape(-1, dys[i].shape[-1])
            if needs_x:
                dx = dy @ weights[i] if dx is None else dx.addmm_(dy, weights[i])
            if needed[i]:
                dweights[i] = dy.t() @ rows
        return None if dx is None else dx.view(ctx.shape), *dweights


def plain_linear(layer: nn.Module) -> bool:
    """Whether a call of `layer` is F.linear of its weight and bias and nothing else.

    Only then may a fused operator read the weight instead of calling the layer. A call may also run
    hooks (FSDP2 gathers the weight in one), an adapter, a parametrization or a forward of the
    instance's own (accelerate loads an offloaded weight there). A weight that is a DTensor, another
    wrapper of tensors or on the meta device is no operand for a kernel.
    """
    own = type(layer).forward
    return (
        own is nn.Linear.forward or (own is Linear.forward and layer.activation is None)
    ) and plain_module(layer)


def plain_module(module: nn.Module) -> bool:
    """Whether a call of `module` is its class's forward, of parameters that kernels can read."""
    return (
        "parametrizations" not in module._modules
        and not is_hooked(module)
        and all(
            x is None or (not is_traceable_wrapper_subclass(x) and x.device.type != "meta")
            for x in module._parameters.values()
        )
    )
