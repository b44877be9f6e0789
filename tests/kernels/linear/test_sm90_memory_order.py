"""That every wait and fence of the delta rule's scans is wanted: without any one of them what the
parts of a program do is not ordered, and that is found (tests/gluon_emulator/race_detector.py).

As they are they have to be ordered wherever a test runs kernels by threads.
"""

import importlib
import inspect
import sys
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from unittest import mock

import pytest
import torch

from slipstream.runtime.backends import HAVE_TRITON, INTERPRETED
from tests.gluon_emulator.linear import emulated, without
from tests.support.sm90_delta import C, Run, fused, inputs, kernels

pytestmark = pytest.mark.skipif(
    not HAVE_TRITON or INTERPRETED, reason="wants Triton, which launches import"
)
PACKAGE = "slipstream.kernels.linear.sm90.delta."


def scans(run: Run, name: str) -> None:
    end = torch.empty(*run.terms.state_shape, dtype=torch.float64)
    start = run.terms.initial_state
    for keep, every in ((False, 0), (False, 2), (True, 0)):
        run.scan(start, None if keep else end, keep, every, name == "wide")


def back(run: Run, name: str) -> None:
    end = torch.randn(*run.terms.state_shape, dtype=torch.float64)
    run.back(torch.randn_like(run.terms.v), end, torch.empty_like(end))


def whole(run: Run, name: str) -> None:
    marks = run.empty(run.count(2 * C), run.HV, run.V, run.K).normal_()
    end = torch.randn(*run.terms.state_shape, dtype=torch.float64)
    ends = (end, torch.empty_like(end))
    fused(run, torch.randn_like(run.terms.v), marks, ends, 1, 2, run.HV * run.slots)


# The kernel's file, those with its parts, how it runs, and what could go, since something else says
# as much: that `scan` has a stage says that `load` filled it; with two stages that one of k is free
# says so of q's, too; that S has come, that `late` was there, and that, that `early` was; `done` is
# said after all that `scan` waited for and fenced; a loop ends with a wait for copies. `scanned` is
# of global memory, which is not followed.
WAYS: dict[str, tuple[str, tuple[str, ...], Callable[[Run, str], None], dict[str, int]]] = {
    "scan": (
        "chunk_fwd", ("chunk_fwd",), scans, {
            "chunk_fwd: mbarrier.wait(queries.empty.index(t), ((i // 2) & 1) ^ 1)": 1,
            "chunk_fwd: mbarrier.wait(barriers.x_full.index(w), ((i // 2) & 1) ^ 1)": 1,
            "chunk_fwd: mbarrier.wait(barriers.full.index(s), (i // c.ST) & 1)": 1,
        },
    ),
    "wide": (
        "chunk_fwd_2tile", ("chunk_fwd_2tile",), scans, {
            "chunk_fwd_2tile: mbarrier.wait(queries.empty.index(b), ((i // 2) & 1) ^ 1)": 1,
        },
    ),
    "back": (
        "chunk_dstate", ("chunk_dstate",), back, {
            "chunk_dstate: mbarrier.wait(barriers.wz_empty.index(w), ((i // 2) & 1) ^ 1)": 1,
            "chunk_dstate: mbarrier.wait(barriers.full.index(s), (i // c.ST) & 1)": 1,
        },
    ),
    "fused": (
        "bwd_fused",
        ("bwd_fused",),
        whole,
        {
            "bwd_fused: mbarrier.wait(barriers.w_empty.index(0), (gone & 1) ^ 1)": 1,
            "bwd_fused: mbarrier.wait(barriers.state_empty.index(0), (gone & 1) ^ 1)": 1,
            "bwd_fused: fence_async_shared()": 2,
            "bwd_fused: mbarrier.wait(barriers.full.index(s), (j // c.ST) & 1)": 1,
            "bwd_fused: mbarrier.wait(barriers.w_full.index(0), i & 1)": 1,
            "bwd_fused: store_wait(0)": 2,
            "bwd_fused: mbarrier.wait(barriers.recomputed.index(0), block & 1)": 1,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=pytest.mark.slow if x in ("scan", "fused") else ()) for x in WAYS],
)
def test_every_wait_is_wanted(name: str) -> None:
    file, files, runs, could_go = WAYS[name]
    K = C if name == "fused" else 16
    run = Run(inputs((290, 1, 2, K, 32, (5, 0, 64, 221), True, True)))
    runs(run, name)
    unnoticed: Counter[str] = Counter()
    with emulated():
        modules = {x: importlib.import_module(PACKAGE + x) for x in (*files, file)}
    for part in files:
        for line, text in without(modules[part]):
            run_of({part: text}, modules, file)
            kernel = f"delta_{file.replace('bwd_fused', 'chunk_bwd')}_sm90_kernel"
            with mock.patch.object(kernels(), name, vars(modules[file])[kernel]):
                try:
                    runs(run, name)
                except (AssertionError, TimeoutError):
                    continue
            unnoticed[line] += 1
        run_of({}, modules, file)
    assert unnoticed <= Counter(could_go)


def run_of(texts: dict[str, str], modules: dict[str, ModuleType], file: str) -> None:
    """Executes the modules again, with `texts` in place of their sources; the kernel's module is
    last, since it imports from the others."""
    with emulated():
        sys.modules.update({PACKAGE + name: x for name, x in modules.items()})
        for name in sorted(modules, key=lambda x: x == file):
            text = texts.get(name) or inspect.getsource(modules[name])
            exec(compile(text, str(modules[name].__file__), "exec"), vars(modules[name]))
