"""rwkv7 with projections other than its own."""

import pytest
import torch
from torch import nn

from slipstream.layers import RWKV7, rwkv7


def test_projections_with_a_bias_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel mixes tokens for matrices, which have none."""
    taken: list[bool] = []
    monkeypatch.setattr(rwkv7.token_mix, "mixed_projections", lambda *a, **k: taken.append(True))
    layer = RWKV7(hidden_size=32, num_heads=2)
    nn.init.normal_(layer.o_proj.weight)  # which starts at 0
    x = torch.randn(1, 5, 32)
    before = layer(x)[0]
    assert taken
    taken.clear()
    biased = nn.Linear(32, 32)
    with torch.no_grad():
        biased.weight.copy_(layer.r_proj.weight)
    layer.r_proj = biased
    after = layer(x)[0]
    assert not taken
    assert not torch.equal(after, before)
