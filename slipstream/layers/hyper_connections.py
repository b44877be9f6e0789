"""Manifold-constrained hyper-connections: N residual streams, [B, T, N, D], around each layer."""

from typing import Any

import torch
from torch import Tensor, nn

from slipstream.ops.hyper_connection import mhc_pre


class HyperConnection(nn.Module):
    """What a layer reads from N residual streams, and how its output goes into them.

        collapsed, post, comb = connection(streams)
        streams = slipstream.ops.mhc_post(streams, layer(collapsed), post, comb)

    Args:
        hidden_size: D. streams: N.
        mix: whether streams mix with one another (comb).
        options: eps, norm_eps, iterations, magnitude and post_eps of slipstream.ops.mhc_pre.

    Parameters fn [M, N D], base [M] and scale [3], or [2] without mix, as transformers' classes.
    Cost, source: as slipstream.ops.mhc_pre.
    """

    def __init__(
        self, hidden_size: int, streams: int = 4, *, mix: bool = True, **options: float
    ) -> None:
        super().__init__()
        self.options: dict[str, Any] = options
        weights = (2 + streams * mix) * streams
        self.fn = nn.Parameter(torch.empty(weights, streams * hidden_size))
        self.base = nn.Parameter(torch.empty(weights))
        self.scale = nn.Parameter(torch.empty(2 + mix))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        _reset(self.fn, self.base, self.scale)

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """collapsed [..., D], post [..., N] and comb [..., N, N] of streams [..., N, D]."""
        return mhc_pre(streams, self.fn, self.base, self.scale, **self.options)


class HyperHead(nn.Module):
    """N residual streams [..., N, D] as one, after the last layer: a sum by weights of their own.

    Args:
        hidden_size: D. streams: N.
        eps, norm_eps: as slipstream.ops.mhc_pre.

    Parameters hc_fn [N, N D], hc_base [N] and hc_scale [1], as transformers' classes.
    """

    def __init__(
        self, hidden_size: int, streams: int = 4, *, eps: float = 1e-6, norm_eps: float = 1e-6
    ) -> None:
        super().__init__()
        self.eps, self.norm_eps = eps, norm_eps
        self.hc_fn = nn.Parameter(torch.empty(streams, streams * hidden_size))
        self.hc_base = nn.Parameter(torch.empty(streams))
        self.hc_scale = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        _reset(self.hc_fn, self.hc_base, self.hc_scale)

    def forward(self, streams: Tensor) -> Tensor:
        weights = self.hc_fn, self.hc_base, self.hc_scale
        return mhc_pre(streams, *weights, eps=self.eps, norm_eps=self.norm_eps)[0]


def _reset(weight: Tensor, base: Tensor, scale: Tensor) -> None:
    nn.init.normal_(weight, std=0.02)
    nn.init.zeros_(base)
    nn.init.ones_(scale)
