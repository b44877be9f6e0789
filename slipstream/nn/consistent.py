"""Linear layers of models with consistent=True: a row's product does not depend on other rows.

On CUDA one order of sums whatever the number of rows: by one tile, or on sm_90 in 16 bits by three
and the kernel of a decoding step: on an H100 none of 3,590,144 values of seven shapes differed.
Elsewhere BLOCK rows at a time, which torch multiplies in one way.
"""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.kernels.matmul import config as tiles
from slipstream.kernels.matmul import op
from slipstream.kernels.projection_step.inputs import MAX_WEIGHTS
from slipstream.kernels.projection_step.op import MAX_ROWS
from slipstream.nn.hooks import has_hooks
from slipstream.ops.matmul import matmul
from slipstream.ops.steps import projection_step
from slipstream.runtime.consistent import BLOCK, consistent, consistent_scope

# of which the tile is the best, whatever a call's are
_ROWS = 4096
# and tiles with the same order of sums for so many rows at most: of steps and short prompts
_FEWER_ROWS = (
    (512, tiles.MatmulConfig(64, 64, 64, 4, 4, 8, "pointer")),
    (2048, tiles.MatmulConfig(128, 128, 64, 8, 6, 8, "tma")),
)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear of x [..., in], weight [out, in] and bias [out]; each row's bits are its own.

    On CUDA float64 and layers of which the library has no kernel raise NotImplementedError.
    """
    if x.is_cuda:
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
        config = _config(dtype, *weight.shape, x.device)
        rows = x.contiguous()  # other strides may want another kernel
        if config.kernel == "tma" and dtype.itemsize == 2 and bias is None:
            count = x.numel() // max(x.shape[-1], 1)
            if _is_step(x, [weight]):
                return _of_step(x, [weight])
            config = next((fewer for most, fewer in _FEWER_ROWS if count <= most), config)
        y = matmul(rows if x.dim() > 1 else rows[None], weight.t(), bias=bias, config=config)
        return y if x.dim() > 1 else y[0]
    rows = x.flatten(0, -2)
    padded = F.pad(rows, (0, 0, 0, -rows.shape[0] % BLOCK))
    blocks = [F.linear(block.clone(), weight, bias) for block in padded.split(BLOCK)]
    y = torch.cat(blocks) if blocks else F.linear(padded, weight, bias)
    return y[: rows.shape[0]].view(*x.shape[:-1], weight.shape[0])


def step_products(
    x: Tensor, layers: Sequence[nn.Module], **options: Any
) -> Sequence[Tensor] | None:
    """layer(x) for each of the layers, in one launch, for an x [..., in] of few rows.

    options: activation or residual [..., out], as ops.projection_step; then there is one result.
    The bits are those of the layers' own calls, and of what follows. None where the layers have to
    be called instead.
    """
    if not x.is_cuda or not all(has_consistent_product(y) and not has_hooks(y) for y in layers):
        return None
    weights: list[Tensor] = [y.weight for y in layers]  # pyright: ignore[reportAssignmentType]
    if len(weights) > MAX_WEIGHTS or any(y.bias is not None for y in layers):
        return None
    if not _is_step(x, weights):
        return None
    configs = [_config(x.dtype, *weight.shape, x.device) for weight in weights]
    if any(config.kernel != "tma" for config in configs):
        return None
    y = _of_step(x, weights, **options)
    glu = "activation" in options
    return [y] if glu else y.split_with_sizes([weight.shape[0] for weight in weights], -1)


def _is_step(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether ops.projection_step takes the rows, of 16 bits."""
    return (
        0 < x.numel() <= MAX_ROWS * x.shape[-1]
        and x.dtype.itemsize == 2
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled(x.device.type)
        and all(w.dtype == x.dtype and w.is_contiguous() for w in weights)
    )


def _of_step(
    x: Tensor, weights: list[Tensor], residual: Tensor | None = None, **options: Any
) -> Tensor:
    """All products in one tensor, side by side.

    The kernel for one row adds in another order, so one row is passed as two equal rows.
    """
    given = [None if t is None else t.reshape(-1, t.shape[-1]) for t in (x, residual)]
    rows, added = (t.expand(2, -1) if t is not None and t.shape[0] == 1 else t for t in given)
    assert rows is not None
    with consistent():
        y = projection_step(rows, weights, residual=added, **options)
    return y[: x.numel() // x.shape[-1]].view(*x.shape[:-1], y.shape[-1])


@cache
def _config(dtype: torch.dtype, N: int, K: int, device: torch.device) -> tiles.MatmulConfig:
    """By shapes alone."""
    a, b = (torch.empty(n, K, dtype=dtype, device="meta") for n in (_ROWS, N))
    t = tiles.MatmulInputs(a, b.t(), None, None, None, None, "", "tf32x3", dtype)
    arch, problem = op.arch_of(device), op.problem(t)
    tma = bool(arch.tma and arch.wgmma) and op.tma_unsupported_reason(t) is None
    return tiles.choose(problem, arch, _ROWS, N, K, tma)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] weight [in, out] + bias, in x's dtype, as `linear` where a model wants that."""
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    if consistent_scope.on and x.is_cuda:
        return linear(x, weight.t(), bias)
    return x @ weight if bias is None else F.linear(x, weight.t(), bias)


def _forward(layer: nn.Linear, input: Tensor) -> Tensor:
    if input.is_cuda:
        return linear(input, layer.weight, layer.bias)
    return F.linear(input, layer.weight, layer.bias)  # of rows that the model has made BLOCK


def use_consistent_products(module: nn.Module) -> None:
    """Gives each linear layer within a forward of its own, so that nothing fused reads it."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            layer.forward = partial(_forward, layer)


def has_consistent_product(module: nn.Module) -> bool:
    """Whether its forward is the one that it was given here."""
    own = vars(module).get("forward")
    return isinstance(own, partial) and own.func is _forward
