"""Shared by tests of operators against their recurrences (tests/support/recurrences.py)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slipstream import ops


def both(name: str) -> list[Callable[..., Any]]:
    return [getattr(ops, f"chunk_{name}"), getattr(ops, f"fused_recurrent_{name}")]


def near(got: Tensor, want: Tensor, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def same(got: tuple[Tensor, Any], want: tuple[Tensor, Any], tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(flat(got), flat(want), rtol=tolerance, atol=tolerance)


def flat(outputs: tuple[Tensor, Any]) -> list[Tensor]:
    o, state = outputs
    return [o, *(state if isinstance(state, tuple) else [state])]
