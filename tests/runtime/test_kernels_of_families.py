"""Every family of kernels computes and writes what plain torch does, also one that only layers
launch; fakes of operators make tensors like theirs."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.runtime import backends, call_replay
from slipstream.runtime.custom_op import DirectCall, KernelOp
from slipstream.runtime.guarded_launch import Guard
from tests.support.interpreted import error, interpreted
from tests.support.recorded import record_on_cpu

# of the largest value, or of one
LIMIT = 1e-5


def counted(launch: Callable, calls: list[Callable]) -> Callable:
    def call(*args: Any, **named: Any) -> Any:
        calls.append(launch)
        return launch(*args, **named)

    return call


def likeness(results: Any) -> list[Any]:
    each = [results] if isinstance(results, Tensor) else results or []
    found = (x for x in each if x is not None)
    return [
        (x.dtype, [x.shape, *((n, s) for n, s in zip(x.shape, x.stride()) if n > 1 and x.numel())])
        for x in found
    ]


def like_their_fakes(run: Callable) -> Callable:
    """Calls of operators, whose fakes make tensors like their results."""

    def call(op: Any, *args: Any, **named: Any) -> Any:
        found = run(op, *args, **named)
        if isinstance(op, KernelOp):
            given = op._by_position(args, named) if named else args
            assert likeness(op.fake(*given)) == likeness(found), op.name
        return found

    return call


def results(family: Any, impl: str) -> tuple[list[Tensor], int]:
    """And the number of its launches."""
    from tests.support.kernel_families import forget_plans

    calls: list[Callable] = []
    # imported before INTERPRETED is another, which they copy
    launches = [place.partition(":") for place in family.each_launch()]
    modules = [importlib.import_module(path) for path, *_ in launches]
    forget_plans()
    with pytest.MonkeyPatch.context() as patch:
        family.take_triton(patch, impl)
        patch.setattr(DirectCall, "__call__", like_their_fakes(DirectCall.__call__))
        if impl == "eager":
            patch.setattr(backends, "INTERPRETED", False)
            patch.setattr(Guard, "__enter__", lambda guard: False)
        for module, (_, _, name) in zip(modules, launches, strict=True):
            patch.setattr(module, name, counted(getattr(module, name), calls))
        torch.manual_seed(3)
        found = [x.detach() for x in family.call()]
    forget_plans()
    return found, len(calls)


def check(family: Any) -> None:
    want, launches = results(family, "eager")
    found, count = results(family, "triton")
    assert count > launches == 0, (family.name, count, launches)
    off = [error(x, y) for x, y in zip(found, want, strict=True)]
    assert max(off) <= LIMIT, (family.name, off)


@interpreted
def test_families_match_plain_torch_when_interpreted() -> None:
    from tests.support.kernel_families import FAMILIES

    for family in FAMILIES:
        check(family)


def refused(family: Any, records: bool) -> list[list[Tensor]]:
    """What calls with other numbers give where a guard refuses the kernels."""
    from tests.support.kernel_families import forget_plans

    forget_plans()
    found = []
    with pytest.MonkeyPatch.context() as patch:
        family.take_triton(patch, "triton")
        patch.setattr(Guard, "__enter__", lambda guard: False)
        record_on_cpu(patch)
        patch.setattr(call_replay, "is_enabled", lambda x: records)
        for seed in range(4):
            torch.manual_seed(seed)
            found.append([x.detach() for x in family.call()])
    forget_plans()
    return found


@interpreted
def test_refused_kernels_stay_right_in_records_interpreted() -> None:
    """Plain torch in their place has gradients that autograd computes, which no record sees."""
    from tests.support.kernel_families import FAMILIES

    for family in FAMILIES:
        for want, found in zip(refused(family, False), refused(family, True), strict=True):
            off = [error(x, y) for x, y in zip(found, want, strict=True)]
            assert max(off) <= LIMIT, (family.name, off)
