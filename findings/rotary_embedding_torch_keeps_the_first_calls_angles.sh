#!/bin/sh
# rotary-embedding-torch 0.9.1, einops 0.8.2, torch 2.13.0 (CPU).
#
# RotaryEmbedding keeps the angles of its first call and hands them to all later calls of at most that length,
# whatever these ask for. Positions are counted in the dtype of the queries: in bfloat16 those beyond 256 are
# rounded, so rows of 2,048 tokens are rotated by wrong angles, and so are float32 rows after them. The other way
# round, bfloat16 after float32, is right: the same call gives other numbers, by what ran before it.
# get_axial_freqs(offsets=) is alike: after a call without offsets it ignores them, and after a call with offsets
# every rotation of the module is moved. cache_if_possible=False mends what is kept, not what bfloat16 rounds.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" rotary-embedding-torch==0.9.1 \
  einops==0.8.2 torch==2.13.0 numpy
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import torch
from rotary_embedding_torch import RotaryEmbedding

torch.manual_seed(0)
T, D = 2048, 64
x = torch.randn(1, 1, T, D)
rates = 10000 ** -(torch.arange(0, D, 2, dtype=torch.float64) / D)
angles = (torch.arange(T, dtype=torch.float64)[:, None] * rates).repeat_interleave(2, -1)
even, odd = x.double().unflatten(-1, (-1, 2)).unbind(-1)
turned = torch.stack((-odd, even), -1).flatten(-2)
want = x.double() * angles.cos() + turned * angles.sin()


def error(got: torch.Tensor, upto: int = T) -> float:
    """Relative root mean square error against float64."""
    return float((got - want[:, :, :upto]).norm() / want[:, :, :upto].norm())


first = RotaryEmbedding(D)
alone = error(first.rotate_queries_or_keys(x))
half_after = error(first.rotate_queries_or_keys(x.bfloat16()))
second = RotaryEmbedding(D)
half_first = error(second.rotate_queries_or_keys(x.bfloat16()))
after_half = error(second.rotate_queries_or_keys(x))
uncached = RotaryEmbedding(D, cache_if_possible=False)
half_uncached = error(uncached.rotate_queries_or_keys(x.bfloat16()))
print(f"float32 first {alone:.1e}, then bfloat16 {half_after:.1e}; bfloat16 first {half_first:.2f}, then float32")
print(f"{after_half:.2f}; bfloat16 without the cache {half_uncached:.2f}")
assert alone < 1e-4 and half_after < 5e-3
assert half_first > 0.2 and after_half > 0.2 and half_uncached > 0.2

module = RotaryEmbedding(D)
plain = module.get_axial_freqs(8, 8).clone()
ignored = torch.equal(module.get_axial_freqs(8, 8, offsets=(4, 4)), plain)
moved = RotaryEmbedding(D)
asked = moved.get_axial_freqs(8, 8, offsets=(4, 4)).clone()
kept = torch.equal(moved.get_axial_freqs(8, 8), asked) and not torch.equal(asked, plain)
row = error(moved.rotate_queries_or_keys(x[:, :, :8]), 8)
print(f"offsets after a call without: ignored {ignored}; without after offsets: moved {kept}, a row's error {row:.2f}")
assert ignored and kept and row > 0.2
EOF
