"""After an operator's first call, the kernels of other sizes are compiled in the background."""

import atexit
import threading
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from slipstream.compiler.compiler_state import CompilerState, Unusable
from slipstream.runtime import (
    backends,
    compile_ahead,
    guarded_launch,
    parallel_compile,
    token_ids,
    warm_up,
)
from slipstream.runtime.custom_op import KernelOp
from slipstream.runtime.launch_cache import of_thread
from slipstream.tools.catalog import Shape, chosen
from tests.support import wants
from tests.support.size_variants import ladder, variants

pytestmark = wants.compiler
OPERATORS = (
    *("chunk_simple_gla", "chunk_gla", "chunk_delta_rule", "chunk_kda"),
    *("chunk_gsa", "chunk_hgrn", "attention", "selective_scan"),
)


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are compilers for any device."""
    monkeypatch.setattr(compile_ahead, "compiler_state", lambda device: SimpleNamespace())


def halves(args: tuple) -> Iterator[tuple]:
    x, *rest = args
    yield (x.new_empty(x.shape[0] // 2), *rest)
    yield (x.new_empty(x.shape[0] // 4), *rest)


@pytest.mark.usefixtures("trusted")
def test_begin_calls_with_fake_tensors_of_other_sizes() -> None:
    seen: list[Any] = []

    def call(x: Tensor, option: int) -> None:
        here = threading.current_thread()
        assert x.data_ptr() == x.new_empty(3).data_ptr() == (x + 1).data_ptr() == 0
        seen.append((type(x), tuple(x.shape), option, here.daemon, of_thread.warmup is not None))
        raise ValueError("what fails is left to a call that wants it")

    compile_ahead.begin(call, (torch.zeros(16), 3), halves)
    compile_ahead.finish()
    assert seen == [(FakeTensor, (n,), 3, True, True) for n in (8, 4)]
    assert of_thread.warmup is None


@pytest.mark.usefixtures("trusted")
def test_warm_up_waits_for_other_sizes() -> None:
    free, seen = threading.Event(), []

    def call(x: Tensor) -> None:
        free.wait(60)
        seen.append(tuple(x.shape))

    def first() -> str:
        compile_ahead.begin(call, (torch.zeros(16),), halves)
        threading.Timer(0.2, free.set).start()
        return "its result"

    assert warm_up(first) == "its result"
    assert seen == [(8,), (4,)]


@pytest.mark.usefixtures("trusted")
def test_begin_waits_for_calls_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other sizes are for later than what a first step makes, unless somebody waits for them."""
    ran = threading.Event()

    def begin(quiet: float) -> None:
        ran.clear()
        monkeypatch.setattr(compile_ahead._BACKGROUND, "quiet", quiet)
        for _ in range(2):
            compile_ahead.begin(lambda x: ran.set(), (torch.zeros(16),), halves)

    begin(600.0)
    assert not ran.wait(0.3)
    compile_ahead.finish()
    assert ran.is_set()
    begin(0.1)
    assert ran.wait(60.0)


def test_threads_end_without_waiting_for_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the interpreter, which waits for them only so long."""
    background = compile_ahead._Background()
    background.quiet = 600.0
    monkeypatch.setattr(parallel_compile, "PATIENCE", 10.0)
    background.put(())
    while not background._jobs.empty():
        time.sleep(0.01)
    background._end()
    atexit.unregister(background._end)
    thread = background._thread
    assert thread is not None and not thread.is_alive()


@pytest.mark.usefixtures("trusted")
def test_begin_runs_operators_within_a_call() -> None:
    """Those that a call makes below its own operator launch, too."""
    seen: list[Any] = []

    def run(x: Tensor) -> Tensor:
        seen.append((type(x), tuple(x.shape)))
        assert backends._THREAD.bound  # no CUDA context is made
        return x.new_empty(3)

    inner = KernelOp("test_ahead_inner", "(Tensor x) -> Tensor", run, lambda x: x.new_empty(3))
    compile_ahead.begin(lambda x: inner(inner(x)), (torch.zeros(16),), halves)
    compile_ahead.finish()
    assert seen == [(FakeTensor, (n,)) for n in (8, 3, 4, 3)]


@pytest.mark.usefixtures("trusted")
def test_begin_leaves_wrong_indices_to_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index of an earlier call is told once, to whoever calls next."""
    watch = token_ids._Watch(-1)
    watch.slots[:6] = torch.tensor([1, 1 + 2, 9, 8, 0, token_ids.NAMES.index("cu_seqlens")])
    monkeypatch.setattr(token_ids, "_watches", [watch])
    compile_ahead.begin(lambda x: token_ids.raise_pending(), (torch.zeros(16),), halves)
    compile_ahead.finish()
    with pytest.raises(token_ids.WrongId, match=r"got 9 at position \(2,\)"):
        token_ids.raise_pending()


@pytest.mark.usefixtures("trusted")
def test_begin_waits_for_calls_that_wait_for_their_kernels() -> None:
    began, seen = threading.Event(), []

    def urgent() -> None:
        compile_ahead.begin(lambda x: seen.append(x), (torch.zeros(16),), halves)
        began.set()
        seen.append("urgent")

    parallel_compile.idle.clear()
    try:
        urgent()
        assert began.is_set() and seen == ["urgent"]
    finally:
        parallel_compile.idle.set()
    compile_ahead.finish()
    assert len(seen) == 3


@pytest.mark.usefixtures("trusted")
def test_guarded_kernels_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """By compilers that are not verified, too. Nothing is probed, and what fails is no verdict."""
    state = CompilerState("sm_90", "3.6.0", "0.0.0", remembers=False)
    assert state.guards and state.probes and not state.unguarded
    monkeypatch.setattr(guarded_launch, "compiler_state", lambda device: state)
    state._reasons[("broken",)] = "it is known to fail"
    seen: list[Any] = []

    def call(x: Tensor) -> None:
        for name in ("new", "broken"):
            with guarded_launch.Guard(
                "triton|eager", x.device, partial(tuple, [name]), probe
            ) as usable:
                seen.append((name, usable, len(x)))
        with guarded_launch.Guard("triton|eager", x.device, lambda: ("refused",), probe):
            raise Unusable("the child died")

    def probe() -> str | None:
        seen.append("probed")
        return "wrong"

    compile_ahead.begin(call, (torch.zeros(16),), halves)
    compile_ahead.finish()
    assert seen == [(x, x == "new", n) for n in (8, 4) for x in ("new", "broken")]
    assert not state.accepted and not state.remembered
    assert state.unusable(("refused",)) is None


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.sample(which=lambda op, packed: packed and op in ("chunk_simple_gla", "attention"))
def test_other_sizes_ask_for_the_listed_variants(op: str, packed: bool) -> None:
    sample, shape = chosen([op])[0], Shape(T=300, H=8, packed=packed)
    listed = variants(sample, shape, any_size=True)
    asked = {key for size in ladder(shape) for key in variants(sample, size)}
    assert asked <= listed.keys()
    # of many keys beside one token, which the ladder has not
    assert {listed[key].name for key in listed.keys() - asked} <= {"softmax_combine_kernel"}
