"""Several ranks: each compiles a model's kernels before its first step, and asks no other rank."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM, first_step
from slipstream.models import model as model_module
from slipstream.parallel import ContextParallel
from slipstream.runtime.launch_cache import of_thread
from tests.support import wants
from tests.support.processes import in_processes

pytestmark = wants.collectives
RANKS = 2
COLLECTIVES = [
    (dist, "all_reduce"),
    (dist, "all_gather"),
    (torch.ops._c10d_functional, "all_to_all_single"),
    (torch.ops._c10d_functional, "all_gather_into_tensor"),
]


def sharded(dtype: torch.dtype) -> Any:
    """As torchtitan makes it: checkpointing around each block, then FSDP2."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    mixers: list[Any] = [*["gated_deltanet"] * 3, "attention"]
    config = SlipstreamConfig(vocab_size=53, hidden_size=32, num_heads=2, mixers=mixers)
    model = SlipstreamForCausalLM(config).train()
    layers = model.model.layers
    for i, layer in enumerate(layers):
        layers[i] = checkpoint_wrapper(layer)
    mesh = init_device_mesh("cpu", (RANKS,))
    for unit in (*layers, model):
        fully_shard(unit, mesh=mesh, mp_policy=MixedPrecisionPolicy(dtype, torch.float32))
    return model


def count_in_process(rank: int, contexts: bool, queue: Any) -> None:
    calls: list[Any] = []
    asked: list[str] = []
    blocks: list[tuple[int, set[torch.dtype]]] = []
    like = first_step._like

    def recorded(model: Any, i: int, h: Any) -> Any:
        block = like(model, i, h)
        blocks.append((i, {p.dtype for p in block.parameters()}))
        return block

    def compile_kernels(run: Any, args: Any) -> None:
        calls.append(run)
        of_thread.warmup = object()  # pyright: ignore[reportAttributeAccessIssue]
        before = len(asked)
        run(*args)
        assert len(asked) == before
        of_thread.warmup = None

    def counted(name: str, collective: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            asked.append(name)
            return collective(*args, **options)

        return call

    for where, name in COLLECTIVES:
        setattr(where, name, counted(name, getattr(where, name)))
    first_step._like, first_step.compile_kernels = recorded, compile_kernels
    model = sharded(torch.bfloat16)
    compile_blocks = first_step.compile_blocks

    def on_a_gpu(model: Any, h: Any, *args: Any) -> Any:
        first_step.compile_once(model, h, *args[:3])
        return compile_blocks(model, h, *args)

    model_module.compile_blocks = on_a_gpu
    ids = torch.arange(2 * 64).mul(7).remainder(53).view(2, 64)
    context = ContextParallel() if contexts else None
    for _ in range(2):
        model(input_ids=ids, labels=ids, context=context).loss.backward()
    queue.put((rank, len(calls), blocks, contexts == bool(asked)))


@pytest.mark.parametrize("contexts", [False, True], ids=["tokens whole", "context parallelism"])
def test_every_rank_compiles_once_alone(contexts: bool, tmp_path: Path) -> None:
    found = in_processes(RANKS, tmp_path, count_in_process, contexts)
    want = [(0, {torch.bfloat16}), (3, {torch.bfloat16})]
    assert sorted(x[0] for x in found) == [0, 1]
    for _, calls, blocks, exchanges in found:
        assert calls == 1 and blocks == want and exchanges
