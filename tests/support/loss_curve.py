"""Steps of training over several ranks beside one process's: FSDP2 x context parallelism x
checkpointing.

    torchrun --nproc-per-node 4 -m tests.support.loss_curve [steps]

Ranks in pairs have the two halves of a row's tokens, and all of them a part of the weights. A row
follows a fixed order of words, but for some words that do not, so that the loss has something to
fall by. The first rank prints losses of both, a line a step, and how far they are apart. On GPUs
the model is larger and computes in bf16 with float32 weights.
"""

import os
import sys
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM
from slipstream.parallel import ContextParallel, shard

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
VOCABULARY, PARTS = 64, 2
HIDDEN, TOKENS = (512, 4096) if ON_GPU else (32, 48)
MIXERS: list[Any] = ["gated_deltanet", *(["kda", "gla"] if ON_GPU else []), "attention"]


@cache
def followers() -> Tensor:
    """The word so many after each [TOKENS, VOCABULARY]."""
    order = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))
    found = [torch.arange(VOCABULARY)]
    for _ in range(TOKENS - 1):
        found.append(order[found[-1]])
    return torch.stack(found)


def rows(step: int, count: int) -> Tensor:
    draw, at = torch.Generator().manual_seed(step), torch.arange(TOKENS)
    words = torch.randint(VOCABULARY, (count, TOKENS), generator=draw)
    begins = torch.rand(count, TOKENS, generator=draw) < 0.2
    begins[:, 0] = True
    first = torch.where(begins, at, 0).cummax(1).values
    return followers()[at - first, words.gather(1, first)].to(DEVICE)


def losses(steps: int, readers: int, mesh: Any = None) -> list[float]:
    """Losses of `readers` rows a step, by one process or, with a mesh, by all."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_heads": 4 if ON_GPU else 2}
    model: Any = SlipstreamForCausalLM(SlipstreamConfig(mixers=MIXERS, **sizes)).to(DEVICE).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    plan, mine = None, slice(None)
    if mesh is not None:
        plan = ContextParallel(mesh["context"])
        reader = mesh.get_local_rank("data")
        mine = slice(reader, reader + 1)
        over = mesh["data", "context"]._flatten("all")
        policy = MixedPrecisionPolicy(torch.bfloat16 if ON_GPU else None)
        for unit in (*model.model.layers, model):
            sharded = fully_shard(unit, mesh=over, mp_policy=policy)
            # parts of a row add up, rows are averaged; gloo has no mean
            sharded.set_gradient_divide_factor(float(readers))
            sharded.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found = []
    for step in range(steps):
        ids = rows(step, readers)[mine]
        if plan is not None:
            ids = shard(ids, plan)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=ON_GPU and mesh is None):
            loss = model(input_ids=ids, labels=ids, use_cache=False, context=plan).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        if mesh is not None:
            dist.all_reduce(total)
            total = total / readers
        found.append(total)
    return torch.stack(found).tolist()


def main(steps: int) -> None:
    if ON_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if ON_GPU else "gloo")
    readers = dist.get_world_size() // PARTS
    mesh = init_device_mesh(DEVICE.type, (readers, PARTS), mesh_dim_names=("data", "context"))
    many = losses(steps, readers, mesh)
    if dist.get_rank() == 0:
        one = losses(steps, readers)
        for step, (x, y) in enumerate(zip(one, many, strict=True)):
            print(f"step {step} {x:.6f} {y:.6f}")
        apart = max(abs(x - y) / x for x, y in zip(one, many, strict=True))
        print(f"at most {apart:.1e} apart", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
