#!/bin/sh
# fla-core 0.6.0, torch 2.13.0 on a CPU, triton 3.6.0. No GPU.
#
# The two references of Comba in one file of fla (ops/comba/naive.py) are two functions. The
# recurrent one lets the state decay and then reads what p erases, the chunk one reads before the
# decay, as the paper's formula does. They agree without gates and differ by 10% of the largest
# output with gates in [-1, 0]. Those of the gated delta rule agree.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" torch==2.13.0 triton==3.6.0 fla-core==0.6.0 numpy
PYTHONPATH="$dir/lib" python3 - <<'EOF' 2> "$dir/log" || { cat "$dir/log"; exit 1; }
import torch
from fla.ops.comba.naive import naive_chunk_comba, naive_recurrent_comba

torch.manual_seed(0)
q, k, v, p = (torch.randn(1, 64, 2, 8) for _ in "qkvp")
k, p = (torch.nn.functional.normalize(x, dim=-1) for x in (k, p))
beta, gates = torch.rand(1, 64, 2), -torch.rand(1, 64, 2)


def step_by_step(g):
    """S <- exp(g) S + k (beta (v - S^T p))^T, S^T p before the decay; o = S^T q / sqrt(K)."""
    state, out = torch.zeros(1, 2, 8, 8), []
    for t in range(64):
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, p[:, t]))
        state = state * g[:, t].exp()[..., None, None] + k[:, t, :, :, None] * u[:, :, None]
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) / 8**0.5)
    return torch.stack(out, 1)


def off(x, y):
    return ((x - y).abs().max() / y.abs().max()).item()


for name, g in (("no gates", 0 * gates), ("gates", gates)):
    recurrent = naive_recurrent_comba(q, k, v, p, beta, g)[0]
    chunk = naive_chunk_comba(q, k, v, p, g, beta, chunk_size=32)[0]
    found = off(recurrent, step_by_step(g)), off(chunk, step_by_step(g))
    print(name, "recurrent and chunk beside the formula:", *found)
    assert found[1] < 1e-4 and (found[0] < 1e-4 if name == "no gates" else found[0] > 0.05)
EOF
