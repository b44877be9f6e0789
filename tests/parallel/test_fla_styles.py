"""fla's styles of tensor parallelism, by parallelize_module, beside one process."""

import importlib
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream.compat.fla.modules import GatedMLP, RMSNorm
from slipstream.compat.fla.modules.fused_linear_cross_entropy import FusedLinearCrossEntropyLoss
from slipstream.compat.fla.modules.mlp import SwiGLULinear
from tests.support.processes import in_processes

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without collectives")
RANKS, ROWS, TOKENS, WIDTH, VOCABULARY = 2, 2, 6, 8, 10


def style(path: str) -> Any:
    """By its name in fla.modules, which imports torch's collectives once it is asked for."""
    module, _, name = f"slipstream.compat.fla.modules.{path}".rpartition(".")
    return getattr(importlib.import_module(module), name)


class Model(nn.Module):
    """Norm, MLP, a second norm of a linear layer's result, and the loss of a head."""

    def __init__(self, reduction: str, fuse: bool) -> None:
        super().__init__()
        self.norm = RMSNorm(WIDTH)
        self.mlp = GatedMLP(WIDTH, intermediate_size=12, fuse_swiglu=fuse)
        self.last = RMSNorm(WIDTH, bias=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.loss = FusedLinearCrossEntropyLoss(reduction=reduction)

    def forward(self, x: Any, target: Tensor) -> Any:
        h, x = self.norm(x, x, True)
        h = self.last(x + self.mlp(h))
        return self.loss(h, target, self.head.weight, self.head.bias)


def make(reduction: str, fuse: bool) -> tuple[Model, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Model(reduction, fuse).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    target = torch.randint(0, VOCABULARY, (ROWS, TOKENS))
    target[0, 1] = target[0, 2] = target[1, 5] = -100
    return model, torch.randn(ROWS, TOKENS, WIDTH, dtype=torch.float64), target


def compare_all(rank: int, found: Any) -> None:
    for reduction, fuse in itertools.product(("mean", "sum"), (False, True)):
        compare(reduction, fuse, found)


def compare(reduction: str, fuse: bool, found: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    norm = style("layernorm.NormParallel")
    one, x, target = make(reduction, fuse)
    x.requires_grad_()
    want = one(x, target)
    want.backward()
    mesh = init_device_mesh("cpu", (RANKS,))
    model, _, _ = make(reduction, fuse)
    plan: dict[str, Any] = {
        "norm": norm(),
        "mlp.gate_proj": ColwiseParallel(input_layouts=Shard(1)),
        "mlp.up_proj": ColwiseParallel(input_layouts=Shard(1)),
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "last": norm(use_local_output=True),
        "head": style("parallel.PrepareModuleWeight")(),
        "loss": style("fused_linear_cross_entropy.LinearLossParallel")(),
    }
    if fuse:
        output = {"output_layouts": Shard(1), "use_local_output": False}
        plan["mlp.swiglu_linear"] = style("mlp.SwiGLULinearParallel")(**output)
    parallelize_module(model, mesh, plan)
    mine = distribute_tensor(x.detach(), mesh, [Shard(1)]).requires_grad_()
    loss = model(mine, target)
    loss.backward()
    pairs: dict[str, Any] = {"loss": (loss, want), "x": (mine.grad, x.grad)}
    for (name, got), (_, alone) in zip(model.named_parameters(), one.named_parameters()):
        pairs[name] = got.grad, alone.grad
    for name, (got, expected) in pairs.items():
        if not isinstance(got, DTensor):
            found.put(f"{name}: {type(got).__name__}")
        elif not torch.allclose(got.full_tensor(), expected):
            found.put(f"{name}: {got.full_tensor()} {expected}")


def test_model_equals_one_process(tmp_path: Path) -> None:
    assert in_processes(RANKS, tmp_path, compare_all) == []


def local_results(rank: int, found: Any) -> None:
    """Results and inputs that are no DTensors, and a bias."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    torch.manual_seed(0)
    x, y, weight, bias = (
        torch.randn(s, dtype=torch.float64) for s in ((3, 4), (3, 4), (5, 4), (5,))
    )
    mesh = init_device_mesh("cpu", (RANKS,))
    module = parallelize_module(SwiGLULinear(), mesh, style("mlp.SwiGLULinearParallel")())
    half = slice(2 * rank, 2 * rank + 2)
    got = module(x[:, half], y[:, half], weight[:, half], bias)
    if not torch.allclose(got, SwiGLULinear()(x, y, weight, bias)):
        found.put("swiglu_linear")
    prepare = style("parallel.PrepareModuleWeight")()
    norm: Any = parallelize_module(RMSNorm(4).double(), mesh, prepare)
    mine = x[rank : rank + 1]
    norm(mine).sum().backward()
    alone: Any = RMSNorm(4).double()
    alone(x[:RANKS]).sum().backward()
    got = norm.weight.grad.full_tensor()
    if not torch.allclose(norm(mine), alone(mine)) or not torch.allclose(got, alone.weight.grad):
        found.put(f"norm: {got} {alone.weight.grad}")


def test_results_on_one_rank(tmp_path: Path) -> None:
    assert in_processes(RANKS, tmp_path, local_results) == []


def test_names_are_found_where_they_are_asked_for() -> None:
    assert style("NormParallel") is style("layernorm.NormParallel")
    with pytest.raises(AttributeError, match="has no attribute 'SwiGLUParallel'"):
        style("SwiGLUParallel")
