"""Patched models of transformers under DDP and FSDP2: two processes have the gradients of one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.support import wants
from tests.support.processes import in_processes
from tests.support.transformers_context import make

pytestmark = [wants.collectives, pytest.mark.filterwarnings("ignore")]
NAMES = ("Qwen3Next", "Llama", "KimiLinear", "Mamba2", "Bamba")
WAYS = ("ddp", "fsdp2 checkpointed", "ddp checkpointed", "fsdp2", "ddp compiled")


def wrapped(model: Any, way: str) -> nn.Module:
    if "checkpointed" in way:
        # the method has another name before transformers 5.20
        word = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
        getattr(model, f"{word}_checkpointing_enable")({"use_reentrant": False})
    if way.startswith("fsdp2"):
        for layer in model.base_model.layers:
            fully_shard(layer)
        return fully_shard(model)
    # an expert may have no token
    call: Any = DistributedDataParallel(model, find_unused_parameters=way == "ddp")
    return torch.compile(call, backend="aot_eager") if "compiled" in way else call


def loss_of(call: Any, ids: Tensor) -> Tensor:
    return call(input_ids=ids, labels=ids, use_cache=False).loss


def compare(rank: int, names: tuple[str, ...], ways: tuple[str, ...], found: Any) -> None:
    ids = torch.randint(5, 50, (2, 24), generator=torch.Generator().manual_seed(0))
    for name in names:
        for way in ways:
            whole, part = (make(f"{name}ForCausalLM") for _ in range(2))
            part.load_state_dict(whole.state_dict())
            torch.stack([loss_of(whole, row[None]) for row in ids]).mean().backward()
            call = wrapped(part, way)  # DDP's backward wants the module alive
            loss_of(call, ids[rank : rank + 1]).backward()
            largest = max(
                float(p.grad.abs().max()) for p in whole.parameters() if p.grad is not None
            )
            for (n, p), q in zip(part.named_parameters(), whole.parameters(), strict=True):
                if q.grad is None:
                    continue
                grad: Any = torch.zeros_like(p) if p.grad is None else p.grad
                grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
                off = float((grad - q.grad).detach().abs().max())
                if not off < 1e-5 * largest:
                    found.put(f"{name}, {way}: {n} is off by {off:.1e} of {largest:.1e}")
    found.put("done")


def test_two_processes_have_the_gradients_of_one(tmp_path: Path) -> None:
    assert in_processes(2, tmp_path, compare, NAMES[:1], WAYS[:2]) == ["done"] * 2


@pytest.mark.slow
def test_every_type_in_every_way(tmp_path: Path) -> None:
    assert in_processes(2, tmp_path, compare, NAMES, WAYS) == ["done"] * 2
