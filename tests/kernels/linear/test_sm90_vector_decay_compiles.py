"""The scans with a decay per channel compiled for sm_90, which need not be there."""

import re
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from slipstream import ops
from slipstream.compiler.arch import ARCHS
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.sm90 import plan
from slipstream.runtime.backends import HAVE_TRITON, INTERPRETED
from tests.support.sass import arrives_early

pytestmark = pytest.mark.skipif(
    not HAVE_TRITON or INTERPRETED, reason="wants Triton, and its compiler"
)

# u, initial state, packed
CASES = {"plain": (False, False, False), "before": (True, True, True)}
SCANS = {"vector_decay_chunk_fwd_sm90_kernel", "vector_decay_dqk_sm90_kernel"}


def terms(case: tuple, device: torch.device | str) -> LinearInputs:
    before, state, packed = case
    B, T, H, HV, K, V = 1 if packed else 2, 192, 1, 2, 128, 128
    make = {"device": device, "dtype": torch.bfloat16}
    N = 2
    return LinearInputs(
        torch.ones(B, T, H, K, **make),
        torch.ones(B, T, H, K, **make),
        torch.ones(B, T, HV, V, **make),
        g=torch.zeros(B, T, HV, K, **make),
        u=torch.ones(HV, K, device=device) if before else None,
        initial_state=torch.ones(N, HV, K, V, device=device) if state else None,
        cu_seqlens=torch.ones(N + 1, dtype=torch.int32, device=device) if packed else None,
    )


@pytest.mark.parametrize(
    ("case", "every"),
    [
        pytest.param(CASES["plain"], True, id="plain", marks=pytest.mark.slow),
        pytest.param(CASES["plain"], False, id="plain, one launch of each kernel"),
        pytest.param(CASES["before"], True, id="before"),
    ],
)
def test_channel_scans_compile(case: tuple, every: bool) -> None:
    from slipstream.compiler.trace import trace
    from slipstream.kernels.linear.sm90.vector_decay import backend

    def call(device: torch.device) -> None:
        given = terms(case, device)
        assert plan.unsupported_reason(given) is None
        backend.forward(given, 0.1)
        dfinal = given.initial_state
        backend.backward(given, torch.ones_like(given.v), dfinal, 0.1)

    found = {True: [], False: []}
    for job in trace(call, "sm_90", backward=False):
        found[job.name.endswith("sm90_kernel")].append(job)
    assert len(found[True]) == 4  # o; dqs, dke and dv
    for job in found[True] if every else {x.name: x for x in found[True]}.values():
        got = job.compile()
        assert got.shared <= ARCHS["sm_90"].shared
        # what a part wants before or after its loop, such as addresses of the state
        assert got.stack <= 144, f"{job.name}: {got.stack} bytes spilled"
        assert got.instructions["wgmma"] >= 40 and got.instructions["tma"] >= 5
        assert got.instructions["mma.sync"] == got.instructions["atomic"] == 0
        assert not arrives_early(got.ptx)
        # no part of a program waits at the barrier of all of them while it works
        assert {threads for _, threads in re.findall(r"bar\.sync\s+(\d+), (\d+);", got.ptx)} == {
            "128"
        }


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(CASES["plain"], id="plain", marks=pytest.mark.slow),
        pytest.param(CASES["before"], id="before"),
    ],
)
def test_segments_compile(case: tuple) -> None:
    from slipstream.compiler.trace import trace
    from slipstream.kernels.linear.segments import split_into_segments
    from slipstream.kernels.linear.sm90.vector_decay import backend

    def call(device: torch.device) -> None:
        with mock.patch.object(backend, "vector_decay_sm90", lambda x: split_into_segments(x, 64)):
            backend.forward(terms(case, device), 0.1)

    ends, passing, o = trace(call, "sm_90", backward=False)
    assert ends.name == o.name == "vector_decay_chunk_fwd_sm90_kernel"
    assert passing.name == "decay_state_passing_kernel"
    for job, stack, wgmma in ((ends, 0, 16), (o, 144, 40)):
        got = job.compile()
        assert got.shared <= ARCHS["sm_90"].shared and got.stack <= stack
        assert got.instructions["wgmma"] >= wgmma and got.instructions["tma"] >= 5
        assert got.instructions["mma.sync"] == got.instructions["atomic"] == 0
        assert not arrives_early(got.ptx)


def test_few_heads_go_in_segments() -> None:
    """Backward by the portable kernels."""
    from slipstream.compiler.trace import trace

    def call(device: torch.device) -> None:
        size, make = (1, 4096, 16, 128), {"device": device, "dtype": torch.bfloat16}
        q, k, v, g = (torch.empty(size, **make, requires_grad=True) for _ in range(4))
        ops.chunk_gla(q=q, k=k, v=v, g=g)

    names = [x.name for x in trace(call, "sm_90", backward=True)]
    # the states that segments begin with, and then o
    assert names.count("vector_decay_chunk_fwd_sm90_kernel") == 2
    assert "vector_decay_chunk_kernel" in names
    assert "vector_decay_dqk_sm90_kernel" not in names


def operator(name: str, gate: torch.dtype, device: torch.device) -> Any:
    """chunk_gla or chunk_rwkv6, with as many heads as are scanned whole."""
    size, make = (2, 192, 2, 128), {"device": device, "dtype": torch.bfloat16}
    q, k, v = (torch.empty(size, **make) for _ in range(3))
    g = torch.empty(size, device=device, dtype=gate)
    if name == "chunk_rwkv6":
        u = torch.empty(2, 128, device=device)
        return ops.chunk_rwkv6(r=q, k=k, v=v, w=g, u=u, output_final_state=True)
    return ops.chunk_gla(q=q, k=k, v=v, g=g, output_final_state=True)


@pytest.mark.parametrize("name", ["chunk_gla", "chunk_rwkv6"])
def test_channel_scans_are_wired(name: str) -> None:
    """Gates of bfloat16 alone: others are for the portable kernels."""
    from slipstream.compiler.trace import trace

    def kernels(gate: torch.dtype, backward: bool) -> list[str]:
        call = partial(operator, name, gate)
        return sorted(x.name for x in trace(call, "sm_90", backward))

    assert kernels(torch.bfloat16, False) == ["vector_decay_chunk_fwd_sm90_kernel"]
    both = kernels(torch.bfloat16, True)
    assert set(both) >= SCANS
    # vector_decay_intra_fwd_kernel makes P alone
    assert not {"vector_decay_scores_kernel", "vector_decay_chunk_kernel"} & set(both)
    assert "vector_decay_dqkg_kernel" in both
    for backward in (False, True):
        portable = set(kernels(torch.float32, backward))
        assert {"vector_decay_intra_fwd_kernel", "vector_decay_chunk_kernel"} <= portable
        assert not SCANS & portable


def test_refuses_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    given = terms(CASES["before"], "cpu")
    refuses = plan.unsupported_reason
    assert "sm_90" in str(refuses(given))
    monkeypatch.setattr(plan, "sm90_unsupported", lambda x: None)
    assert refuses(given) is None
    assert given.g is not None
    narrow = {n: x[..., :64] for n, x in given._asdict().items() if n in ("q", "k", "g")}
    assert "128" in str(refuses(given._replace(**narrow)))
    assert "128" in str(refuses(given._replace(v=given.v[..., :64])))
    for name in "qkvg":
        for dtype in (torch.float16, torch.float32):
            other = given._replace(**{name: getattr(given, name).to(dtype)})
            assert f"{name} is {dtype}" in str(refuses(other))
    assert "one gate" in str(refuses(given._replace(g=None)))
    few = (x[:, :1].expand(1, 2048, *x.shape[2:]) for x in (*given[:3], given.g))
    assert "few heads" in str(refuses(LinearInputs(*few)))
