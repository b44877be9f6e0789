"""A step on a CPU as the list of its kernels (models/host_graph.py)."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.models.host_graph import Call, CannotRepeat, HostGraph, _scripted
from slipstream.ops import embedding, recurrent_step


@torch.no_grad()
def test_host_graph_repeats_a_step() -> None:
    x, state, weight = torch.randn(2, 3), torch.zeros(2, 3), torch.randn(3, 3)

    def step() -> Tensor:
        state.mul_(0.5).add_(x)
        first, second = (state @ weight).t().split([1, 2])
        return torch.cat([first.exp(), second]).sum(0, keepdim=True) + torch.arange(2)

    graph = HostGraph()
    result = graph.capture(step)
    for _ in range(3):
        x.normal_()
        before = state.clone()
        graph.replay()
        got = result.clone()
        state.copy_(before)  # as if it had not run
        torch.testing.assert_close(got, step(), rtol=0, atol=0)


def test_host_graph_is_one_function_of_torchscript() -> None:
    """With operators of ours and several results; not where it refuses the calls."""
    x, table = torch.randn(3, 4), torch.randn(5, 4)

    def step() -> torch.Tensor:
        x2 = torch.where(x > 0, 2 * x, -torch.inf).T.clone(memory_format=torch.contiguous_format)
        y = x2.T.softmax(-1, dtype=torch.float32).nan_to_num().sum([0], keepdim=True)
        low, high = torch.aminmax(y, dim=0)
        y = torch.cat([y, embedding(torch.tensor([[1]]), table)[0], low[None], high[None]])
        return y.relu_().cummax(0).values

    graph = HostGraph()
    out = graph.capture(step)
    assert any(str(call.op).startswith("slipstream.") for call in graph.calls)
    assert len(graph.runs) == 1
    for _ in range(3):
        x.normal_()
        table.normal_()
        graph.replay()
        assert torch.equal(out, step())
    refused = Call(torch.relu_, torch.ops.aten.relu_.default, (x, x, x), {})
    assert len(_scripted([refused, refused])) == 2


@torch.no_grad()
def test_host_graph_copies_results_of_in_place_operators() -> None:
    state = torch.zeros(1, 2, 16, 16)
    q, k, v = (torch.randn(1, 1, 2, 16) for _ in "qkv")
    graph = HostGraph()
    out = graph.capture(lambda: 2 * recurrent_step(q, k, v, state=state))
    for _ in range(3):
        v.normal_()
        before = state.clone()
        graph.replay()
        torch.testing.assert_close(out, 2 * recurrent_step(q, k, v, state=before))
        torch.testing.assert_close(state, before)


@torch.no_grad()
def test_host_graph_computes_constants_once() -> None:
    x, own = torch.randn(4), torch.zeros(4)

    def step() -> Tensor:
        table = (torch.arange(4) * 2).float().exp()  # of nothing but numbers
        counted = torch.arange(4.0).add_(1)  # written to twice
        own.add_(1)
        return x * table + counted + own

    graph = HostGraph()
    out = graph.capture(step)
    assert not any("exp" in str(call.op) or "mul.Scalar" in str(call.op) for call in graph.calls)
    for i in range(3):
        x.normal_()
        graph.replay()
        want = x * torch.tensor([1, 7.3890561, 54.59815, 403.42879]) + torch.arange(4) + 1
        torch.testing.assert_close(out, want + i + 2)


@torch.no_grad()
def test_host_graph_shares_a_weight_among_threads() -> None:
    """Each of several threads has a part of its rows, and the sums are the same."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for N in (256, 1284, 1283):  # halves, parts of 12 rows, and none
            x, weight = torch.randn(1, 256), torch.randn(N, 256)
            graph = HostGraph()
            out = graph.capture(lambda x=x, weight=weight: F.linear(x, weight))
            assert [call.op._schema.name for call in graph.calls] == (
                ["aten::mm" if N == 1283 else "aten::bmm"]
            )
            for _ in range(2):
                x.normal_()
                weight.normal_()
                graph.replay()
                torch.testing.assert_close(out, F.linear(x, weight), rtol=1e-5, atol=1e-5)
    finally:
        torch.set_num_threads(threads)


def test_host_graph_refuses_what_changes() -> None:
    for step in (lambda: torch.rand(2), lambda: torch.ones(2) * torch.ones(()).item()):
        with pytest.raises(CannotRepeat, match="depends on values"):
            HostGraph().capture(step)


@torch.no_grad()
def test_host_graph_that_fails_has_changed_nothing() -> None:
    """For the step will run again."""
    state, x = torch.zeros(2, 3), torch.ones(2, 3)
    before = state.clone()

    def step() -> Tensor:
        state[0].add_(1)
        y = (x * 2).add_(1)
        state.mul_(3).add_(y)
        state[0].add_(1)
        raise RuntimeError("not here")

    with pytest.raises(RuntimeError, match="not here"):
        HostGraph().capture(step)
    assert torch.equal(state, before)
