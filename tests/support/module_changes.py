"""Changes that trainers make to a module, for tests of modules and of whole models."""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from tests.support.processes import own_group


def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keeps products and the package's operators, as torchtitan keeps attention, and of the rest
    nothing."""
    save = "mm" in str(op) or "slipstream" in str(op)
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


def hook(modules: Iterable[nn.Module]) -> None:
    """Hooks that make new tensors of what goes in and comes out."""

    def copied(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(copied, x))
        return x.clone() if isinstance(x, Tensor) and x.is_floating_point() else x

    for module in modules:
        module.register_forward_pre_hook(lambda module, args: copied(args))
        module.register_forward_hook(lambda module, args, y: copied(y))


def mesh(*sizes: int, names: tuple[str, ...]) -> Any:
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return dist.init_device_mesh(device, sizes, mesh_dim_names=names)


def shard(units: Iterable[nn.Module], copies: int = 0) -> None:
    """Over all processes; with copies of shards, HSDP."""
    from torch.distributed.fsdp import fully_shard

    ranks = dist.get_world_size()
    over = mesh(ranks, names=("shard",))
    if copies:
        over = mesh(copies, ranks // copies, names=("copy", "shard"))
    for unit in units:
        fully_shard(unit, mesh=over)


def split_columns(module: nn.Module, whole: nn.Module | None = None) -> None:
    """DTensors in every linear layer but one: columns of each on one process, whose outputs are
    joined."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    plan: dict[str, Any] = {
        name: ColwiseParallel(output_layouts=Replicate())
        for name, inner in module.named_modules()
        if isinstance(inner, nn.Linear) and inner is not whole
    }
    parallelize_module(module, mesh(dist.get_world_size(), names=("tp",)), plan)


class Adapter(nn.Module):
    """A linear layer or an embedding and a low-rank correction, with peft's `weight`."""

    def __init__(self, base: Any, rank: int = 3) -> None:
        super().__init__()
        self.base = base
        rows, columns = base.weight.shape
        self.down = nn.Parameter(torch.randn(rank, columns) * 0.3)
        self.up = nn.Parameter(torch.randn(rows, rank) * 0.3)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Any:
        return getattr(self.base, "bias", None)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.base, nn.Embedding):
            return self.base(x) + self.up[x] @ self.down
        return self.base(x) + x @ self.down.t() @ self.up.t()

    def merged(self) -> Tensor:
        return self.base.weight + self.up @ self.down


def adapt(module: nn.Module) -> dict[str, Adapter]:
    """Wraps every linear layer and embedding below a module: by its name."""
    wrapped = {}
    for name, inner in list(module.named_modules()):
        if isinstance(inner, nn.Linear | nn.Embedding) and name:
            parent, _, child = name.rpartition(".")
            wrapped[name] = Adapter(inner)
            setattr(module.get_submodule(parent), child, wrapped[name])
    return wrapped


@pytest.fixture(scope="module")
def process() -> Iterator[None]:
    with own_group():
        yield
