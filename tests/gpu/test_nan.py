"""A NaN in a gate or in an input reaches whatever depends on it, by every back end on a GPU.

tests/kernels/test_nan_interpreted.py has all operators and inputs, without a GPU.
"""

from dataclasses import replace

import pytest
import torch

from slipstream.tools.catalog import Sample
from tests.gpu.operator_runs import on_cuda
from tests.support.operators import LINEAR, TESTED, Size, cast

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GATES = ("gv", "g", "gk", "w")
ROWS = [
    x for x in LINEAR if x.op.startswith("chunk_") and any("T" in x.dims.get(n, "") for n in GATES)
]
SIZE = Size(B=1, T=256, H=2, HV=2, K=64, V=64, M=64, dtype=torch.bfloat16, state=False)


@pytest.mark.parametrize("gate", ["weak", "strong", "mixed"])
@pytest.mark.parametrize("impl", [None, "triton", "eager"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_nan_gate_reaches_later_outputs(row: Sample, impl: str | None, gate: str) -> None:
    for token in (70, 200):
        args = row.inputs(replace(SIZE, gate=gate))
        name = next(n for n in GATES if n in args)
        args[name][(0, token, 1, 3)[: args[name].dim()]] = torch.nan
        want = row.call(cast(args, torch.float64), impl="reference")[0].isnan()
        assert want[:, token:].any() and not want[:, :token].any()
        o = row.call(on_cuda(args), impl=impl)[0].cpu()
        assert o.isnan()[want].all() and o[:, :64].isfinite().all(), token


@pytest.mark.parametrize("impl", ["triton", "eager"])
@pytest.mark.parametrize("name", ["squared_relu", "glu_linear-squared_relu", "matmul-silu"])
def test_nan_reaches_activation(name: str, impl: str) -> None:
    (row,) = [x for x in TESTED if x.name == name]
    args = on_cuda(row.inputs(Size(T=37, D=64, C=128, dtype=torch.bfloat16)))
    x = next(iter(args.values()))
    x.view(-1, x.shape[-1])[5, 3] = torch.nan
    y = row.call(args, impl=impl)[0].flatten(0, -2)
    assert y[5].isnan().any() and y[:5].isfinite().all() and y[6:].isfinite().all()
