"""Training steps over several GPUs, beside one of them.

    torchrun --nproc-per-node 2 bench/parallel_training.py
    torchrun --nproc-per-node 2 bench/parallel_training.py --only million

fsdp2: a hybrid of 0.35 B parameters (24 layers, hidden size 1024, three of gated_deltanet to one of
attention) with FSDP2 over all GPUs and on each alone, --rows rows of 4096 tokens a GPU in both.
context: the same model, checkpointed, one sequence of --context tokens cut over all GPUs, and whole
on each alone. million: one gated_deltanet layer with its norm (hidden size 2048, 16 heads of 128),
checkpointed, forward and backward of a sequence of 1,048,576 tokens cut over all GPUs.

bf16 with float32 weights, but for the layer, whose weights are bf16; a step is the loss, gradients
and AdamW's update. ms: of the slowest GPU, median; peak_GiB: the most that any GPU holds.
"""

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from context_parallel import alone_ms, join, slowest
from harness import BF16, DEVICE, Report, checkpointed, language_model, parser
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from slipstream.layers import GatedDeltaNet
from slipstream.nn import RMSNorm
from slipstream.parallel import ContextParallel, shard

VOCABULARY = 32000
CASES = ("fsdp2", "context", "million")


def hybrid(small: bool, mesh: Any, with_checkpoints: bool) -> Any:
    """The model, its weights in shards over the mesh."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mixers: list[Any] = [*["gated_deltanet"] * 3, "attention"] * (1 if small else 6)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = language_model(mixers, small, hidden_size=1024, num_heads=8).float().train()
    if with_checkpoints:
        checkpointed(model)
    policy = MixedPrecisionPolicy(BF16 if DEVICE.type == "cuda" else None)
    for unit in (*model.model.layers, model):
        sharded = fully_shard(unit, mesh=mesh, mp_policy=policy)
        if DEVICE.type == "cpu":  # gloo takes no mean
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
    return model


def train_step(model: Any, ids: Tensor, context: ContextParallel | None) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=DEVICE.type == "cuda")

    def run() -> None:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False, context=context).loss.backward()
        optimizer.step()

    return run


def milliseconds(call: Callable[[], Any], runs: int) -> dict[str, float]:
    """The median, and the peak in GiB, both of the worst GPU."""
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    ms = alone_ms(call, runs)
    peak = torch.cuda.max_memory_allocated() / 2**30 if DEVICE.type == "cuda" else 0.0
    return slowest({"ms": ms, "peak_GiB": peak})


def alone_mesh() -> Any:
    """A mesh of this rank alone, on every rank."""
    sizes = dist.get_world_size(), 1
    return init_device_mesh(DEVICE.type, sizes, mesh_dim_names=("ranks", "alone"))["alone"]


def write(report: Report, case: str, gpus: int, tokens: int, found: dict[str, float]) -> None:
    """One row, on the first rank."""
    if dist.get_rank() == 0:
        ms = found["ms"]
        cells = {"case": case, "gpus": gpus, "tokens": tokens, "ms": round(ms, 2)}
        cells |= {"tokens/s": round(1e3 * tokens / ms), "peak_GiB": round(found["peak_GiB"], 2)}
        report.row("parallel_training", cells)


def fsdp2(report: Report) -> None:
    small, ranks = report.options.small, dist.get_world_size()
    rows, tokens = (1, 64) if small else (report.options.rows, 4096)
    mesh = init_device_mesh(DEVICE.type, (ranks,))
    ids = torch.randint(1, 64 if small else VOCABULARY, (rows, tokens), device=DEVICE)
    for gpus, over in ((1, alone_mesh()), (ranks, mesh)):
        run = train_step(hybrid(small, over, False), ids, None)
        for _ in range(1 if small else 3):
            run()
        write(report, "fsdp2", gpus, gpus * rows * tokens, milliseconds(run, report.runs(7)))
        del run
        empty_cache()


def context(report: Report) -> None:
    small, ranks = report.options.small, dist.get_world_size()
    tokens = 128 * ranks if small else report.options.context
    mesh = init_device_mesh(DEVICE.type, (ranks,))
    for gpus, over in ((1, alone_mesh()), (ranks, mesh)):
        plan = ContextParallel(mesh) if gpus == ranks else None
        model = hybrid(small, over, True)
        # the first steps are short: what they compile is what the long ones take
        for length in (min(tokens, 16384), tokens):
            torch.manual_seed(0)
            ids = torch.randint(1, 64 if small else VOCABULARY, (1, length), device=DEVICE)
            run = train_step(model, ids if plan is None else shard(ids, plan), plan)
            if length < tokens or small:
                run()
        write(report, "context", gpus, tokens, milliseconds(run, 1))
        del run, model
        empty_cache()


class Layer(nn.Module):
    """A layer behind its norm, with its residual connection."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.norm, self.mixer = RMSNorm(size), GatedDeltaNet(size, heads)

    def forward(self, x: Tensor, plan: ContextParallel) -> Tensor:
        return x + self.mixer(self.norm(x), context=plan)[0]


def million(report: Report) -> None:
    small, ranks = report.options.small, dist.get_world_size()
    tokens, size, heads = (128 * ranks, 32, 2) if small else (1 << 20, 2048, 16)
    dtype, plan = BF16 if DEVICE.type == "cuda" else torch.float32, ContextParallel()
    layer = Layer(size, heads).to(DEVICE, dtype)
    x = torch.randn(1, tokens // ranks, size, device=DEVICE, dtype=dtype, requires_grad=True)
    dy = torch.randn_like(x)

    def run() -> None:
        y = checkpoint(layer, x, plan, use_reentrant=False)
        assert isinstance(y, Tensor)
        torch.autograd.grad(y, [x, *layer.parameters()], dy)

    run()
    write(report, "million", ranks, tokens, milliseconds(run, report.runs(3)))


def empty_cache() -> None:
    gc.collect()  # a sharded model is part of cycles, and the next peak would have it
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rows", type=int, default=8, help="of 4096 tokens a GPU")
    arguments.add_argument("--context", type=int, default=262144, help="tokens in all")
    options = arguments.parse_args(argv)
    report = Report(options, needs_gpu=True)
    join()
    for case in CASES:
        if slowest({"": 0.0 if report.wants(case) else 1.0})[""]:  # on any rank
            continue
        globals()[case](report)
        empty_cache()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
