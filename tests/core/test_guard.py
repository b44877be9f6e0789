"""Guarded compilation and the numeric probe: what fails is replaced, said once, remembered."""

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.core import guard
from slipstream.kernels.linear.triton.plan import HAVE_TRITON, INTERPRETED

CPU = torch.device("cpu")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> guard.Machine:
    """A machine nobody has verified, which `attempt` takes for the CPU's."""
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(tmp_path))
    found = guard.Machine("sm_90", "3.6.0", "1.2.3")
    monkeypatch.setattr(guard, "machine", lambda device: found)
    return found


def fails() -> str:
    raise guard.Unusable("planted_kernel: the compiler's process died, killed by SIGABRT")


def test_attempt_falls_back_says_so_once_and_remembers(here: guard.Machine, tmp_path: Path) -> None:
    with pytest.warns(guard.Guarded, match="linear.triton is not used on sm_90 .* SIGABRT"):
        assert guard.attempt("linear.triton", CPU, fails, lambda: "eager") == "eager"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert guard.attempt("linear.triton", CPU, fails, lambda: "eager") == "eager"
        assert guard.attempt("softmax.triton", CPU, lambda: "ran", lambda: "eager") == "ran"
    assert "SIGABRT" in json.dumps(json.loads((tmp_path / "verdicts.json").read_text()))
    again = guard.Machine("sm_90", "3.6.0", "1.2.3")
    assert "SIGABRT" in (again.unusable("linear.triton") or "")
    assert guard.Machine("sm_90", "3.7.1", "1.2.3").unusable("linear.triton") is None
    assert "SIGABRT" in (guard.unusable("linear.triton", CPU) or "")
    here.forget()
    assert guard.attempt("linear.triton", CPU, lambda: "ran", lambda: "eager") == "ran"


def test_attempt_never_replaces_what_was_asked_for_by_name(here: guard.Machine) -> None:
    with pytest.raises(NotImplementedError, match=r"linear\.triton: planted_kernel: .*impl=None"):
        guard.attempt("linear.triton", CPU, fails)


def test_other_errors_are_not_swallowed(here: guard.Machine) -> None:
    def wrong() -> str:
        raise ValueError("q: want ...")

    with pytest.raises(ValueError, match="q: want"):
        guard.attempt("linear.triton", CPU, wrong, lambda: "eager")


def test_probe_runs_once_and_demotes_a_mismatch(
    here: guard.Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes: list[str] = []

    def probe(answer: str | None) -> Callable[[], str | None]:
        return lambda: probes.append("x") or answer

    def attempt(answer: str | None, variant: str) -> str:
        return guard.attempt(
            "norm", CPU, lambda: "ran", lambda: "eager", probe(answer), lambda: variant
        )

    assert attempt(None, "bf16") == attempt(None, "bf16") == "ran"
    assert len(probes) == 1
    monkeypatch.setenv("SLIPSTREAM_PROBE", "off")
    assert attempt("dq is off", "fp16") == "ran"
    monkeypatch.setenv("SLIPSTREAM_PROBE", "always")
    with pytest.warns(guard.Guarded, match="wrong result: dq is off"):
        assert attempt("dq is off", "fp16") == "eager"
    monkeypatch.setenv("SLIPSTREAM_PROBE", "sometimes")
    with pytest.raises(ValueError, match="SLIPSTREAM_PROBE: want once, off, always"):
        guard.attempt("loss", CPU, lambda: "ran", None, probe(None))


def test_a_cpu_has_no_compiler_to_guard() -> None:
    assert guard.machine(CPU) is None
    assert guard.attempt("norm", CPU, lambda: "ran") == "ran"


@pytest.fixture
def jitting(
    here: guard.Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[[str], Any]]:
    """Triton's JIT on a GPU that is not there, under the guard."""
    if not HAVE_TRITON or INTERPRETED:
        pytest.skip("wants Triton, and its compiler")
    from triton.runtime import driver

    from tests.core.planted import planted_kernel
    from tests.core.test_aot import Driver

    # nothing compiled yet: what is in Triton's cache needs no child
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(driver, "_active", Driver())
    undo = guard.watch(here, "tests.")
    yield lambda what: planted_kernel.warmup(torch.int32, 17, WHAT=what, num_warps=1, grid=(1,))
    undo()
    if here._worker is not None:
        here._worker.close()


@pytest.mark.parametrize(
    ("what", "words"), [("abort", "SIGABRT"), ("kill", "SIGKILL"), ("hang", "had not finished")]
)
def test_a_dying_compiler_leaves_the_process_alive(
    here: guard.Machine,
    jitting: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    words: str,
) -> None:
    assert jitting("nothing") is not None
    monkeypatch.setattr(guard, "TIMEOUT", 5.0)
    with pytest.warns(guard.Guarded, match=words):
        assert guard.attempt("planted", CPU, lambda: jitting(what), lambda: "eager") == "eager"
