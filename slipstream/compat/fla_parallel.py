"""fla's styles of tensor parallelism, for torch's parallelize_module on a mesh of one dimension.

Our kernels take no DTensors: a module with a style computes on this rank's tensors, and its results
are wrapped as DTensors. This module imports torch's collectives, so that it is imported only when
one of its classes is asked for.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle


def _local(x: Any, mesh: DeviceMesh, placement: Placement, given: Placement | None = None) -> Any:
    """This rank's part of x under a placement. A plain tensor is this rank's part under `given`, or
    under the placement itself. Gradients of replicated tensors are summed over the ranks."""
    if not isinstance(x, Tensor):
        return x
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [given or placement], run_check=False)
    x = x.redistribute(placements=[placement])
    return x.to_local(grad_placements=[Partial()] if placement == Replicate() else None)


def _made(x: Any, mesh: DeviceMesh, has: Placement, wants: Placement, local: bool) -> Any:
    if not isinstance(x, Tensor):
        return x
    found = DTensor.from_local(x, mesh, [has], run_check=False).redistribute(placements=[wants])
    return found.to_local() if local else found


def _parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return module.named_parameters(recurse=False)


class PrepareModuleWeight(ParallelStyle):
    """Makes the module's own parameters DTensors. If its arguments are plain tensors, it computes
    on this rank's part of them; gradients of replicated parameters are summed over the ranks.

    Args:
        layouts: their placement, Replicate() if None: equal on all ranks, or this rank's part.
    """

    def __init__(self, *, layouts: Placement | None = None) -> None:
        super().__init__()
        self.layouts = Replicate() if layouts is None else layouts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _with_parameters(module, device_mesh, self.layouts)
        run = module.forward

        @wraps(run)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(x, DTensor) for x in (*args, *kwargs.values())):
                return run(*args, **kwargs)
            return _on_local_parameters(module, run, device_mesh, args, kwargs)

        module.forward = forward
        return module


class NormParallel(ParallelStyle):
    """A norm whose tokens are sharded along sequence_dim, with replicated parameters.

    Args:
        use_local_output: the result is this rank's tokens as a plain tensor.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        super().__init__()
        self.sequence_sharding = (Shard(sequence_dim),)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _with_parameters(module, device_mesh, Replicate())
        run, (tokens,) = module.forward, self.sequence_sharding

        @wraps(run)
        def forward(*args: Any, **kwargs: Any) -> Any:
            mine = [_local(x, device_mesh, tokens) for x in args]
            named = {name: _local(x, device_mesh, tokens) for name, x in kwargs.items()}
            found = _on_local_parameters(module, run, device_mesh, mine, named)
            if self.use_local_output:
                return found
            every = found if isinstance(found, tuple) else (found,)
            made = tuple(_made(x, device_mesh, tokens, tokens, False) for x in every)
            return made if isinstance(found, tuple) else made[0]

        module.forward = forward
        return module


class SwiGLULinearParallel(ParallelStyle):
    """SwiGLULinear whose channels are sharded: its weight is Shard(1), and the results are summed
    over the ranks.

    Args:
        input_layouts: of x and y where they are plain tensors, Shard(-1) if None.
        output_layouts: of the result, Replicate() if None.
        use_local_output: the result is a plain tensor.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        self.input_layouts = (input_layouts or Shard(-1),)
        self.output_layouts = (output_layouts or Replicate(),)
        self.desired_input_layouts = (Shard(-1),)
        self.use_local_output = use_local_output

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        run, (given,), (wants,) = module.forward, self.input_layouts, self.output_layouts

        @wraps(run)
        def forward(x: Any, y: Any, weight: Any, bias: Any = None) -> Any:
            x, y = (_local(each, device_mesh, Shard(each.dim() - 1), given) for each in (x, y))
            weight = _local(weight, device_mesh, Shard(1))
            bias = _local(bias, device_mesh, Replicate())
            if bias is not None and device_mesh.get_local_rank() != 0:  # one rank adds it
                bias = bias.masked_fill(torch.ones_like(bias, dtype=torch.bool), 0)
            found = run(x, y, weight, bias)
            return _made(found, device_mesh, Partial(), wants, self.use_local_output)

        module.forward, module.sharded = forward, True
        return module


class LinearLossParallel(ParallelStyle):
    """FusedLinearCrossEntropyLoss of tokens that are sharded along sequence_dim: the mean or the
    sum over all ranks' tokens. A plain x is this rank's tokens. Plain targets, weights and biases
    are whole.

    Args:
        use_local_output: the loss is a plain tensor.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        super().__init__()
        self.sequence_sharding = (Shard(sequence_dim),)
        self.use_local_output = use_local_output

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        run, (tokens,) = module.forward, self.sequence_sharding

        @wraps(run)
        def forward(x: Any, target: Any, weight: Any, bias: Any = None) -> Any:
            if module.use_l2warp:
                raise NotImplementedError("use_l2warp: not with LinearLossParallel")
            x = _local(x, device_mesh, tokens)
            target = _local(target, device_mesh, tokens, Replicate())
            weight, bias = (_local(each, device_mesh, Replicate()) for each in (weight, bias))
            reduction, module.reduction = module.reduction, "sum"
            try:
                found = run(x, target, weight, bias)
            finally:
                module.reduction = reduction
            if reduction == "mean":
                count = (target != module.ignore_index).sum()
                count = _made(count, device_mesh, Partial(), Replicate(), True)
                found = found / count.clamp(min=1)
            return _made(found, device_mesh, Partial(), Replicate(), self.use_local_output)

        module.forward = forward
        return module


def _with_parameters(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Its own parameters become DTensors, unless they are."""
    for name, x in list(_parameters(module)):
        if not isinstance(x, DTensor):
            made = DTensor.from_local(x, mesh, [placement], run_check=False)
            module.register_parameter(name, nn.Parameter(made, requires_grad=x.requires_grad))


def _on_local_parameters(
    module: nn.Module,
    run: Callable[..., Any],
    mesh: DeviceMesh,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """run, the module's forward, with this rank's part of its own parameters."""
    given = dict(_parameters(module))
    try:
        for name, x in given.items():
            placement = x.placements[0] if isinstance(x, DTensor) else Replicate()
            module._parameters[name] = _local(x, mesh, placement)
        return run(*args, **kwargs)
    finally:
        module._parameters.update(given)
