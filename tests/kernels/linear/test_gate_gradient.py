"""The sum of g dg, which is the gradient of a layer's A_log, where gates are strong. dg of a strong
gate is nearly 0, but a sum over later tokens, whose terms cancel only if they are rounded alike.
Triton kernels are interpreted, in a process of their own; sm_90's are emulated with the rounding of
bfloat16, where they were off by 0.03 to 11 of the sum. Gates of -1e4 multiply the rounding of
float32 too: there dg has to be 0, and was not in the delta rule. Gates per channel that are NaN or
infinite reach results; fresh memory is one finite number there: what no kernel writes, or only the
first of two, is finite where the float64 reference is not."""

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.kernels.linear.inputs import LinearInputs
from tests.gluon_emulator import launches
from tests.gluon_emulator.rounding import rounded
from tests.support.interpreted import interpreted
from tests.support.linear_interpreted import CHANNEL_GATES, FORMS, reference
from tests.support.operators import offsets, relative_error

T, LENGTHS = 150, (5, 0, 71, 74)
GATES = {
    "all strengths": lambda x: -37 * x**8,
    "few of -37": lambda x: torch.where(x > 0.97, -37.0, -0.05 * x),
    "few of -10": lambda x: torch.where(x > 0.97, -10.0, -0.05 * x),
    "few of -1e4": lambda x: torch.where(x > 0.97, -1e4, -0.05 * x),
}
# in bfloat16 and float16; in float32 errors are about 2^12 times less
LIMIT = 0.02
FLOAT32_LIMIT = 1e-5
SM90 = "slipstream.kernels.linear.sm90."


def inputs(gates: str, width: int, packed: bool, delta: bool, dtype: torch.dtype) -> LinearInputs:
    """Numbers that dtype has, in float64."""
    torch.manual_seed(0)
    H = 1 + (dtype == torch.float32)  # whose error in one head may be that of a sum of 0
    q, k, v = (torch.randn(1, T, H, width) for _ in range(3))
    q, k = (F.normalize(x, dim=-1) for x in (q, k))
    q, k, v = (x.to(dtype).double() for x in (q, k, v))
    return LinearInputs(
        q,
        k,
        v,
        g=GATES[gates](torch.rand(1, T, H)).double(),
        beta=torch.rand(1, T, H).double() if delta else None,
        cu_seqlens=offsets(LENGTHS).int() if packed else None,
    )


def error(dg: Tensor, want: Tensor, g: Tensor | None) -> float:
    assert g is not None
    found, right = ((g.double() * x.double()).sum((0, 1)) for x in (dg, want))
    return float((found - right).norm() / right.norm())


def assert_crossed_down_to_32(backend: Any, delta: bool, dtype: torch.dtype) -> None:
    """By what later tokens read of earlier ones, and by nothing below."""
    width = 64 if delta else 128
    for gate in (-25.0, -31.0, -33.0, -45.0):
        terms = inputs("few of -10", width, False, delta, dtype)
        terms.k[:, 20:], g = 0.0, terms.q[..., 0] * 0 - 0.05
        g[:, 20] = gate
        terms = terms._replace(g=g)
        given: dict[str, Any] = {n: getattr(terms, n).to(dtype) for n in "qkv"}
        given |= {n: x.float() for n in ("g", "beta") if (x := getattr(terms, n)) is not None}
        end = torch.zeros(terms.state_shape, dtype=torch.float64)
        dg = backend.backward(terms._replace(**given), given["v"], end, 0.3)["g"]
        assert bool(dg[0, 20, 0]) == (gate > -32), gate


def check_triton(family: str, gates: str, packed: bool, dtype: torch.dtype) -> None:
    backend = importlib.import_module(f"slipstream.kernels.linear.triton.{family}.backend")
    terms = inputs(gates, 64, packed, family == "delta", dtype)
    do = torch.randn(terms.v.shape).to(dtype)
    given = {name: getattr(terms, name).to(dtype) for name in "qkv"}
    limit = FLOAT32_LIMIT if dtype == torch.float32 else LIMIT
    given |= {name: x.float() for name in ("g", "beta") if (x := getattr(terms, name)) is not None}
    has_p = family == "delta" and gates in ("all strengths", "few of -1e4")
    for p in (None, given["k"] * 0.75)[: 1 + has_p]:
        terms = terms._replace(**given, p=p)
        got, want = backend.backward(terms, do, None, 0.3), reference(terms, 0.3, do, None)
        assert terms.g is not None and not got["g"][terms.g < -1e3].any()
        e = error(got["g"], want["g"], terms.g)
        assert e <= limit, f"{family}, {gates}, packed={packed}, p={p is not None}: {e:.1e}"


@interpreted
@pytest.mark.parametrize("family", ["delta", "scalar_decay"])
def test_triton_gate_gradient_of_strong_gates(family: str) -> None:
    for gates in GATES:
        for packed in (False, True) if gates == "all strengths" else (False,):
            check_triton(family, gates, packed, torch.float16)
    check_triton(family, "few of -1e4", True, torch.float32)
    backend = importlib.import_module(f"slipstream.kernels.linear.triton.{family}.backend")
    assert_crossed_down_to_32(backend, family == "delta", torch.float32)


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("family", ["delta", "scalar_decay"])
@pytest.mark.sample(which=lambda family, gates, packed: not packed or gates == "all strengths")
def test_sm90_gate_gradient_of_strong_gates(
    family: str, gates: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the delta rule by the backward in two kernels, and in one."""
    delta = family == "delta"
    backend = importlib.import_module(f"slipstream.kernels.linear.sm90.{family}.backend")
    terms = inputs(gates, 64 if delta else 128, packed, delta, torch.bfloat16)
    do, end = (
        torch.randn(terms.v.shape).bfloat16().double(),
        torch.zeros(terms.state_shape).double(),
    )
    want = reference(terms, 0.3, do, None)["g"]
    assert terms.g is not None
    launches.as_numpy(monkeypatch, rounds=True)
    first = gates == "few of -10" and not packed
    for interval in (None, 2)[: 1 + delta]:
        if delta:
            cut = interval and backend.bwd_schedule.make_schedule(terms, interval, 0)
            monkeypatch.setattr(backend.bwd_schedule, "choose_schedule", lambda _, cut=cut: cut)
        if first:
            assert_crossed_down_to_32(backend, delta, torch.float64)
        with rounded(torch.bfloat16):
            dg = backend.backward(terms, do, end, 0.3)["g"].double()
        e = error(dg, want, terms.g)
        assert e <= LIMIT, f"{interval}: {e:.4f}"
        assert not dg[terms.g < -1e3].any(), interval


# A full chunk and another; a power of two of channels, so that none is masked.
T_NAN, K, CHUNK = 40, 16, 32
EVERY = slice(None)
# form, gates, the token and channels that have another, which
CASES = [
    *((form, "weak", 35, EVERY, torch.nan) for form in FORMS),
    ("g", "mixed", 3, EVERY, torch.nan),
    ("g", "weak", 35, 5, torch.nan),
    ("g", "weak", 35, EVERY, torch.inf),
    *((form, "weak", 35, EVERY, -torch.inf) for form in ("g", "gv")),
]


class Poisoned(TorchDispatchMode):
    """Fresh memory is one finite number."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.fill_(7) if "empty" in func.__name__ else made


def check(form: str, gate: str, token: int, channels: Any, value: float) -> None:
    from slipstream.kernels.linear.triton.vector_decay.backend import backward, forward

    case = f"{form}, {gate}, {value} at {token}"
    q, k, v, x = (torch.randn(1, T_NAN, 1, K) for _ in range(4))
    g = CHANNEL_GATES[gate](x.sigmoid())
    g[:, token, :, channels] = value
    gates = {"gv": g} if form == "gv" else {"g": g}
    if form == "u":
        gates["u"] = torch.randn(1, K)
    terms = LinearInputs(q, k, v, initial_state=torch.randn(1, 1, K, K), **gates)
    do, dfinal = torch.randn(v.shape), torch.randn(terms.state_shape)
    with Poisoned():
        o, final = forward(terms, 0.25)
        got = {"o": o, "final": final, **backward(terms, do, dfinal, 0.25)}
    want = reference(terms, 0.25, do, dfinal)
    assert set(got) == set(want)
    for name, x in want.items():
        seen = got[name].isfinite()
        assert x.isfinite()[seen].all(), f"{case}: {name} is finite where the reference is not"
        error = relative_error(got[name][seen], x[seen])
        assert error <= 2e-6, f"{case}: {name} is off by {error:.1e}"
        assert seen.all() or value != -torch.inf, f"{case}: {name} is not finite"
    # earlier chunks do not see the gate
    assert o[:, : token // CHUNK * CHUNK].isfinite().all(), case


@interpreted
def test_nan_gates_reach_results_interpreted() -> None:
    for case in CASES:
        check(*case)
