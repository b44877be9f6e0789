"""rwkv7 with projections other than its own."""

from typing import Any

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


@pytest.mark.parametrize(("width", "ranks"), [(768, (64, 64, 128, 32)), (2560, (96, 96, 320, 64))])
def test_ranks_are_those_of_released_models(width: int, ranks: tuple[int, ...]) -> None:
    """Of w, a, g and v: RWKV-7 of 0.1B and of 2.9B."""
    with torch.device("meta"):
        layer: Any = RWKV7(width, head_dim=64, layer_idx=1)
    loras = layer.w_lora, layer.a_lora, layer.g_lora, layer.v_lora
    assert tuple(x.down.shape[1] for x in loras) == ranks
