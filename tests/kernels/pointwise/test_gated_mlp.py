"""A gated MLP as one Function: its gradients in plain torch, which calls its kernels take, and
which modules it is for."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream.kernels.elementwise import glu_mlp as gated_mlp
from slipstream.nn import linear as modules
from slipstream.runtime.consistent import consistent
from slipstream.runtime.dispatch import TRITON_OR_EAGER

FUNCTIONS = {"silu": "swiglu", "gelu": "geglu", "sigmoid": "sigmoid_glu"}


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


@pytest.mark.parametrize("f", FUNCTIONS)
@pytest.mark.parametrize("frozen", [(), (0,), (1, 2), (3, 4), (0, 1, 2)])
def test_gradients_are_those_of_three_layers(f: str, frozen: tuple[int, ...]) -> None:
    given = [drawn(2, 5, 6), drawn(9, 6), drawn(9, 6), drawn(4, 9), drawn(4)]
    for i in frozen:
        given[i].requires_grad_(False)
    x, gate, up, down, bias = given
    gated = modules.GATES[FUNCTIONS[f]](x @ gate.t(), x @ up.t())
    want = torch.nn.functional.linear(gated, down, bias)
    got = gated_mlp.gated_mlp(x, gate, up, down, bias, f, "eager")
    leaves, dy = [t for t in given if t.requires_grad], torch.randn_like(want)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(
        torch.autograd.grad(got, leaves, dy), torch.autograd.grad(want, leaves, dy)
    )


def test_nothing_superfluous_is_kept() -> None:
    x, gate, up, down = drawn(3, 6), drawn(9, 6), drawn(9, 6), drawn(4, 9)
    for frozen in ([x], [gate, up]):
        for t in frozen:
            t.requires_grad_(False)
        y = gated_mlp.gated_mlp(x, gate, up, down, None, "silu", "eager")
        saved = [t for t in y.grad_fn.saved_tensors if t is not None]  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
        shared = {t.data_ptr() for t in saved}
        kept = [gate, up] if frozen[0] is x else [x]
        assert not shared & {t.data_ptr() for t in kept}
        for t in frozen:
            t.requires_grad_(True)


def reason(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> str:
    return gated_mlp.unsupported_reason(x, gate, up, down, "silu") or ""


def test_which_calls_the_kernels_take() -> None:
    bf16 = torch.bfloat16
    x, gate, up, down = (
        drawn(*s, dtype=bf16) for s in ((256, 64), (512, 64), (512, 64), (64, 512))
    )
    assert "sm_90" in reason(x, gate, up, down)  # nothing else is against it
    assert "16-bit" in reason(x.float(), gate, up, down)
    assert "16-bit" in reason(x, gate.half(), up, down)
    assert gated_mlp.impls_for(x, gate, processors=4) == gated_mlp.IMPLS
    assert gated_mlp.impls_for(x[:128], gate, processors=4) == TRITON_OR_EAGER
    assert "sizes" in reason(x, gate, up[:128], down)
    assert "columns" in reason(x, gate[:500], up[:500], down[:, :500])
    assert "sm_90" in reason(x, gate, up, down.t().contiguous().t())
    assert "sizes" in reason(x[:, :32], gate, up, down)
    assert "gate" in reason(x, gate.t().contiguous().t(), up, down)
    shifted = torch.empty(512 * 64 + 1, dtype=bf16)[1:].view(512, 64)
    assert "up" in reason(x, gate, shifted, down)
    odd = [drawn(*s, dtype=bf16) for s in ((256, 60), (512, 60), (512, 60), (60, 512))]
    assert "16 bytes" in reason(*odd)


class Counted:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        patch.setattr(modules, "unsupported_reason", lambda *args: None)
        patch.setattr(modules, "impls_for", lambda *args: "eager")
        patch.setattr(modules, "gated_mlp", self)

    def __call__(self, *args: Any) -> Tensor:
        self.calls += 1
        return gated_mlp.gated_mlp(*args)


@pytest.mark.parametrize("activation", modules.GATES)
def test_modules_that_are_plain_take_it(monkeypatch: pytest.MonkeyPatch, activation: str) -> None:
    mlp, x = modules.GatedMLP(6, 9, activation).double(), drawn(2, 5, 6)
    leaves = [x, *mlp.parameters()]
    want = mlp(x)
    wants = torch.autograd.grad(want.square().sum(), leaves)
    counted = Counted(monkeypatch)
    got = mlp(x)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got.square().sum(), leaves), wants)
    assert counted.calls == 1


def test_bfloat16_on_a_cpu_calls_its_layers() -> None:
    mlp, x = modules.SwiGLU(64, 96).bfloat16(), drawn(300, 64, dtype=torch.bfloat16)
    y = mlp(x)
    y.sum().backward()
    assert y.isfinite().all() and x.grad is not None and x.grad.isfinite().all()


def test_others_call_their_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    x = torch.randn(3, 6, requires_grad=True)
    mlp = modules.SwiGLU(6, 9)
    with torch.no_grad():
        mlp(x)
    with torch.autocast("cpu", torch.bfloat16):
        mlp(x)
    with consistent():
        mlp(x)
    modules.SwiGLU(6, 9, bias=True)(x)
    modules.SwiGLU(6, 9).requires_grad_(False)(x.detach())
    seen = []
    for name in ("gate_proj", "up_proj", "down_proj"):
        hooked = modules.SwiGLU(6, 9)
        getattr(hooked, name).register_forward_hook(lambda *args: seen.append(args))
        hooked(x)
    assert counted.calls == 0 and len(seen) == 3

    class Own(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + 1

    modules.SwiGLU(6, 9, linear=Own)(x)
    assert counted.calls == 0
    mlp(x)
    assert counted.calls == 1
