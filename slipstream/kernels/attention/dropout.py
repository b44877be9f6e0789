"""Which weights attention's dropout keeps: the same in every back end, in forward and backward.

The weight of query t and key s, by their positions in their sequence n, of head h is kept where

    word_{s mod 4} of Philox4x32(counter = (s div 4, t, h, n), key = seed)     halved

is below (1 - p) 2^31. So nothing depends on tiles, on how sequences are packed or on who computes.
Philox: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011; of its ROUNDS the authors
say that 7 are the fewest that pass all tests.
"""

import torch
from torch import Tensor

ROUNDS = 7  # as few as the source allows
_LOW = 0xFFFFFFFF


def threshold(dropout: float) -> int:
    """The bound below which a halved random word keeps its weight; an int32."""
    return min(int((1.0 - dropout) * 2**31), 2**31 - 1)


def factor(dropout: float) -> float:
    """The factor of weights that are kept."""
    return 1.0 / (1.0 - dropout) if dropout < 1 else 0.0


def keep_mask(
    seed: Tensor, dropout: float, keys: int, queries: Tensor, heads: int, sequences: Tensor
) -> Tensor:
    """bool [B, heads, T, keys]: whether each weight of keys 0 .. keys - 1 is kept.

    Args:
        seed: int64 [1]. queries, sequences: [B, T], of each query its position and sequence.
    """
    groups = torch.arange(-(-keys // 4), device=seed.device)
    head = torch.arange(heads, device=seed.device)[:, None, None]
    counter = (groups, queries[:, None, :, None] & _LOW, head, sequences[:, None, :, None])
    shape = (queries.shape[0], heads, queries.shape[1], groups.shape[0])
    limit = threshold(dropout)
    below = [(x >> 1 < limit).expand(shape) for x in philox(seed, *counter)]
    return torch.stack(below, -1).flatten(-2)[..., :keys]


def philox(seed: Tensor, *counter: Tensor) -> tuple[Tensor, ...]:
    """Four words of 32 bits, as int64, of counters that broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _LOW, seed >> 32 & _LOW
    # the source's multipliers, and what keys grow by in a round
    for _ in range(ROUNDS):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c2 = _high(b) ^ c1 ^ k0, _high(a) ^ c3 ^ k1
        c1, c3 = b & _LOW, a & _LOW
        k0, k1 = k0 + 0x9E3779B9 & _LOW, k1 + 0xBB67AE85 & _LOW
    return c0, c1, c2, c3


def _high(product: Tensor) -> Tensor:
    """Bits 32 to 63, of which the last is int64's sign."""
    return product >> 32 & _LOW
