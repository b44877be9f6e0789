"""A decoding step's linear layers, with the norm before them and what follows, in one launch each.

Where a layer is no plain linear layer (nn/linear.py: plain_linear), and everywhere but on CUDA
without gradients, autocast or a tracer, the modules are called as they are.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slipstream.kernels.primitives.norm_options import NormOptions
from slipstream.kernels.projection_step import inputs, op
from slipstream.nn.consistent import step_products
from slipstream.nn.linear import GatedMLP, is_hooked, plain_linear, plain_module
from slipstream.nn.norm import RMSNorm
from slipstream.runtime.consistent import consistent_scope

# Hidden size up to which shares of K, whose sum makes the next norm, are faster than a product and
# a norm: 0.61 to 0.95 of their time with 40 and 64 rows on an H100, and 0.95 to 1.26 from 3072 on.
MAX_SHARED_SIZE = 2048


def fuses(x: Tensor) -> bool:
    """Whether x [N, 1, D] is the input of a fused step of linear layers."""
    return takes_step(x) and x.shape[0] <= op.MAX_ROWS


def makes_norms(x: Tensor) -> bool:
    """Whether one launch may add a layer's result to x, and make the norm of the sum too."""
    return fuses(x) and x.shape[-1] <= MAX_SHARED_SIZE and op.takes(x.shape[0], x.device)


def takes_step(x: Tensor) -> bool:
    """Whether x [N, 1, D] is one token of each of N sequences that decoding operators take."""
    return (
        x.dim() == 3
        and x.shape[1] == 1
        and x.shape[0] > 0
        and _on_device(x)
        and type(x) is Tensor
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled(x.device.type)
    )


def linears(
    x: Tensor, layers: Sequence[nn.Linear | None], norm: nn.Module | None = None
) -> list[Any]:
    """layer(norm(x)) for each layer, None where the layer is None."""
    given = [layer for layer in layers if layer is not None]
    if not _plain(x, given):
        x = _normed_for(given, x, norm)
        return [None if layer is None else layer(x) for layer in layers]
    y = _call(x, given, norm)
    parts = iter(y.split([layer.weight.shape[0] for layer in given], dim=-1))
    return [None if layer is None else next(parts) for layer in layers]


class NormedNext(NamedTuple):
    """A residual, and the norm of its sum with a layer's result: `projected` returns both.
    n: the norm's row_norm."""

    residual: Tensor
    norm: RMSNorm
    n: NormOptions


Residual = Tensor | NormedNext | None


def normed_next(residual: Tensor, norm: nn.Module | None) -> Tensor | NormedNext:
    """The residual with the norm of the sum, where one launch makes both; else alone."""
    if (
        type(norm) is RMSNorm
        and makes_norms(residual)
        and (n := norm.row_norm) is not None
        and isinstance(norm.weight, Tensor)
        and norm.weight.dtype.itemsize == 2
        and plain_module(norm)
        and norm.weight.device == residual.device
    ):
        return NormedNext(residual, norm, n)
    return residual


def projected(x: Tensor, layer: nn.Linear, residual: Residual) -> Any:
    """layer(x) + residual, which may be None; with a NormedNext that sum and its norm."""
    if residual is None:
        return layer(x)
    if isinstance(residual, NormedNext):
        h, norm, n = residual
        weight: Any = norm.weight
        if not _plain(x, [layer]) or not weight.dtype == layer.weight.dtype == x.dtype:
            h = projected(x, layer, h)
            return h, _normed(h, norm)
        rows, added = x.flatten(0, 1), h.flatten(0, 1)
        t = inputs.NormedInputs(rows, layer.weight, layer.bias, added, weight)
        h, y = op.run_norm(t, n)
        return h[:, None], y[:, None]
    if not _plain(x, [layer]):
        return residual + layer(x)
    return _call(x, [layer], None, residual=residual.flatten(0, 1))


def by_rows(x: Tensor, layer: Any) -> Tensor:
    """layer(x) of x [N, T, D], a part of wider rows, in a launch that begins ahead in a step; else
    a plain layer takes rows, for of three dimensions torch adds the bias in a launch of its own."""
    if not plain_linear(layer):
        return layer(x)
    if fuses(x):
        return _call(x, [layer], None)
    return layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def gated_mlp(
    mlp: GatedMLP, x: Tensor, norm: nn.Module | None, residual: Tensor, next_norm: nn.Module | None
) -> tuple[Tensor, Tensor | None]:
    """h = mlp(norm(x)) + residual, and next_norm(h) where a launch makes that too."""
    layers = [mlp.gate_proj, mlp.up_proj]
    if mlp.activation != "swiglu" or is_hooked(mlp) or not _plain(x, layers):
        return residual + mlp(_normed_for(layers, x, norm)), None
    inner = _call(x, layers, norm, glu=True)
    y = projected(inner, mlp.down_proj, normed_next(residual, next_norm))
    return y if isinstance(y, tuple) else (y, None)


def consistent_mlp(mlp: GatedMLP, x: Tensor, residual: Tensor) -> Tensor:
    """residual + mlp(x), in two launches with the same bits where a step of a consistent model has
    them."""
    if consistent_scope.step is not None and mlp.activation == "swiglu" and not is_hooked(mlp):
        inner = step_products(x, (mlp.gate_proj, mlp.up_proj), activation=mlp.activation)
        if inner is not None:
            y = step_products(inner[0], (mlp.down_proj,), residual=residual)
            return residual + mlp.down_proj(inner[0]) if y is None else y[0]
    return residual + mlp(x)


def _on_device(x: Tensor) -> bool:
    return x.is_cuda


def _plain(x: Tensor, layers: Sequence[nn.Linear]) -> bool:
    return fuses(x) and all(
        plain_linear(layer) and layer.weight.dtype == layers[0].weight.dtype for layer in layers
    )


def _call(
    x: Tensor,
    layers: Sequence[nn.Linear],
    norm: nn.Module | None,
    residual: Tensor | None = None,
    glu: bool = False,
) -> Tensor:
    """[N, 1, D] -> [N, 1, ...]"""
    weight: Any = None
    made = None
    if type(norm) is RMSNorm and not is_hooked(norm):
        weight, made = norm.weight, norm.row_norm
    normed = x.shape[0] > 1 or made is None
    rows = (_normed(x, norm) if normed else x).flatten(0, 1)
    weights: list[Any] = [layer.weight for layer in layers]
    biases: list[Any] = [layer.bias for layer in layers]
    terms = rows, weights, biases, weight, residual
    options = made, glu, consistent_scope.on, normed
    return op.run(inputs.ProjectionInputs(*terms, *options), None)[:, None]


def _normed(x: Tensor, norm: nn.Module | None) -> Tensor:
    if norm is None:
        return x
    weight = getattr(norm, "weight", None)
    return norm(x if weight is None else x.to(weight.dtype))


def _normed_for(layers: Sequence[nn.Module], x: Tensor, norm: nn.Module | None) -> Tensor:
    """norm(x) for layers that are called, whose weights may be narrower than the norm's."""
    if norm is None:
        return x
    y, weight = _normed(x, norm), getattr(layers[0], "weight", None)
    if not isinstance(weight, Tensor):
        return y
    return y.to(weight.dtype) if weight.is_floating_point() and weight.itemsize > 1 else y
