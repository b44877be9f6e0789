"""That every wait and fence of the linear family's scans is wanted: without any one of them what
the parts of a program do is not ordered, and that is found (tests/gluon_emulator/race_detector.py).
As they are they have to be ordered wherever a test runs kernels by threads."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.kernels.linear import segments
from tests.gluon_emulator import launches
from tests.gluon_emulator.linear import emulated, without
from tests.support import wants
from tests.support.sm90_linear import SCALE, backend, inputs

pytestmark = wants.compiler
DELTA = ("delta", (290, 1, 2, 64, 64), (5, 0, 64, 221), "resets")
WIDE = ("delta", (290, 1, 1, 128, 128), (5, 0, 64, 221), "resets")
SIMPLE = ("simple", (150, 1, 1, 256, 256), 1, "resets")
# The kernel's module, the call, chunks of a part of the backward in one scan, and what could go,
# since something else says as much: that `scan` has a stage says that `load` filled it; with two
# stages that one of k is free says so of q's, too; that S has come, that `late` was there, and
# that, that `early` was; `done` is said after all that `scan` waited for and fenced; a loop ends
# with a wait for copies. `scanned` is of global memory, which is not followed. Of "simple" a shared
# S alone has the last two, and a stage, of which there are as many, says that its scores are free.
WAYS: dict[str, tuple[str, tuple, int, dict[str, int]]] = {
    "scan": ("delta.chunk_fwd", DELTA, 2, {
        "mbarrier.wait(queries.empty.index(t), ((i // 2) & 1) ^ 1)": 1,
        "mbarrier.wait(barriers.x_full.index(w), ((i // 2) & 1) ^ 1)": 1,
        "mbarrier.wait(barriers.full.index(s), (i // c.ST) & 1)": 1,
    }),
    "many heads": ("delta.fused_fwd", WIDE, 2, {"sm90.store_wait(0)": 1}),
    "back": ("delta.chunk_dstate", DELTA, 0, {
        "mbarrier.wait(barriers.wz_empty.index(w), ((i // 2) & 1) ^ 1)": 1,
        "mbarrier.wait(barriers.full.index(s), (i // c.ST) & 1)": 1,
    }),
    "fused": ("delta.bwd_fused", DELTA, 2, {
        "mbarrier.wait(barriers.w_empty.index(0), (gone & 1) ^ 1)": 1,
        "mbarrier.wait(barriers.state_empty.index(0), (gone & 1) ^ 1)": 1,
        "sm90.fence_async_shared()": 2,
        "mbarrier.wait(barriers.full.index(s), (j // c.ST) & 1)": 1,
        "mbarrier.wait(barriers.w_full.index(0), i & 1)": 1,
        "sm90.store_wait(0)": 2,
        "mbarrier.wait(barriers.recomputed.index(0), block & 1)": 1,
    }),
    "simple": ("scalar_decay.chunk_fwd", SIMPLE, 0, {
        "mbarrier.wait(a_empty.index(a), ((i // 2) & 1) ^ 1)": 1,
        "mbarrier.wait(barriers.full.index(s), (i // c.ST) & 1)": 1,
        "mbarrier.wait(barriers.s_empty.index(0), (i & 1) ^ 1)": 1,
        "sm90.fence_async_shared()": 1,
    }),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=pytest.mark.slow if x in ("scan", "fused") else ()) for x in WAYS],
)
def test_every_wait_is_wanted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, call, every, could_go = WAYS[name]
    path, terms, launch = f"slipstream.kernels.linear.sm90.{path}", inputs(*call), backend(call[0])
    do, dfinal = torch.randn_like(terms.v), torch.randn(*terms.state_shape, dtype=torch.float64)
    if call[0] == "delta":
        monkeypatch.setattr(segments, "NUM_SMS", 1 if name == "many heads" else 132)
        many = name == "many heads"
        monkeypatch.setattr(type(launch.BACKEND), "fuses", lambda self, terms: many)
    ran = launches.as_numpy(monkeypatch)
    module = launches.module

    def both() -> None:
        for chunks in {0, every}:
            if call[0] == "delta":
                cut = chunks and launch.bwd_schedule.make_schedule(terms, chunks, 0)
                monkeypatch.setattr(launch.bwd_schedule, "choose_schedule", lambda _: cut or None)  # noqa: B023
            if name == "many heads":  # in another form without gradients
                launch.forward(terms, SCALE)
            launch.forward(terms, SCALE, save=True)
            launch.backward(terms, do, dfinal, SCALE)

    both()
    assert any(path.rpartition(".")[2].replace("bwd_fused", "chunk_bwd") in x for x in ran)
    made, unnoticed = module(path, False), Counter()
    imported = {n: x for n, x in vars(made).items() if getattr(x, "__module__", "") != path}
    for line, text in without(made):
        planted: dict[str, Any] = {"__name__": path}
        with emulated():
            exec(compile(text, str(made.__file__), "exec"), planted)
        planted |= imported
        other = SimpleNamespace(**planted)
        monkeypatch.setattr(
            launches,
            "module",
            lambda x, rounds, other=other: other if x == path else module(x, rounds),
        )
        try:
            both()
        except (AssertionError, TimeoutError):
            continue
        unnoticed[line.partition(": ")[2]] += 1
    assert unnoticed <= Counter(could_go)
