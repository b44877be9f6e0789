"""Every operator through its public function, on a machine whose compilers are not verified. The
launches are planted: they do what the kernels do in plain torch, or die, or are wrong. Only the GPU
is missing: the operators take their Triton path on the CPU."""

import ast
import importlib
import pkgutil
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import kernels
from slipstream.compiler import compiler_state, known_bugs
from slipstream.kernels.attention import eager
from slipstream.runtime import backends, guarded_launch
from tests.support import kernel_calls, wants
from tests.support.kernel_families import FAMILIES, KERNELS, Family, forget_plans

pytestmark = wants.compiler

every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.call.__name__)


def plant(
    patch: pytest.MonkeyPatch, family: Family, change: Callable[[Callable], Callable]
) -> None:
    for place, plain in family.each_launch().items():
        module, _, name = place.partition(":")
        patch.setattr(importlib.import_module(module), name, change(plain))


def tensors_in(given: Any) -> list[Tensor]:
    if isinstance(given, Tensor):
        return [given]
    items = given.values() if isinstance(given, dict) else given
    return (
        [y for x in items for y in tensors_in(x)] if isinstance(given, list | tuple | dict) else []
    )


def wrong(plain: Callable) -> Callable:
    """1.2 times what it should be, in every tensor returned or written."""

    def launch(*args: Any, **kwargs: Any) -> Any:
        given = tensors_in((args, kwargs))
        before = [x.clone() for x in given]
        out = plain(*args, **kwargs)
        for x, old in zip(given, before, strict=True):
            if x.is_floating_point() and not torch.equal(x, old):
                x.mul_(1.2)
        if isinstance(out, Tensor):
            return out * 1.2
        if isinstance(out, dict):
            return {name: x * 1.2 for name, x in out.items()}
        return out if out is None else tuple(x if x is None else x * 1.2 for x in out)

    return launch


def dies(plain: Callable) -> Callable:
    def launch(*args: Any, **kwargs: Any) -> Any:
        raise guarded_launch.Unusable(
            "planted_kernel: the compiler's process died, killed by SIGABRT"
        )

    return launch


def refuses(plain: Callable) -> Callable:
    def launch(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("PassManager::run failed")

    return launch


def import_kernels() -> None:
    """Modules copy INTERPRETED, and are to have the real one."""
    for found in pkgutil.walk_packages(kernels.__path__, f"{KERNELS}."):
        importlib.import_module(found.name)


@pytest.fixture
def unverified(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[[], compiler_state.CompilerState]]:
    """Makes machines, each what a new process would find; operators take their Triton path."""
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(tmp_path))
    import_kernels()
    monkeypatch.setattr(backends, "INTERPRETED", True)
    family: Family = request.getfixturevalue("family")
    family.take_triton(monkeypatch, "triton|eager")

    def make() -> compiler_state.CompilerState:
        found = compiler_state.CompilerState("sm_90", "3.6.0", "1.2.3")
        monkeypatch.setattr(guarded_launch, "compiler_state", lambda device: found)
        forget_plans()
        return found

    yield make
    forget_plans()


def looked_up_by_plans(here: compiler_state.CompilerState) -> list[bool]:
    """Whether the kernels that a plan asks for are known to fail, call by call."""
    found: list[bool] = []
    unusable = here.unusable

    def noted(kind: compiler_state.KernelKey) -> str | None:
        reason = unusable(kind)
        if sys._getframe(1).f_code.co_name == "known_failure":
            found.append(reason is not None)
        return reason

    here.unusable = noted
    return found


def results(family: Family) -> list[Tensor]:
    torch.manual_seed(3)
    return family.call()


@every_family
@pytest.mark.parametrize(
    ("fate", "words"),
    [(dies, "SIGABRT"), (refuses, "PassManager"), (wrong, "wrong result: .* is off by .*")],
    ids=["dies", "refuses", "wrong"],
)
def test_failing_kernel_falls_back(
    family: Family,
    fate: Callable,
    words: str,
    unverified: Callable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a warning that says why; the next process knows."""
    with monkeypatch.context() as patch:
        patch.setattr(backends, "INTERPRETED", False)
        family.take_triton(patch, "eager")
        patch.setattr(guarded_launch, "compiler_state", lambda device: None)
        patch.setattr(guarded_launch.Guard, "__enter__", lambda guard: False)
        want = results(family)
    plant(monkeypatch, family, fate)
    for is_new in (True, False):
        here = unverified()
        looked_up = looked_up_by_plans(here)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", guarded_launch.KernelDisabledWarning)
            got = results(family)
        if is_new:
            assert any(re.match(f"{family.name} .*{words}", str(x.message)) for x in said)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        assert any(kind.startswith(family.name) for kind in here.remembered["unusable"])
        if not is_new:
            assert not any(str(kind[0]) in family.name for kind in here.accepted)
            # a plan that looks for what failed looks for the kind that did
            assert all(looked_up)


@every_family
def test_sound_kernels_are_probed_once(
    family: Family, unverified: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes: list[str] = []
    wants = compiler_state.CompilerState.should_probe

    def noted(here: compiler_state.CompilerState, kind: compiler_state.KernelKey) -> bool:
        wanted = wants(here, kind)
        probes.extend(["probed"] * wanted)
        return wanted

    monkeypatch.setattr(compiler_state.CompilerState, "should_probe", noted)
    plant(monkeypatch, family, lambda plain: plain)
    here = unverified()
    with warnings.catch_warnings():
        warnings.simplefilter("error", guarded_launch.KernelDisabledWarning)
        results(family)
        assert len(probes) >= 1 and here.remembered["probed"]
        probes.clear()
        results(family)
        unverified()
        results(family)
    assert not probes


@every_family
def test_verified_machine_skips_checks(
    family: Family, unverified: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = frozenset(compiler_state.families())
    monkeypatch.setattr(
        compiler_state, "verified", lambda: {("sm_90", "3.6.0", "1.2.3"): everything}
    )
    monkeypatch.setattr(guarded_launch, "_verify", lambda *args: pytest.fail("looked"))
    plant(monkeypatch, family, lambda plain: plain)
    assert unverified().unguarded
    results(family)


@every_family
def test_kinds_are_of_one_dtype(
    family: Family, unverified: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verdict on a kernel in float32 is none on the same in bfloat16."""
    kinds: dict[torch.dtype, set[compiler_state.KernelKey]] = {torch.float32: set()}
    kinds[torch.bfloat16] = set()

    def enter(guard: guarded_launch.Guard) -> bool:
        if not guard._impl.startswith("eager"):
            kinds[torch.get_default_dtype()].add(guard._kind_of())
        return False

    monkeypatch.setattr(guarded_launch.Guard, "__enter__", enter)
    for dtype in kinds:
        unverified()
        monkeypatch.setattr(kernel_calls, "SMALL", replace(kernel_calls.SMALL, dtype=dtype))
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            results(family)
        finally:
            torch.set_default_dtype(before)
    assert all(kinds.values())
    shared = kinds[torch.float32] & kinds[torch.bfloat16]
    # what counts labels is of the labels' dtype
    assert not [kind for kind in shared if torch.int64 not in kind]


@pytest.mark.parametrize(
    "family", [x for x in FAMILIES if x.name == "attention.triton"], ids=["attention"]
)
@pytest.mark.parametrize("dying", ["forward", "backward"])
@pytest.mark.parametrize("portable", [lambda plain: plain, dies], ids=["sound", "dies too"])
def test_sm90_falls_back_to_portable(
    family: Family,
    dying: str,
    portable: Callable,
    unverified: Callable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first that works of "sm90|triton|eager"; plain torch only where both die."""
    ran: list[str] = []

    def noting(name: str, launch: Callable) -> Callable:
        return lambda *args: ran.append(name) or launch(*args)

    with monkeypatch.context() as patch:
        patch.setattr(backends, "INTERPRETED", False)
        want = results(family)
    plant(monkeypatch, family, lambda plain: noting("triton", portable(plain)))
    for name in ("forward", "backward"):
        plain = getattr(eager, name)
        launch = noting("sm90", dies(plain) if name == dying else plain)
        monkeypatch.setattr(f"{KERNELS}.attention.sm90.launch.{name}", launch)
    monkeypatch.setattr(f"{KERNELS}.attention.dispatch.sm90_unsupported", lambda *call: None)
    here = unverified()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", guarded_launch.KernelDisabledWarning)
        got = results(family)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    both = portable is dies
    lost = ["attention.sm90", *["attention.triton"] * both]
    assert [str(x.message).split()[0] for x in said] == lost
    assert all("SIGABRT" in str(x.message) for x in said)
    assert [x.split()[0] for x in here.remembered["unusable"]] == lost
    assert ran[0] == "sm90" and "triton" in ran
    ran.clear()
    results(family)
    assert set(ran) == (set() if both else {"triton"})


def guarded_files() -> set[str]:
    """Those that make a Guard; every one has a probe, but what only looks for wrong ids."""
    files = set()
    for path in Path(kernels.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func).rpartition(".")[2]
            keywords = {x.arg for x in node.keywords}
            run = name in ("Guard", "guarded", "KernelPair")
            if run or (name == "KernelOp" and "kernel" in keywords):
                # the others want one
                assert name != "Guard" or len(node.args) == 4, f"{path}: no probe"
                files.add(str(path))
    return files


def test_every_guarded_call_is_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Families' calls come by every file that makes a Guard, but for sm_90's, of tests/gpu."""
    files, reached = guarded_files(), set()

    def enter(guard: guarded_launch.Guard) -> bool:
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename not in files:
            frame = frame.f_back
        if frame is not None and not guard._impl.startswith("eager"):
            reached.add(frame.f_code.co_filename)
        return False

    monkeypatch.setattr(guarded_launch.Guard, "__enter__", enter)
    import_kernels()
    for family in FAMILIES:
        with monkeypatch.context() as patch:
            patch.setattr(backends, "INTERPRETED", True)
            family.take_triton(patch, "triton|eager")
            forget_plans()
            results(family)
    forget_plans()
    left = {Path(x).parts[-2:] for x in files - reached}
    assert left == {("attention", "rotary.py"), ("selected_attention", "launch.py")}
    named = {known_bugs.family((x.name.split()[0],)) for x in FAMILIES}
    assert named == {*compiler_state.families()} - {known_bugs.CORE}
