"""Packed sequences in spans of tokens: the oracle's numbers, the same bits, in CUDA graphs."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.linear import op, workspace
from slipstream.kernels.linear.inputs import DIFFERENTIABLE, LinearInputs
from slipstream.kernels.linear.reference import linear_reference
from slipstream.runtime import call_replay
from tests.gpu.sm90_runs import on_hopper
from tests.support.operators import offsets

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a GPU"),
]
# In spans of 128 tokens: ends at a border and next to it, many in one span, one over three.
LENGTHS = (127, 0, 1, 64, 65, 63, 5, 290, 25, 0)
OTHERS = (0, 310, 2, 1, 61, 3, 128, 60, 11, 64)
SPANS, SCALE = 5, 0.09
CASES = {  # H, HV, V
    "gated": (1, 2, 128),
    "delta": (1, 1, 64),
    "kda": (1, 1, 128),
    "dplr": (1, 2, 128),
}
LIMITS = {"o": 0.006, "final": 0.006, "g": 0.02, "beta": 0.02}
OTHER_LIMIT = 0.008


@pytest.fixture(autouse=True)
def cut(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {
        "MIN_WORKSPACE_BYTES": 0,
        "MAX_WORKSPACE_PCT": 0,
        "MIN_SLICE_TOKENS": 1,
        "MIN_ACTIVE_PROGRAMS": 1,
        "MAX_SLICES": SPANS,
    }
    for name, value in few.items():
        monkeypatch.setattr(workspace, name, value)


def inputs(kind: str, states: bool) -> LinearInputs:
    H, HV, V = CASES[kind]
    T, K = sum(LENGTHS), 128
    make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    q, k, a = (F.normalize(torch.randn(1, T, H, K, **make), dim=-1) for _ in range(3))
    channels = (K,) if kind in ("kda", "dplr") else ()
    given: dict[str, Any] = {}
    if kind != "delta":
        given["g"] = -0.3 * torch.rand(1, T, HV, *channels, device="cuda")
    if kind == "dplr":
        given |= {"a": a, "b": -0.5 * a}
    else:
        given["beta"] = torch.rand(1, T, HV, device="cuda")
    if states:
        given["initial_state"] = torch.randn(len(LENGTHS), HV, K, V, device="cuda")
    return LinearInputs(
        q, k, torch.randn(1, T, HV, V, **make), **given, cu_seqlens=offsets(LENGTHS).int().cuda()
    )


def results(terms: LinearInputs, do: Tensor, dfinal: Tensor | None, run: Any) -> dict[str, Tensor]:
    given = {n: x for n, x in terms._asdict().items() if x is not None}
    live = {n: x.detach().requires_grad_() for n, x in given.items() if n in DIFFERENTIABLE}
    o, final = run(LinearInputs(**{**given, **live}))
    loss = (o * do.to(o)).sum()
    if dfinal is not None:
        loss = loss + (final * dfinal.to(final)).sum()
    grads = dict(zip(live, torch.autograd.grad(loss, list(live.values()))))
    return {"o": o.detach(), "final": final.detach(), **grads}


def ours(terms: LinearInputs) -> tuple[Tensor, Tensor]:
    return op.linear(terms, SCALE, 64, "sm90" if on_hopper else "triton")


@pytest.mark.parametrize("states", [False, True], ids=["from zero", "states"])
@pytest.mark.parametrize("kind", CASES)
def test_spans_match_reference(kind: str, states: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    terms = inputs(kind, states)
    assert workspace.num_slices(terms, "sm90") == SPANS
    do = torch.randn_like(terms.v)
    dfinal = torch.randn(terms.state_shape, device="cuda") if states else None
    monkeypatch.setattr(call_replay, "ENABLED", False)
    got = results(terms, do, dfinal, ours)
    again = results(terms, do, dfinal, ours)
    with torch.no_grad():
        alone, end = ours(terms)
    wide = {n: x.cpu() for n, x in terms._asdict().items() if x is not None}
    wide = {n: x if n == "cu_seqlens" else x.double() for n, x in wide.items()}
    there = None if dfinal is None else dfinal.cpu()
    want = results(LinearInputs(**wide), do.cpu(), there, lambda x: linear_reference(x, SCALE))
    more = {"o": alone, "final": end}
    for name, x in [*got.items(), *more.items()]:
        error = (x.cpu().double() - want[name]).norm() / want[name].norm()
        assert error <= LIMITS.get(name, OTHER_LIMIT), (name, float(error))
        assert torch.equal(got[name], again[name]), name


@pytest.mark.parametrize("kind", ["gated", "kda"])
def test_replay_is_the_call(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for turn in range(4):
        torch.manual_seed(turn)
        terms = inputs(kind, True)
        do, dfinal = torch.randn_like(terms.v), torch.randn(terms.state_shape, device="cuda")
        monkeypatch.setattr(call_replay, "ENABLED", True)
        got = results(terms, do, dfinal, ours)
        monkeypatch.setattr(call_replay, "ENABLED", False)
        for name, x in results(terms, do, dfinal, ours).items():
            assert torch.equal(got[name], x), (turn, name)


@pytest.mark.parametrize("kind", ["gated", "kda"])
def test_graph_takes_new_lengths(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(call_replay, "ENABLED", False)
    terms = inputs(kind, True)
    do, dfinal = torch.randn_like(terms.v), torch.randn(terms.state_shape, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results(terms, do, dfinal, ours)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = results(terms, do, dfinal, ours)
    assert terms.cu_seqlens is not None
    for lengths in (OTHERS, LENGTHS):
        terms.cu_seqlens.copy_(offsets(lengths))
        graph.replay()
        for name, x in results(terms, do, dfinal, ours).items():
            assert torch.equal(got[name], x), (lengths, name)
