"""One long sequence on two processes: torchrun --nproc-per-node 2 examples/context_parallel.py

Each process has half of the tokens. The model runs on its half, and the state of a linear layer,
the keys of a softmax layer and the label after the last token come from the other process. The
losses add up to what one process computes from the whole sequence; python on its own starts both.
"""

import os
import subprocess
import sys

import torch
import torch.distributed as dist

from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM
from slipstream.parallel import ContextParallel, shard

TOKENS = 200


def make() -> SlipstreamForCausalLM:
    torch.manual_seed(0)  # the same weights in every process
    config = SlipstreamConfig(
        vocab_size=32, hidden_size=64, num_heads=2, mixers=["gated_deltanet", "attention"]
    )
    return SlipstreamForCausalLM(config).train()


def train_step() -> float:
    """In each process: the relative error of the gradient, whole on both."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{dist.get_rank()}"
        torch.cuda.set_device(device)
    with torch.device(device):
        model, ids = make(), torch.randint(32, (1, TOKENS))
    plan = ContextParallel()  # all processes, equally many tokens each
    mine = shard(ids, plan)
    loss = model(mine, labels=mine, context=plan).loss
    loss.backward()
    grads = [plan.sum(p.grad) for p in model.parameters() if p.grad is not None]
    total = float(plan.sum(loss))
    if plan.rank == 0:
        print(f"{mine.shape[1]} of {TOKENS} tokens here, loss {total:.4f}")
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    whole = [p.grad for p in model.parameters() if p.grad is not None]
    off = sum(float((x - y).square().sum()) for x, y in zip(grads, whole, strict=True))
    size = sum(float(y.square().sum()) for y in whole)
    dist.destroy_process_group()
    return (off / size) ** 0.5


def main() -> float:
    """Starts two processes; returns by how much their gradient differs from one process's."""
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run([*run, __file__], check=True, capture_output=True, text=True)
    print(done.stdout, end="")
    return float(done.stdout.split()[-1])


if __name__ == "__main__":
    if "RANK" not in os.environ:
        main()
    else:
        apart = train_step()
        if os.environ["RANK"] == "0":
            print(f"gradients differ by {apart:.1e}")
