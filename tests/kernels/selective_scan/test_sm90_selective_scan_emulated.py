"""The Gluon kernels of the selective scan as numpy, with their launches, against the oracle. Sums,
masks and indices are those of the kernels; layouts and rounding are not there
(tests/kernels/test_compiles.py)."""

import functools
import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.kernels.selective_scan.eager import selective_scan_reference
from slipstream.kernels.selective_scan.inputs import ScanInputs
from tests.gluon_emulator import linear as emulator
from tests.gluon_emulator import threads
from tests.support.operators import offsets, relative_error

LAUNCH = "slipstream.kernels.selective_scan.sm90_launch"
OPTIONAL = ("D", "z", "delta_bias", "initial_state")
# B, T, D, N, G, lengths of packed sequences
SIZES: dict[str, Any] = {
    "one token": (1, 1, 1, 1, 1, None),
    "one tile": (2, 16, 33, 16, 1, None),
    "tiles": (2, 37, 40, 5, 1, None),
    "groups": (1, 19, 72, 16, 2, None),
    "packed": (1, 82, 8, 16, 1, (5, 0, 40, 1, 0, 16, 20, 0)),
    "wide states": (1, 33, 20, 24, 1, None),
}

# arguments that a kernel is not compiled for
NUMBERS = ("total", "rows", "blocks", "sequences", "programs", "u_row", "B_row")


class _Pointer(threads.Pointer):
    def __init__(self, x: Tensor) -> None:
        left = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
        super().__init__(torch.as_strided(x, (left,), (1,)).numpy())
        self.dtype = SimpleNamespace(element_ty="64-bit")


class _Launcher:
    """Kernel[grid](**arguments), as launches write it."""

    def __init__(self, kernel: Callable) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int]) -> Callable:
        def call(**arguments: Any) -> None:
            given = {n: _Pointer(x) if isinstance(x, Tensor) else x for n, x in arguments.items()}
            del given["num_warps"]
            given |= {n: threads.tensor(given[n]) for n in NUMBERS if n in given}
            run = functools.partial(self.kernel, **given)
            threads.launch(run, grid[0], ())

        return call


@functools.cache
def launches() -> Any:
    with emulator.emulated():
        made = importlib.import_module(LAUNCH)
    vars(made).update(launch_cache=SimpleNamespace(cached=_Launcher))
    return made


def inputs(size: str, given: tuple[str, ...]) -> ScanInputs:
    """u in rows of a wider tensor, the others without gaps."""
    B, T, D, N, G, lengths = SIZES[size]
    torch.manual_seed(0)
    kind: dict[str, Any] = {"dtype": torch.float64}
    S = B if lengths is None else len(lengths)
    optional = {
        "D": torch.randn(D, **kind),
        "z": torch.randn(B, T, D, **kind),
        "delta_bias": torch.rand(D, **kind),
        "initial_state": torch.randn(S, D, N, **kind),
    }
    values: Any = (
        torch.randn(B, T, 2 * D, **kind)[..., D:],
        torch.rand(B, T, D, **kind),
        -2 * torch.rand(D, N, **kind),
        torch.randn(B, T, G, N, **kind),
        torch.randn(B, T, G, N, **kind),
        *(optional[name] if name in given else None for name in OPTIONAL),
        None if lengths is None else offsets(lengths),
    )
    return ScanInputs._make(values)


def check(size: str, given: tuple[str, ...], softplus: bool) -> None:
    made = inputs(size, given)
    with np.errstate(all="ignore"):
        y, final, states = launches().forward(made, softplus, True)
    leaves: Any = [x if x is None else x.detach().requires_grad_() for x in made[:9]]
    want_y, want_final = selective_scan_reference(
        ScanInputs._make([*leaves, made.cu_seqlens]), softplus
    )
    assert relative_error(y, want_y) < 1e-6
    assert relative_error(final, want_final) < 1e-6
    dy, dfinal = torch.randn_like(y), torch.randn_like(final)
    kept = [x for x in leaves if x is not None]
    want = iter(torch.autograd.grad((want_y, want_final), kept, (dy, dfinal.to(want_final.dtype))))
    got = launches().backward(made, states, dy, dfinal, softplus)
    for name, leaf, x in zip(ScanInputs._fields, leaves, got, strict=False):
        assert (x is None) == (leaf is None), name
        if leaf is not None:
            assert relative_error(x, next(want)) < 3e-6, name


@pytest.mark.parametrize("size", SIZES)
def test_emulated_matches_reference(size: str) -> None:
    check(size, OPTIONAL, True)


@pytest.mark.parametrize("given", OPTIONAL)
def test_emulated_with_one_of_the_optional(given: str) -> None:
    check("tiles", (given,), False)


def test_without_a_backward_no_states_are_kept() -> None:
    _, _, states = launches().forward(inputs("tiles", ()), False, False)
    assert states.numel() == 0
