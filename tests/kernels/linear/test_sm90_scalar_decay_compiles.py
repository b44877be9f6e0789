"""The additive family's Gluon scans compiled for sm_90, which need not be there."""

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

# 16-bit dtype, gate, initial state, packed, tokens, K and V
CASES = {
    "plain": (torch.bfloat16, False, False, False, 192, 128),
    "gated": (torch.bfloat16, True, True, True, 192, 128),
    "split": (torch.float16, True, False, False, 8192, 128),
    "wide plain": (torch.bfloat16, False, False, False, 192, 256),
    "wide gated": (torch.bfloat16, True, True, True, 192, 256),
    "wide split": (torch.float16, True, False, False, 8192, 256),
}
FURTHER = ("gated", "wide plain", "wide split")


def terms(case: tuple, device: torch.device | str) -> LinearInputs:
    dtype, gate, state, packed, T, K = case
    B, H, HV, V = 1 if packed else 2, 1, 2, K
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


@pytest.mark.parametrize(
    "case",
    [
        # each flag is in another
        pytest.param(x, id=name, marks=pytest.mark.slow if name in FURTHER else ())
        for name, x in CASES.items()
    ],
)
def test_additive_scans_compile(case: tuple) -> None:
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
    wide = case[-1] == 256
    assert len(found[True]) == (4 if wide else 3)  # o; dq; dk and dv, wide one after the other
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
        waits = {threads for _, threads in re.findall(r"bar\.sync\s+(\d+), (\d+);", got.ptx)}
        assert waits == ({"128", "256"} if wide else {"128"})


def test_refuses_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    given = terms(CASES["gated"], "cpu")
    refuses = plan.unsupported_reason
    assert "sm_90" in str(refuses(given))
    monkeypatch.setattr(plan, "sm90_unsupported", lambda x: None)
    assert refuses(given) is None
    q, k, v, g = (x[..., :64] if x is not None and x.dim() == 4 else x for x in given[:4])
    assert "128" in str(refuses(given._replace(q=q, k=k)))
    wider = given._replace(v=torch.cat([given.v, given.v], -1))
    assert "both 128 or both 256" in str(refuses(wider))
    assert "128" in str(refuses(given._replace(v=v)))
    assert "float16" in str(refuses(given._replace(q=given.q.float())))
    assert "one gate" in str(refuses(given._replace(u=given.k[0, 0])))
    assert refuses(given._replace(beta=g)) is None  # the delta rule's kernels take that


@pytest.mark.parametrize(
    ("K", "V", "columns"), [(128, 256, 2), (128, 512, 4), (256, 512, 2), (256, 128, None)]
)
def test_columns_are_split_for_them(
    monkeypatch: pytest.MonkeyPatch, K: int, V: int, columns: int | None
) -> None:
    from slipstream.kernels.linear import dispatch

    monkeypatch.setattr(plan, "sm90_unsupported", lambda x: None)
    q, v = (torch.ones(1, 64, 1, width, dtype=torch.bfloat16) for width in (K, V))
    groups = dispatch._groups_for_sm90(LinearInputs(q, q, v), None)
    if columns is None:
        assert groups is None
    else:
        assert groups == (1, K, columns, V // columns)
