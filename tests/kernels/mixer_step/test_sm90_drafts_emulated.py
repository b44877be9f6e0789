"""Drafts for sm_90 in the emulator: what they compute, and that NaN in one leaves no trace."""

import importlib
import inspect
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from slipstream.kernels.mixer_step import op
from slipstream.kernels.mixer_step.inputs import StepInputs, StepOptions
from slipstream.ops import mixer_step
from tests.gluon_emulator import linear, threads
from tests.support import wants
from tests.support.mixer_steps import INDICES, KINDS, POOLS, Sizes, expected, make

pytestmark = wants.triton
FAMILY = "slipstream.kernels.mixer_step"


def kernel() -> Any:
    with linear.emulated():
        made = importlib.import_module(f"{FAMILY}.sm90_kernels")
        vars(made)["halves"] = linear.halves
        return made.mixer_drafts_sm90_kernel


def run(args: dict[str, Tensor], options: dict[str, Any]) -> Tensor:
    """By the emulator, as launches have it; the pools of args are written."""
    from slipstream.kernels.mixer_step import sm90_kernels as sm90
    from slipstream.kernels.mixer_step.triton import launch

    caught: list[Any] = []
    with mock.patch.object(op, "mixer_step", lambda *given: caught.extend(given)):
        mixer_step(**args, **options, state_indices=torch.tensor(INDICES), impl="eager")
    out, inputs, chosen = caught[:3]
    assert isinstance(inputs, StepInputs) and isinstance(chosen, StepOptions)
    counter = None
    if inputs.conv_state is not None:
        each = launch.counters_per_slot(inputs, chosen)
        counter = None if each is None else torch.zeros(len(args["state"]), each)
    out.fill_(torch.nan)
    emulated = kernel()
    launched: dict[str, Any] = {}

    class Launch:
        def __getitem__(self, grid: tuple[int]) -> Any:
            return lambda **given: launched.update(given, programs=grid[0])

    with mock.patch.object(sm90, "cached", return_value=Launch()):
        sm90.drafts(launch.arguments(out, inputs, counter, chosen), inputs, chosen)
    programs = launched.pop("programs")
    for name in ("num_warps", "maxnreg"):
        launched.pop(name)
    names = list(inspect.signature(emulated).parameters)
    assert set(launched) == set(names)
    split = names.index("P")  # constants follow
    given = [launched[name] for name in names[:split]]
    pointers = [linear.Pointer(x) if isinstance(x, Tensor) else x for x in given]
    constants = {name: launched[name] for name in names[split:]}
    threads.launch(emulated, programs, tuple(pointers), **constants)
    assert counter is None or not counter.any()
    return out


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("kind", ["gated_deltanet", "delta_net", "retention", "linear_attn"])
@pytest.mark.parametrize(
    ("K", "V", "T", "pending"), [(64, 64, 8, 4), (128, 64, 5, 1), (64, 128, 9, 8)]
)
def test_drafts_are_those_of_the_formula(
    kind: str, K: int, V: int, T: int, pending: int, v_first: bool
) -> None:
    n = Sizes(H=1, HV=2, K=K, V=V, T=T, pending=pending, short=K == 64, dtype=torch.float64)
    n = Sizes(**{**vars(n), "pool_dtype": torch.float64})
    args, options = make(KINDS[kind], n)
    args = {name: x.double() if x.is_floating_point() else x for name, x in args.items()}
    copies = {name: x.clone() for name, x in args.items()}
    want = expected(copies, options, torch.tensor(INDICES))
    if v_first:
        args["state"] = args["state"].mT.contiguous()
        options |= {"state_v_first": True}
    found = {"out": run(args, options), **{name: args[name] for name in POOLS if name in args}}
    if v_first:
        found["state"] = found["state"].mT
    for name, x in found.items():
        torch.testing.assert_close(x, want[name], msg=lambda text, name=name: f"{name}: {text}")
