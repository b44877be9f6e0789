#!/bin/sh
# torch 2.13.0 (CPU), two processes on gloo.
#
# mse_loss of tensors that are split over ranks (DTensor, Shard) has the right value where the pieces are equal, but its
# gradient is as many times too large as there are ranks: each divides by the numbers of its own piece. huber_loss does
# the same; l1_loss and the mean of the squared difference have the gradient of the whole. Where the pieces differ in
# length the values of mse_loss and huber_loss are wrong, too: the mean of the pieces' means.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" torch==2.13.0 numpy
cat > "$dir/losses.py" <<'EOP'
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

LOSSES = {"mse_loss": F.mse_loss, "huber_loss": F.huber_loss, "l1_loss": F.l1_loss,
          "mean of squares": lambda x, y: ((x - y) ** 2).mean()}
SEEN = {"mse_loss": 2.0, "huber_loss": 2.0, "l1_loss": 1.0, "mean of squares": 1.0}


def work(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for rows in (6, 5):
        torch.manual_seed(0)
        x, y = torch.randn(rows, 4).double().requires_grad_(), torch.randn(rows, 4).double()
        for name, loss in LOSSES.items():
            whole = loss(x, y)
            (wanted,) = torch.autograd.grad(whole, x)
            split = distribute_tensor(x.detach(), mesh, [Shard(0)]).requires_grad_()
            value = loss(split, distribute_tensor(y, mesh, [Shard(0)]))
            value.backward()
            number, gradient = value.detach().full_tensor(), split.grad.full_tensor()
            ratio = gradient / wanted
            right = bool(torch.isclose(number, whole))
            if rank == 0:
                print(f"{name}, {rows} rows on 2 ranks: value {'right' if right else 'wrong'}, gradient "
                      f"{float(ratio.min()):.2f} to {float(ratio.max()):.2f} times the whole's", flush=True)
            assert right == (rows == 6 or SEEN[name] == 1.0)
            assert rows == 5 or torch.allclose(ratio, torch.full_like(ratio, SEEN[name]))
            assert rows == 6 or SEEN[name] == 1.0 or float(ratio.max()) > 1.5
            assert SEEN[name] == 2.0 or torch.allclose(gradient, wanted)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(work, (sys.argv[1],), 2)
EOP
PYTHONPATH="$dir/lib" python3 -W ignore "$dir/losses.py" "$dir/store"
