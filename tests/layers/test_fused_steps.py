"""Layers' decoding steps by ops.mixer_step, which they take off the host, beside their forward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.kernels.projection_step import op
from slipstream.kernels.projection_step.inputs import ProjectionInputs
from slipstream.kernels.projection_step.op import run
from slipstream.layers import (
    DeltaNet,
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedLinearAttention,
    KimiDeltaAttention,
    Mamba2,
    MultiScaleRetention,
    delta_heads,
    rwkv7,
)
from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM, StateCache
from slipstream.nn import projections
from slipstream.ops import norm, steps

D = 32
LAYERS: dict[str, Any] = {
    "gated_deltanet": lambda: GatedDeltaNet(D, 2, 4, allow_neg_eigval=True, conv_bias=True),
    "gated_deltanet without a gate": lambda: GatedDeltaNet(D, 2, use_gate=False),
    "kda": lambda: KimiDeltaAttention(D, 2, num_v_heads=4),
    "kda bounded": lambda: KimiDeltaAttention(D, 2, lower_bound=-5.0, allow_neg_eigval=True),
    "gdn2": lambda: GatedDeltaNet2(D, 2, num_v_heads=4, allow_neg_eigval=True, conv_bias=True),
    "gdn2 wide values": lambda: GatedDeltaNet2(D, 2, head_dim=8, head_v_dim=16),
    "mamba2": lambda: Mamba2(D, head_dim=8, state_size=12, n_groups=2, dt_limit=(0.01, 0.2)),
    "mamba2 norm first": lambda: Mamba2(D, head_dim=8, state_size=12, norm_before_gate=True),
    "mamba2 without norm": lambda: Mamba2(D, head_dim=16, state_size=12, norm=False),
    "delta_net": lambda: DeltaNet(D, 2, allow_neg_eigval=True),
    "delta_net gated": lambda: DeltaNet(D, 2, use_gate=True, use_beta=False),
    "gla": lambda: GatedLinearAttention(D, 2),
    "gla convolved": lambda: GatedLinearAttention(D, 2, conv_size=4, gate_activation="sigmoid"),
    "retention": lambda: MultiScaleRetention(D, 2),
    "retention convolved": lambda: MultiScaleRetention(D, 2, conv_size=4, norm_affine=True),
}


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators that steps call."""
    called: list[str] = []

    def recorded(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            called.append(name)
            return fn(*args, **options)

        return call

    for name in ("mixer_step", "recurrent_step"):
        monkeypatch.setattr(steps, name, recorded(name, getattr(steps, name)))
    for name in ("rms_norm", "rms_norm_gated", "l2_norm"):
        monkeypatch.setattr(norm, name, recorded(name, getattr(norm, name)))
    monkeypatch.setattr(delta_heads, "l2_norm", recorded("l2_norm", delta_heads.l2_norm))
    return called


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_step_is_one_operator(name: str, operators: list[str]) -> None:
    layer, x = LAYERS[name]().eval(), torch.randn(3, 12, D)
    for parameter in layer.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    want, end = layer(x, use_cache=True)
    _, state = layer(x[:, :9], use_cache=True)
    operators.clear()
    y = [layer.step(x[:, t : t + 1], state) for t in range(9, 12)]
    assert operators == ["mixer_step"] * 3
    torch.testing.assert_close(torch.cat(y, 1), want[:, 9:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, end, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("rows", "product"), [(1, "_projection_step"), (64, "_projection_step"), (65, "addmm")]
)
@pytest.mark.parametrize("name", ["gla", "kda", "gdn2"])
@torch.no_grad()
def test_bias_is_added_within_its_product(
    name: str, rows: int, product: str, operators: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second matrix of a gate sees a part of what one launch has made of x."""
    monkeypatch.setattr(projections, "_on_device", lambda x: True)
    options = {} if name == "gla" else {"gate_bias": True}
    kind = {"gla": GatedLinearAttention, "kda": KimiDeltaAttention, "gdn2": GatedDeltaNet2}[name]
    layer: Any = kind(D, 2, **options).eval()
    bias = (layer.gk_up if name == "gla" else layer.g_up).bias
    _, state = layer(torch.randn(rows, 5, D), use_cache=True)
    readers: list[str] = []

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if any(x is bias for x in args):
                readers.append(func.name().split("::")[1])
            return func(*args, **(kwargs or {}))

    with Recorded():
        layer.step(torch.randn(rows, 1, D), state)
    assert readers == [product]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("mixer", "options"),
    [
        *((name, {}) for name in ("gated_deltanet", "kda", "gla", "mamba2", "delta_net")),
        ("attention", {"qk_norm": True, "output_gate": True}),
        ("retention", {}),  # of whose blocks the MLP alone is fused
    ],
)
@torch.no_grad()
def test_steps_of_models_fuse_norms_and_residuals(
    mixer: str, options: dict[str, Any], rows: int, operators: list[str], monkeypatch: Any
) -> None:
    """Same logits, by four launches of linear layers a block and one a gate's second matrix; a
    hooked one is called."""
    sizes = {"vocab_size": 97, "hidden_size": 64, "num_heads": 2, "norm": "zero_centered_rms"}
    mixers: list[Any] = [{"type": mixer, **options}] * 2
    config = SlipstreamConfig(mixers=mixers, initializer_range=0.3, **sizes)
    model = SlipstreamForCausalLM(config).double().eval()
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    ids, calls, logits = torch.randint(97, (rows, 7)), [], []

    def counted(t: ProjectionInputs, impl: str | None) -> Any:
        calls.append(t)
        return run(t, impl)

    monkeypatch.setattr(projections.op, "run", counted)
    for on_device, hooked in ((False, False), (True, False), (True, True)):
        monkeypatch.setattr(projections, "_on_device", lambda x, fused=on_device: fused)
        layer = model.get_submodule("model.layers.0.mlp.down_proj")
        hook = layer.register_forward_hook(lambda *args: None) if hooked else None
        cache = StateCache(2)
        steps = [model(input_ids=ids[:, :5], cache=cache).logits[:, -1:]]
        calls.clear()
        steps += [model(input_ids=ids[:, t : t + 1], cache=cache).logits for t in (5, 6)]
        each = 4 * on_device  # of two layers and two steps
        mixes = each * (mixer != "retention")
        gates = each * {"kda": 2, "gla": 1}.get(mixer, 0)
        downs = each - 2 * hooked * on_device
        assert len(calls) == each + downs + 2 * mixes + gates
        assert sum(call.residual is not None for call in calls) == downs + mixes
        assert sum(call.normalises for call in calls) == (each + mixes) * (rows == 1)
        logits.append(torch.cat(steps, 1))
        if hook is not None:
            hook.remove()
    torch.testing.assert_close(logits[1], logits[0])
    torch.testing.assert_close(logits[2], logits[0])


def moved(module: Any, args: Any) -> Any:
    return (args[0] + 1, *args[1:])


def step_logits(model: Any, calls: list[Any], monkeypatch: Any) -> list[torch.Tensor]:
    """Of three sequences, by modules and as on a GPU, whose two steps leave calls of run_norm."""
    monkeypatch.setattr(op.inputs, "MMA_ROWS", 2)
    monkeypatch.setattr(op.backends, "supports_pdl", lambda device: True)
    run, ids, logits = op.run_norm, torch.randint(97, (3, 7)), []
    monkeypatch.setattr(op, "run_norm", lambda t, n: calls.append(t) or run(t, n))
    for on_device in (False, True):
        monkeypatch.setattr(projections, "_on_device", lambda x, fused=on_device: fused)
        cache = StateCache(2)
        steps = [model(input_ids=ids[:, :5], cache=cache).logits[:, -1:]]
        calls.clear()
        steps += [model(input_ids=ids[:, t : t + 1], cache=cache).logits for t in (5, 6)]
        logits.append(torch.cat(steps, 1))
    return logits


def stepped_model(mixer: Any, **options: Any) -> SlipstreamForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 64, "num_heads": 2, "norm": "zero_centered_rms"}
    model = SlipstreamForCausalLM(SlipstreamConfig(mixers=[mixer] * 2, **options, **sizes)).eval()
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize(
    ("hooked", "each"),
    [("", 4), ("layers.1", 2), ("norm", 3), ("layers.1.mixer_norm", 3), ("layers.1.mlp_norm", 3)],
)
@pytest.mark.parametrize("fp32", [False, True])
@pytest.mark.parametrize(
    "mixer", ["gated_deltanet", "kda", "gla", "mamba2", "attention", "retention"]
)
@torch.no_grad()
def test_sums_and_norms_of_many_rows_are_one_operator(
    mixer: str, fp32: bool, hooked: str, each: int, operators: list[str], monkeypatch: Any
) -> None:
    """Same logits, whatever a hook in between does to what is normed."""
    model, calls = stepped_model(mixer, residual_in_fp32=fp32).half(), []
    if hooked:
        model.model.get_submodule(hooked).register_forward_pre_hook(moved)
    logits = step_logits(model, calls, monkeypatch)
    assert len(calls) == 2 * each * (mixer != "retention")
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("fp32", [False, True])
@pytest.mark.parametrize("name", ["mixer_norm", "mlp_norm"])
@torch.no_grad()
def test_hooks_of_norms_see_sums_in_every_way(
    name: str, fp32: bool, operators: list[str], monkeypatch: Any
) -> None:
    """One tensor in, of one dtype, and one out: in a forward, a step by modules, a fused one."""
    model = stepped_model("gla", residual_in_fp32=fp32).bfloat16()
    norm, ids = model.get_submodule(f"model.layers.1.{name}"), torch.randint(97, (3, 6))
    seen: list[Any] = []
    norm.register_forward_hook(lambda module, args, y: seen.append((args, y)))
    model(input_ids=ids)
    (((whole,), y),) = seen
    for on_device in (False, True):
        monkeypatch.setattr(projections, "_on_device", lambda x, fused=on_device: fused)
        cache = StateCache(2)
        model(input_ids=ids[:, :5], cache=cache)
        seen.clear()
        model(input_ids=ids[:, 5:], cache=cache)
        (((x,), z),) = seen
        assert x.dtype == z.dtype == y.dtype == torch.bfloat16
        torch.testing.assert_close(x, whole[:, 5:], rtol=0, atol=5e-2)
        torch.testing.assert_close(z, y[:, 5:], rtol=0, atol=0.1)


@pytest.mark.parametrize("hooked", ["", "mlp", "mlp.gate_proj", "mixer.q_proj"])
@pytest.mark.parametrize("fp32", [False, True])
@torch.no_grad()
def test_float32_norms_in_models_of_16_bits(
    hooked: str, fp32: bool, operators: list[str], monkeypatch: Any
) -> None:
    """As narrow norms, by the modules and as on a GPU."""
    model = stepped_model("gla", residual_in_fp32=fp32).bfloat16()
    want = model(input_ids=(ids := torch.randint(97, (3, 7)))).logits.float()
    for name, module in model.named_modules():
        if name.endswith(("mixer_norm", "mlp_norm", "model.norm")):
            module.float()
        if hooked and name.endswith(hooked):
            module.register_forward_hook(lambda *args: None)
    assert model.model.norm.weight.dtype == torch.float32
    assert model(input_ids=ids).logits.dtype == torch.bfloat16
    for on_device in (False, True):
        monkeypatch.setattr(projections, "_on_device", lambda x, fused=on_device: fused)
        cache = StateCache(2)
        steps = [model(input_ids=ids[:, :5], cache=cache).logits]
        steps += [model(input_ids=ids[:, t : t + 1], cache=cache).logits for t in (5, 6)]
        torch.testing.assert_close(torch.cat(steps, 1).float(), want, rtol=0, atol=0.1)
        assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (3, 10)


class Around(torch.nn.Module):
    """A block within another module, as trainers and quantisers leave it."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block, self.mixer, self.mixer_norm = block, block.mixer, block.mixer_norm

    def forward(self, h: torch.Tensor, *args: Any, **options: Any) -> Any:
        return self.block(h + 1, *args, **options)


@pytest.mark.parametrize(("changed", "each"), [("around", 2), ("no mlp", 3), ("float32", 0)])
@torch.no_grad()
def test_norms_behind_changed_blocks(
    changed: str, each: int, operators: list[str], monkeypatch: Any
) -> None:
    """Same logits where a block is wrapped or has lost its MLP; float32 has no such launch."""
    model, calls = stepped_model("gated_deltanet"), []
    model = model if changed == "float32" else model.half()
    layers: Any = model.model.layers
    if changed == "around":
        layers[1] = Around(layers[1])
    if changed == "no mlp":
        layers[0].mlp = None
    logits = step_logits(model, calls, monkeypatch)
    assert len(calls) == 2 * each
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-2, atol=1e-2)


@torch.no_grad()
def test_steps_of_rwkv7_models_are_few_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Same logits; a hooked channel mix is called."""
    kinds: list[Any] = ["rwkv7"] * 2
    config = SlipstreamConfig(vocab_size=97, hidden_size=32, num_heads=2, mixers=kinds, mlps=kinds)
    model = SlipstreamForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    calls: list[str] = []

    def recorded(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: calls.append(name) or fn(*args, **options)

    for name in ("token_mix_step", "low_rank", "rwkv7_step", "token_shift"):
        monkeypatch.setattr(rwkv7, name, recorded(name, getattr(rwkv7, name)))
    ids, logits, seen = torch.randint(97, (3, 7)), [], []
    mixer, mlp = ["token_mix_step", "low_rank", "rwkv7_step"], ["token_mix_step"]
    for on_device, hooked in ((False, False), (True, False), (True, True)):
        monkeypatch.setattr(projections, "_on_device", lambda x, on=on_device: on)
        layer = model.get_submodule("model.layers.0.mlp")
        hook = layer.register_forward_hook(lambda *args: seen.append(1)) if hooked else None
        cache = StateCache(2)
        steps = [model(input_ids=ids[:, :5], cache=cache).logits[:, -1:]]
        calls.clear()
        seen.clear()
        steps += [model(input_ids=ids[:, t : t + 1], cache=cache).logits for t in (5, 6)]
        if on_device:
            first = ["token_shift"] if hooked else mlp
            assert calls == [*mixer, *first, *mixer, *mlp] * 2
        assert len(seen) == 2 * hooked
        logits.append(torch.cat(steps, 1))
        if hook is not None:
            hook.remove()
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits[2], logits[0], rtol=1e-4, atol=1e-5)
