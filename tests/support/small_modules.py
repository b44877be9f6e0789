"""Every module of slipstream.nn and every layer at a few channels, with inputs, and what a way of
running one is held to: outputs and gradients of the untouched module."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import layers, nn
from tests.support import small_layers

D, H = 12, 2
Inputs = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Subject:
    """inputs: what `make()` is called with, whose floating tensors get gradients."""

    make: Callable[[], torch.nn.Module]
    inputs: Inputs


class Distillation(torch.nn.Module):
    """LinearKLDivLoss, with the layers that its call takes."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = torch.nn.Linear(D, 9), torch.nn.Linear(6, 9)
        self.teacher.requires_grad_(False)
        self.loss = nn.LinearKLDivLoss(2.0)

    def forward(self, hidden: Tensor, known: Tensor) -> Tensor:
        return self.loss(hidden, self.student, known, self.teacher)


class Later(torch.nn.Module):
    """A layer that takes an earlier one's value."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, first_value=x.sin())[0]


def rows(*shape: int) -> Inputs:
    return lambda: (torch.randn(*shape, D),)


def target(*shape: int) -> Tensor:
    return torch.randint(0, 9, shape)


def layer(name: str) -> Subject:
    def make() -> torch.nn.Module:
        made = small_layers.make(name)
        return Later(made) if name == "RWKV7-later" else made

    return Subject(make, lambda: (torch.randn(2, 7, small_layers.D),))


def channel_mix() -> torch.nn.Module:
    """Whose values begin at 0."""
    made = layers.RWKV7ChannelMix(D, 20, 1, 3)
    torch.nn.init.normal_(made.value.weight, std=0.2)
    return made


MODULES: dict[str, Subject] = {
    "Linear": Subject(lambda: nn.Linear(D, 7, activation="silu"), rows(2, 5)),
    "Embedding": Subject(lambda: nn.Embedding(9, D), lambda: (target(2, 5),)),
    "GatedMLP": Subject(lambda: nn.GatedMLP(D, 20, "sigmoid_glu"), rows(2, 5)),
    "SwiGLU": Subject(lambda: nn.SwiGLU(D, 20, bias=True), rows(2, 5)),
    "GEGLU": Subject(lambda: nn.GEGLU(D, 20), rows(2, 5)),
    "ShortConvolution": Subject(lambda: nn.ShortConvolution(D, 4, bias=True), rows(2, 5)),
    "RMSNorm": Subject(lambda: nn.RMSNorm(D, zero_centered=True), rows(2, 5)),
    "LayerNorm": Subject(lambda: nn.LayerNorm(D), rows(2, 5)),
    "GroupNorm": Subject(lambda: nn.GroupNorm(3, D), rows(2, 5)),
    "L2Norm": Subject(nn.L2Norm, rows(2, 5)),
    "GatedRMSNorm": Subject(
        lambda: nn.GatedRMSNorm(D), lambda: (torch.randn(2, 5, D), torch.randn(2, 5, D))
    ),
    "RotaryEmbedding": Subject(
        lambda: nn.RotaryEmbedding(8), lambda: (torch.randn(2, 5, 2, D), torch.randn(2, 5, 1, D))
    ),
    "CrossEntropyLoss": Subject(
        lambda: nn.CrossEntropyLoss(label_smoothing=0.1), lambda: (torch.randn(5, 9), target(5))
    ),
    "LinearCrossEntropyLoss": Subject(
        lambda: nn.LinearCrossEntropyLoss(D, 9, bias=True), lambda: (torch.randn(5, D), target(5))
    ),
    "HyperConnection": Subject(lambda: layers.HyperConnection(D, 3), rows(2, 5, 3)),
    "HyperHead": Subject(lambda: layers.HyperHead(D, 3), rows(2, 5, 3)),
    "LinearKLDivLoss": Subject(Distillation, lambda: (torch.randn(5, D), torch.zeros(5, 6))),
}
LAYERS: dict[str, Subject] = {name: layer(name) for name in small_layers.LAYERS}
LAYERS["RWKV7ChannelMix"] = Subject(channel_mix, rows(2, 7))
SUBJECTS = MODULES | LAYERS
# a state, a convolution, two projections at once, softmax; values of an earlier layer; no layer
SAMPLE = {"GatedDeltaNet", "Attention-grouped", "KimiDeltaAttention", "Mamba3", "RWKV7-later"}

Result = tuple[list[Tensor], dict[str, Tensor]]
Call = Callable[..., Any]


def flat(outputs: Any) -> list[Tensor]:
    if isinstance(outputs, Tensor):
        return [outputs]
    return [x for y in outputs or () if y is not None for x in flat(y)]


def leaves(given: tuple[Tensor, ...]) -> list[Tensor]:
    return [x.clone().requires_grad_(x.is_floating_point()) for x in given]


def full(x: Tensor) -> Tensor:
    """A whole tensor of a DTensor; a copy."""
    return getattr(x, "full_tensor", x.clone)()


def total(outputs: Any) -> Tensor:
    return sum((x.float().sin().sum() for x in flat(outputs)), torch.zeros(()))


def results(module: torch.nn.Module, call: Call, given: tuple[Tensor, ...]) -> Result:
    """Outputs, and gradients by name of inputs and parameters."""
    inputs = leaves(given)
    outputs = call(*inputs)
    total(outputs).backward()
    grads = {f"input {i}": x.grad for i, x in enumerate(inputs)}
    grads |= {name.replace("base.", ""): p.grad for name, p in module.named_parameters()}
    return [x.detach() for x in flat(outputs)], {
        name: full(x) for name, x in grads.items() if x is not None
    }


def assert_same(got: Result, want: Result, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    assert len(got[0]) == len(want[0]) and got[1].keys() == want[1].keys()
    for x, y in zip(got[0], want[0]):
        torch.testing.assert_close(full(x), y, rtol=rtol, atol=atol)
    for name, x in want[1].items():
        largest = max(1.0, float(x.abs().max()))
        torch.testing.assert_close(got[1][name], x, rtol=rtol, atol=atol * largest, msg=name)


def modules(name: str) -> tuple[torch.nn.Module, torch.nn.Module, tuple[Tensor, ...]]:
    plain = SUBJECTS[name].make()
    return plain, copy.deepcopy(plain), SUBJECTS[name].inputs()


def is_sample(name: str) -> bool:
    return name in MODULES or name in SAMPLE


Module = torch.nn.Module
# changes a module, or the plain one that it shall equal, and returns how to call it
Way = Callable[[Module, Module], Call]
# of torch's own ways to change a module, and to look at one
EXPECTED_WARNINGS = [
    pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning"),
    pytest.mark.filterwarnings("ignore:For backward hooks to be called:UserWarning"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
]
every_subject = pytest.mark.parametrize("name", SUBJECTS)
sample = pytest.mark.sample(which=lambda name, **_: is_sample(name))
