"""Gates per channel that are NaN or infinite, under Triton's interpreter.

As test_triton_vector_decay_interpreted.py, but fresh memory is one finite number: what no kernel
writes, or only the first of two, is finite where the float64 reference is not.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.kernels.linear.inputs import LinearInputs
from tests.support.interpreted import interpreted
from tests.support.linear_interpreted import CHANNEL_GATES, FORMS, reference
from tests.support.operators import relative_error

# A full chunk and another; a power of two of channels, so that none is masked.
T, K, CHUNK = 40, 16, 32
EVERY = slice(None)
# form, gates, the token and channels that have another, which
CASES = [
    *((form, "weak", 35, EVERY, torch.nan) for form in FORMS), ("g", "mixed", 3, EVERY, torch.nan),
    ("g", "weak", 35, 5, torch.nan), ("g", "weak", 35, EVERY, torch.inf),
    *((form, "weak", 35, EVERY, -torch.inf) for form in ("g", "gv")),
]  # fmt: skip


class Poisoned(TorchDispatchMode):
    """Fresh memory is one finite number."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.fill_(7) if "empty" in func.__name__ else made


def check(form: str, gate: str, token: int, channels: Any, value: float) -> None:
    from slipstream.kernels.linear.triton.vector_decay.backend import backward, forward

    case = f"{form}, {gate}, {value} at {token}"
    q, k, v, x = (torch.randn(1, T, 1, K) for _ in range(4))
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
