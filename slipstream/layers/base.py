"""What the layers share: how a model calls them, when they go token by token, where tokens stand.

Every layer mixes tokens, [B, T, D] to [B, T, D], and is called the same way:

    y, state = layer(x, cu_seqlens=, positions=, state=, use_cache=, shared=)

    x           [B, T, D]
    cu_seqlens  int32 or int64 [N+1]: N sequences packed in B = 1; without it N = B
    positions   int64 [1 or B, T], for what looks at them; None counts on from `state`
    state       the dict of an earlier call, N rows in every tensor; None is the start
    use_cache   whether to return the state after the last token, else None
    shared      a dict that all layers of one forward pass see

A call in two halves with the state handed over gives what one call gives. The given state is
never changed: what is returned are new tensors.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.nn.conv import ShortConvolution as ShortConvolution
from slipstream.ops.rotary import packed_positions

State = dict[str, Tensor]
Mixed = tuple[Tensor, State | None]

MODES = ("chunk", "fused_recurrent", None)
# on one CPU core at B 1, D 256, H 4 token by token is faster up to 16 tokens, chunks from 32 on
RECURRENT_UP_TO = 16


class Mixer(nn.Module):
    """A layer that mixes tokens.

    Args:
        mode: "chunk" or "fused_recurrent" to have only that; None chooses by length.
        layer_idx: where in the model it stands.
    """

    def __init__(self, mode: str | None = None, layer_idx: int = 0) -> None:
        super().__init__()
        if mode not in MODES:
            raise ValueError(f"mode: want one of {MODES}, got {mode!r}")
        self.mode, self.layer_idx = mode, layer_idx

    def recurrent(self, x: Tensor) -> bool:
        """Whether to go token by token: if told to, or if x is short and nobody wants gradients."""
        if self.mode is not None:
            return self.mode == "fused_recurrent"
        return x.shape[1] <= RECURRENT_UP_TO and not torch.is_grad_enabled()

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        positions: Tensor | None = None,
        state: State | None = None,
        use_cache: bool = False,
        shared: dict[str, Any] | None = None,
    ) -> Mixed:
        raise NotImplementedError


def past(state: State | None, name: str) -> Tensor | None:
    return None if state is None else state[name]


def kept(use_cache: bool, **tensors: Tensor | None) -> State | None:
    """The next state, of what the operators returned."""
    if not use_cache:
        return None
    return {name: x for name, x in tensors.items() if x is not None}


def next_lengths(x: Tensor, cu_seqlens: Tensor | None, state: State | None) -> Tensor:
    """How many tokens each sequence has after this call, int64 [N]."""
    if cu_seqlens is None:
        here = torch.full((x.shape[0],), x.shape[1], device=x.device)
    else:
        here = cu_seqlens.diff().long()
    return here if state is None else here + state["length"]


def token_positions(
    x: Tensor, cu_seqlens: Tensor | None, positions: Tensor | None, state: State | None
) -> Tensor:
    """Where each token stands in its sequence, int64 [1 or B, T]."""
    if positions is not None:
        return positions
    start = past(state, "length")
    if cu_seqlens is not None:
        return packed_positions(cu_seqlens, x.shape[1], offsets=start)
    at = torch.arange(x.shape[1], device=x.device)[None]
    return at if start is None else at + start[:, None]


def xavier(linear: nn.Linear, gain: float = 2**-2.5) -> nn.Linear:
    """As RetNet and GLA begin: a small gain keeps the state of the first steps small."""
    nn.init.xavier_uniform_(linear.weight, gain)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
    return linear


def normal(linear: nn.Linear, std: float = 0.02) -> nn.Linear:
    """As Qwen3-Next, Kimi Linear and most softmax models begin."""
    nn.init.normal_(linear.weight, std=std)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
    return linear


def decay_parameters(rates: int, steps: int) -> tuple[nn.Parameter, nn.Parameter]:
    """A_log [rates] and dt_bias [steps] of a decay -exp(A_log) softplus(x + dt_bias), as Mamba-2.

    exp(A_log) begins uniform in [1, 16], the step softplus(dt_bias) log-uniform in [1e-3, 1e-1].
    """
    step = torch.empty(steps).uniform_(math.log(1e-3), math.log(1e-1)).exp()
    dt_bias = step + torch.log(-torch.expm1(-step))  # the inverse of softplus
    return nn.Parameter(torch.empty(rates).uniform_(1, 16).log()), nn.Parameter(dt_bias)


def expect_divisor(name: str, value: int, of_name: str, of: int) -> None:
    if value < 1 or of % value:
        raise ValueError(f"{name}: want a divisor of {of_name} = {of}, got {value}")
