"""The matrices by which kernels sum gates: what is in them, and who owns them."""

from unittest import mock

import pytest
import torch

from slipstream.kernels.linear.triton.plan import HAVE_TRITON

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
C = 32


def test_ones_sum_gates_up_to_an_edge() -> None:
    from slipstream.kernels.linear.triton.common import gate_ones

    g = torch.arange(1.0, C + 1)
    edges = [lambda t: 0, lambda t: t >> 4 << 4]
    edges += [lambda t, n=n: (t >> (n + 1) << (n + 1)) + (1 << n) for n in range(5)]
    ones = gate_ones.gate_ones(torch.device("cpu"), C, torch.float32)
    assert ones.shape == (len(edges), 3, C, C)
    for of_edge, edge_of in zip(ones, edges, strict=True):
        for kind, (after, before) in zip(of_edge, ((1, 1), (0, 0), (0, 1)), strict=True):
            for t in range(C):
                edge = edge_of(t)
                # tokens whose gates are between, of a token after the edge, or before it
                span = slice(edge, t + after) if t >= edge else slice(t + before, edge)
                assert kind[t] @ g == g[span].sum(), (t, edge)


def test_kept_ones_are_of_the_call() -> None:
    from slipstream.kernels.linear.triton.common import gate_ones

    calls = [("cpu", C, torch.float32), ("meta", C, torch.float32), ("cpu", 16, torch.float32)]
    for device, size, dtype in [*calls, ("cpu", C, torch.bfloat16)]:
        for _ in range(2):
            ones = gate_ones.gate_ones(torch.device(device), size, dtype)
            assert (ones.device.type, ones.shape[-1], ones.dtype) == (device, size, dtype)


def test_ones_of_graphs_are_not_kept() -> None:
    """Nothing would be there until its replay, nor after its end."""
    from slipstream.kernels.linear.triton.common import gate_ones

    device, kept = torch.device("cuda", 0), {}
    made = mock.Mock()
    with (
        mock.patch.object(gate_ones, "_cached", kept),
        mock.patch.object(gate_ones, "_made", made),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
    ):
        assert gate_ones.gate_ones(device, C, torch.bfloat16) is made.return_value
    made.assert_called_once_with(device, C, torch.bfloat16)
    assert not kept


def test_kept_ones_are_copied_from_the_cpu() -> None:
    """That copy waits for itself: a kernel of another stream may read them at once."""
    from slipstream.kernels.linear.triton.common import gate_ones

    device, made = torch.device("cuda", 0), mock.Mock()
    with mock.patch.object(gate_ones, "_cached", {}), mock.patch.object(gate_ones, "_made", made):
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False):
            first = gate_ones.gate_ones(device, C, torch.bfloat16)
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
            again = gate_ones.gate_ones(device, C, torch.bfloat16)
    made.assert_called_once_with(torch.device("cpu"), C, torch.bfloat16)
    made.return_value.to.assert_called_once_with(device)
    assert first is again is made.return_value.to.return_value
