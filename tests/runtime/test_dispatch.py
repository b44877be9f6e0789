"""The choice of an implementation: first that takes the call, or the named one, never silently."""

import contextlib
import inspect
import sys
from types import SimpleNamespace

import pytest
import torch

from slipstream.runtime import backends, call_replay
from slipstream.runtime import dispatch as plan
from slipstream.runtime.dispatch import Candidate, choose

CANDIDATES = (
    Candidate("fast", "quick", unsupported_reason=lambda n: "n is odd" if n % 2 else None),
    Candidate("plain", "takes all"),
    Candidate("oracle", "slow", by_name_only=True),
)


def test_choose_takes_the_first_that_does_not_refuse() -> None:
    assert choose(CANDIDATES, 2, None).impl == "fast"
    plan = choose(CANDIDATES, 3, None)
    assert (plan.impl, plan.why, plan.rejected) == ("plain", "takes all", (("fast", "n is odd"),))


def test_choose_uses_or_refuses_the_named_one() -> None:
    assert choose(CANDIDATES, 3, "oracle").impl == "oracle"
    with pytest.raises(NotImplementedError, match="n is odd"):
        choose(CANDIDATES, 3, "fast")
    with pytest.raises(ValueError, match=r"want None or one of 'fast', 'plain', 'oracle'"):
        choose(CANDIDATES, 3, "fastest")


def test_choose_says_why_nothing_takes_the_call() -> None:
    with pytest.raises(NotImplementedError, match="fast: n is odd"):
        choose(CANDIDATES[:1], 3, None)


class Given:
    """A tensor on a GPU, for a plan that looks at nothing else."""

    is_cuda = True

    def numel(self) -> int:
        return 4


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Given:
    monkeypatch.setattr(plan.backends, "is_plain_call", lambda x: True)
    monkeypatch.setattr(plan, "reported", {})
    monkeypatch.delenv(plan.FALLBACK, raising=False)
    return Given()


WITHOUT_KERNEL = (
    Candidate("triton", "a kernel", lambda call: f"{call} is too wide"),
    Candidate("eager", "plain torch"),
)


def test_fallback_warns_once_per_reason(on_gpu: Given) -> None:
    with pytest.warns(
        plan.FallbackWarning, match=r"conv runs in plain torch.*triton: K is too wide"
    ):
        assert choose(WITHOUT_KERNEL, "K", None, "conv", on_gpu).impl == "eager"
    choose(WITHOUT_KERNEL, "K", None, "conv", on_gpu)  # warnings are errors here
    for family, call in (("conv", "V"), ("norm", "K")):
        with pytest.warns(plan.FallbackWarning, match=f"{family} .*{call} is too wide"):
            choose(WITHOUT_KERNEL, call, None, family, on_gpu)


def test_fallback_remembers_few_reasons(on_gpu: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_MAX_ENTRIES", 3)
    for size in range(10):
        with pytest.warns(plan.FallbackWarning, match=f"{size} is too wide"):
            choose(WITHOUT_KERNEL, size, None, "conv", on_gpu)
        assert len(plan.reported) <= 3
    choose(WITHOUT_KERNEL, 9, None, "conv", on_gpu)


def test_fallback_silent_when_not_needed(on_gpu: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plan.FALLBACK, "error")
    taken = (Candidate("triton", "a kernel"), Candidate("eager", "plain torch"))
    assert choose(taken, "K", None, "conv", on_gpu).impl == "triton"
    assert choose(WITHOUT_KERNEL, "K", "eager", "conv", on_gpu).impl == "eager"
    monkeypatch.setattr(Given, "is_cuda", False)
    assert choose(WITHOUT_KERNEL, "K", None, "conv", on_gpu).impl == "eager"


def test_fallback_variable_raises(on_gpu: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plan.FALLBACK, "error")
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=r"conv: no kernel takes .* K is too wide"):
            choose(WITHOUT_KERNEL, "K", None, "conv", on_gpu)
    monkeypatch.setenv(plan.FALLBACK, "raise")
    with pytest.raises(ValueError, match="SLIPSTREAM_FALLBACK: want warn or error, got 'raise'"):
        choose(WITHOUT_KERNEL, "K", None, "conv", on_gpu)


def test_fallback_variable_raises_after_the_first_call(
    on_gpu: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where choices are remembered by signature, and calls as records."""
    plans = plan.ValidationCache()

    def call(family: str = "conv") -> str:
        make = lambda: choose(WITHOUT_KERNEL, "K", None, family, on_gpu)  # noqa: E731
        return plans.get((family,), make).impl

    def recorded(x: torch.Tensor) -> torch.Tensor:
        call()
        return x + 1

    with pytest.warns(plan.FallbackWarning):
        assert call() == "eager"
    assert call_replay.record(recorded, [torch.ones(2)])[1] is None
    monkeypatch.setenv(plan.FALLBACK, "error")
    with pytest.raises(NotImplementedError, match="conv: no kernel takes"):
        call()


def test_every_operator_reports_its_fallbacks(
    on_gpu: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of float64 that say that they are on a GPU: no kernel takes them."""
    from slipstream.tools.catalog import SAMPLES, Shape

    reported: list[str] = []
    monkeypatch.setattr(plan, "report_fallback", lambda plan, family, x: reported.append(family))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    modules = [vars(x) for name, x in sys.modules.items() if name.startswith("slipstream.")]
    for plans in (x["_PLANS"] for x in modules if "_PLANS" in x):
        # of tensors that said that they are on a CPU, and this test's are not for others
        monkeypatch.setattr(plans, "_by_kind", {})
    sample = {x.op: x for x in reversed(SAMPLES)}  # the plainest of each
    shape = Shape(T=4, K=16, V=16, dtype=torch.float64)
    for op in OPERATORS:
        reported.clear()
        with NEEDS_A_GPU if op == "cross_entropy" else contextlib.nullcontext():
            sample[op].call(sample[op].inputs(shape, torch.device("cpu")))
        assert reported, op


# its targets are looked at by a kernel
NEEDS_A_GPU = pytest.raises((RuntimeError, ValueError), match=r"active drivers|cpu tensor")
OPERATORS = (
    "chunk_gla",
    "chunk_hgrn",
    "attention",
    "matmul",
    "rms_norm",
    "short_convolution",
    "selective_scan",
    "mixer_step",
    "swiglu",
    "cross_entropy",
    "rotary_embedding",
)


def test_choose_deprecated_name() -> None:
    """impl="hopper" is sm90 for one release more."""
    candidates = (Candidate("sm90", ""), Candidate("eager", ""))
    with pytest.warns(DeprecationWarning, match='is called "sm90" now'):
        assert choose(candidates, None, "hopper").impl == "sm90"
    with pytest.raises(ValueError, match="one of 'sm90', 'eager', got 'cuda'"):
        choose(candidates, None, "cuda")


def test_multiprocessors_are_each_devices_own(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = lambda index: SimpleNamespace(multi_processor_count=100 + index)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    assert [inspect.unwrap(backends.sm_count)(i) for i in (-1, 0, 1)] == [2, 100, 101]
