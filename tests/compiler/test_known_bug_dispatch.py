"""Each fault of compiler/known_bugs.py where its compilers are: what the plan, the matrix or the
probe do about it, and that `slipstream explain` says so."""

from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from slipstream.compiler import compiler_state, toolchain
from slipstream.compiler.arch import ARCHS
from slipstream.compiler.known_bugs import INTERPRETER, KNOWN_BUGS, applying, features_of, suspected
from slipstream.runtime import guarded_launch
from slipstream.tools import explain_text
from slipstream.tools.backend_query import TracedKernels, trace_operator
from slipstream.tools.catalog import Shape, chosen
from tests.support import wants
from tests.support.planted_fault import FAULT, plant

pytestmark = wants.compiler
BY_NAME = {x.name: x for x in KNOWN_BUGS}
HALF, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


class Met(NamedTuple):
    """Compilers with the fault, a call that meets it, and compilers without."""

    arch: str
    triton: str
    ptxas: str
    op: str
    dtype: torch.dtype
    without: tuple[str, str]


# what the plan refuses
REFUSED = {
    "planted-fault": Met("sm_75", "3.6.0", "12.8.93", "matmul", BF16, ("3.8.0", "12.8.93")),
    "ptxas13-volta": Met("sm_70", "3.6.0", "13.0.88", "rms_norm", FP32, ("3.6.0", "12.8.93")),
}  # fmt: skip
# kinds that no sample has: what plans ask, and what launches do
LAUNCHED = {
    "fp8-scaled-mm": ("sm_90", "3.8.0", "13.3.33", ("matmul.sm90", torch.float8_e4m3fn, "tf32")),
    "tf32x3-on-hip": ("gfx942", "3.6.0", "", ("matmul.triton", FP32, "tf32x3")),
}
# patterns that no kernel has, as compiling shows (tools/matrix.py)
AVOIDED = ("overwritten-tile", "two-axis-sum", "pipelined-store")
# where kernels may be wrong: Triton, ptxas
PROBED = {
    "chained-dots": ("3.6.0", "12.8.93"),
    "narrow-dot": ("3.6.0", "12.8.93"),
    "transposed-dot": ("3.7.0", "13.1.80"),
}
SLOW = ("fma-dots", "spilled-vector-decay", "spilled-gated-delta", "spilled-wide-delta")
INTERPRETED_ONLY = ("interpreter-bf16", "interpreter-mask")


def test_every_fault_is_answered_and_tested() -> None:
    answered = [
        *REFUSED.keys() - {FAULT.name},
        *LAUNCHED,
        *AVOIDED,
        *PROBED,
        *SLOW,
        *INTERPRETED_ONLY,
    ]
    assert sorted(answered) == sorted(BY_NAME)
    for name, x in BY_NAME.items():
        assert x.avoided == (name in AVOIDED)
        assert x.probed == (name in PROBED)
        assert (x.effect == "slow") == (name in SLOW)
        assert (INTERPRETER in x.archs) == (name in INTERPRETED_ONLY)


def compilers(triton: str, ptxas: str) -> dict[str, str]:
    return {"triton": triton, "ptxas": ptxas, "ptxas_blackwell": ptxas}


def plan_of(met: Met, triton: str, ptxas: str) -> TracedKernels:
    shape = Shape(K=64, V=64, dtype=met.dtype)
    sample = chosen([met.op])[0]
    return trace_operator(sample, shape, met.arch, False, compilers=compilers(triton, ptxas))


@pytest.mark.parametrize("name", REFUSED)
def test_selection_refuses_faulty_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And takes plain torch; by name it says why; with other compilers it takes the kernels."""
    plant(monkeypatch)
    met, fault = REFUSED[name], (BY_NAME | {FAULT.name: FAULT})[name]
    got = plan_of(met, met.triton, met.ptxas)
    assert not got.jobs[None] and fault.name in got.refused["triton"]
    assert fault.way_out in got.refused["triton"]
    assert plan_of(met, *met.without).jobs[None]
    monkeypatch.setattr(toolchain, "versions", lambda: compilers(met.triton, met.ptxas))
    monkeypatch.setattr(toolchain, "triton_version", lambda: met.triton)
    monkeypatch.setattr(toolchain, "ptxas_version", lambda path: met.ptxas)
    monkeypatch.setattr(toolchain, "select_ptxas", lambda *args: None)
    shape = Shape(K=64, V=64, dtype=met.dtype)
    said = list(explain_text.lines(chosen([met.op])[:1], shape, met.arch))
    assert any(name in x and ("rejected" in x or "no, " in x) for x in said)
    assert any(f"known fault {name} ({fault.effect})" in x for x in said)


@pytest.mark.parametrize("name", LAUNCHED)
def test_kernels_with_the_fault_are_not_launched(name: str) -> None:
    arch, triton, ptxas, kind = LAUNCHED[name]
    here = compiler_state.CompilerState(arch, triton, ptxas, passive=True, remembers=False)
    with mock.patch.object(guarded_launch, "compiler_state", return_value=here):
        assert name in (guarded_launch.known_failure(lambda: kind, torch.device("cuda")) or "")
        guard = guarded_launch.Guard("triton|eager", torch.device("cpu"), lambda: kind)
        with pytest.warns(guarded_launch.KernelDisabledWarning, match=name), guard as usable:
            assert not usable
    later = compiler_state.CompilerState(arch, "3.6.0", ptxas or "", passive=True, remembers=False)
    other = kind[:-1] if name == "tf32x3-on-hip" else kind
    assert later.unusable(other) is None


def test_default_precision_avoids_tf32x3_on_hip() -> None:
    """compiler/arch.py says the same as the fault."""
    fault = BY_NAME["tf32x3-on-hip"]
    for arch in ARCHS.values():
        assert (arch.name in fault.archs) == ("tf32x3" not in arch.precisions)


KINDS: list[tuple[Any, ...]] = [
    (x, *y, dtype, 64, 64)
    for x in ("linear.triton", "linear.sm90", "attention.triton", "attention.sm90", "matmul.sm90")
    for y in (("none", "none"), ("none", "channel"), ("delta", "head"), ("dplr", "channel"))
    for dtype in (BF16, FP32)
]


@pytest.mark.parametrize("name", PROBED)
def test_probed_fault_is_probed_when_verified(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the first use of each kind that has its pattern; not where the GPU tests have passed."""
    for variable in ("SLIPSTREAM_PROBE", "SLIPSTREAM_GUARD"):
        monkeypatch.delenv(variable, raising=False)
    everything = frozenset(compiler_state.families())
    fault, wrong, cured = BY_NAME[name], PROBED[name], ("3.7.1", "13.1.80")

    def state(triton: str, ptxas: str) -> compiler_state.CompilerState:
        where = {("sm_90", triton, ptxas): everything}
        monkeypatch.setattr(compiler_state, "verified", lambda where=where: where)
        return compiler_state.CompilerState("sm_90", triton, ptxas, remembers=False)

    faulty = state(*wrong)
    assert not faulty.guards and faulty.probes and not faulty.unguarded
    kinds = [x for x in KINDS if fault.trigger in features_of(x)]
    assert kinds and all(faulty.should_probe(kind) for kind in kinds)
    assert not faulty.should_probe(("norm.triton", BF16, 64))
    assert suspected("sm_90", *wrong, {fault.trigger}) is fault
    for triton, ptxas in fault.sound:
        assert suspected("sm_90", triton, ptxas or "13.1.80", {fault.trigger}) is None
    assert state("3.6.0", "13.0.88").unguarded
    assert state(*cured).unguarded and fault not in applying("sm_90", *cured)
    assert suspected("sm_80", *wrong, {fault.trigger}) is None


def test_interpreter_fault_is_avoided(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "interpreter-bf16"
    cpu = torch.device("cpu")
    monkeypatch.setattr(toolchain, "triton_version", lambda: "3.6.0")
    assert guarded_launch.known_failure(lambda: KINDS[0], cpu) is None
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert name in (guarded_launch.known_failure(lambda: ("linear.triton", BF16, 64), cpu) or "")
    assert guarded_launch.known_failure(lambda: ("linear.triton", HALF, 64), cpu) is None
    assert guarded_launch.known_failure(lambda: ("norm.triton", BF16, 64), cpu) is None
    monkeypatch.setattr(toolchain, "triton_version", lambda: "3.10.0")
    assert guarded_launch.known_failure(lambda: ("linear.triton", BF16, 64), cpu) is None
