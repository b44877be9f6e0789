#!/bin/sh
# torch 2.13.0 on a CPU.
#
# Within one torch.autocast block a parameter is cast once and the copy is used until the block ends,
# also after an optimizer has changed the parameter in place. A training loop inside of one block
# computes every step with the first weights: the loss stays where it was to the last bit, while the
# parameter moves. With the block inside of the loop, or cache_enabled=False, it falls.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" torch==2.13.0 numpy
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import torch


def train(**options):
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(4, 4, bias=False), torch.ones(1, 4)
    begin = layer.weight.detach().clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    losses = []
    with torch.autocast("cpu", dtype=torch.bfloat16, **options):
        for _ in range(5):
            loss = (layer(x) - 3).pow(2).mean()
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return losses, (layer.weight - begin).abs().max().item()


stale, moved = train()
fresh, _ = train(cache_enabled=False)
print("cached    ", stale, "weights moved by", moved)
print("not cached", fresh)
assert len(set(stale)) == 1 and moved > 0.1 and fresh[-1] < 0.5 * fresh[0]
EOF
