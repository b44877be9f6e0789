"""The matmul for sm_90 in the emulator: what it computes, at sizes that are no multiples of a tile,
and what orders the parts of a program."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gluon_emulator import linear, threads

MODULE = "slipstream.kernels.matmul.sm90.matmul"
BK, COLUMNS = 16, 64
# rows, columns and what is summed over; columns of a tile: of several tiles a program
SIZES = [(256, 512, 48, 256), (200, 288, 40, 128), (100, 64, 16, 64)]


def kernel() -> Any:
    with linear.emulated():
        return importlib.import_module(MODULE).matmul_sm90_kernel


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def run(a: Tensor, weight: Tensor, BN: int, activation: str = "", **more: Tensor) -> Tensor:
    """more: bias and residual."""
    (M, K), N = a.shape, weight.shape[0]
    out = torch.full((M, N), float("nan"), dtype=torch.float64)
    descriptors = [
        linear.Descriptor(x, x.shape[1], *block)
        for x, block in ((a, (64, BK)), (weight, (BN, BK)), (out, (64, COLUMNS)))
    ]
    added = [linear.Pointer(more[x]) if x in more else None for x in ("bias", "residual")]
    stride = N if "residual" in more else 0
    threads.launch(
        kernel(),
        2,
        (*descriptors, *added, None, None, M, N, K, stride, 0, 0),
        BN=BN, BK=BK, GROUP=2, STAGES=3, A_T=False, B_T=True, OUT_T=False, ACTIVATION=activation,
        LEVELS=(BN // COLUMNS).bit_length() - 1,
    )  # fmt: skip
    return out


@pytest.mark.parametrize(("M", "N", "K", "BN"), SIZES)
def test_products_are_right(M: int, N: int, K: int, BN: int) -> None:
    a, weight = drawn(M, K), drawn(N, K)
    torch.testing.assert_close(run(a, weight, BN), a @ weight.t())


def test_epilogue_is_right() -> None:
    a, weight, bias, residual = drawn(200, 40), drawn(288, 40), drawn(288), drawn(200, 288)
    got = run(a, weight, 256, "silu", bias=bias, residual=residual)
    want = torch.nn.functional.silu(a @ weight.t() + bias) + residual
    torch.testing.assert_close(got, want)
