"""A gated MLP's products for sm_90 in the emulator: what they compute, at sizes that are no
multiples of a tile, and what orders the parts of a program."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gluon_emulator import linear, threads

MODULE = "slipstream.kernels.elementwise.sm90.glu"
BK = 16
# rows, columns, and what they are summed over: of several tiles a program, with and without edges
SIZES = [(256, 512, 48), (128, 288, 16), (200, 288, 40), (64, 96, 8)]


def kernel() -> Any:
    with linear.emulated():
        return importlib.import_module(MODULE).glu_products_sm90_kernel


def descriptor(x: Tensor, *block: int) -> linear.Descriptor:
    return linear.Descriptor(x, x.shape[1], *block)


def run(x: Tensor, weights: list[Tensor], f: str) -> list[Tensor]:
    (M, K), N = x.shape, weights[0].shape[0]
    outs = [torch.full((M, N), float("nan"), dtype=torch.float64) for _ in range(3)]
    given = [descriptor(x, 64, BK), *(descriptor(w, 128, BK) for w in weights)]
    given += [descriptor(y, 64, 64) for y in outs]
    threads.launch(kernel(), 2, (*given, M, N, K), BK=BK, GROUP=2, STAGES=3, ACTIVATION=f)
    return outs


def activated(gate: Tensor, f: str) -> Tensor:
    F = torch.nn.functional
    if f == "gelu":
        return F.gelu(gate, approximate="tanh")
    return {"silu": F.silu, "sigmoid": torch.sigmoid, "relu2": lambda x: F.relu(x).square()}[f](
        gate
    )


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("f", ["silu", "gelu", "sigmoid", "relu2"])
@pytest.mark.parametrize(("M", "N", "K"), SIZES)
@pytest.mark.sample(which=lambda f, M, N, K: f == "silu" or M == 200)
def test_glu_products_are_right(M: int, N: int, K: int, f: str) -> None:
    x, weights = drawn(M, K), [drawn(N, K), drawn(N, K)]
    gate, up = (x @ w.t() for w in weights)
    torch.testing.assert_close(run(x, weights, f), (gate, up, activated(gate, f) * up))
