#!/bin/sh
# titans-pytorch 0.5.5, torch 2.13.0 (CPU).
#
# NeuralMemory returns a state to go on from. It remembers a chunk that is not complete, so that after 5 tokens of
# chunks of 4 single tokens give what the whole row gives. Several tokens on the same state do not: by their number
# a product of shapes that do not fit is raised, or outputs are handed back that are off by as much as they are large.
# A state after whole chunks takes pieces of any length.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" titans-pytorch==0.5.5 torch==2.13.0 numpy
PYTHONPATH="$dir/lib" python3 -W ignore - <<'EOF'
import torch
from titans_pytorch import NeuralMemory

CHUNK = 4
torch.manual_seed(0)
memory = NeuralMemory(dim=16, chunk_size=CHUNK)


def pieces(cuts: list[int]) -> float | None:
    """Largest difference of outputs by pieces from the whole row's; None where a piece raises."""
    x = torch.randn(1, cuts[-1], 16)
    state, outputs = None, []
    try:
        for begin, end in zip(cuts, cuts[1:]):
            output, state = memory(x[:, begin:end], state=state)
            outputs.append(output.detach())
    except RuntimeError:
        return None
    return float((torch.cat(outputs, 1) - memory(x)[0].detach()).abs().max())


good = [pieces([0, 8, 23]), pieces([0, 8, 24]), pieces([0, *range(5, 24)])]
print("8 tokens and 15, 8 and 16, 5 and then one by one: off by", ", ".join(f"{d:.0e}" for d in good))
assert all(d < 1e-4 for d in good)
found = {(a, b): pieces([0, a, a + b]) for a in (5, 6, 7) for b in (2, 9, 17, 18, 19)}
for (a, b), off in found.items():
    print(f"{a} tokens and {b}: {'raised' if off is None else f'off by {off:.1e}'}")
wrong = [off for off in found.values() if off is not None]
assert None in found.values() and len(wrong) >= 3 and sum(off > 0.1 for off in wrong) >= 3
EOF
