#!/bin/sh
# torch 2.13.0 (CPU), two processes on gloo.
#
# conv1d of a sequence that is split over ranks along time (DTensor, Shard of the last dimension) exchanges nothing and
# says so nowhere: each rank convolves its own piece, padded as if it were a whole, and the result is declared a
# replicated tensor of a piece's length. It has another shape than the convolution of the sequence, and the ranks, which
# by its placement hold the same numbers, hold different ones. Split over the batch it is right.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" torch==2.13.0 numpy
cat > "$dir/split.py" <<'EOP'
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

B, C, T, W = 2, 6, 16, 4


def work(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    x, weight = torch.randn(B, C, T), torch.randn(C, 1, W)
    whole = F.conv1d(x, weight, groups=C, padding=W - 1)
    for name, dim in (("batch", 0), ("time", 2)):
        split = distribute_tensor(x, mesh, [Shard(dim)])
        y = F.conv1d(split, distribute_tensor(weight, mesh, [Replicate()]), groups=C, padding=W - 1)
        full = y.full_tensor()
        both = [torch.empty_like(full) for _ in range(2)]
        dist.all_gather(both, full.contiguous())
        same = torch.equal(*both)
        right = full.shape == whole.shape and torch.allclose(full, whole)
        if rank == 0:
            print(f"split over {name}: {y.placements}, {tuple(full.shape)} of {tuple(whole.shape)}, "
                  f"{'right' if right else 'wrong'}, {'equal' if same else 'other'} numbers on each rank", flush=True)
        assert right == same == (name == "batch")
        piece = F.conv1d(x.chunk(2, 2)[rank], weight, groups=C, padding=W - 1)
        assert name == "batch" or (y.placements == (Replicate(),) and torch.allclose(full, piece))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(work, (sys.argv[1],), 2)
EOP
PYTHONPATH="$dir/lib" python3 -W ignore "$dir/split.py" "$dir/store"
