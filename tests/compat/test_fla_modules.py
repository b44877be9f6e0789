"""fla's modules on Slipstream, beside formulas written out in torch."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.compat.fla import functions, modules, utils
from slipstream.compat.fla.modules import (
    activations,
    convolution,
    feature_map,
    fused_bitlinear,
    fused_cross_entropy,
    fused_linear_cross_entropy,
    fused_norm_gate,
    l2norm,
    layernorm,
    layernorm_gated,
    long_conv,
    rotary,
    token_shift,
)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def close(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


# norms


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
def test_norms_with_a_residual(rms: bool, groups: int) -> None:
    x, residual = torch.randn(2, 2, 4, 12)
    weight, bias = torch.randn(2, 12)
    h = x + residual
    parts = h.unflatten(-1, (groups, -1))
    centred = parts if rms else parts - parts.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    want = normed.flatten(-2) * weight + bias
    got = layernorm.group_norm(x, weight, bias, residual, 1e-5, True, False, rms, groups)
    close(got, (want, h))
    module = modules.GroupNorm(groups, 12, bias=True, is_rms_norm=rms)
    module.load_state_dict({"weight": weight, "bias": bias})
    close(module(x, residual), want)
    w, b = torch.randn(7, 12), torch.randn(7)
    linear = modules.GroupNormLinear(groups, 12, bias=True, is_rms_norm=rms)
    linear.load_state_dict(module.state_dict())
    close(linear(x, w, b, residual, True), (F.linear(want, w, b), h), 1e-4)
    if groups == 1:
        close(layernorm.layer_norm(x, weight, bias, residual, is_rms_norm=rms), want)
        plain, fused = (
            (modules.RMSNorm, modules.RMSNormLinear)
            if rms
            else (modules.LayerNorm, modules.LayerNormLinear)
        )
        for made, args in ((plain(12, True, True), ()), (fused(12, True, True), (w, b))):
            made.load_state_dict(module.state_dict())
            close(made(x, *args, residual), F.linear(want, *args) if args else want, 1e-4)
        assert list(plain(12).state_dict()) == ["weight"]
        assert list(plain(12, elementwise_affine=False).state_dict()) == []


def test_residual_keeps_its_dtype() -> None:
    x, residual = torch.randn(2, 4, 12).bfloat16()
    for r, flag, want in (
        (residual, False, torch.bfloat16),
        (residual.float(), False, torch.float32),
        (None, True, torch.float32),
        (None, False, torch.bfloat16),
    ):
        for norm in (layernorm.rms_norm, fused_norm_gate.rms_norm_gated):
            gate = (x,) if norm is fused_norm_gate.rms_norm_gated else ()
            options = {"residual": r, "prenorm": True, "residual_in_fp32": flag}
            y, h = norm(x, *gate, None, None, **options)
            assert y.dtype == torch.bfloat16 and h.dtype == want, (norm, flag)


@pytest.mark.parametrize("activation", ["swish", "silu", "sigmoid"])
@pytest.mark.parametrize("rms", [False, True])
def test_gated_norms(activation: str, rms: bool) -> None:
    x, g, residual = torch.randn(3, 2, 4, 12)
    made = (
        modules.FusedRMSNormGated(12, activation=activation)
        if rms
        else modules.FusedLayerNormGated(12, activation=activation)
    )
    with torch.no_grad():
        made.weight.copy_(torch.randn(12))
    f = torch.sigmoid if activation == "sigmoid" else F.silu
    norm = F.rms_norm if rms else F.layer_norm
    for r in (None, residual):
        h = x if r is None else x + r
        want = norm(h, (12,), made.weight, eps=1e-5) * f(g)
        close(made(x, g, r, True), (want, h))
        close(made(x, g.flatten(1).view(2, 4, 3, 4), r), want)
    names = ["FusedRMSNormSwishGateLinear" if rms else "FusedLayerNormSwishGateLinear"]
    fused = getattr(modules, names[0])(12)
    fused.load_state_dict(made.state_dict())
    w, b = torch.randn(7, 12), torch.randn(7)
    want = F.linear(norm(x, (12,), made.weight, eps=1e-5) * F.silu(g), w, b)
    close(fused(x, g, w, b), want, 1e-4)
    with pytest.raises(ValueError, match="activation: want one of"):
        type(made)(12, activation="tanh")


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("group", [None, 4])
def test_norms_of_mamba2(rms: bool, before: bool, group: int | None) -> None:
    x, z = torch.randn(2, 2, 5, 12)
    made = (modules.RMSNormGated if rms else modules.LayerNormGated)(12, 1e-5, group, before)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(12))
    size = 12 if group is None else group

    def norm(y: Tensor) -> Tensor:
        y = y.unflatten(-1, (-1, size))
        y = F.rms_norm(y, (size,), eps=1e-5) if rms else F.layer_norm(y, (size,), eps=1e-5)
        y = y.flatten(-2) * made.weight
        return y if made.bias is None else y + made.bias

    close(made(x, z), norm(x) * F.silu(z) if before else norm(x * F.silu(z)))
    close(made(x), norm(x))
    function = layernorm_gated.rmsnorm_fn if rms else layernorm_gated.layernorm_fn
    close(function(x, made.weight, made.bias, z, 1e-5, group, before), made(x, z))


def test_l2_norm() -> None:
    x = torch.randn(3, 5).bfloat16()
    want = x.float() / (x.float().square().sum(-1, keepdim=True) + 1e-6).sqrt()
    close(l2norm.l2_norm(x, output_dtype=torch.float32), want, 1e-2)
    close(modules.L2Norm()(x.double()), F.normalize(x.double(), dim=-1))


# convolution, token shift, rotary embeddings


def _convolved(x: Tensor, module: nn.Conv1d) -> Tensor:
    y = F.conv1d(
        F.pad(x.mT, (module.kernel_size[0] - 1, 0)), module.weight, module.bias, groups=x.shape[-1]
    ).mT
    return F.silu(y)


def test_short_convolution() -> None:
    made = modules.ShortConvolution(6, 4, bias=True)
    assert isinstance(made, nn.Conv1d) and made.weight.shape == (6, 1, 4)
    assert made.state_size == 24
    x, residual = torch.randn(2, 2, 9, 6)
    y, state = made(x, residual, output_final_state=True)
    close(y, _convolved(x, made) + residual)
    close(state, x[:, -4:].mT)
    mask = torch.ones(2, 9)
    mask[0, :4] = 0
    close(made(x, mask=mask)[0], _convolved(x * mask[..., None], made))
    packed, states = made(
        x.flatten(0, 1)[None], cu_seqlens=torch.tensor([0, 9, 18]), output_final_state=True
    )
    close(packed.view_as(x), _convolved(x, made))
    close(states, state)
    with pytest.raises(ValueError, match="mask: want None beside cu_seqlens"):
        made(x[:1], mask=mask[:1], cu_seqlens=torch.tensor([0, 9]))


@pytest.mark.parametrize("packed", [False, True])
def test_short_convolution_decodes_in_place(packed: bool) -> None:
    made = modules.ShortConvolution(6, 4)
    x = torch.randn(2, 9, 6)
    with torch.no_grad():
        want, _ = made(x)
        _, cache = made(x[:, :8], output_final_state=True)
        last = x[:, 8:].transpose(0, 1) if packed else x[:, 8:]
        offsets = torch.tensor([0, 1, 2]) if packed else None
        y, after = made(last, cache=cache, output_final_state=True, cu_seqlens=offsets)
        assert after is cache
        close(y.reshape(2, 6), want[:, 8])
        close(cache, x[:, -4:].mT)
        made(last, cu_seqlens=offsets)  # without a cache, from nothing


def test_convolution_functions() -> None:
    made = modules.ShortConvolution(6, 4)
    weight, x = made.weight.squeeze(1).detach(), torch.randn(2, 5, 6)
    heads = x.unflatten(-1, (3, 2))
    y, _ = convolution.causal_conv1d(heads, weight, activation="silu", backend="cuda")
    close(y.flatten(2), _convolved(x, made))
    cache = torch.randn(2, 6, 4)
    y, same = convolution.causal_conv1d_update(heads[:, :1], cache.clone(), None, weight)
    close(y.flatten(2)[:, 0], (torch.cat([cache[..., 1:], x[:, 0, :, None]], -1) * weight).sum(-1))
    close(same[..., -1], x[:, 0])
    with pytest.raises(TypeError, match="cp_context: want what"):
        convolution.causal_conv1d(x, weight, cp_context=object())
    with pytest.raises(NotImplementedError, match="seq_idx: want cu_seqlens"):
        convolution.causal_conv1d(x, weight, seq_idx=torch.zeros(2, 5))
    with pytest.raises(TypeError, match="unexpected arguments: nonsense"):
        modules.ShortConvolution(6, 4, nonsense=1)
    with pytest.warns(DeprecationWarning, match="use_fast_conv1d has no effect"):
        modules.ShortConvolution(6, 4, use_fast_conv1d=True)


def test_token_shift_is_a_difference() -> None:
    x, before = torch.randn(2, 5, 3), torch.randn(2, 3)
    shifted = torch.cat([before[:, None], x[:, :-1]], 1)
    y, last = token_shift.token_shift(x, cache=before, output_cache=True)
    close(y, shifted - x)
    assert torch.equal(last, x[:, -1])
    packed = token_shift.token_shift(x.flatten(0, 1)[None], torch.tensor([0, 5, 10]))
    shifted[:, 0] = 0
    close(packed.view_as(x), shifted - x)
    close(token_shift.TokenShift.apply(x, None, before, True)[0], y)
    assert token_shift.TokenShift.apply(x)[1] is None


@pytest.mark.parametrize("implicit", [False, True])
@torch.no_grad()
def test_long_convolution_is_a_sum_over_the_past(implicit: bool) -> None:
    cls: Any = modules.ImplicitLongConvolution if implicit else modules.LongConvolution
    layer = cls(3, 9)
    x = torch.randn(2, 7, 3)
    k = layer.filter(7)[0] if implicit else layer.filter[:, :7]
    want = x.clone()
    for t in range(7):
        for s in range(t + 1):
            want[:, t] += k[:, t - s] * x[:, s]
    close(layer(x), want)
    with pytest.raises(ValueError, match=r"x: want \[B, T, D\] with T up to 9"):
        layer(torch.randn(2, 10, 3))
    with pytest.raises(ValueError, match="d_emb: want an odd number"):
        modules.ImplicitLongConvolution(3, 9, d_emb=4)


def test_long_convolution_of_both_directions() -> None:
    u, k, later, mask = (torch.randn(*n) for n in ((2, 3, 6), (3, 6), (3, 6), (2, 3)))
    y = long_conv.fft_conv(u, k, mask, k_rev=later)
    want = u.clone()
    for t in range(6):
        for s in range(6):
            taps = k[:, t - s] * (s <= t) + later[:, s - t] * (s >= t)
            want[..., t] += taps * u[..., s]
    close(y, F.gelu(want) * mask[..., None])


def _rotated(x: Tensor, positions: Tensor, base: float = 1e4, interleaved: bool = False) -> Tensor:
    """x [B, T, H, D] as complex numbers times exp(i p w)."""
    D = x.shape[-1]
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).mT
    angle = positions[..., None] * base ** (-torch.arange(0, D, 2) / D)
    turned = torch.view_as_complex(pairs.contiguous()) * torch.exp(1j * angle[..., None, :])
    y = torch.view_as_real(turned)
    return y.flatten(-2) if interleaved else y.mT.flatten(-2)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding(interleaved: bool) -> None:
    made = modules.RotaryEmbedding(8, interleaved=interleaved)
    q, k = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 1, 8)
    time = torch.arange(5)[None]
    for offset, positions in (
        (0, time),
        (7, time + 7),
        (torch.tensor([2, 9]), time + torch.tensor([[2], [9]])),
        # a row that is padded on the left
        (torch.tensor([0, -2]), (time + torch.tensor([[0], [-2]])).clamp(min=0)),
    ):
        length = 16 if isinstance(offset, Tensor) else None
        got = made(q, k, seqlen_offset=offset, max_seqlen=length)
        close(got, tuple(_rotated(x, positions, 1e4, interleaved) for x in (q, k)))
    offsets = torch.tensor([0, 5, 10])
    packed = made(*(x.flatten(0, 1)[None] for x in (q, k)), torch.tensor([2, 9]), offsets, 16)
    positions = time + torch.tensor([[2], [9]])
    close(packed[0].view_as(q), _rotated(q, positions, 1e4, interleaved))
    packed = made(*(x.flatten(0, 1)[None] for x in (q, k)), 3, offsets)
    close(packed[0].view_as(q), _rotated(q, time + 3, 1e4, interleaved))
    with pytest.raises(ValueError, match="max_seqlen: want it with a tensor"):
        modules.RotaryEmbedding(8)(q, k, torch.tensor([1, 2]))


def test_rotary_embedding_in_place_and_cast() -> None:
    made = modules.RotaryEmbedding(8)
    q = torch.randn(1, 5, 2, 8)
    made(q, q)
    assert made._cos_cached is not None and made._sin_cached is not None
    x = q.clone()
    y = rotary.rotary_embedding(x, made._cos_cached, made._sin_cached, inplace=True)
    assert y is x
    close(x, _rotated(q, torch.arange(5)[None]))
    half = made.bfloat16()
    half(q.bfloat16(), q.bfloat16())
    assert half._cos_cached is not None and half._cos_cached.dtype == torch.bfloat16
    # of positions in float32, though the module was cast
    close(half._cos_cached[4, 0], torch.tensor(4.0).cos().bfloat16())


def test_rotary_embedding_compiles_and_leaves_inference_mode() -> None:
    made, q = modules.RotaryEmbedding(8), torch.randn(1, 5, 2, 8, requires_grad=True)
    with torch.inference_mode():
        made(q, q)
    made.train()(q, q)[0].sum().backward()
    compiled = torch.compile(made, fullgraph=True, backend="eager")
    close(compiled(q, q), made(q, q))


def test_xpos_scores_depend_on_the_distance() -> None:
    made = modules.RotaryEmbedding(8, scale_base=4.0)
    x = torch.randn(1, 1, 1, 8).expand(1, 9, 1, 8)
    q, k = made(x, x)
    scores = torch.einsum("bthd,bshd->ts", q, k)
    close(scores[1:, 1:], scores[:-1, :-1], 1e-4)


# losses


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy(reduction: str) -> None:
    logits, target = torch.randn(6, 9), torch.tensor([1, -100, 3, 8, 0, 2])
    made = modules.FusedCrossEntropyLoss(
        reduction=reduction,
        label_smoothing=0.1,
        logit_scale=0.7,
        lse_square_scale=0.01,
        logit_softcapping=3.0,
        inplace_backward=True,
        return_z_loss=True,
    )
    capped = 3 * torch.tanh(logits * 0.7 / 3)
    z = (0.01 * capped.logsumexp(-1) ** 2).masked_fill(target == -100, 0)
    want = F.cross_entropy(capped, target, reduction="none", label_smoothing=0.1) + z
    if reduction != "none":
        want, z = want.sum(), z.sum()
    if reduction == "mean":
        want, z = want / 5, z / 5
    close(made(logits, target), (want, z))
    made.return_z_loss = False
    close(made(logits, target), want)
    with pytest.raises(ValueError, match="reduction: want"):
        modules.FusedCrossEntropyLoss(reduction="batchmean")


def test_cross_entropy_loss_function() -> None:
    logits, target = torch.randn(6, 9), torch.randint(0, 9, (6,))
    loss, z = fused_cross_entropy.cross_entropy_loss(logits, target)
    close(loss, F.cross_entropy(logits, target, reduction="none"))
    assert not z.any()


@pytest.mark.parametrize("warp", [False, True])
def test_linear_cross_entropy(warp: bool) -> None:
    x, target = torch.randn(2, 4, 5, dtype=torch.float64), torch.randint(0, 9, (2, 4))
    weight = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(9, dtype=torch.float64)
    made = modules.FusedLinearCrossEntropyLoss(use_l2warp=warp, l2_penalty_factor=0.5)
    loss = made(x, target, weight, bias)
    logits = F.linear(x, weight, bias)
    want = F.cross_entropy(logits.flatten(0, 1), target.flatten())
    close(loss, want)
    # the penalty is there in the gradient alone: half the square of the largest logit
    total = want + 0.5 * (0.5 / 8) * (logits.amax(-1) ** 2).sum() if warp else want
    close(*(torch.autograd.grad(y, weight)[0] for y in (loss, total)))
    with pytest.raises(NotImplementedError, match="use_l2warp: not with logit_softcapping"):
        fused_linear_cross_entropy.fused_linear_cross_entropy_loss(
            x[0], target[0], weight, logit_scale=0.5, use_l2warp=True
        )


def test_kl_divergence() -> None:
    x, y = torch.randn(2, 6, 5)
    w, u = torch.randn(2, 9, 5)
    want = F.kl_div(
        (x @ w.T).log_softmax(-1), (y @ u.T).log_softmax(-1), reduction="batchmean", log_target=True
    )
    close(modules.FusedKLDivLoss()(x, y, w, u), want, 1e-4)


# activations, MLPs, feature maps


def test_activations() -> None:
    x, y = torch.randn(2, 4, 6)
    w, b = torch.randn(3, 6), torch.randn(3)
    act = activations.ACT2FN
    close(act["swish"](x), F.silu(x))
    close(act["sqrelu"](x), F.relu(x) ** 2)
    close(act["gelu"](x), F.gelu(x, approximate="tanh"))
    close(act["bias_gelu"](x, y), F.gelu(x + y, approximate="tanh"))
    close(act["sigmoid"](x), x.sigmoid())
    close(activations.logsigmoid(x, 4.0), F.logsigmoid(x) / 4)
    close(activations.elu_p1(x), F.elu(x) + 1)
    close(activations.swiglu(x, y), F.silu(x) * y)
    close(activations.swiglu_linear(x, y, w, b), F.linear(F.silu(x) * y, w, b))
    close(activations.sigmoidglu(x, y), x.sigmoid() * y)
    close(activations.sigmoidglu_linear(x, y, w, None), F.linear(x.sigmoid() * y, w))
    raised = [v ** (3 / (math.sqrt(v) + 1)) if v > 0 else v for v in x.flatten().tolist()]
    want = torch.tensor(raised).view_as(x) * x.sigmoid() * y
    close(activations.powglu(x, y), want)
    close(activations.powglu_linear(x, y, w, b), F.linear(want, w, b))
    x = x.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda v: activations.powglu(v, y.double()), x)


@pytest.mark.parametrize("fused", [False, True])
def test_gated_mlp(fused: bool) -> None:
    made = modules.GatedMLP(6, intermediate_size=10, fuse_swiglu=fused)
    x = torch.randn(2, 6)
    hidden = F.silu(made.gate_proj(x)) * made.up_proj(x)
    close(made(x), made.down_proj(hidden))
    seen = []
    made.down_proj.register_forward_hook(lambda *args: seen.append(args))
    close(made(x), F.linear(hidden, made.down_proj.weight))
    assert seen  # a hook is run though the layer is fused
    assert modules.GatedMLP(96).intermediate_size == 256
    power = modules.GatedMLP(6, intermediate_size=10, hidden_act="powlu", powglu_power=2.0)
    hidden = activations.powglu(power.gate_proj(x), power.up_proj(x), 2.0)
    close(power(x), power.down_proj(hidden))
    with pytest.raises(ValueError, match="hidden_act: want"):
        modules.GatedMLP(6, hidden_act="gelu")


def test_feature_maps_of_the_second_order() -> None:
    q, k = torch.randn(2, 7, 6, dtype=torch.float64)
    s = (q * k).sum(-1) / math.sqrt(6)
    f = feature_map.TaylorFeatureMap(6)
    close((f(q) * f(k)).sum(-1), 1 + s + s**2 / 2)
    f = feature_map.RebasedFeatureMap(6, normalize=False).double()
    close((f(q) * f(k)).sum(-1), (q * k).sum(-1) ** 2 / 6)
    assert f(q, flatten=False).shape == q.shape
    close((functions.taylor_features(q) * functions.taylor_features(k)).sum(-1),
          1 + (q * k).sum(-1) + (q * k).sum(-1) ** 2 / 2)  # fmt: skip
    with pytest.raises(ValueError, match="use_gamma: want it without normalize"):
        feature_map.RebasedFeatureMap(6, use_gamma=False, normalize=False)


def test_other_feature_maps() -> None:
    x = torch.randn(5, 6)
    close(feature_map.HedgehogFeatureMap(6)(x), torch.cat([2 * x, -2 * x], -1).softmax(-1))
    dpfp = feature_map.DPFPFeatureMap(6, nu=2)(x)
    both = torch.cat([x.relu(), (-x).relu()], -1)
    close(dpfp, torch.cat([both * both.roll(1, -1), both * both.roll(2, -1)], -1))
    t2r = feature_map.T2RFeatureMap(6, 4, True)
    close(t2r(x), F.relu(F.linear(x, t2r.layer.weight, t2r.layer.bias)))
    hadamard = feature_map.HadamardFeatureMap(6)
    close(hadamard(x), hadamard.layer1(x) * hadamard.layer2(x))
    outer = feature_map.LearnableOuterProductFeatureMap(6, 4)
    row, column = torch.triu_indices(4, 4)
    close(outer(x), outer.layer1(x)[:, row] * outer.layer2(x)[:, column])
    sketch = feature_map.LearnablePolySketchNonNegativeFeatureMap(6, 4, degree=8)
    assert len(sketch.sketches1) == 2 and sketch(x).shape == (5, 10)
    with pytest.raises(ValueError, match="degree: want a power of two"):
        feature_map.LearnablePolySketchNonNegativeFeatureMap(6, degree=3)
    close(feature_map.ReLUFeatureMap()(x), F.relu(x))
    close(feature_map.SquaredReLUFeatureMap()(x), F.relu(x) ** 2)
    close(feature_map.GELUFeatureMap()(x), F.gelu(x, approximate="tanh"))
    close(feature_map.SwishFeatureMap()(x), F.silu(x))
    close(feature_map.SigmoidFeatureMap()(x), x.sigmoid())


def test_bit_linear() -> None:
    made = modules.BitLinear(6, 4, bias=True)
    x = torch.randn(3, 6)
    normed = F.rms_norm(x, (6,), eps=1e-8)
    scale = 127 / normed.abs().amax(-1, keepdim=True)
    weight = (made.weight / made.weight.abs().mean()).round().clamp(-1, 1)
    want = F.linear((normed * scale).round() / scale, weight * made.weight.abs().mean(), made.bias)
    close(made(x), want, 1e-4)
    made(x).sum().backward()
    assert made.weight.grad is not None and made.weight.grad.any()
    y, h = fused_bitlinear.rms_norm_linear_quant(
        x, None, None, made.weight, made.bias, torch.ones_like(x), prenorm=True
    )
    close(h, x + 1)
    close(modules.FusedBitLinear(6, 4)(x).shape, y.shape)


# fla.utils


def test_input_guard_makes_contiguous() -> None:
    seen = []

    @utils.input_guard(no_guard_contiguous=["b"])
    def function(a: Tensor, b: Tensor, *rest: Tensor, c: Tensor | None = None) -> None:
        seen.extend([a, b, *rest, c])

    x = torch.randn(3, 4).mT
    function(x, x, x, c=x)
    assert [y.is_contiguous() for y in seen] == [True, False, True, True]
    guarded = utils.input_guard(lambda a: a.is_contiguous())
    assert guarded(x)
    whole = utils.input_guard(lambda a: a.is_contiguous(), no_guard_contiguous=True)
    assert not whole(x)


def test_assert_close() -> None:
    x = torch.randn(100)
    utils.assert_close("x", x, x + 1e-7, 1e-9)
    utils.assert_close("x", x, x * 1.001, 0.01)
    with pytest.raises(AssertionError, match="x: difference"):
        utils.assert_close("x", x, x * 1.1, 0.01)
    with pytest.raises(AssertionError, match="x: difference"):
        utils.assert_close("x", x, x * float("nan"), 0.01)


def test_utilities() -> None:
    assert utils.tensor_cache(len) is len
    calls = []

    @utils.checkpoint
    def square(x: Tensor) -> Tensor:
        calls.append(1)
        return (x * x).sin()

    x = torch.randn(3, requires_grad=True)
    square(x).sum().backward()
    assert len(calls) == 2
    close(x.grad, 2 * x.detach() * (x.detach() ** 2).cos())
    if not torch.cuda.is_available():
        assert utils.get_available_device() == utils.device_name == "cpu"
        assert utils.get_multiprocessor_count() == 1 and not utils.check_shared_mem("hopper")
