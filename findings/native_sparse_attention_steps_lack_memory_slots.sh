#!/bin/sh
# native-sparse-attention-pytorch 0.2.3, torch 2.13.0 (CPU).
#
# Its compressed branch attends to learned memory slots and to one key for each block. A step on a cache leaves the
# slots out as long as no block is complete: after a prompt shorter than a block, tokens up to the block's end get
# other outputs than the same module gives for the whole row. A new module has slots of zeros and shows nothing: the
# difference begins with training. Longer prompts agree to rounding.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" native-sparse-attention-pytorch==0.2.3 torch==2.13.0 numpy
PYTHONPATH="$dir/lib" python3 -W ignore - <<'EOF'
import torch
from native_sparse_attention_pytorch import SparseAttention

BLOCK, T = 8, 40


def worst(trained: bool, prompt: int) -> tuple[float, float]:
    """Largest differences between steps and the whole row, up to the first block's end and after it."""
    torch.manual_seed(0)
    layer = SparseAttention(dim=32, dim_head=16, heads=2, sliding_window_size=4, compress_block_size=BLOCK,
                            compress_block_sliding_stride=BLOCK, selection_block_size=BLOCK,
                            num_selected_blocks=2, causal=True).double()
    if trained:
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
    x = torch.randn(1, T, 32, dtype=torch.float64)
    with torch.no_grad():
        whole = layer(x)
        _, cache = layer(x[:, :prompt], return_cache=True)
        found = []
        for t in range(prompt, T):
            out, cache = layer(x[:, t : t + 1], cache=cache, return_cache=True)
            found.append(float((out - whole[:, t : t + 1]).abs().max()))
    early = max(found[: max(BLOCK - prompt, 0)], default=0.0)
    return early, max(found[max(BLOCK - prompt, 0) :])


for trained, prompt, other in ((False, 3, False), (True, 3, True), (True, BLOCK, False), (True, 19, False)):
    early, late = worst(trained, prompt)
    print(f"{'trained' if trained else 'new'}, prompt of {prompt}: {early:.1e} up to token {BLOCK}, {late:.1e} after")
    assert late < 1e-9 and (early > 1e-3) == other
EOF
