"""The diagonal preconditioner of keys: a decayed sum of their squares, squashed."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.gated_scan.dispatch import run as gated_scan
from slipstream.kernels.linear.dispatch import LinearOptions
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.ops._fp32 import widen

# The centre of log A that stands for None, fla's.
CENTRE = -0.2
States = tuple[Tensor, Tensor]


class Preconditioner(NamedTuple):
    """g_atk, beta_atk [B, T, H]; state [N, H, K]; centre [H]; x the bound of the
    factors, which are in [1 / x, x]."""

    g_atk: Tensor
    beta_atk: Tensor
    state: Tensor | None
    centre: Tensor | None
    x: float
    eps: float

    def keys(
        self, k: Tensor, options: LinearOptions, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """k by its factors, [B, T, H, K] in k's dtype, and the final state [N, H, K]."""
        B, T, H, K = k.shape
        wide = widen(k)
        squares = widen(self.beta_atk)[..., None] * wide.square()
        sums, final = gated_scan(
            squares.flatten(2),
            widen(self.g_atk)[..., None].expand_as(wide).flatten(2),
            None if self.state is None else self.state.flatten(1),
            options.output_final_state,
            options.reverse,
            cu_seqlens,
            _impl_of_scan(options.impl),
            options.context,
        )
        factors = squashed(sums.view(B, T, H, K), self.centre, self.x, self.eps)
        return (wide * factors).to(k.dtype), None if final is None else final.unflatten(1, (H, K))

    def check(self, terms: LinearInputs, gate: str) -> None:
        """Whatever does not fit; gate: the dimensions of g."""
        checks.expect_layouts(
            q=(terms.q, "B T H K"), k=(terms.k, "B T H K"), v=(terms.v, "B T HV V"),
            g=(terms.g, gate), beta=(terms.beta, "B T HV"), g_atk=(self.g_atk, "B T H"),
            beta_atk=(self.beta_atk, "B T H"), log_atk_scale=(self.centre, "H"),
            initial_state=(self.state, "N H K"),
        )  # fmt: skip
        given = {
            "q": terms.q, "k": terms.k, "v": terms.v, "g": terms.g, "beta": terms.beta,
            "g_atk": self.g_atk, "beta_atk": self.beta_atk, "log_atk_scale": self.centre,
            "initial_state[0]": terms.initial_state, "initial_state[1]": self.state,
        }  # fmt: skip
        checks.expect_floating(given)
        checks.expect_one_device({**given, "cu_seqlens": terms.cu_seqlens})
        checks.expect_multiple("HV", terms.v.shape[2], "H", terms.k.shape[2])
        for name, value in (("x", self.x), ("eps", self.eps)):
            if not value > 0:
                raise ValueError(f"{name}: want a number above 0, got {value}")


def squashed(sums: Tensor, centre: Tensor | None, x: float, eps: float) -> Tensor:
    """x^-s, s = r / (1 + |r|), r = log(A + eps) - centre: A [..., H, K] -> factors in [1/x, x]"""
    r = torch.log(sums + eps) - (CENTRE if centre is None else centre.to(sums.dtype)[:, None])
    return torch.exp(-math.log(x) * r / (1 + r.abs()))


def two_states(initial_state: States | None) -> tuple[Tensor | None, Tensor | None]:
    """S and A of a call's initial_state."""
    if initial_state is None:
        return None, None
    if not isinstance(initial_state, tuple) or len(initial_state) != 2:
        raise TypeError(
            "initial_state: want a tuple (S [N, HV, K, V], A [N, H, K]), "
            f"got {type(initial_state).__name__}"
        )
    for i, state in enumerate(initial_state):
        checks.expect_tensor(f"initial_state[{i}]", state)
    return initial_state


def _impl_of_scan(impl: str | None) -> str | None:
    """The scan has no kernels of its own for sm_90."""
    return "triton" if impl == "sm90" else impl
