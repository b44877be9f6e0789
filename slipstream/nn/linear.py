"""Linear layers: alone with what follows in one pass, several of one input, gated in pairs, and the
embedding."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from slipstream.common.checks import autocast_dtype, expect_tensor
from slipstream.kernels.elementwise.glu_mlp import gated_mlp, impls_for, unsupported_reason
from slipstream.kernels.matmul.inputs import activated
from slipstream.nn.consistent import step_products
from slipstream.nn.hooks import is_hooked as is_hooked
from slipstream.ops.activation import ACTIVATIONS, geglu, glu_linear, sigmoid_glu, swiglu
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
        if self._fuses(x):
            gate, f = self.gate_proj.weight, ACTIVATIONS[self.activation][0]
            weights = gate, self.up_proj.weight, down.weight
            return gated_mlp(x, *weights, down.bias, f, impls_for(x, gate))
        gate, up = linears(x, (self.gate_proj, self.up_proj))
        # without gradients nothing is kept
        if not torch.is_grad_enabled() or not plain_linear(down):
            return down(GATES[self.activation](gate, up))
        return glu_linear(gate, up, down.weight, down.bias, activation=self.activation)

    def _fuses(self, x: Tensor) -> bool:
        """Whether gradients are wanted, and kernels have the activation within the products."""
        layers = self.gate_proj, self.up_proj, self.down_proj
        if not torch.is_grad_enabled() or consistent_scope.on or not _all_plain(x, layers):
            return False
        if self.gate_proj.bias is not None or self.up_proj.bias is not None:
            return False
        gate, up, down = (y.weight for y in layers)
        if not autograd.needs_autograd(x, gate, up, down, self.down_proj.bias):
            return False
        return unsupported_reason(x, gate, up, down, ACTIVATIONS[self.activation][0]) is None


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


def _linears(x: Tensor, layers: Sequence[nn.Module]) -> Sequence[Tensor]:
    plain = _all_plain(x, layers)
    parameters: list[Any] = [p for y in layers for p in (y.weight, y.bias)] if plain else []
    dtypes = {p.dtype for p in parameters if p is not None}
    if dtypes == {x.dtype} and autograd.needs_autograd(x, *parameters):
        return _Linears.apply(x, *parameters)
    if consistent_scope.step is not None:
        found = step_products(x, layers)
        if found is not None:
            return found
    return [layer(x) for layer in layers]


def _all_plain(x: Tensor, layers: Sequence[nn.Module]) -> bool:
    """Whether a Function may multiply x by the layers' weights in the place of their calls."""
    return (
        (type(x) is Tensor or backends.TRACING)
        and not autograd.by_operation()
        and autocast_dtype(x) is None
        and all(type(y).forward is nn.Linear.forward and plain_linear(y) for y in layers)
    )


class _Linears(autograd.Function):
    """Products of x [..., D] with each layer's weight [F, D], and its bias [F] or None."""

    operator = "slipstream.nn.linears"

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Any) -> tuple[Tensor, ...]:
        weights, biases = parameters[::2], parameters[1::2]
        # nothing that no gradient wants is kept: a frozen layer's input, say
        needs_x, *needed = ctx.needs_input_grad
        autograd.save(
            ctx, x if any(needed[::2]) else None, *(w if needs_x else None for w in weights)
        )
        ctx.shape = x.shape
        ctx.rows = [w.shape[0] for w in weights]
        ctx.narrow = narrow = _narrow(weights, biases)
        ctx.set_materialize_grads(False)
        ys: list[Any] = [
            None if i in narrow else autograd.as_base(F.linear(x, w, b))
            for i, (w, b) in enumerate(zip(weights, biases, strict=True))
        ]
        if narrow:
            y = F.linear(x, _joined([weights[i] for i in narrow], 0))
            for i, part in zip(narrow, y.split_with_sizes(_sizes(ctx.rows, narrow), -1)):
                ys[i] = autograd.as_base(part)
        return tuple(ys)

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx: Any, saved: autograd.Saved, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = saved
        needs_x, *needed = ctx.needs_input_grad
        dx: Any = None
        rows: Any = None if x is None else x.reshape(-1, x.shape[-1])
        flat = [None if dy is None else dy.reshape(-1, dy.shape[-1]) for dy in dys]
        dweights: list[Any] = [None] * len(dys)
        narrow = [i for i in ctx.narrow if flat[i] is not None]
        alone = [i for i in range(len(dys)) if i not in narrow and flat[i] is not None]
        # the narrowest first: adding to x's gradient costs a narrow product more than a wide one
        alone.sort(key=lambda i: ctx.rows[i])
        parts: list[list[int]] = [*([narrow] if narrow else []), *([i] for i in alone)]
        for part in parts:
            dy: Any = flat[part[0]] if len(part) == 1 else _joined([flat[i] for i in part], 1)
            if needs_x:
                w = weights[part[0]] if len(part) == 1 else _joined([weights[i] for i in part], 0)
                if dx is None:
                    dx = dy @ w
                elif dx.dtype == w.dtype:
                    dx = dx.addmm_(dy, w)
                else:  # of two dtypes under autocast, which knows no addmm_
                    dx = torch.addmm(dx, dy, w)
            if any(needed[2 * i] for i in part):
                dw = (dy.t() @ rows).split_with_sizes(_sizes(ctx.rows, part, dy.shape[1]), 0)
                for i, one in zip(part, dw):
                    dweights[i] = one if needed[2 * i] else None
        found: list[Tensor | None] = []
        for i, (dw, dy) in enumerate(zip(dweights, flat, strict=True)):
            found += [dw, dy.sum(0) if dy is not None and needed[2 * i + 1] else None]
        return None if dx is None else dx.view(ctx.shape), *found


# Columns up to which a product takes as long as reading x does, whatever their number.
NARROW = 256
# x's columns for each of them, so that what the products write is little beside x.
WIDER = 4
# Columns of narrow layers side by side: their rows begin at multiples of 16 bytes.
ALIGNED = 8


def _narrow(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[int]:
    """Which layers are one product: the widest first, so that all but the last are aligned."""
    found = [
        i
        for i, (w, b) in enumerate(zip(weights, biases))
        if b is None and w.shape[0] <= min(NARROW, w.shape[1] // WIDER)
    ]
    found.sort(key=lambda i: -weights[i].shape[0])
    return found if len(found) > 1 else []


def _joined(parts: Sequence[Any], dim: int) -> Tensor:
    """The parts side by side, with zeros up to a multiple of ALIGNED."""
    missing = -sum(x.shape[dim] for x in parts) % ALIGNED
    if missing:
        shape = [*parts[0].shape]
        shape[dim] = missing
        parts = [*parts, parts[0].new_zeros(shape)]
    return torch.cat([*parts], dim)


def _sizes(rows: Sequence[int], part: Sequence[int], total: int | None = None) -> list[int]:
    """The columns of each layer of a product, then those that _joined has added."""
    sizes = [rows[i] for i in part]
    missing = -sum(sizes) % ALIGNED if total is None else total - sum(sizes)
    return [*sizes, missing] if missing else sizes


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
