"""fla's losses, activations and helpers on Slipstream, beside formulas written out in torch."""

import math
import runpy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.compat.fla import modules, utils
from slipstream.compat.fla.modules import (
    activations,
    fused_cross_entropy,
    fused_linear_cross_entropy,
)


def close(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


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
    zeros = torch.zeros(3, requires_grad=True)  # where branches meet
    for gated in (activations.swiglu, activations.sigmoidglu, activations.powglu):
        (grad,) = torch.autograd.grad(gated(zeros, torch.ones(3)).sum(), zeros)
        assert grad.isfinite().all()


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
    utils.assert_close("x", x, x, 0.0, err_atol=0.0)
    utils.assert_close("x", x, x * 1.001, 0.01)
    with pytest.raises(AssertionError, match="x: difference"):
        utils.assert_close("x", x, x * 1.1, 0.01)
    with pytest.raises(AssertionError, match="x: difference"):
        utils.assert_close("x", x, x * float("nan"), 0.01)
    off, ratio = utils.get_abs_err(x, x * 1.1), utils.get_err_ratio(x, x * 1.1)
    utils.assert_close("x", x, x * 1.1, 0.0, err_atol=off)
    with pytest.raises(AssertionError, match="x: difference"):
        utils.assert_close("x", x, x * 1.1, ratio)


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


@pytest.mark.parametrize(
    ("hip", "capability", "families"),
    [
        (None, (8, 9), (False, False, True)),
        (None, (9, 0), (True, False, True)),
        (None, (12, 0), (False, True, True)),
        (None, (7, 5), (False, False, False)),
        ("7.0", (9, 4), (False, False, False)),
    ],
)
def test_constants_of_a_gpu(
    hip: str | None, capability: tuple, families: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is known as the module is imported, on machines that this one may not be."""
    shared = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=232448)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: shared)
    monkeypatch.setattr(torch.version, "hip", hip)
    made = runpy.run_path(utils.__file__)
    assert made["device_platform"] == made["get_available_device"]() == ("hip" if hip else "cuda")
    assert made["device_name"] == "cuda" and (made["is_amd"], made["is_nvidia"]) == (
        bool(hip), not hip,
    )  # fmt: skip
    names = "is_nvidia_hopper", "is_nvidia_blackwell", "is_tf32_supported"
    assert tuple(made[x] for x in names) == tuple(made[x.upper()] for x in names) == families
    assert made["get_multiprocessor_count"]() == 132
    found = [made["check_shared_mem"](x) for x in ("none", "ada", "hopper")]
    shared.shared_memory_per_block_optin -= 1
    found.append(made["check_shared_mem"]("hopper"))
    assert found == [True, True, True, False]
