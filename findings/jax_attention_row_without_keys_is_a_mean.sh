#!/bin/sh
# jax 0.10.2 on a CPU, torch 2.13.0.
#
# A query that may see no key: jax.nn.dot_product_attention gives it the mean of all values, of those
# that the mask hides, if the mask says so, and zeros if query_seq_lengths says so; both in one
# function. torch's gives zeros. With is_causal and fewer queries than keys both libraries count from
# the first key, so that a query that continues a cache sees too little.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" jax==0.10.2 torch==2.13.0 numpy
PYTHONPATH="$dir/lib" JAX_PLATFORMS=cpu python3 - <<'EOF'
import jax
import numpy as np
import torch

r = np.random.default_rng(0)
q, k, v = (r.standard_normal((1, n, 2, 16)).astype(np.float32) for n in (3, 7, 7))  # [B, T, H, D]
mask = np.ones((3, 7), bool)
mask[1] = False
attention = jax.nn.dot_product_attention
by_mask = np.asarray(attention(q, k, v, mask=mask[None, None]))[0, 1]
by_length = np.asarray(attention(q, k, v, query_seq_lengths=np.array([1])))[0, 1]
heads = [torch.from_numpy(x).transpose(1, 2) for x in (q, k, v)]
theirs = torch.nn.functional.scaled_dot_product_attention
torchs = theirs(*heads, attn_mask=torch.from_numpy(mask))[0, :, 1]
print("by mask", by_mask[0, :3], "mean of values", v[0, :, 0].mean(0)[:3])
print("by length", by_length[0, :3], "torch, by mask", torchs[0, :3].tolist())
assert np.allclose(by_mask, v[0].mean(0), atol=1e-6) and not by_length.any() and not torchs.any()
causal = np.asarray(attention(q, k, v, is_causal=True))
assert np.allclose(causal[0, 0], v[0, 0], atol=1e-6)  # the first query sees the first key alone
assert np.allclose(causal, theirs(*heads, is_causal=True).transpose(1, 2).numpy(), atol=1e-5)
EOF
