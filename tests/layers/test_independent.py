"""The layers beside code that is not ours: transformers' where it has them, the paper's formulas
written out where it has not."""

import importlib
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream import layers
from slipstream.layers import RWKV7, Attention, GatedDeltaNet, KimiDeltaAttention, Mamba2
from tests.support.small_layers import D, make

# what reaches the internals of transformers warns about kernels that are not installed
pytestmark = pytest.mark.filterwarnings("ignore")


def randomised(layer: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    return layer


def load(layer: nn.Module, **values: Tensor) -> None:
    """Every parameter of `layer`, by name with _ for the dots."""
    parameters = {name.replace(".", "_"): p for name, p in layer.named_parameters()}
    assert parameters.keys() == values.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(values[name].view_as(parameter))


def test_gated_deltanet_matches_qwen3_next() -> None:
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next import modeling_qwen3_next as hf

    H, HV, K, V, D = 2, 4, 6, 5, 24
    config: Any = Qwen3NextConfig(
        hidden_size=D, linear_num_key_heads=H, linear_num_value_heads=HV, linear_key_head_dim=K,
        linear_value_head_dim=V, num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    theirs = randomised(hf.Qwen3NextGatedDeltaNet(config, 0))
    ours = GatedDeltaNet(D, H, HV, K, V, norm_eps=config.rms_norm_eps)
    p = dict(theirs.named_parameters())
    group = HV // H
    parts = p["in_proj_qkvz.weight"].view(H, -1, D).split([K, K, group * V, group * V], dim=1)
    q, k, v, z = (x.reshape(-1, D) for x in parts)
    b, a = (x.reshape(-1, D) for x in p["in_proj_ba.weight"].view(H, -1, D).chunk(2, dim=1))
    load(
        ours, qkv_proj_weight=torch.cat([q, k, v]), z_proj_weight=z,
        ab_proj_weight=torch.cat([a, b]), o_proj_weight=p["out_proj.weight"],
        conv_weight=p["conv1d.weight"], A_log=p["A_log"], dt_bias=p["dt_bias"],
        norm_weight=p["norm.weight"],
    )  # fmt: skip
    x = torch.randn(2, 30, D)
    torch.testing.assert_close(ours(x)[0], theirs(x), rtol=1e-4, atol=1e-5)


def test_kimi_delta_attention_matches_kimi_linear() -> None:
    from transformers.models.kimi_linear import modeling_kimi_linear as hf

    H, K, D = 2, 6, 24
    config: Any = hf.KimiLinearConfig(
        hidden_size=D, linear_num_heads=H, linear_head_dim=K, num_hidden_layers=1,
        layer_types=["linear_attention"],
    )  # fmt: skip
    theirs = randomised(hf.KimiLinearDeltaAttention(config, 0))
    ours = KimiDeltaAttention(D, H, K, norm_eps=config.rms_norm_eps)
    p = dict(theirs.named_parameters())
    load(
        ours,
        qkv_proj_weight=torch.cat([p[f"{name}_proj.weight"] for name in "qkv"]),
        f_down_weight=p["forget_gate.f_a_proj.weight"],
        f_up_weight=p["forget_gate.f_b_proj.weight"],
        b_proj_weight=p["b_proj.weight"], g_down_weight=p["g_a_proj.weight"],
        g_up_weight=p["g_b_proj.weight"], o_proj_weight=p["o_proj.weight"],
        conv_weight=p["conv1d.weight"], A_log=p["forget_gate.A_log"],
        dt_bias=p["forget_gate.dt_bias"], norm_weight=p["o_norm.weight"],
    )  # fmt: skip
    x = torch.randn(2, 30, D)
    torch.testing.assert_close(ours(x)[0], theirs(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("limit", [None, (0.5, 0.8)])
@pytest.mark.parametrize("bias", [False, True])
def test_mamba2_matches_transformers(bias: bool, limit: tuple[float, float] | None) -> None:
    from transformers import Mamba2Config
    from transformers.models.mamba2 import modeling_mamba2 as hf

    D, H, N, G = 24, 4, 7, 2
    config: Any = Mamba2Config(
        hidden_size=D, num_heads=H, head_dim=2 * D // H, state_size=N, n_groups=G, chunk_size=16,
        num_hidden_layers=1, use_bias=bias, time_step_limit=limit or (0.0, math.inf),
    )  # fmt: skip
    theirs = randomised(hf.Mamba2Mixer(config, 0))
    options = {"use_bias": bias, "dt_limit": limit, "norm_eps": config.layer_norm_epsilon}
    ours = Mamba2(D, H, state_size=N, n_groups=G, **options)
    p = {name.replace(".", "_"): x for name, x in theirs.named_parameters()}
    p |= {"conv_weight": p.pop("conv1d_weight"), "conv_bias": p.pop("conv1d_bias")}
    load(ours, **p)
    x = torch.randn(2, 30, D)
    torch.testing.assert_close(ours(x)[0], theirs(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("peer", ["Llama", "Qwen2"])
def test_attention_matches_that_of_transformers(peer: str) -> None:
    """Qwen2's has biases, and a base of its own."""
    transformers = importlib.import_module("transformers")
    hf = importlib.import_module(f"transformers.models.{peer.lower()}.modeling_{peer.lower()}")
    D, H, HKV = 24, 4, 2
    config: Any = getattr(transformers, f"{peer}Config")(
        hidden_size=D, num_attention_heads=H, num_key_value_heads=HKV, num_hidden_layers=1
    )
    config._attn_implementation = "sdpa"
    theirs = randomised(getattr(hf, f"{peer}Attention")(config, 0))
    p, has_bias = dict(theirs.named_parameters()), peer == "Qwen2"
    options = {"qkv_bias": True, "rotary_base": config.rope_parameters["rope_theta"]}
    ours = Attention(D, H, HKV, **(options if has_bias else {}))
    given = {
        f"qkv_proj_{kind}": torch.cat([p[f"{n}_proj.{kind}"] for n in "qkv"])
        for kind in ("weight", *(["bias"] if has_bias else []))
    }
    load(ours, **given, o_proj_weight=p["o_proj.weight"])
    x = torch.randn(2, 30, D)
    rotary = getattr(hf, f"{peer}RotaryEmbedding")(config)(x, torch.arange(30)[None])
    want, _ = theirs(x, position_embeddings=rotary, attention_mask=None)
    torch.testing.assert_close(ours(x)[0], want, rtol=1e-4, atol=1e-5)


def test_retention_matches_its_parallel_form() -> None:
    """RetNet, section 2.1: (Q K^T, with rotated Q and K, * gamma^(n - m)) V."""
    D, H, T = 16, 2, 20
    layer = layers.MultiScaleRetention(D, H)
    randomised(layer)
    x = torch.randn(1, T, D)
    at = torch.arange(T)
    angle = at[:, None] * 10000.0 ** (-torch.arange(4) / 4)  # K / 2 = 4
    turn = torch.polar(torch.ones_like(angle), angle)
    q, k = (
        torch.complex(*f(x)[0].view(T, H, 2, 4).unbind(2)) * turn[:, None]
        for f in (layer.q_proj, layer.k_proj)
    )
    v = layer.v_proj(x)[0].view(T, H, -1)
    outputs = []
    for h in range(H):
        gamma = 1 - 2.0 ** (-5 - h)
        age = (at[:, None] - at).clamp(min=0)
        score = (q[:, h] @ k[:, h].conj().t()).real * (gamma**age).tril()
        o = score @ v[:, h] / math.sqrt(8)
        outputs.append(o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt())
    want = (torch.cat(outputs, -1) * F.silu(layer.g_proj(x)[0])) @ layer.o_proj.weight.t()
    torch.testing.assert_close(layer(x)[0][0], want, rtol=1e-4, atol=1e-5)


def test_rwkv7_matches_the_paper_token_by_token() -> None:
    """Its formulas with its own conventions: row states, w through softplus, a loop over tokens."""
    D, H, T = 16, 2, 12
    N = D // H
    layer = RWKV7(D, H, layer_idx=1)
    randomised(layer)
    assert layer.v_lora is not None
    x, first = torch.randn(1, T, D), torch.randn(1, T, D)
    S, outputs, last = torch.zeros(H, N, N), [], torch.zeros(D)

    def lora(m: Any, y: Tensor, f: Any = lambda z: z) -> Tensor:
        return f(y @ m.down) @ m.up + (0 if m.bias is None else m.bias)

    for t in range(T):
        xt = x[0, t]
        xr, xw, xk, xv, xa, xg = (xt + (last - xt) * mu for mu in layer.mix)
        last = xt
        r, k, v = xr @ layer.r_proj.weight.t(), xk @ layer.k_proj.weight.t(), layer.v_proj(xv)
        v = v + (first[0, t] - v) * torch.sigmoid(lora(layer.v_lora, xv))
        w = torch.exp(-torch.exp(-F.softplus(-lora(layer.w_lora, xw, torch.tanh)) - 0.5))
        a = torch.sigmoid(lora(layer.a_lora, xa))
        g = lora(layer.g_lora, xg, torch.sigmoid)
        kk = F.normalize((k * layer.k_k).view(H, N), dim=-1)
        k = k * (1 + (a - 1) * layer.k_a)
        r, k, v, w, a = (y.view(H, N) for y in (r, k, v, w, a))
        # S [H, value, key]
        Sa = torch.einsum("hij,hj->hi", S, -kk)
        S = S * w[:, None] + Sa[:, :, None] * (kk * a)[:, None] + v[:, :, None] * k[:, None]
        o = torch.einsum("hij,hj->hi", S, r)
        o = F.group_norm(o.reshape(1, D), H, layer.norm_weight, layer.norm_bias, N * 1e-5)[0]
        o = o + ((r * k * layer.r_k).sum(-1, keepdim=True) * v).flatten()
        outputs.append((o * g) @ layer.o_proj.weight.t())
    got, state = layer(x, first_value=first, use_cache=True)
    assert state is not None
    torch.testing.assert_close(got[0], torch.stack(outputs), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state["recurrent"][0], S.mT, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["DSA", "QSA", "MSA"])
def test_indexers_alone_learn_from_their_loss(name: str) -> None:
    """Gradients of others are those without it."""
    with_loss, without = make(name), make(name, index_loss=0.0)
    without.load_state_dict(with_loss.state_dict())
    x = torch.randn(2, 20, D)
    grads: list[dict[str, Tensor | None]] = []
    for layer in (with_loss, without):
        layer(x)[0].square().sum().backward()
        grads.append({n: p.grad for n, p in layer.named_parameters()})
    for n, grad in grads[1].items():
        assert (grad is None) == n.startswith("index_"), n
        if grad is not None:
            torch.testing.assert_close(grads[0][n], grad)
