"""Prefix trees on a GPU: outputs and gradients are those of each path alone."""

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import ops
from slipstream.runtime.rows import row_sums
from slipstream.tools.catalog import OPERATORS, flat
from slipstream.tools.samples import Shape
from tests.support.prefix_trees import random_tree

NAMES = ("chunk_simple_gla", "chunk_gated_delta_rule", "chunk_hgrn", "selective_scan")
NAMES += ("short_convolution", "token_shift", "attention")


@pytest.mark.parametrize("name", NAMES)
def test_tree_equals_its_paths(name: str) -> None:
    sample = next(x for x in OPERATORS if x.name == name)
    lengths, parents = random_tree(Random(len(name)))
    torch.manual_seed(0)
    args: dict[str, Any] = sample.inputs(
        Shape(B=1, H=2, K=64, V=64, D=96, lengths=lengths, dtype=torch.float32),
        torch.device("cuda"),
    )
    args.pop("cu_seqlens")
    inputs = [x.requires_grad_() for n, x in args.items() if n not in sample.fixed]
    tree, rows = ops.PrefixTree([0, *torch.tensor(lengths).cumsum(0).tolist()], parents), []
    o = flat(sample.fn(**args, **sample.options, context=tree))[0]
    for n in range(len(parents)):
        tokens = [t for x in [*tree.path(n), tree.own(n)] for t in x]
        row = {k: x[:, tokens] if sample.dims[k][1:2] == "T" else x for k, x in args.items()}
        rows.append(flat(sample.fn(**row, **sample.options))[0][:, len(tokens) - lengths[n] :])
    dout = torch.randn_like(o)
    found, wanted = ([x, *torch.autograd.grad(x, inputs, dout)] for x in (o, torch.cat(rows, 1)))
    for x, y in zip(found, wanted):
        error = float(((x - y).norm() / y.norm()).detach())
        assert error < 3e-3, f"off by {error:.1e} of its size"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [5, 70, 1030])
def test_row_sums_match_plain_torch(dtype: torch.dtype, columns: int) -> None:
    x = torch.randn(3, columns, 2, device="cuda").to(dtype).mT
    index, starts, to = (
        torch.tensor(i, device="cuda") for i in ([5, 0, -1, 2, 1], [0, 2, 2, 5], [3, 0, 1])
    )

    def run(impl: str, starts: Tensor | None, to: Tensor | None, add: bool) -> Tensor:
        torch.manual_seed(0)
        shape = (4 if to is not None else 5 if starts is None else 3), 1, columns
        y = torch.randn(shape, device="cuda").to(dtype)
        y = y if to is not None else y.fill_(torch.nan)
        row_sums(x, index, starts, to, y, add, impl)
        return y

    for given in ((starts, to, True), (starts, to, False), (starts, None, False), (None,) * 2):
        call = (*given, False)[:3]
        torch.testing.assert_close(run("triton", *call), run("eager", *call))
