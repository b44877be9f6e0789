"""The matmul for sm_90 in the emulator: what it computes, at sizes that are no multiples of a tile,
and what orders the parts of a program."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.matmul.config import ACTIVATIONS, activated, column_levels
from tests.gluon_emulator import linear, threads, values

MODULE = "slipstream.kernels.matmul.sm90_kernels"
BK = 16
# rows, columns and what is summed over; columns of a tile: of several tiles a program
SIZES = [(256, 512, 48, 256), (200, 288, 40, 128), (100, 64, 16, 64), (256, 320, 16, 64)]


def kernel() -> Any:
    with linear.emulated():
        return importlib.import_module(MODULE).matmul_sm90_kernel


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def run(
    a: Tensor, weight: Tensor, BN: int, activation: str = "", turned: str = "", **more: Tensor
) -> Tensor:
    """more: bias, residual and scales, of out. turned: whether memory has a or b by columns, and
    whether out is that of the transposes."""
    (M, K), N = a.shape, weight.shape[0]
    levels = column_levels(BN, 2)
    out = torch.full((N, M) if "o" in turned else (M, N), float("nan"), dtype=torch.float64)
    descriptors = []
    blocks = (64, BK), (BN, BK), (64, BN >> levels)
    for name, x, block in zip("abo", (a, weight, out), blocks):
        if name in turned:
            x, block = x if name == "o" else x.t().contiguous(), block[::-1]
        descriptors.append(linear.Descriptor(x, x.shape[1], *block))
    names = "bias", "residual", "scale_a", "scale_b"
    added = [linear.Pointer(more[x]) if x in more else None for x in names]
    threads.launch(
        kernel(),
        2,
        (*descriptors, *added, M, N, K, out.shape[1], 1, 1),
        BN=BN, BK=BK, GROUP=2, STAGES=3, A_T="a" in turned, B_T="b" not in turned,
        OUT_T="o" in turned, ACTIVATION=activation, LEVELS=levels,
    )  # fmt: skip
    return out


@pytest.mark.parametrize(("M", "N", "K", "BN"), SIZES)
def test_products_are_right(M: int, N: int, K: int, BN: int) -> None:
    a, weight = drawn(M, K), drawn(N, K)
    torch.testing.assert_close(run(a, weight, BN), a @ weight.t())


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("turned", ["a", "b", "ab"])
def test_factors_lie_either_way(turned: str, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 32 bits a goes through registers."""
    monkeypatch.setattr(type(values.DTYPE), "primitive_bitwidth", bits)
    a, weight = drawn(200, 40), drawn(144, 40)
    torch.testing.assert_close(run(a, weight, 128, turned=turned), a @ weight.t())


@pytest.mark.parametrize("turned", ["", "o"])
@pytest.mark.parametrize("activation", ["", *ACTIVATIONS])
def test_epilogue_is_right(activation: str, turned: str) -> None:
    a, weight = drawn(200, 40), drawn(144, 40)
    product = a @ weight.t()
    product = product.t() if turned else product
    R, C = product.shape
    more = {"scale_a": drawn(R), "scale_b": drawn(C), "bias": drawn(C), "residual": drawn(R, C)}
    z = product * more["scale_a"][:, None] * more["scale_b"] + more["bias"]
    want = activated(z, activation) + more["residual"]
    torch.testing.assert_close(run(a, weight, 128, activation, turned, **more), want)
