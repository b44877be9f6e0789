"""Guarded compilation and the numeric probe: what fails is replaced, said once, remembered."""

import importlib.util
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from slipstream.compiler import compiler_state
from slipstream.compiler.aot import FUSION
from slipstream.compiler.known_bugs import KNOWN_BUGS, applying
from slipstream.kernels.linear.plan import HAVE_TRITON, INTERPRETED
from slipstream.kernels.linear.triton.scalar_decay.tiles import family_of
from slipstream.runtime import guarded_launch
from slipstream.runtime.kernel_pair import relative_error
from tests.support.recorded import Toy, record_on_cpu

CPU = torch.device("cpu")

KIND = ("linear.triton", "delta", torch.bfloat16, 128)


def make(monkeypatch: pytest.MonkeyPatch) -> guarded_launch.CompilerState:
    """A machine nobody has verified, as a new process finds it; Guard takes it for its own."""
    found = guarded_launch.CompilerState("sm_90", "3.6.0", "1.2.3")
    monkeypatch.setattr(guarded_launch, "compiler_state", lambda device: found)
    return found


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> guarded_launch.CompilerState:
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(tmp_path))
    return make(monkeypatch)


def fails() -> str:
    raise guarded_launch.Unusable("planted_kernel: the compiler's process died, killed by SIGABRT")


def attempt(run: Callable[[], str], instead: Any = lambda: "eager", **rest: Any) -> str:
    impl = "triton|eager" if instead else "triton"
    with guarded_launch.Guard(
        impl, CPU, lambda: rest.get("kind", KIND), rest.get("probe")
    ) as usable:
        if usable:
            return run()
    return instead()


def test_attempt_falls_back_says_so_once_and_remembers(
    here: guarded_launch.CompilerState, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.warns(
        guarded_launch.KernelDisabledWarning,
        match="linear.triton delta bfloat16 128 is not .* SIGABRT",
    ):
        assert attempt(fails) == "eager"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert attempt(fails) == "eager"
        assert attempt(lambda: "ran", kind=("attention.triton",)) == "ran"
    assert "SIGABRT" in json.dumps(json.loads((tmp_path / "verdicts.json").read_text()))
    again = make(monkeypatch)
    assert "SIGABRT" in (again.unusable(KIND) or "")
    assert guarded_launch.CompilerState("sm_90", "3.7.1", "1.2.3").unusable(KIND) is None
    assert "SIGABRT" in (guarded_launch.known_failure(lambda: KIND, CPU) or "")
    guarded_launch.clear_verdicts()
    make(monkeypatch)
    assert attempt(lambda: "ran") == "ran"


def test_attempt_keeps_named_impl(here: guarded_launch.CompilerState) -> None:
    with pytest.raises(NotImplementedError, match=r"linear\.triton .*: planted_.*impl=None"):
        attempt(fails, None)


def no_compiler(folder: str) -> str:
    from triton.runtime.build import _build

    os.environ["PATH"] = folder
    os.environ.pop("CC", None)
    return _build("launcher", "launcher.c", folder, [], [], [], [])


def failing_compiler(folder: str) -> str:
    from triton.runtime.build import _build

    os.environ["CC"] = "/bin/false"
    return _build("launcher", "launcher.c", folder, [], [], [], [])


def no_library(folder: str) -> str:
    raise AssertionError("libcuda.so cannot found!\nPossible files are located at ['/usr/lib'].")


def unloadable(folder: str) -> str:
    Path(folder, "launcher.so").write_text("")
    spec = importlib.util.spec_from_file_location("launcher", f"{folder}/launcher.so")
    assert spec is not None
    return str(importlib.util.module_from_spec(spec))


def cut_description(folder: str) -> str:
    return json.loads("{")


def cut_kernel(folder: str) -> str:
    raise RuntimeError("Triton Error [CUDA]: device kernel image is invalid")


MISSING = [no_compiler, failing_compiler, no_library, unloadable, cut_description, cut_kernel]


@pytest.mark.parametrize("missing", MISSING)
def test_machine_without_what_triton_wants_falls_back(
    here: guarded_launch.CompilerState, tmp_path: Path, missing: Callable[[str], str]
) -> None:
    """And says so once; a later process looks again."""
    (tmp_path / "bin").mkdir()
    with pytest.warns(
        guarded_launch.KernelDisabledWarning, match=r"compiler|launcher|libcuda|damaged"
    ):
        assert attempt(lambda: missing(str(tmp_path / "bin"))) == "eager"
    assert attempt(lambda: missing(str(tmp_path / "bin"))) == "eager"
    assert not (tmp_path / "verdicts.json").exists()


def test_other_errors_are_not_swallowed(here: guarded_launch.CompilerState) -> None:
    def wrong() -> str:
        raise ValueError("q: want ...")

    with pytest.raises(ValueError, match="q: want"):
        attempt(wrong)


def test_probe_runs_once_and_demotes_a_mismatch(
    here: guarded_launch.CompilerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes: list[str] = []

    def probe(answer: str | None) -> Callable[[], str | None]:
        return lambda: probes.append("x") or answer

    assert attempt(lambda: "ran", probe=probe(None)) == "ran"
    assert attempt(lambda: "ran", probe=probe(None)) == "ran"
    make(monkeypatch)
    assert attempt(lambda: "ran", probe=probe(None)) == "ran"
    assert len(probes) == 1
    monkeypatch.setenv("SLIPSTREAM_PROBE", "off")
    make(monkeypatch)
    assert attempt(lambda: "ran", probe=probe("dq is off")) == "ran"
    monkeypatch.setenv("SLIPSTREAM_PROBE", "always")
    make(monkeypatch)
    with pytest.warns(guarded_launch.KernelDisabledWarning, match="wrong result: dq is off"):
        assert attempt(lambda: "ran", probe=probe("dq is off")) == "eager"
    monkeypatch.setenv("SLIPSTREAM_PROBE", "sometimes")
    with pytest.raises(ValueError, match="SLIPSTREAM_PROBE: want once, off, always"):
        make(monkeypatch)


def test_error_of_a_probe_counts_infinities() -> None:
    """As the log-sum-exp of a query without keys: they are to be where they are wanted."""
    want = torch.tensor([3.0, 4.0, -torch.inf])
    assert relative_error(want, want) == 0.0
    assert relative_error(want + 1, want) == pytest.approx((2 / 25) ** 0.5)
    assert relative_error(want + torch.tensor([0, 1, 0]), want) == pytest.approx(0.2)
    for wrong in (0.0, torch.inf, torch.nan):
        assert not relative_error(torch.tensor([3.0, 4.0, wrong]), want) <= 1e6
        assert not relative_error(torch.tensor([3.0, wrong + 1e9, -torch.inf]), want) <= 1e6


def test_failed_probe_decides_nothing(here: guarded_launch.CompilerState) -> None:
    def probe() -> str | None:
        raise torch.OutOfMemoryError("no memory")

    with pytest.warns(
        guarded_launch.KernelDisabledWarning, match="could not be probed: OutOfMemoryError"
    ):
        assert attempt(lambda: "ran", probe=probe) == "ran"
    assert here.unusable(KIND) is None


@pytest.mark.parametrize(
    ("arch", "ptxas", "known"),
    [
        ("sm_90", "12.8.93", ["narrow-dot", "transposed-dot", "chained-dots", "overwritten-tile"]),
        ("sm_90", "13.1.80", ["transposed-dot", "overwritten-tile"]),
        ("sm_80", "12.8.93", []),
    ],
)
def test_mismatch_names_known_faults(
    here: guarded_launch.CompilerState,
    monkeypatch: pytest.MonkeyPatch,
    arch: str,
    ptxas: str,
    known: list[str],
) -> None:
    """With the way out of each; none where the compilers have no fault that makes wrong results."""
    monkeypatch.setattr(compiler_state, "verified", dict)
    found = guarded_launch.CompilerState(arch, "3.6.0", ptxas)
    monkeypatch.setattr(guarded_launch, "compiler_state", lambda device: found)
    with pytest.warns(
        guarded_launch.KernelDisabledWarning, match="wrong result: dq is off"
    ) as said:
        assert attempt(lambda: "ran", probe=lambda: "dq is off") == "eager"
    (text,) = (str(x.message) for x in said)
    faults = {x.name: x.way_out for x in KNOWN_BUGS}
    named = ", ".join(f"{x} ({faults[x]})" for x in known)
    assert text.partition("known of these compilers: ")[2].startswith(named)
    assert ("known of these compilers" in text) == bool(known)
    assert [x for x in faults if f"{x} (" in text] == known
    assert all(x in (found.unusable(KIND) or "") for x in known)


def test_probe_leaves_wrong_ids_to_the_caller(here: guarded_launch.CompilerState) -> None:
    def probe() -> str | None:
        raise guarded_launch.WrongId(
            "input_ids: id 9 at position (0,) is outside the vocabulary of 5"
        )

    with pytest.raises(ValueError, match="id 9"):
        attempt(lambda: "ran", probe=probe)
    assert KIND not in here.accepted and not here.probing
    assert attempt(lambda: "ran") == "ran"


@pytest.mark.parametrize(
    ("capability", "name"), [((12, 1), "sm_121"), ((8, 7), "sm_87"), ((6, 1), "sm_61")]
)
def test_unlisted_gpu_keeps_its_name(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], name: str
) -> None:
    watched: list[tuple[str, Any]] = []
    monkeypatch.setattr(
        compiler_state, "watch", lambda here, devices: watched.append((here.arch, devices))
    )
    monkeypatch.setattr(compiler_state.toolchain, "triton_version", lambda: "3.6.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(compiler_state.toolchain, "select_ptxas", lambda archs, driver: None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    compiler_state._of_arch.cache_clear()
    try:
        found = compiler_state.compiler_state.__wrapped__(torch.device("cuda", 0))
    finally:
        compiler_state._of_arch.cache_clear()
    assert found is not None and found.guards and watched == [(name, (0,))]


def test_amd_gpu_keeps_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """And gfx942's limits and faults: the child compiles for what is there."""
    properties = SimpleNamespace(gcnArchName="gfx90a:sramecc+:xnack-")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    found = compiler_state.arch_of_device(torch.device("cuda", 0))
    assert (found.name, found.warp, found.shared) == ("gfx90a", 64, 64 << 10)
    assert "tf32x3-on-hip" in {x.name for x in applying("gfx90a", "3.6.0")}
    assert family_of.__wrapped__(torch.device("cuda", 0)) == "sm_75"


def test_guard_watches_its_device_and_package(monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAVE_TRITON:
        pytest.skip("wants Triton")
    from triton import knobs

    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", None)
    asked: list[str] = []
    here: Any = SimpleNamespace(compiles=lambda module, name, compile: asked.append(name))
    undo = compiler_state.watch(here, devices=(0,))
    hook: Any = knobs.runtime.jit_cache_hook
    for module, device in (("slipstream.kernels.x", 0), ("slipstream.kernels.x", 1), ("other", 0)):
        told = {"compile": {"device": device}, "key": "", "repr": "", "already_compiled": False}
        assert not hook(fn=SimpleNamespace(module=module, name=f"{module} {device}"), **told)
    assert asked == ["slipstream.kernels.x 0"]
    undo()
    assert knobs.runtime.jit_cache_hook is None


_LEARNS = """
import sys
from slipstream.compiler.compiler_state import CompilerState
here = CompilerState("sm_90", "3.6.0", "1.2.3", passive=True)
for i in range(30):
    here.mark_unusable((f"{sys.argv[1]}{i}.triton",), "it dies")
"""


def test_verdicts_of_concurrent_processes(
    here: guarded_launch.CompilerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = [sys.executable, "-W", "ignore", "-c", _LEARNS]
    both = [subprocess.Popen([*run, name]) for name in ("a", "b")]
    assert [x.wait() for x in both] == [0, 0]
    assert len(make(monkeypatch).remembered["unusable"]) == 60


@pytest.mark.parametrize("error", [PermissionError("read-only"), TimeoutError("locked")])
def test_verdict_is_kept_without_a_file(
    here: guarded_launch.CompilerState, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    """The folder is read-only, or another process holds its lock."""
    monkeypatch.setattr("filelock.FileLock.acquire", mock.Mock(side_effect=error))
    here.mark_unusable(KIND, "it dies")
    assert here.unusable(KIND) == "it dies" and "unusable" in here.remembered
    assert make(monkeypatch).unusable(KIND) is None


@pytest.fixture
def jitting(
    here: guarded_launch.CompilerState, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[[str], Any]]:
    """Triton's JIT on a GPU that is not there, under the guard."""
    if not HAVE_TRITON or INTERPRETED:
        pytest.skip("wants Triton, and its compiler")
    from triton.runtime import driver

    from tests.support.drivers import Driver
    from tests.support.planted_bugs import planted_kernel

    # nothing compiled yet: what is in Triton's cache needs no child
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(driver, "_active", Driver())
    undo = compiler_state.watch(here, "tests.")
    planted: Any = planted_kernel
    yield lambda what: planted.warmup(torch.int32, 17, WHAT=what, num_warps=1, grid=(1,), **FUSION)
    undo()
    if here._worker is not None:
        here._worker.close()


@pytest.mark.parametrize(
    ("what", "words"), [("abort", "SIGABRT"), ("kill", "SIGKILL"), ("hang", "had not finished")]
)
def test_process_survives_dying_compiler(
    here: guarded_launch.CompilerState,
    jitting: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    words: str,
) -> None:
    assert jitting("nothing") is not None
    if what == "hang":
        monkeypatch.setattr(compiler_state, "TIMEOUT", 0.2)
    with pytest.warns(guarded_launch.KernelDisabledWarning, match=words):
        assert attempt(lambda: jitting(what)) == "eager"


def test_missing_child_falls_back(
    here: guarded_launch.CompilerState, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def absent() -> str:
        raise guarded_launch.Unusable("planted_kernel: no process to compile in", lasting=False)

    def unwritable() -> str:
        raise FileNotFoundError(2, "No such file or directory", "/nowhere/cache")

    for i, run in enumerate((absent, unwritable)):
        kind = ("linear.triton", f"planted{i}")
        with pytest.warns(
            guarded_launch.KernelDisabledWarning, match="no process to compile in|/nowhere/cache"
        ):
            assert attempt(run, kind=kind) == "eager"
        assert attempt(run, kind=kind) == "eager"  # said once
        assert here.unusable(kind) and not make(monkeypatch).unusable(kind)
        monkeypatch.setattr(guarded_launch, "compiler_state", lambda device: here)
    assert not (tmp_path / "verdicts.json").exists()


def test_failing_kernel_raises_without_fallback(
    here: guarded_launch.CompilerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_FALLBACK", "error")
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=r"SIGABRT.*SLIPSTREAM_FALLBACK=error"):
            attempt(fails)


def test_plain_gradients_of_nothing_are_zero() -> None:
    x, weight = torch.randn(2, 3), torch.randn(3, 2).mT
    dx, dw = guarded_launch.plain_gradients(
        lambda x, w, b: (x * w, x), (x, weight, None), (None, None)
    )
    for got, of in ((dx, x), (dw, weight)):
        assert got.shape == of.shape and got.is_contiguous() and not got.any()


def test_plain_gradients_are_no_constants_of_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a probe's twin in plain torch has them: each call's own."""
    record_on_cpu(monkeypatch)

    def body(x: Tensor, dy: Tensor, n: int) -> Tensor:
        found = guarded_launch.plain_gradients(lambda x: x.unflatten(0, (n, -1)) ** 2, [x], [dy])
        return found[0]

    toy = Toy(body)
    for seed in range(4):
        torch.manual_seed(seed)
        x, dy = torch.randn(6), torch.randn(2, 3)
        torch.testing.assert_close(toy.run(x, dy, 2), 2 * x * dy.flatten())
    assert toy.calls == 4
