"""Losses on several ranks: of a vocabulary in shards, with FSDP2 over the data and tensor
parallelism over it; of rows without a label that counts, 0 and without gradient; of a rank whose
kernels fail."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessException

from slipstream.integrations.context import call_in_context
from slipstream.ops import linear_cross_entropy
from slipstream.parallel import ContextParallel
from tests.support import wants
from tests.support.fault_on_a_rank import fail_on_a_rank
from tests.support.ignored_rows import faults, of_a_group
from tests.support.language_models import small_model
from tests.support.processes import in_processes
from tests.support.transformers_context import make

pytestmark = wants.collectives
DATA, TENSOR = 2, 2
ROWS, TOKENS, WIDTH, VOCABULARY = 4, 7, 12, 26


class Head(nn.Module):
    """The last projection and its loss, the weight whole or this rank's part of the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.group: Any = None

    def forward(self, h: Tensor, target: Tensor) -> Tensor:
        weight: Any = self.out.weight
        if self.group is not None:
            weight = weight.to_local()
        h, target = h.flatten(0, 1), target.flatten()
        return linear_cross_entropy(h, weight, target, group=self.group, reduction="sum")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), Head()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.head(self.body(x).tanh(), target)


def sharded() -> tuple[Model, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Model().double()
    x = torch.randn(ROWS, TOKENS, WIDTH, dtype=torch.float64)
    target = torch.randint(0, VOCABULARY, (ROWS, TOKENS))
    target[0, 2] = target[3, 0] = -100
    return model, x, target


def in_process(rank: int, found: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model, x, target = sharded()
    want = model(x, target)
    want.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    model, x, target = sharded()
    mesh = init_device_mesh("cpu", (DATA, TENSOR), mesh_dim_names=("data", "tensor"))
    # the vocabulary in equal parts, the first dimension of the weight
    parallelize_module(model.head, mesh["tensor"], {"out": ColwiseParallel()})
    model.head.group = mesh["tensor"].get_group()
    for unit in (model.body, model.head, model):
        fully_shard(unit, mesh=mesh["data"])
    mine = slice(*(ROWS // DATA * (mesh.get_local_rank("data") + i) for i in (0, 1)))
    loss = model(x[mine], target[mine])
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total, group=mesh["data"].get_group())
    if not torch.allclose(total, want, rtol=1e-12):
        found.put(f"rank {rank}: loss {total} instead of {want}")
    for name, p in model.named_parameters():
        grad: Any = p.grad
        grad = DATA * grad.full_tensor()  # FSDP2 takes the mean of what ranks add up to
        off = float((grad - grads[name]).abs().max())
        if not off < 1e-12:
            found.put(f"rank {rank}: {name} is off by {off:.1e}")


def test_shared_vocabulary_and_fsdp2(tmp_path: Path) -> None:
    assert in_processes(DATA * TENSOR, tmp_path, in_process) == []


@wants.collectives
def test_fault_on_one_rank_ends_all(tmp_path: Path) -> None:
    """With the names of the kernel and the rank; the next run knows of it before it begins."""
    with pytest.raises(ProcessException):
        in_processes(2, tmp_path, fail_on_a_rank, tmp_path)
    text = (tmp_path / "rank 1").read_text()
    assert text.startswith("rank 1: linear.triton") and "planted_kernel" in text
    (tmp_path / "meeting").unlink(missing_ok=True)
    assert sorted(in_processes(2, tmp_path, fail_on_a_rank, tmp_path)) == [0, 1]


IDS = torch.arange(8).view(2, 4)
NO_LABELS = torch.full_like(IDS, -100)


def check(rank: int, found: Any) -> None:
    own, llama = small_model(["gla", "attention"]), make("LlamaForCausalLM")
    plan = ContextParallel(None)
    losses = {
        "own": (own, own(IDS, labels=NO_LABELS, context=plan).loss),
        "llama": (llama, call_in_context(llama, plan, input_ids=IDS, labels=NO_LABELS).loss),
    }
    for name, (model, loss) in losses.items():
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        if loss != 0 or not grads or any(x.any() for x in grads):
            found.put(f"{name}: a loss of {loss}, or gradients")
    for fault in faults(of_a_group(dist.group.WORLD)):
        found.put(fault)


@pytest.mark.filterwarnings("ignore")
def test_ranks_without_labels_have_no_gradient(tmp_path: Path) -> None:
    assert in_processes(2, tmp_path, check) == []
