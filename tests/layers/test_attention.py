"""The attention layer never makes a dense mask."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from slipstream.layers import MLA, Attention


@pytest.mark.parametrize("layer", [Attention, MLA])
def test_packed_sequences_need_no_dense_mask(monkeypatch: Any, layer: type) -> None:
    calls = []
    torchs = F.scaled_dot_product_attention

    def watched(q: Any, *args: Any, attn_mask: Any = None, **kwargs: Any) -> Any:
        assert attn_mask is None
        calls.append(q.shape[2])
        return torchs(q, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    widths = {} if layer is Attention else {"nope_head_dim": 4, "rope_head_dim": 4, "v_head_dim": 8}
    made = layer(16, 2, **widths)
    offsets = torch.tensor([0, 9, 9, 12, 30], dtype=torch.int32)
    _, state = made(torch.randn(1, 30, 16), cu_seqlens=offsets, use_cache=True)
    assert calls == [9, 0, 3, 18]
    made(torch.randn(1, 30, 16), cu_seqlens=offsets, state=state)
