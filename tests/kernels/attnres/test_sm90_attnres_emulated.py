"""The backward for sm_90 as numpy, with its launch, against plain torch in float64.

Layouts and rounding are not there (tests/kernels/test_compiles.py); copies in flight are.
"""

import functools
import importlib
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from slipstream.kernels.attnres import op
from slipstream.kernels.attnres.inputs import AttnresInputs, ForwardSums
from slipstream.kernels.attnres.sm90 import plan
from tests.gluon_emulator import linear as emulator
from tests.gluon_emulator import threads

LAUNCH = "slipstream.kernels.attnres.sm90.launch"
PROGRAMS = 3


class _Launcher:
    """Kernel[grid](**arguments), as launches write it."""

    def __init__(self, kernel: Callable) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int]) -> Callable:
        def call(**arguments: Any) -> None:
            del arguments["num_warps"]
            given = {
                n: emulator.Pointer(x) if isinstance(x, Tensor) else x for n, x in arguments.items()
            }
            # others do not compile: asynchronous copies are of 4 bytes or more
            copied = [x for n, x in arguments.items() if n[0] == "v" and isinstance(x, Tensor)]
            assert all(x.data_ptr() % 16 == 0 for x in copied)
            given["R"] = threads.tensor(given["R"])
            threads.launch(functools.partial(self.kernel, **given), grid[0], ())

        return call


@functools.cache
def launch() -> Any:
    with emulator.emulated():
        made = importlib.import_module(LAUNCH)
    backends = SimpleNamespace(sm_count=lambda device: PROGRAMS, device_of=nullcontext)
    vars(made).update(launch_cache=SimpleNamespace(cached=_Launcher), backends=backends)
    return made


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("L", "R", "D"), [(1, 1, 8), (3, 8, 1024), (9, 7, 1160), (16, 4, 7168)])
def test_emulated_matches_torch(L: int, R: int, D: int, normed: bool) -> None:
    rows = [torch.randn(R, D).double() for _ in range(L)]
    rows[-1] = torch.cat([rows[-1].new_zeros(1), rows[-1].flatten()])[1:].view(R, D)
    query, weight, last, dy = torch.randn(3 + R, D).double().split([1, 1, 1, R])
    query, weight = query[0] * D**-0.5, weight[0]
    output = last[0] if normed else None
    inputs = AttnresInputs(query, rows, weight, output, 1e-6, 0.5)
    _, s = op.eager(inputs)
    rstd = torch.stack([(x.square().mean(-1) + 1e-6).rsqrt() for x in rows])
    with mock.patch.object(plan, "programs", return_value=1):
        sums = ForwardSums(None, None, s, rstd, s.logsumexp(0))
        got = launch().backward(inputs, dy, sums)
    want = op.eager_backward(inputs, dy, sums)
    for x, right in zip(got, want, strict=True):
        assert (x.double() - right).norm() <= 1e-5 * right.norm()


def test_emulated_launch_is_in_no_package() -> None:
    made = launch()
    from slipstream.kernels.attnres.sm90 import launch as real

    assert real is not made


def test_planned_programs_fit() -> None:
    for L, D, normed in ((9, 4096, True), (16, 7168, False), (1, 8, True), (16, 8, False)):
        tile = plan.tile(L, D, normed)
        used = plan.shared_bytes(L, tile, normed)
        assert used <= plan.MAX_SHARED and tile.BD * tile.PIECES >= D
        assert plan.programs(L, tile, normed) * (used + plan.RESERVED) <= plan.SHARED
    rows = [torch.empty(1, 8192, dtype=torch.bfloat16)] * 16
    with mock.patch.object(plan, "sm90_unsupported", return_value=None):
        assert "no room in shared memory" in str(plan.unsupported_reason(rows, False))
        assert "16 bits" in str(plan.unsupported_reason([torch.empty(1, 8)], False))
        assert "no multiple" in str(plan.unsupported_reason([rows[0][:, :9]], True))
        assert "Triton's is faster" in str(plan.unsupported_reason(rows[:9], True))
        assert plan.unsupported_reason(rows[:13], False) is None
