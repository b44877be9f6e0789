#!/bin/sh
# torch 2.13.0 on a CPU; the compiled part wants a C++ compiler.
#
# A BlockMask that is made from blocks of keys (BlockMask.from_kv_blocks), as an indexer chooses them,
# says two things: which blocks a block of queries sees, and by mask_mod which pairs. flex_attention
# under torch.compile reads both. Called plainly, it reads mask_mod alone: with none given every query
# attends to every key, and no error or warning says so. A block that is listed twice counts twice in
# the softmax when compiled, though to_dense() shows it once; plainly it counts once.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" torch==2.13.0 numpy
PYTHONPATH="$dir/lib" TORCHINDUCTOR_CACHE_DIR="$dir/cache" python3 - <<'EOF'
import math
import warnings

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as attend

warnings.simplefilter("ignore")
torch.manual_seed(0)
SIZE, N = 128, 4
q, k, v = torch.randn(3, 1, 1, N * SIZE, 32)


def mask_of(rows):
    width = len(rows[0])
    lists = torch.zeros(1, 1, N, N, dtype=torch.int32)
    lists[0, 0, :, :width] = torch.tensor(rows)
    counts = torch.full((1, 1, N), width, dtype=torch.int32)
    return BlockMask.from_kv_blocks(counts, lists, BLOCK_SIZE=SIZE)


def wanted(weights):
    """Attention to blocks, by how often each counts."""
    bias = torch.tensor([[math.log(w) if w else -math.inf for w in row] for row in weights])
    bias = bias.repeat_interleave(SIZE, 0).repeat_interleave(SIZE, 1)
    return attend(q, k, v, attn_mask=bias)


compiled = torch.compile(flex_attention)
own = mask_of([[0], [1], [2], [3]])
again = mask_of([[0, 0, 1]] * N)
blocks = wanted([[float(i == j) for j in range(N)] for i in range(N)])
twice = wanted([[2.0, 1.0, 0.0, 0.0]] * N)
off = {
    "plain beside the blocks": flex_attention(q, k, v, block_mask=own) - blocks,
    "plain beside all keys": flex_attention(q, k, v, block_mask=own) - attend(q, k, v),
    "compiled beside the blocks": compiled(q, k, v, block_mask=own) - blocks,
    "compiled, a block listed twice, beside twice its weight": compiled(q, k, v, block_mask=again)
    - twice,
}
off = {name: float(x.abs().max()) for name, x in off.items()}
print({name: f"{x:.1e}" for name, x in off.items()}, again.to_dense()[0, 0, 0].tolist())
assert off.pop("plain beside the blocks") > 0.1 and max(off.values()) < 1e-5
assert again.to_dense()[0, 0, 0].tolist() == [1, 1, 0, 0]
EOF
