"""Layers beside their formulas, token by token: those that transformers has no like of."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream import layers

B, T, D, H = 2, 21, 24, 4


def randomised(layer: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    return layer.double()


def convolved(layer: nn.Module, x: Tensor) -> Tensor:
    """silu of a causal convolution [B, T, C] with weight [C, W]."""
    weight = layer.weight
    padded = F.pad(x.mT, (weight.shape[1] - 1, 0))
    return F.silu(F.conv1d(padded, weight[:, None], layer.bias, groups=weight.shape[0]).mT)


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def normed(o: Tensor, weight: Tensor | float, eps: float) -> Tensor:
    return o / (o.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def heads(x: Tensor, h: int = H) -> Tensor:
    return x.unflatten(-1, (h, -1))


def grouped(x: Tensor, h: int) -> Tensor:
    """Heads [B, T, H, ...] as often as h heads read them."""
    return x.repeat_interleave(h // x.shape[2], 2)


def decayed(layer: nn.Module, a: Tensor) -> Tensor:
    return torch.exp(-layer.A_log.exp() * F.softplus(a + layer.dt_bias))


def scan(q: Tensor, v: Tensor, step: Callable[[int, Tensor], Tensor], scale: float) -> Tensor:
    """o_t = scale S_t^T q_t, where S_t = step(t, S_{t-1})."""
    S = q.new_zeros(B, q.shape[2], q.shape[3], v.shape[3])
    o = []
    for t in range(T):
        S = step(t, S)
        o.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(o, 1)


def outer(k: Tensor, v: Tensor) -> Tensor:
    return k[..., :, None] * v[..., None, :]


def read(S: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bhk,bhkv->bhv", k, S)


@pytest.mark.parametrize("gated", [False, True])
def test_delta_net(gated: bool) -> None:
    layer = randomised(layers.DeltaNet(D, H, 6, 5, use_gate=gated, allow_neg_eigval=gated))
    x = torch.randn(B, T, D, dtype=torch.float64)
    qkv = convolved(layer.conv, layer.qkv_proj(x))
    q, k, v = (heads(y) for y in qkv.split([24, 24, 20], -1))
    q, k = unit(q), unit(k)
    beta = (1 + gated) * layer.b_proj(x).sigmoid()

    def step(t: int, S: Tensor) -> Tensor:
        return S + outer(k[:, t], beta[:, t, :, None] * (v[:, t] - read(S, k[:, t])))

    o = normed(scan(q, v, step, 6**-0.5), layer.norm_weight, 1e-5)
    if gated:
        o = o * F.silu(heads(layer.g_proj(x)))
    torch.testing.assert_close(layer(x)[0], layer.o_proj(o.flatten(2)))


HV, K, V = 8, 6, 5  # of layers with more heads of values


def expect_delta(
    layer: Any, x: Tensor, alpha: Tensor, erase: Tensor, write: Tensor, gate: Tensor | float
) -> None:
    """alpha, erase: [B, T, HV, K or 1]. write, gate: [B, T, HV, V or 1]."""
    q, k, v = convolved(layer.conv, layer.qkv_proj(x)).split([H * K, H * K, HV * V], -1)
    q, k, v = grouped(unit(heads(q)), HV), grouped(unit(heads(k)), HV), heads(v, HV)

    def step(t: int, S: Tensor) -> Tensor:
        S = alpha[:, t, ..., None] * S
        return S + outer(k[:, t], write[:, t] * v[:, t] - read(S, erase[:, t] * k[:, t]))

    o = normed(scan(q, v, step, K**-0.5), layer.norm_weight, layer.norm_eps) * gate
    torch.testing.assert_close(layer(x)[0], layer.o_proj(o.flatten(2)))


def test_gated_deltanet_without_a_gate() -> None:
    options = {"allow_neg_eigval": True, "use_gate": False, "conv_bias": True}
    layer = randomised(layers.GatedDeltaNet(D, H, HV, K, V, **options))
    assert layer.norm_eps == 1e-6
    x = torch.randn(B, T, D, dtype=torch.float64)
    a, b = layer.ab_proj(x)[..., None].chunk(2, 2)
    alpha, beta = decayed(layer, a[..., 0])[..., None], 2 * b.sigmoid()
    expect_delta(layer, x, alpha, beta, beta, 1.0)


def test_kimi_delta_attention_with_a_bound() -> None:
    options = {"conv_bias": True, "gate_bias": True, "allow_neg_eigval": True}
    layer = randomised(
        layers.KimiDeltaAttention(D, H, K, V, num_v_heads=HV, lower_bound=-3.0, **options)
    )
    x = torch.randn(B, T, D, dtype=torch.float64)
    raw = heads(layer.f_up(layer.f_down(x)) + layer.dt_bias, HV)
    alpha = torch.exp(-3 * torch.sigmoid(layer.A_log.exp()[:, None] * raw))
    beta = 2 * layer.b_proj(x).sigmoid()[..., None]
    gate = heads(layer.g_up(layer.g_down(x)), HV).sigmoid()
    expect_delta(layer, x, alpha, beta, beta, gate)


def test_gated_deltanet_2() -> None:
    options = {"num_v_heads": HV, "conv_bias": True, "gate_bias": True, "allow_neg_eigval": True}
    layer = randomised(layers.GatedDeltaNet2(D, H, K, V, **options))
    x = torch.randn(B, T, D, dtype=torch.float64)
    f = heads(layer.f_up(layer.f_down(x)) + layer.dt_bias)
    alpha = grouped(torch.exp(-layer.A_log.exp()[:, None] * F.softplus(f)), HV)
    b, w = layer.bw_proj(x).sigmoid().split([H * K, HV * V], -1)
    gate = heads(layer.g_up(layer.g_down(x)), HV).sigmoid()
    expect_delta(layer, x, alpha, grouped(2 * heads(b), HV), heads(w, HV), gate)


@pytest.mark.parametrize("affine", [False, True])
def test_retention_norm(affine: bool) -> None:
    layer = randomised(layers.MultiScaleRetention(D, H, rotary_base=None, norm_affine=affine))
    x = torch.randn(B, T, D, dtype=torch.float64)
    q, k, v = (heads(f(x)) for f in (layer.q_proj, layer.k_proj, layer.v_proj))
    gamma = (1 - 2.0 ** (-5 - torch.arange(H)))[:, None, None]

    def step(t: int, S: Tensor) -> Tensor:
        return gamma * S + outer(k[:, t], v[:, t])

    weight = layer.norm_weight if affine else 1.0
    o = normed(scan(q, v, step, 6**-0.5), weight, 1e-5) * F.silu(heads(layer.g_proj(x)))
    want = layer.o_proj(o.flatten(2))
    torch.testing.assert_close(layer(x)[0], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("doubled", [False, True])
def test_gated_deltaproduct(doubled: bool) -> None:
    n = 3
    layer = randomised(
        layers.GatedDeltaProduct(D, H, HV, K, V, num_householder=n, allow_neg_eigval=doubled)
    )
    x = torch.randn(B, T, D, dtype=torch.float64)
    qkv = convolved(layer.conv, layer.qkv_proj(x))
    q, k, v = qkv.split([H * K, n * H * K, n * HV * V], -1)
    q = grouped(unit(heads(q)), HV)
    k, v = k.view(B, T, n, H, K), v.view(B, T, n, HV, V)
    beta = (1 + doubled) * layer.b_proj(x).view(B, T, n, HV).sigmoid()
    alpha = decayed(layer, layer.a_proj(x))

    def step(t: int, S: Tensor) -> Tensor:
        S = alpha[:, t, :, None, None] * S
        for j in range(n):
            key = grouped(unit(k[:, t : t + 1, j]), HV)[:, 0]
            S = S + outer(key, beta[:, t, j, :, None] * (v[:, t, j] - read(S, key)))
        return S

    o = normed(scan(q, v[:, :, 0], step, K**-0.5), layer.norm_weight, 1e-5)
    o = o * F.silu(heads(layer.z_proj(x), HV))
    torch.testing.assert_close(layer(x)[0], layer.o_proj(o.flatten(2)))


def test_comba() -> None:
    layer = randomised(layers.Comba(D, H, HV, K, V))
    x = torch.randn(B, T, D, dtype=torch.float64)
    q, k, v = convolved(layer.conv, layer.qkv_proj(x)).split([24, 24, 40], -1)
    q, k, v = unit(heads(q)), unit(heads(k)), heads(v, HV)
    q = q - layer.correction[:, None] * k
    q, k, p = (grouped(y, HV) for y in (q, k, layer.erase.sigmoid()[:, None] * k))
    a, b = layer.ab_proj(x).chunk(2, -1)
    alpha, beta = decayed(layer, a), b.sigmoid()

    def step(t: int, S: Tensor) -> Tensor:
        new = beta[:, t, :, None] * (v[:, t] - read(S, p[:, t]))
        return alpha[:, t, :, None, None] * S + outer(k[:, t], new)

    o = normed(scan(q, v, step, K**-0.5), layer.norm_weight, 1e-5)
    o = o * heads(layer.z_proj(x), HV).sigmoid()
    torch.testing.assert_close(layer(x)[0], layer.o_proj(o.flatten(2)))


@pytest.mark.parametrize("window", [None, 5])
def test_forgetting_attention(window: int | None) -> None:
    layer = randomised(
        layers.ForgettingAttention(D, num_heads=H, num_kv_heads=2, window_size=window)
    )
    x = torch.randn(B, T, D, dtype=torch.float64)
    q, k, v = layer.qkv_proj(x).split([H * K, 2 * K, 2 * K], -1)
    q, k, v = heads(q), grouped(heads(k, 2), H), grouped(heads(v, 2), H)
    forgets, rows = layer.f_proj(x).sigmoid().log(), []
    for t in range(T):
        seen = range(0 if window is None else max(0, t - window + 1), t + 1)
        scores = torch.stack(
            [(q[:, t] * k[:, s]).sum(-1) * K**-0.5 + forgets[:, s + 1 : t + 1].sum(1) for s in seen]
        ).softmax(0)
        rows.append(sum(p[..., None] * v[:, s] for p, s in zip(scores, seen)))
    want = layer.o_proj(torch.stack(rows, 1).flatten(2))
    torch.testing.assert_close(layer(x)[0], want)


def test_heavy_tail_has_one_gradient_at_zero() -> None:
    """Where a token's embedding is zero, as padding's is, so is A."""
    x = torch.tensor([-1.0, -1e-9, 0.0, 1e-9, 2.0], dtype=torch.float64, requires_grad=True)
    layers.mamba._ACTIVATIONS["heavy_tail"](x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, x.grad.new_tensor([0.25, 1, 1, 1, 1]))


@pytest.mark.parametrize(
    ("rank", "options"),
    [(1, {}), (3, {}), (1, {"output_norm": True}), (3, {"output_norm": True}),
     (1, {"A_activation": "heavy_tail"})],
)  # fmt: skip
def test_mamba3(rank: int, options: dict[str, Any]) -> None:
    N, P, pairs = 8, 12, 2
    layer = randomised(layers.Mamba3(D, H, None, N, 2, mimo_rank=rank, **options))
    x = torch.randn(B, T, D, dtype=torch.float64)
    sizes = [48, 48, 2 * rank * N, 2 * rank * N, H, H, H, pairs]
    z, u, b, c, dt, a, trap, angle = layer.in_proj(x).split(sizes, -1)
    rate = torch.where(a < 0, 1 / (1 - a), 1 + a) if "A_activation" in options else F.softplus(a)
    step, g = F.softplus(dt + layer.dt_bias), rate.clamp(min=1e-4)
    theta = (torch.pi * step[..., None] * angle.tanh()[:, :, None]).cumsum(1)[:, :, :, None]
    alpha, share = torch.exp(-g * step)[..., None, None], trap.sigmoid()[..., None, None]
    step = step[..., None, None]

    def of_heads(y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = normed(y.unflatten(-1, (rank, 2, N)), weight, 1e-5).transpose(2, 3)
        y = y.repeat_interleave(H // 2, 2) + bias
        first, second = y[..., : 2 * pairs].unflatten(-1, (pairs, 2)).unbind(-1)
        cos, sin = theta.cos(), theta.sin()
        turned = torch.stack([first * cos - second * sin, first * sin + second * cos], -1)
        return torch.cat([turned.flatten(-2), y[..., 2 * pairs :]], -1)

    c = of_heads(c, layer.C_norm, layer.C_bias)
    b = of_heads(b, layer.B_norm, layer.B_bias)
    ones = torch.ones(H, 1, P).double()
    m, n, e = (ones if w is None else w for w in (layer.mimo_x, layer.mimo_o, layer.mimo_z))
    u, z = heads(u)[:, :, :, None] * m, heads(z)[:, :, :, None] * e
    S, before, out = x.new_zeros(B, H, N, P), x.new_zeros(B, H, N, P), []
    for t in range(T):
        write = b[:, t].mT @ u[:, t]
        S = alpha[:, t] * (S + (1 - share[:, t]) * step[:, t] * before)
        S, before = S + share[:, t] * step[:, t] * write, write
        out.append(c[:, t] @ S + layer.D[:, None, None] * u[:, t])
    o = torch.stack(out, 1)
    if layer.norm_weight is not None:
        o = normed(o, layer.norm_weight[:, None], 1e-5)
    o = (n * o * F.silu(z)).sum(3)
    torch.testing.assert_close(layer(x)[0], layer.out_proj(o.flatten(2)))


@pytest.mark.parametrize("bound", [0.0, 0.4])
def test_hgrn(bound: float) -> None:
    layer = randomised(layers.HGRN(D, expand=1.5, lower_bound=bound))
    x = torch.randn(B, T, D, dtype=torch.float64)
    f = bound + (1 - bound) * layer.f_proj(x).sigmoid()
    i = (1 - f) * F.silu(layer.i_proj(x))
    h, out = torch.zeros(B, 36, dtype=x.dtype), []
    for t in range(T):
        h = f[:, t] * h + i[:, t]
        out.append(h)
    y = normed(torch.stack(out, 1), layer.norm_weight, 1e-5) * F.silu(layer.g_proj(x))
    torch.testing.assert_close(layer(x)[0], layer.o_proj(y))
    with pytest.raises(ValueError, match=r"lower_bound: want a number in \[0, 1\)"):
        layers.HGRN(D, lower_bound=1.0)


@pytest.mark.parametrize("bound", [0.0, 0.4])
def test_hgrn2(bound: float) -> None:
    layer = randomised(layers.HGRN2(D, H, 7, lower_bound=bound))
    x = torch.randn(B, T, D, dtype=torch.float64)
    f = heads(bound + (1 - bound) * layer.f_proj(x).sigmoid())
    q, v = heads(F.silu(layer.q_proj(x))), heads(layer.i_proj(x))

    def step(t: int, S: Tensor) -> Tensor:
        return f[:, t, ..., None] * S + outer(1 - f[:, t], v[:, t])

    o = scan(q, v, step, 7**-0.5).flatten(2)
    torch.testing.assert_close(layer(x)[0], layer.o_proj(normed(o, layer.norm_weight, 1e-5)))


def test_gated_slot_attention() -> None:
    layer = randomised(layers.GatedSlotAttention(D, H, 2, num_slots=5))
    x = torch.randn(B, T, D, dtype=torch.float64)
    q = heads(F.silu(layer.q_proj(x)))
    k, v = (grouped(heads(F.silu(f(x)), 2), H) for f in (layer.k_proj, layer.v_proj))
    alpha = grouped(heads(layer.f_proj(x), 2), H).sigmoid() ** (1 / 8)
    keys, values, out = torch.zeros(B, H, 6, 5), torch.zeros(B, H, 5, 6), []
    for t in range(T):
        keys = keys * alpha[:, t, :, None] + outer(k[:, t], 1 - alpha[:, t])
        values = values * alpha[:, t, ..., None] + outer(1 - alpha[:, t], v[:, t])
        p = torch.einsum("bhk,bhkm->bhm", q[:, t], keys).softmax(-1)
        out.append(torch.einsum("bhm,bhmv->bhv", p, values))
    o = F.silu(torch.stack(out, 1).flatten(2))
    torch.testing.assert_close(layer(x)[0], layer.o_proj(normed(o, layer.norm_weight, 1e-5)))


def test_rwkv6() -> None:
    layer = randomised(layers.RWKV6(D, H, mix_low_rank_dim=3, decay_low_rank_dim=5))
    x = torch.randn(B, T, D, dtype=torch.float64)
    d = F.pad(x, (0, 0, 1, 0))[:, :-1] - x
    inner = torch.tanh((x + d * layer.mix_base) @ layer.mix_down).unflatten(-1, (5, 3))
    mixed = [x + d * (layer.mix[c] + inner[:, :, c] @ layer.mix_up[c]) for c in range(5)]
    r, k, v = layer.r_proj(mixed[0]), layer.k_proj(mixed[2]), layer.v_proj(mixed[3])
    lora = layer.w_lora
    w = torch.exp(-torch.exp(torch.tanh(mixed[1] @ lora.down) @ lora.up + lora.bias))
    r, k, v, w = (heads(y) for y in (r, k, v, w))
    S, out = torch.zeros(B, H, 6, 6, dtype=x.dtype), []
    for t in range(T):
        new = outer(k[:, t], v[:, t])
        out.append(read(S + layer.bonus[..., None] * new, r[:, t]))
        S = w[:, t, ..., None] * S + new
    o = torch.stack(out, 1).flatten(2)
    o = F.group_norm(o.flatten(0, 1), H, layer.norm_weight, layer.norm_bias, 1e-5).view_as(o)
    torch.testing.assert_close(layer(x)[0], layer.o_proj(o * F.silu(layer.g_proj(mixed[4]))))


@pytest.mark.parametrize("depth", [(0, None), (1, 4), (3, 4)])
def test_lightning_attention(depth: tuple[int, int | None]) -> None:
    index, count = depth
    layer = randomised(layers.LightningAttention(D, H, 7, num_layers=count, layer_idx=index))
    x = torch.randn(B, T, D, dtype=torch.float64)
    q, k, v = (heads(y) for y in F.silu(layer.qkv_proj(x)).chunk(3, -1))
    share = 1.0 if count is None else 1 - index / count
    alpha = torch.exp(-8 / H * share * torch.arange(H))[:, None, None]

    def step(t: int, S: Tensor) -> Tensor:
        return alpha * S + outer(k[:, t], v[:, t])

    o = normed(scan(q, v, step, 7**-0.5).flatten(2), layer.norm_weight, 1e-5)
    want = layer.o_proj(o * layer.g_proj(x).sigmoid())
    torch.testing.assert_close(layer(x)[0], want, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="num_layers: want more than layer_idx = 4, got 4"):
        layers.LightningAttention(D, H, num_layers=4, layer_idx=4)
