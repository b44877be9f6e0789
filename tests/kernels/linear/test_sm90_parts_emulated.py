"""Parts of the linear family's kernels on sm_90 as numpy: the inverse of a chunk, views of some
heads, transitions that count as zero, blocks by levels. Every wait and fence of the scans is
wanted: without any one of them what the parts of a program do is not ordered, and that is found."""

from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.kernels.linear import segments
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.modes import memory
from slipstream.kernels.linear.reference import linear_reference
from tests.gluon_emulator import launches, race_detector, threads
from tests.gluon_emulator.linear import emulated, without
from tests.support import wants
from tests.support.sm90_linear import SCALE, SM90, C, backend, cut_by, fused_by, inputs, near

pytestmark = wants.compiler


@pytest.mark.parametrize("views", [True, False], ids=["views", "tiles"])
def test_inverse_is_of_what_is_below_the_diagonal(views: bool) -> None:
    """Gives the diagonal back too; no kernel reads what is above it. views: of several tiles where
    one is, as up to Triton 3.7; else each warp finds its own tile."""
    a = torch.randn(C, C, dtype=torch.float64) / 4
    junk = torch.where(torch.rand(C, C) < 0.5, torch.inf, torch.nan)
    given = torch.where(torch.ones(C, C).triu(1) > 0, junk, a)
    threads._LOCAL.part = race_detector.Part(race_detector.Program(), "the program")
    given_by_triton = {"LARGER_VIEWS": views, "warp_of_four": lambda: np.arange(4)}
    used = launches.module(SM90 + "common", False).inverse
    with np.errstate(all="ignore"), mock.patch.dict(used.__globals__, given_by_triton):
        got, own = used(threads.tensor(given.numpy()))
    want = torch.linalg.inv(torch.eye(C, dtype=torch.float64) + a.tril(-1))
    near(torch.tensor(np.asarray(got)), want)
    near(torch.tensor(np.asarray(own)).flatten(), a.diagonal())


def test_mbarriers_end_once_all_threads_are_past_them() -> None:
    """Else a warp may still wait at one; numpy's threads are a part each, which never meet."""
    calls, used = mock.Mock(), launches.module(SM90 + "common", False).invalidate_mbarriers
    bars = mock.Mock(shape=[2])
    with mock.patch.dict(used.__globals__, {"gl": calls, "mbarrier": calls}):
        calls.static_range = range
        used(bars)
    met, *ends = (name for name, *_ in calls.method_calls)
    assert (met, ends) == ("thread_barrier", ["invalidate"] * 2)


@pytest.mark.parametrize("level", [2, 3, 4, 5])
def test_blocks_are_as_large_as_their_decay_allows(level: int) -> None:
    """Of gates whose sums over half a block come to the limit itself, and a little further."""
    used = launches.module(SM90 + "dplr.blocks", False).block_level
    threads._LOCAL.part = race_detector.Part(race_detector.Program(), "the program")
    for further, want in ((0.0, level), (2.0**-20, max(2, level - 1))):
        gates = np.full((4, 16, 64), -(1.0 + further) * 64 / 2 ** (level - 1))
        assert int(np.asarray(used(threads.tensor(gates), 0.0, 32.0))) == want


@pytest.mark.parametrize("quarters", [True, False])
def test_chunks_at_their_limit_are_not_strong(quarters: bool) -> None:
    used = launches.module(SM90 + "dplr.wy", False).is_strong
    for strongest, farthest, strong in ((4.0, 4.0, False), (4.5, 4.0, not quarters)):
        assert bool(used(strongest, farthest, 2.0, 1.0, quarters)) is strong
    assert bool(used(4.0, 4.5, 2.0, 1.0, quarters)) is quarters


def test_chunks_are_looked_at_until_their_decay_is_known() -> None:
    """Four at most, from the last one back, while each has taken off 2^-8 and not all is gone."""
    used = launches.module(SM90 + "dplr.chunk_fwd", False).effective_chunks
    threads._LOCAL.part = race_detector.Part(race_detector.Program(), "the program")
    logs: dict[int, float] = {}
    found = {"transition_log2norm": lambda w, b, total, at, K, C: logs[int(at)]}
    gone, rest = -40.0, [-1.0] * 6
    for n, first, want in (
        *((n, [x] * n, (n, False)) for n in range(1, 7) for x in (-8.0, -7.0, 0.0)),
        *((n, [gone, *rest], (1, True)) for n in range(1, 5)),
        *((3, x, (3, False)) for x in ([-9.0, -6.0, gone], [-7.5, gone, gone])),
        *((6, x, (len(x), True)) for x in ([-8.0, gone], [-32.0, -1.0], [-8.0] * 3 + [-9.0])),
        (6, [-8.0] * 4 + [gone], (6, False)),
    ):
        logs = {7 + 3 * (n - 1 - i): x for i, x in enumerate([*first, *rest][:n])}
        with mock.patch.dict(used.__globals__, found):
            need, decayed = used(0, 0, 0, 7, 3, threads.tensor(n), 64, 64)
        assert (int(need), bool(decayed)) == want, (n, first)


def test_nothing_crosses_gates_below_their_bound() -> None:
    """Of natural logarithms, where sums of gates have base 2; the first gate is its own sum."""
    used = launches.module(SM90 + "delta.delta_device", False).strong_gates
    threads._LOCAL.part = race_detector.Part(race_detector.Program(), "the program")
    gates = np.array([-32.001, -31.999, -1.0, -32.001, -31.999])
    sums = threads.Pointer(np.cumsum(gates) / np.log(2.0), np.array(0))
    got = np.asarray(used(sums, threads.tensor(np.arange(5))))
    assert got.tolist() == [True, False, False, True, False]


def test_longest_first_gives_each_sequence_once_by_length() -> None:
    used = launches.module(SM90 + "common", False).longest_first
    threads._LOCAL.part = race_detector.Part(race_detector.Program(), "the program")
    # with equal and empty ones, one that ends before it begins, more heads and more than are sorted
    cases = ([0, 9], 2), ([0, 5, 5, 20, 25, 25, 26], 2), ([0, 40, 3, 60, 61], 1), ([0, 1, 9], 513)
    for offsets, heads in (*cases, ([*range(0, 130, 2), 199], 1)):
        N = len(offsets) - 1
        cu = threads.Pointer(np.array(offsets, dtype=np.float64), np.array(0))
        ends = [threads.tensor(i) for i in range(N)]
        with mock.patch.dict(used.__globals__, {"sm90": mock.Mock(uniform=lambda n: n)}):
            got = [int(used(cu, i, N, heads, True)) for i in ends]
        lengths = [max(0, b - a) for a, b in pairwise(offsets)]
        few = N <= 64 and N * heads <= 1024
        assert got == (sorted(range(N), key=lambda n: -lengths[n]) if few else [*range(N)])


@pytest.mark.parametrize("kind", ["kda", "dplr", "gdn2"])
def test_views_of_heads_equal_those_heads_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read where they are, and o written there, beside other heads."""
    whole = inputs(kind, (150, 2, 4, 128, 64), 1, "all kinds")
    _, part = memory._cut(whole, whole.dims, ("H", "HV"), 2)
    assert part.initial_state is not None
    alone = part.of_tokens(Tensor.contiguous)._replace(
        initial_state=part.initial_state.contiguous()
    )
    assert (part.row_heads, alone.row_heads) == (4, 2)
    launch = backend(kind)
    launches.as_numpy(monkeypatch)
    want, end = launch.forward(alone, SCALE)
    rows = torch.full((*part.v.shape[:2], 4, part.v.shape[3]), torch.nan, dtype=torch.float64)
    new_empty, here = Tensor.new_empty, rows[:, :, 2:]

    def empty(x: Tensor, *shape: Any, **options: Any) -> Tensor:
        return here if x is part.v and shape == (part.v.shape,) else new_empty(x, *shape, **options)

    monkeypatch.setattr(Tensor, "new_empty", empty)
    monkeypatch.setattr(type(launch.BACKEND), "forward_layout", lambda self, terms: terms)
    got, final = launch.forward(part, SCALE)
    assert got is here and rows[:, :, :2].isnan().all()
    for x, y in ((got, want), (final, end)):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


# Whether a transition counts as zero, for gates of
DECAYED = {"-5 to 0": True, "-0.3": True, "-0.1": False, "swapped": False, "late": False}


def of_gates_by_head(T: int, K: int) -> LinearInputs:
    """Each head has gates of its own. Those of "swapped" add up to 2^-230 a chunk, but every key,
    erased twice, moves the state to the channel that is about to keep it. "late" decays before the
    last chunk of a segment, further back than is worth a look."""
    HV = len(DECAYED)
    terms = inputs("kda", (T, HV, HV, K, K))
    k, g, beta = terms.k, terms.g, terms.beta
    assert g is not None and beta is not None and terms.initial_state is not None
    k[:, :, 3], k[:, :, 3, 0], k[:, :, 3, 1] = 0.0, 0.5**0.5, -(0.5**0.5)
    g[:, :, 0] *= 5
    g[:, :, 1], g[:, :, 2], g[:, :, 3] = -0.3, -0.1, -5.0
    g[:, ::2, 3, 0] = g[:, 1::2, 3, 1] = 0.0
    g[:, :, 4] = -5.0
    g[:, 2 * C : 3 * C, 4] = g[:, 5 * C :, 4] = -1e-3
    beta /= 2
    beta[:, :, 3] = 2.0
    return terms


def test_transition_counts_as_zero_where_its_norm_does(monkeypatch: pytest.MonkeyPatch) -> None:
    terms = of_gates_by_head(384, 64)
    launch, made = backend("kda"), []
    cut_by(3 * C)(monkeypatch)
    launches.as_numpy(monkeypatch)
    transition = launch.BACKEND.segment_transition
    monkeypatch.setattr(
        launch.BACKEND, "segment_transition", lambda *x: made.append(transition(*x)) or made[-1]
    )
    o, final = launch.forward(terms, SCALE)
    (_, (M, m_is_zero)) = made[0]
    assert m_is_zero.tolist() == 2 * [[int(x) for x in DECAYED.values()]]
    assert 1 - 1e-9 < M[0, 3, 0, 0] < 1 + 1e-9  # all that this channel held is there
    for got, want in zip((o, final), linear_reference(terms, SCALE), strict=True):
        torch.testing.assert_close(got, want, rtol=0.0, atol=2.0**-29)


def test_segment_waits_where_its_past_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of KDA's forward in one kernel, whose programs are turned to in any order. "-0.3" leaves
    2^-24 of 64 tokens."""
    terms, waits = of_gates_by_head(5 * C, 128), Counter[int]()
    fused_by(C)(monkeypatch)
    launches.as_numpy(monkeypatch, together="kda_fused_fwd_sm90_kernel")
    scan = launches.module(SM90 + "dplr.fused_fwd", False)
    acquire, heads = scan.semaphore.semaphore_acquire, len(DECAYED)

    def counted(p: Any) -> Any:
        waits[(int(p.at) // 2 - heads) % heads] += 1
        return acquire(p)

    monkeypatch.setattr(scan.semaphore, "semaphore_acquire", counted)
    found = backend("kda").forward(terms, SCALE)
    assert [not waits[head] for head in range(heads)] == [True, False, False, False, False]
    for got, want in zip(found, linear_reference(terms, SCALE), strict=True):
        torch.testing.assert_close(got, want, rtol=0.0, atol=2.0**-29)


def products_of_scores(gate: float, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of a chunk, all of whose gates are that."""
    terms = inputs("gla", (64, 1, 1, 128, 128), state=False)
    terms = terms._replace(g=torch.full_like(terms.q, gate))
    scan = launches.module(
        SM90 + "vector_decay.chunk_fwd", False
    ).vector_decay_chunk_fwd_sm90_kernel
    of_scores = vars(scan.__globals__["intra"])
    count = mock.Mock(side_effect=of_scores["warpgroup_mma"])
    with mock.patch.dict(of_scores, warpgroup_mma=count):
        backend("gla").forward(terms, SCALE)
    return count.call_count


def test_strong_blocks_go_by_levels_below_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 tokens that decay by no more than the bound are one product, in a strong chunk too."""
    launches.as_numpy(monkeypatch)
    tables = backend("gla").triton.RANGES
    monkeypatch.setitem(tables, torch.float64, tables[torch.bfloat16])
    gates = (-0.1, -5.0, -7.4, -7.6)
    weak, at_once, *others = [products_of_scores(x, monkeypatch) for x in gates]
    assert weak < at_once
    assert others == [at_once, at_once + 4 * (128 // 64) * 2]


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
