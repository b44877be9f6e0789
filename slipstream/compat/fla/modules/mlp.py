"""fla.modules.mlp: the gated MLP of fla's models."""

from typing import Any

from torch import Tensor, nn

from slipstream.compat.fla.modules.activations import powglu, swiglu, swiglu_linear
from slipstream.nn.linear import plain_linear


class SwiGLULinear(nn.Module):
    """swiglu_linear as a module."""

    def forward(self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return swiglu_linear(x, y, weight, bias)


class GatedMLP(nn.Module):
    """down_proj(f(gate_proj(x)) up_proj(x)).

    Args:
        hidden_ratio: inner over outer size of an MLP without a gate that has as many parameters;
            None is 4. intermediate_size: the inner size, in place of the multiple of 256 above
            2/3 hidden_size hidden_ratio.
        hidden_act: f: "swish", or "powlu" (powglu). powglu_power: its power.
        fuse_swiglu: the product is not kept for the backward.
    """

    def __init__(
        self,
        hidden_size: int,
        hidden_ratio: int | None = None,
        intermediate_size: int | None = None,
        hidden_act: str = "swish",
        fuse_swiglu: bool = True,
        powglu_power: float = 3.0,
    ) -> None:
        super().__init__()
        if hidden_act not in ("swish", "powlu"):
            raise ValueError(f'hidden_act: want "swish" or "powlu", got {hidden_act!r}')
        hidden_ratio = 4 if hidden_ratio is None else hidden_ratio
        if intermediate_size is None:
            intermediate_size = -(-int(hidden_size * hidden_ratio * 2 / 3) // 256) * 256
        self.hidden_size, self.hidden_ratio = hidden_size, hidden_ratio
        self.intermediate_size, self.hidden_act = intermediate_size, hidden_act
        self.fuse_swiglu, self.powglu_power = fuse_swiglu, powglu_power
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        if fuse_swiglu and hidden_act == "swish":
            self.swiglu_linear = SwiGLULinear()

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.hidden_act == "powlu":
            return self.down_proj(powglu(gate, up, self.powglu_power))
        # an adapter or a hook on down_proj runs only if it is called
        if self.fuse_swiglu and plain_linear(self.down_proj):
            return self.swiglu_linear(gate, up, self.down_proj.weight, self.down_proj.bias)
        return self.down_proj(swiglu(gate, up))
