"""Formulas, written out in torch, of functions and modules of peers that the other tests here call
only where the peer itself is installed."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.compat import flash_attn_interface
from slipstream.compat.fla.modules import fused_norm_gate
from slipstream.compat.flash_attn import bert_padding
from slipstream.compat.flash_attn.ops.triton import layer_norm as triton_norm
from slipstream.compat.mamba_ssm.ops.triton import layer_norm as mamba_norm
from slipstream.compat.mamba_ssm.ops.triton import selective_state_update as mamba_step

B, T, H, K, V, D = 2, 9, 2, 4, 6, 8


def wide(*size: int) -> Tensor:
    return torch.randn(size, dtype=torch.float64)


def close(got: Any, want: Any, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rms", [True, False])
def test_swish_gates_of_norms(rms: bool) -> None:
    x, g = wide(B, T, D), wide(B, T, D)
    kind = fused_norm_gate.FusedRMSNormSwishGate if rms else fused_norm_gate.FusedLayerNormSwishGate
    module = kind(D, eps=1e-3).double()
    with torch.no_grad():
        assert module.weight is not None
        module.weight.copy_(wide(D))
    centred = x if rms else x - x.mean(-1, keepdim=True)
    normed = centred * (centred.square().mean(-1, keepdim=True) + 1e-3).rsqrt()
    close(module(x, g), normed * module.weight * F.silu(g), 1e-6)


@pytest.mark.parametrize("zero_centered", [True, False])
@pytest.mark.parametrize("prenorm", [True, False])
def test_rms_norm_modules(zero_centered: bool, prenorm: bool) -> None:
    x, residual = wide(B, T, D), wide(B, T, D)
    module = triton_norm.RMSNorm(D, 1e-3, zero_centered_weight=zero_centered).double()
    assert module.weight.unique().tolist() == [0.0 if zero_centered else 1.0]
    with torch.no_grad():
        module.weight.copy_(wide(D))
    h = x + residual
    factor = module.weight + 1 if zero_centered else module.weight
    want = h * (h.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * factor
    close(module(x, residual, prenorm=prenorm), (want, h) if prenorm else want, 1e-6)
    if not zero_centered:
        other = mamba_norm.RMSNorm(D, 1e-3).double()
        other.load_state_dict(module.state_dict())
        close(other(x, residual, prenorm=prenorm), (want, h) if prenorm else want, 1e-6)


def test_rms_norm_fn_refuses_dropout() -> None:
    with pytest.raises(ValueError, match="dropout_p: want a number from 0 to 1, got 2"):
        triton_norm.rms_norm_fn(wide(3, D), wide(D), None, dropout_p=2.0)


def test_selective_state_update_of_one_group() -> None:
    state, x, dt = wide(B, H, 3, K), wide(B, H, 3), wide(B, H, 3).abs()
    A, b, c = -wide(H, 3, K).abs(), wide(B, K), wide(B, K)
    new = state * (dt[..., None] * A).exp() + dt[..., None] * x[..., None] * b[:, None, None]
    y = mamba_step.selective_state_update(state, x, dt, A, b, c)
    close(y, (new * c[:, None, None]).sum(-1), 1e-6)
    close(state, new, 1e-6)


def test_flash_attn_of_one_tensor() -> None:
    qkv = torch.randn(B, T, 3, H, 16)
    got = flash_attn_interface.flash_attn_qkvpacked_func(qkv, causal=True)
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    close(got[0] if isinstance(got, tuple) else got, want, 1e-4)


def test_rows_of_tokens_by_index() -> None:
    x = torch.randn(5, 3, 2)
    rows = torch.tensor([4, 0, 4])
    assert torch.equal(bert_padding.index_first_axis(x, rows), x[rows])
    with pytest.raises(TypeError, match="indices: want int32 or int64"):
        bert_padding.index_put_first_axis(x, torch.zeros(5), 9)
