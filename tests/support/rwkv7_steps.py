"""RWKV-7's decoding step on a pool, its mixes and low-rank products, against float64, and the layer
by them beside its own parts."""

from dataclasses import dataclass
from typing import Any

import torch

INDICES, SLOTS = (3, -1, 0), 5
TOKENS = ("r", "w", "k", "v", "a", "g", "v_gate", "first_value")
OF_VALUES = ("v_gate", "first_value", "v_bias")


@dataclass(frozen=True)
class Sizes:
    """first: of the first layer, which has no first_value."""

    H: int = 2
    K: int = 16
    N: int = 3
    first: bool = False
    dtype: torch.dtype = torch.float32
    pool_dtype: torch.dtype = torch.float32


def make(n: Sizes, strength: float = 1.0) -> dict[str, Any]:
    """Arguments of rwkv7_step; tokens are columns of wider tensors. strength: of w and a."""
    D = n.H * n.K
    args = {name: torch.randn(n.N, 2 * D).to(n.dtype)[:, :D] for name in TOKENS}
    names = ("w_bias", "a_bias", "v_bias", "k_k", "k_a", "norm_weight", "norm_bias")
    args |= {name: torch.randn(D) for name in names} | {"r_k": torch.randn(n.H, n.K)}
    args |= {name: strength * args[name] for name in ("w", "a")}
    args["state"] = torch.randn(SLOTS, n.H, n.K, n.K).to(n.pool_dtype)
    return {name: x for name, x in args.items() if not (n.first and name in OF_VALUES)}
