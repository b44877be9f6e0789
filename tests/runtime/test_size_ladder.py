"""Calls in other sizes, whose kernels are compiled ahead: arguments that fit one another."""

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.selective_scan import op as selective
from slipstream.kernels.selective_scan.inputs import ScanInputs
from slipstream.runtime.compile_ahead import AtSizes, Size, sizes


def meta(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


@pytest.mark.parametrize("packed", [False, True])
def test_arguments_of_other_sizes_fit_one_another(packed: bool) -> None:
    offsets = meta(4) if packed else None
    rows = meta(1 if packed else 3, 8, 2, 6)[..., :4]  # of a wider tensor
    args = rows, meta(24, 5), meta(7), None, meta(3, 6, 7), offsets, meta(3, 2, 8), 0.5
    make = AtSizes(tokens=(0, 1, 2, 3), states=(4,), offsets=(5,), by_heads=(6,), heads=0)
    made, wanted = list(make(args)), sizes(2, packed)
    assert len(made) == len(wanted) > 5
    for given, (B, T, sequences, _) in zip(made, wanted):
        x, flat, vector, nothing, states, cuts, heads, number = given
        assert x.shape == (B, T, 2, 4) and x.stride() == (12 * T, 12, 6, 1)
        assert flat.shape == (B * T, 5) and heads.shape == (B, 2, T)
        assert vector is args[2] and nothing is None and number == 0.5
        assert states.shape == (sequences if packed else B, 6, 7)
        assert cuts is None or cuts.shape == (sequences + 1,)
    (given,) = make._replace(steps=(Size(5, 0),))(args)  # as many tokens as there are
    assert given[0].shape == (5, 8, 2, 4) and given[1].shape == (5, 5)


@pytest.mark.parametrize("impl", ["triton", "sm90"])
@pytest.mark.parametrize("packed", [False, True])
def test_scans_backward_has_the_states_of_its_forward(impl: str, packed: bool) -> None:
    B, T, D, N = (1 if packed else 2), 150, 4, 3
    u, BC, state = meta(B, T, D), meta(B, T, 1, N), meta(2, D, N)
    offsets = meta(3) if packed else None
    inputs: Any = (u, u, meta(D, N), BC, BC, meta(D), u, meta(D), state, offsets)
    saved = selective._fake_forward(*inputs, True, True, impl)[2]
    others = list(selective._backward_at_sizes((*inputs, saved, u, state, True, impl)))
    assert len(others) > 5
    for *tensors, states, dy, dfinal, _, of in others:
        y, final, want = selective._fake_forward(*tensors, True, True, impl)
        assert (states.shape, dy.shape, dfinal.shape) == (want.shape, y.shape, final.shape)
        assert ScanInputs(*tensors).B.shape == (*dy.shape[:2], 1, N) and of == impl
