"""fla's modules on Slipstream, beside formulas written out in torch."""

import importlib
import inspect
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.compat import install
from slipstream.compat.fla import modules
from slipstream.compat.fla.modules import (
    convolution,
    fused_norm_gate,
    l2norm,
    layernorm,
    layernorm_gated,
    rotary,
    token_shift,
)
from slipstream.compat.fla.paths import ALIASES, AUTOGRAD


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
    _, middle = made(x[:, :5], output_final_state=True)
    close(made(x[:, 5:], residual[:, 5:], cache=middle)[0], y[:, 5:])
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
    given: dict[str, Any] = {"residual": torch.randn(2, 5, 6), "bias": torch.randn(6)}
    whole = convolution.causal_conv1d(x, weight, output_final_state=True, **given)
    state, parts = None, []
    for part in (slice(0, 2), slice(2, 5)):
        y, state = convolution.causal_conv1d(
            x[:, part],
            weight,
            given["bias"],
            given["residual"][:, part],
            initial_state=state,
            output_final_state=True,
        )
        parts.append(y)
    close((torch.cat(parts, 1), state), whole)
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


ROOT = "slipstream.compat.fla"


@pytest.mark.parametrize("path", sorted(ALIASES))
def test_other_names_are_modules_of_fla(path: str) -> None:
    """Imported before their parents: what has no file here is a package too."""
    with install("fla"):
        found = importlib.import_module(f"fla.{path}")
        assert found is importlib.import_module(f"{ROOT}.{ALIASES[path]}")
        with pytest.raises(ModuleNotFoundError, match=rf"Slipstream has no fla\.{path}\.other"):
            importlib.import_module(f"fla.{path}.other")


def calls(path: str) -> tuple[list[Any], dict[str, Any], int]:
    """Arguments of apply(), those of the function, and how many of them have gradients."""
    offsets = torch.tensor([0, 5, 12])
    if path == "modules.convolution":
        x, weight = torch.randn(1, 12, 8), torch.randn(8, 4)
        given = [x, weight, None, None, None, True, "silu", offsets, None, None, 32]
        names = {"x": x, "weight": weight, "output_final_state": True, "activation": "silu"}
        return given, {**names, "cu_seqlens": offsets}, 2
    q, k, v = torch.randn(3, 1, 12, 2, 8).unbind()
    g, beta = F.logsigmoid(torch.randn(1, 12, 2)), torch.rand(1, 12, 2)
    names = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "scale": 0.5}
    names |= {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "cu_seqlens": offsets}
    if path == "ops.gated_delta_rule.chunk":
        return [q, k, v, g, beta, 0.5, None, True, False, offsets, None, None, True], names, 5
    given = [q, k, v, g, None, None, beta, None, None, 0.5, None, True, True, False, False, False]
    return [*given, offsets], names, 5


@pytest.mark.parametrize("path", sorted(AUTOGRAD))
def test_apply_is_the_function(path: str) -> None:
    name, function, signature = AUTOGRAD[path]
    module: Any = importlib.import_module(f"{ROOT}.{path}")
    cls = getattr(module, name)
    assert issubclass(cls, torch.autograd.Function) and cls.__name__ == name
    assert len(inspect.signature(cls.apply).parameters) == signature.count(", ") + 1
    args, given, count = calls(path)
    tensors = [x for x in args if isinstance(x, torch.Tensor) and x.is_floating_point()]
    for x in tensors[:count]:
        x.requires_grad_()
    outputs = cls.apply(*args), getattr(module, function)(**given)
    grads = [torch.autograd.grad(o.square().sum() + s.sum(), tensors[:count]) for o, s in outputs]
    for one, two in ((*outputs,), (*grads,)):
        assert len(one) == len(two) > 1
        torch.testing.assert_close(one, two, rtol=0, atol=0)
    with pytest.raises(TypeError):
        cls.apply(*args, *[None] * 20)


def test_imports_leave_members_alone() -> None:
    """Of every module: importing one makes it a member of its parent, where a function may have its
    name, or another module, as slipstream.ops in fla.modules.rotary."""

    def members() -> dict[tuple[str, str], Any]:
        found = {}
        for name in sorted(x for x in sys.modules if x.startswith(f"{ROOT}.")):
            for key, value in vars(sys.modules[name]).items():
                if key[0] != "_":
                    found[name, key] = value
        return found

    before = members()
    with install("fla"):
        for name in sorted(x for x in sys.modules if x.startswith(f"{ROOT}.")):
            importlib.import_module(name.removeprefix("slipstream.compat."))
        after = members()
    assert {x: after[x] for x in before} == before
    assert inspect.isfunction(before[f"{ROOT}.modules.conv", "causal_conv1d"])
