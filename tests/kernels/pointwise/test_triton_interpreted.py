"""Rotary and gated activations under Triton's interpreter: the rows of the blocks, strides."""

import pytest
import torch

from slipstream.ops.activation import geglu, swiglu
from slipstream.ops.rotary import rotary_embedding, rotary_tables
from slipstream.runtime.backends import HAVE_TRITON
from tests.support.interpreted import error, run


@pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
def test_triton_pointwise_matches_reference() -> None:
    run(
        "rotary_embedding",
        "swiglu",
        "geglu",
        "sigmoid_glu",
        "squared_relu",
        "glu_linear",
        "token_shift",
    )


@pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
def test_triton_pointwise_takes_strides() -> None:
    run(script="tests.kernels.pointwise.test_triton_interpreted")


def main() -> None:
    torch.manual_seed(0)
    wide = torch.randn(2, 3, 2050, requires_grad=True)
    for call in (swiglu, geglu):
        found = []
        for impl in ("triton", "eager"):
            y = call(*wide.chunk(2, -1), impl=impl)
            found.append([y, *torch.autograd.grad(y.sin().sum(), wide)])
        assert max(error(x, y) for x, y in zip(*found)) < 1e-5
    packed = torch.randn(2, 7, 3, 5, 12, requires_grad=True)
    tables = rotary_tables(torch.arange(20), 8)
    rows = [table[torch.randint(0, 20, (n, 7))] for n in (1, 2) for table in tables]
    cases = [(tables, None), (tables, torch.randperm(20)[:7]), (rows[:2], None), (rows[2:], None)]
    for (cos, sin), positions in cases:
        for interleaved in (False, True):
            found = []
            for impl in ("triton", "eager"):
                y = rotary_embedding(
                    packed[:, :, 1], cos, sin,
                    positions=positions, interleaved=interleaved, impl=impl,
                )  # fmt: skip
                found.append([y, *torch.autograd.grad(y.sin().sum(), packed)])
            assert max(error(x, y) for x, y in zip(*found)) < 1e-5


if __name__ == "__main__":
    main()
