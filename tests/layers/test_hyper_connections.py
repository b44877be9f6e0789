"""Hyper-connections around a layer, by their modules."""

import pytest
import torch

from slipstream import layers, ops
from tests.support import formulas


@pytest.mark.parametrize("mix", [True, False])
def test_streams_around_a_layer_equal_formulas(mix: bool) -> None:
    torch.manual_seed(0)
    streams = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    options = {"eps": 1e-4, "iterations": 3, "magnitude": 1.5, "post_eps": 0.1}
    connection = layers.HyperConnection(8, 3, mix=mix, **options).double()
    head, layer = layers.HyperHead(8, 3, eps=1e-4).double(), torch.nn.Linear(8, 8).double()
    collapsed, post, comb = connection(streams)
    got = head(ops.mhc_post(streams, layer(collapsed), post, comb))
    weights = connection.fn, connection.base, connection.scale
    first, *others = formulas.mhc_pre(streams, *weights, **options)
    assert (comb is None) == (not mix) == (len(others) == 1)
    want = formulas.mhc_post(streams, layer(first), *others)
    want = formulas.mhc_pre(want, head.hc_fn, head.hc_base, head.hc_scale, eps=1e-4)[0]
    torch.testing.assert_close(got, want)
    parameters = [*connection.parameters(), *head.parameters(), *layer.parameters()]
    for x, y in zip(*(torch.autograd.grad(z.sin().sum(), parameters) for z in (got, want))):
        torch.testing.assert_close(x, y)


def test_new_connections_leave_streams_bounded() -> None:
    """Rows and columns of comb sum to 1, so that no stream grows by mixing."""
    torch.manual_seed(0)
    collapsed, post, comb = layers.HyperConnection(16)(torch.randn(7, 4, 16))
    assert collapsed.shape == (7, 16) and post.shape == (7, 4) and comb.shape == (7, 4, 4)
    for axis in (-1, -2):
        torch.testing.assert_close(comb.sum(axis), torch.ones(7, 4), rtol=0, atol=1e-4)
    assert post.min() >= 0 and post.max() <= 2
