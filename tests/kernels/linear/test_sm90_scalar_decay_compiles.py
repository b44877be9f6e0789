"""The additive family's Gluon walks compiled for sm_90, which need not be there."""

import re

import pytest
import torch

from slipstream.compiler.arch import ARCHS
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.sm90 import plan
from slipstream.runtime.backends import HAVE_TRITON, INTERPRETED
from tests.support.sass import arrives_early

pytestmark = pytest.mark.skipif(
    not HAVE_TRITON or INTERPRETED, reason="wants Triton, and its compiler"
)

# 16-bit dtype, gate, initial state, packed, tokens
CASES = {
    "plain": (torch.bfloat16, False, False, False, 192),
    "gated": (torch.bfloat16, True, True, True, 192),
    "split": (torch.float16, True, False, False, 8192),
}


def terms(case: tuple, device: torch.device | str) -> LinearInputs:
    dtype, gate, state, packed, T = case
    B, H, HV, K, V = 1 if packed else 2, 1, 2, 128, 128
    make = {"device": device, "dtype": dtype}
    N = 2 if packed else B
    return LinearInputs(
        torch.ones(B, T, H, K, **make),
        torch.ones(B, T, H, K, **make),
        torch.ones(B, T, HV, V, **make),
        g=torch.zeros(B, T, HV, device=device) if gate else None,
        initial_state=torch.ones(N, HV, K, V, device=device) if state else None,
        cu_seqlens=torch.ones(N + 1, dtype=torch.int32, device=device) if packed else None,
    )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_additive_walks_compile(case: tuple) -> None:
    from slipstream.compiler.trace import trace
    from slipstream.kernels.linear.sm90.scalar_decay import backend

    def call(device: torch.device) -> None:
        given = terms(case, device)
        assert plan.unsupported_reason(given) is None
        backend.forward(given, 0.1)
        dfinal = given.initial_state
        backend.backward(given, torch.ones_like(given.v), dfinal, 0.1)

    found = {True: [], False: []}
    for job in trace(call, "sm_90", backward=False):
        found[".sm90." in job.kernel].append(job)
    assert len(found[True]) == 3  # o; dq; dk and dv
    for job in found[False]:
        job.compile()
    for job in found[True]:
        got = job.compile()
        assert got.shared <= ARCHS["sm_90"].shared
        # what a part wants before or after its loop, such as addresses of the state
        assert got.stack <= 320, f"{job.name}: {got.stack} bytes spilled"
        assert got.instructions["wgmma"] >= 40 and got.instructions["tma"] >= 5
        assert got.instructions["mma.sync"] == got.instructions["atomic"] == 0
        assert not arrives_early(got.ptx)
        # no part of a program waits at the barrier of all of them while it works
        assert {threads for _, threads in re.findall(r"bar\.sync\s+(\d+), (\d+);", got.ptx)} == {
            "128"
        }


def test_refuses_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    given = terms(CASES["gated"], "cpu")
    refuses = plan.unsupported_reason
    assert "sm_90" in str(refuses(given))
    monkeypatch.setattr(plan, "sm90_unsupported", lambda x: None)
    assert refuses(given) is None
    q, k, v, g = (x[..., :64] if x is not None and x.dim() == 4 else x for x in given[:4])
    assert "128" in str(refuses(given._replace(q=q, k=k)))
    assert "128" in str(refuses(given._replace(v=v)))
    assert "float16" in str(refuses(given._replace(q=given.q.float())))
    assert "one gate" in str(refuses(given._replace(u=given.k[0, 0])))
    assert refuses(given._replace(beta=g)) is None  # the delta rule's kernels take that
