"""Inputs of the functions that slipstream.compat.fla has under fla's names."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slipstream.compat.fla.adaptor import Operator

B, T, H, K = 1, 12, 2, 8


def member(row: Operator) -> Callable[..., Any]:
    return getattr(importlib.import_module(f"slipstream.compat.fla.{row.path}"), row.name)


def inputs(row: Operator) -> dict[str, Any]:
    """A value for every argument without a default, by fla's name."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    family = row.path.split(".")[1]
    made: dict[str, Any] = {}
    for name, p in inspect.signature(member(row)).parameters.items():
        if p.default is not p.empty or p.kind is p.VAR_KEYWORD:
            continue
        if family == "hgrn":
            made[name] = -random(B, T, H * K) if name == "g" else random(B, T, H * K)
        elif name in ("layer_idx", "num_layers", "num_householder"):
            made[name] = {"layer_idx": 1, "num_layers": 4, "num_householder": 1}[name]
        elif name == "u":
            made[name] = random(H, K)
        elif name in ("w", "gk", "gv") or (name == "g" and family in ("gdn2", "gla", "kda", "gsa")):
            made[name] = -random(B, T, H, K)
        elif name == "g":
            made[name] = -random(B, T, H)
        elif name == "beta":
            made[name] = random(B, T, H)
        else:
            made[name] = random(B, T, H, K) * K**-0.5
    return made
