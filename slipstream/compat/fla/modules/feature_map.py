"""fla.modules.feature_map: what queries and keys are mapped by before linear attention."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.compat.fla.modules.activations import fast_gelu_impl, sigmoid, sqrelu, swish
from slipstream.compat.fla.modules.layernorm import layer_norm


def flatten_diag_outer_product(x: Tensor, y: Tensor) -> Tensor:
    """The entries x_i y_j with i <= j: [..., D], [..., D] -> [..., D (D + 1) / 2]."""
    row, column = torch.triu_indices(x.shape[-1], x.shape[-1], device=x.device)
    return x[..., row] * y[..., column]


def flatten_diag_outer_product_off1(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The entries x_i y_j with i < j, and those with i = j."""
    row, column = torch.triu_indices(x.shape[-1], x.shape[-1], 1, device=x.device)
    return x[..., row] * y[..., column], x * y


def is_power_of_2(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


class HedgehogFeatureMap(nn.Module):
    """softmax of (2 y, -2 y), y a linear layer that begins as the identity.

    Source: Zhang and others, "The Hedgehog & the Porcupine" (2024).
    """

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.layer = nn.Linear(head_dim, head_dim)
        self.init_weights_()

    def init_weights_(self) -> None:
        nn.init.eye_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = 2 * self.layer(x)
        return torch.cat([y, -y], dim=-1).softmax(-1)


class T2RFeatureMap(nn.Module):
    """max(y, 0), y a linear layer.

    Source: Kasai and others, "Finetuning Pretrained Transformers into RNNs" (2021).
    """

    def __init__(
        self, head_dim: int, dot_dim: int | None = None, bias: bool | None = False
    ) -> None:
        super().__init__()
        self.head_dim, self.bias = head_dim, bias
        self.dot_dim = head_dim if dot_dim is None else dot_dim
        self.layer = nn.Linear(head_dim, self.dot_dim, bias=bool(bias))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()


class DPFPFeatureMap(nn.Module):
    """Products of max(+-x, 0) with itself shifted by 1 to nu features.

    Source: Schlag, Irie, Schmidhuber, "Linear Transformers Are Secretly Fast Weight Programmers"
    (2021).
    """

    def __init__(self, head_dim: int, nu: int = 4) -> None:
        super().__init__()
        self.nu = nu

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([x.relu(), (-x).relu()], dim=-1)
        return torch.cat([y * y.roll(j, dims=-1) for j in range(1, self.nu + 1)], dim=-1)


class HadamardFeatureMap(nn.Module):
    """The product of two linear layers."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.layer1 = nn.Linear(head_dim, head_dim)
        self.layer2 = nn.Linear(head_dim, head_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer1(x) * self.layer2(x)


class LearnableOuterProductFeatureMap(nn.Module):
    """flatten_diag_outer_product of two linear layers."""

    def __init__(self, head_dim: int, feature_dim: int) -> None:
        super().__init__()
        self.layer1 = nn.Linear(head_dim, feature_dim, bias=False)
        self.layer2 = nn.Linear(head_dim, feature_dim, bias=False)
        self.normalizer = feature_dim**-0.5

    def forward(self, x: Tensor) -> Tensor:
        return flatten_diag_outer_product(self.layer1(x), self.layer2(x))


class LearnablePolySketchNonNegativeFeatureMap(nn.Module):
    """A polynomial of even degree of a normed x, sketched by products of linear layers.

    Args:
        sketch_size: features of a sketch; head_dim if None.
        degree: a power of two from 2.
    """

    def __init__(
        self, head_dim: int, sketch_size: int | None = None, degree: int | None = 2
    ) -> None:
        super().__init__()
        if degree is None or degree < 2 or not is_power_of_2(degree):
            raise ValueError(f"degree: want a power of two from 2, got {degree}")
        size = head_dim if sketch_size is None else sketch_size
        self.head_dim, self.sketch_size, self.degree = head_dim, size, degree
        self.gamma = nn.Parameter(torch.ones(head_dim))
        self.beta = nn.Parameter(torch.zeros(head_dim))
        inputs = [head_dim] + [size] * (int(math.log2(degree)) - 2)
        self.sketches1 = nn.ModuleList(nn.Linear(n, size, bias=False) for n in inputs)
        self.sketches2 = nn.ModuleList(nn.Linear(n, size, bias=False) for n in inputs)

    def forward(self, x: Tensor) -> Tensor:
        x = layer_norm(x, self.gamma, self.beta)
        for first, second in zip(self.sketches1, self.sketches2):
            x = first(x) * second(x) * self.head_dim**-0.5
        return flatten_diag_outer_product(x, x)


class TaylorFeatureMap(nn.Module):
    """f with f(q) . f(k) = 1 + s + s^2 / 2, where s = q . k / sqrt(head_dim)."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    def forward(self, x: Tensor) -> Tensor:
        mixed, squares = flatten_diag_outer_product_off1(x, x)
        root = self.head_dim**0.5
        parts = [torch.ones_like(x[..., :1]), x / root**0.5, squares / (root * 2**0.5)]
        return torch.cat([*parts, mixed / root], dim=-1)


class RebasedFeatureMap(nn.Module):
    """f with f(q) . f(k) = (q . k)^2 / head_dim, of inputs that are normed and scaled.

    Args:
        use_gamma, use_beta: whether there are a factor and a summand. normalize: a norm before.
    """

    def __init__(
        self,
        head_dim: int,
        use_gamma: bool | None = True,
        use_beta: bool | None = True,
        normalize: bool | None = True,
    ) -> None:
        super().__init__()
        self.head_dim, self.normalize = head_dim, normalize
        self.use_gamma, self.use_beta = use_gamma, use_beta
        self.gamma = nn.Parameter(torch.ones(head_dim)) if use_gamma else None
        self.beta = nn.Parameter(torch.zeros(head_dim)) if use_beta else None
        if not (normalize or use_gamma):
            raise ValueError("use_gamma: want it without normalize")

    def forward(self, x: Tensor, flatten: bool | None = True) -> Tensor:
        if self.normalize:
            x = layer_norm(x, self.gamma, self.beta)
        else:
            x = x if self.gamma is None else x * self.gamma
            x = x if self.beta is None else x + self.beta
        if not flatten:
            return x
        mixed, squares = flatten_diag_outer_product_off1(x, x)
        scale = self.head_dim**-0.5
        return torch.cat([squares * scale, mixed * (2**0.5 * scale)], dim=-1)


class ReLUFeatureMap(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x)


class SquaredReLUFeatureMap(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return sqrelu(x)


class GELUFeatureMap(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return fast_gelu_impl(x)


class SwishFeatureMap(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return swish(x)


class SigmoidFeatureMap(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return sigmoid(x)
