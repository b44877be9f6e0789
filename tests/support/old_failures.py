"""Inputs of calls that failed once."""

from typing import Any

import torch

RWKV7 = ("r", "w", "k", "v", "a", "b")


def rwkv7_inputs(T: int, device: Any = "cpu", dtype: torch.dtype = torch.bfloat16) -> dict:
    """B 1, H 2, D 128, four packed sequences with states."""
    x = {name: torch.randn(1, T, 2, 128, device=device) for name in RWKV7}
    kappa = torch.nn.functional.normalize(x["a"], dim=-1)
    given: dict[str, Any] = {
        "r": x["r"],
        "w": -0.6 * torch.sigmoid(x["w"]),
        "k": x["k"],
        "v": x["v"],
        "a": -kappa,
        "b": kappa * torch.sigmoid(x["b"]),
    }
    given = {name: value.to(dtype) for name, value in given.items()}
    cuts = [0, T // 5, T // 5, T // 2 + 3, T]
    given["cu_seqlens"] = torch.tensor(cuts, dtype=torch.int32, device=device)
    given["initial_state"] = torch.randn(4, 2, 128, 128, device=device, dtype=torch.float32)
    return given


WIDTHS = [(128, 64), (64, 128), (192, 128)]
