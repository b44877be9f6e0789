"""The layer of Mamba-2, its state space duality (SSD) as linear attention, and the block of
Mamba-3, without its MLP.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.kernels.elementwise.mamba_terms import mamba_terms
from slipstream.layers.base import Mixer, ShortConvolution, assign, heads_of_inner, reset_decay
from slipstream.layers.call import Mixed, MixerCall, State
from slipstream.nn import decoding, linear, projections, recompute
from slipstream.ops import _fp32, norm
from slipstream.ops.mamba import chunk_mamba3, fused_recurrent_mamba3
from slipstream.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla


class Mamba2(Mixer):
    """A selective state space with a scalar decay per head.

        z, xBC, dt = x W_in;  u, B, C = silu(conv(xBC));  step = softplus(dt + dt_bias)
        S_t = exp(-exp(A_log) step_t) S_{t-1} + B_t (step_t u_t)^T;  o_t = S_t^T C_t + D u_t
        y = rms_norm(o * silu(z)) W_out

    Args:
        hidden_size: D.
        num_heads: H; None is the inner width by head_dim.
        head_dim: P, width of u's heads, 64 in the paper; None is the inner width by num_heads.
        state_size: N, rows of the state.
        n_groups: G, heads of B and C, a divisor of H; the norm is over as many groups.
        expand: inner width by D.
        conv_size: taps of the convolution.
        norm_eps: of the norm.
        use_bias: whether W_in and W_out have a bias.
        dt_limit: least and largest step; None is no limit.
        conv_bias: whether the convolution has its bias.
        D_per_channel: D is [inner], not [H].
        norm: without, y = (o * silu(z)) W_out.
        norm_before_gate: y = (rms_norm(o) * silu(z)) W_out.
        mode, layer_idx: as Mixer.

    State: recurrent [sequences, H, N, P] and conv [sequences, H P + 2 G N, W].
    Source: Dao and Gu, Transformers are SSMs, 2024, section 8.
    """

    verifies_drafts = True
    leaves_states = True
    forms = chunk_simple_gla, fused_recurrent_simple_gla

    def __init__(
        self,
        hidden_size: int,
        num_heads: int | None = None,
        head_dim: int | None = None,
        state_size: int = 128,
        n_groups: int = 1,
        expand: int = 2,
        conv_size: int = 4,
        norm_eps: float = 1e-5,
        mode: str | None = None,
        layer_idx: int = 0,
        *,
        use_bias: bool = False,
        dt_limit: tuple[float, float] | None = None,
        conv_bias: bool = True,
        D_per_channel: bool = False,
        norm: bool = True,
        norm_before_gate: bool = False,
    ) -> None:
        super().__init__(mode, layer_idx)
        self.inner = expand * hidden_size
        num_heads = heads_of_inner(self.inner, num_heads, head_dim, n_groups)
        self.num_heads, self.state_size, self.n_groups = num_heads, state_size, n_groups
        self.norm_eps, self.dt_limit, self.norm_before_gate = norm_eps, dt_limit, norm_before_gate
        if dt_limit is not None and not 0 <= dt_limit[0] <= dt_limit[1]:
            raise ValueError(f"dt_limit: want 0 <= least <= largest, got {dt_limit}")
        channels = self.inner + 2 * n_groups * state_size
        # torch's own init, as the reference code of the paper leaves it
        self.in_proj = nn.Linear(hidden_size, self.inner + channels + num_heads, bias=use_bias)
        self.out_proj = nn.Linear(self.inner, hidden_size, bias=use_bias)
        self.conv = ShortConvolution(channels, conv_size, bias=conv_bias)
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        self.D = nn.Parameter(torch.empty(self.inner if D_per_channel else num_heads))
        self._add_norm(self.inner if norm else None)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        reset_decay(self.A_log, self.dt_bias)
        nn.init.ones_(self.D)

    def _mix_tokens(self, x: Tensor, call: MixerCall) -> Mixed:
        groups = self.n_groups * self.state_size
        z, xbc, dt = linear.linear_in_parts(
            x, self.in_proj, (self.inner, self.inner + 2 * groups, self.num_heads)
        )
        sizes, conv = (self.inner, groups, groups), None
        convolve, elements = call.convolution_in_parts(self.conv, xbc, sizes)
        heads = self.num_heads, self.inner // self.num_heads
        A_log, dt_bias, D = self.A_log, self.dt_bias, self.D.view(heads[0], -1).expand(heads)
        others: tuple[Tensor, ...] | None = None

        def prepare() -> list[Tensor]:
            nonlocal conv, others
            # as the kernels want it, here, so that the copy is not kept
            inner = xbc.contiguous() if xbc.is_cuda else xbc
            (u, b, c), conv = convolve(inner)
            # the backward, which calls this once more, reads v alone
            once = D if others is None else None
            v, *rest = mamba_terms(
                u.unflatten(-1, heads), dt, A_log, dt_bias, once, self.dt_limit
            )  # [B, T, H, P]
            others = (*rest,) if others is None else ()
            return [inner, u, b, c, v]

        with recompute.Recompute(prepare, elements) as (_, _, b, c, v):
            assert others is not None
            (skip, g), others = others, ()
            b, c = (y.unflatten(-1, (self.n_groups, self.state_size)) for y in (b, c))
            o, recurrent = self._scan(x, call, c, b, v, g, scale=1.0)
        y = self.out_proj(self._gated(o, z, skip))
        return y, call.new_state(recurrent=recurrent, conv=conv)

    def decode(
        self, x: Tensor, state: State, positions: Tensor | None = None, **options: Any
    ) -> Tensor:
        if self.has_fused_step():
            return self._fused_step(x, state, **options)
        groups = self.n_groups * self.state_size
        z, xbc, dt = self.in_proj(x).split(
            [self.inner, self.inner + 2 * groups, self.num_heads], dim=-1
        )
        xbc = decoding.convolution(self.conv, xbc, state["conv"])
        u, b, c = xbc.split([self.inner, groups, groups], dim=-1)
        u = u.unflatten(-1, (self.num_heads, -1))
        b, c = (y.unflatten(-1, (self.n_groups, self.state_size)) for y in (b, c))
        step, g = self._step(dt)
        v = u * step.to(u.dtype)[..., None]
        o = decoding.recurrence(c, b, v, state, g=g, scale=1.0)
        return self.out_proj(self._gated(torch.addcmul(o, u, self._skip(u.dtype)), z))

    def _skip(self, dtype: torch.dtype) -> Tensor:
        """D as [H, 1] or [H, P]."""
        D = self.D.to(dtype)
        return D[:, None] if self.has_fused_step() else D.view(self.num_heads, -1)

    def has_fused_step(self) -> bool:
        return self.D.numel() == self.num_heads

    def _fused_step(
        self,
        x: Tensor,
        state: State,
        norm: nn.Module | None = None,
        residual: projections.Residual = None,
    ) -> Any:
        groups = self.n_groups * self.state_size
        (zxbcdt,) = projections.linears(x, (self.in_proj,), norm)
        z, u, b, c, dt = zxbcdt.split(
            [self.inner, self.inner, groups, groups, self.num_heads], dim=-1
        )
        b, c = (y.unflatten(-1, (self.n_groups, self.state_size)) for y in (b, c))
        z, u = (y.unflatten(-1, (self.num_heads, -1)) for y in (z, u))
        weight = self.norm_weight
        y = decoding.mixer(
            c,
            b,
            u,
            state,
            self.conv,
            channel_order="vkq",
            g=dt,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            dt_limit=self.dt_limit,
            dt_scales_v=True,
            D=self.D,
            scale=1.0,
            z=z,
            norm_weight=None if weight is None else weight.view(self.num_heads, -1),
            norm_eps=None if weight is None else self.norm_eps,
            norm_group_size=self.inner // self.n_groups,
            norm_before_gate=self.norm_before_gate,
        )
        return projections.projected(y, self.out_proj, residual)

    def _gated(self, o: Tensor, z: Tensor, skip: Tensor | None = None) -> Tensor:
        """The norm of o + skip [B, T, H, P] with its gate z [B, T, H P]."""
        o, skip = o.flatten(-2), None if skip is None else skip.flatten(-2)
        if self.norm_weight is None:
            return (o if skip is None else o + skip) * F.silu(z)
        group = self.inner // self.n_groups
        options = {"norm_before_gate": self.norm_before_gate, "group_size": group}
        return self._norm_of_all_heads(o, z, skip, **options)

    def _step(self, dt: Tensor) -> tuple[Tensor, Tensor]:
        """The step and the log decay over it, both [B, T, H]."""
        wide = torch.float64 if dt.dtype == torch.float64 else torch.float32
        step = F.softplus(dt.to(wide) + self.dt_bias)
        if self.dt_limit is not None:
            step = step.clamp(*self.dt_limit)
        return step, -self.A_log.to(wide).exp() * step


class Mamba3(Mixer):
    """A selective state space by the trapezoid rule: B and C are rotated, and nothing is convolved.

        z, u, B, C, dt, A, trap, angle = x W_in
        B, C = rms_norm(B) + b_B, rms_norm(C) + b_C, of each head and rank
        step = softplus(dt + dt_bias);  g = -f(A) step;  theta += pi step tanh(angle)
        o_r = mamba3(C_r, B_r, u * m_r, g, step, sigmoid(trap), theta) + D u * m_r
        y = (sum_r n_r * o_r * silu(z * l_r)) W_out

    Channels 2 i and 2 i + 1 of B and C are rotated as a pair; mamba_ssm's and fla's MIMO has pairs
    of i and i + N / 2. Their weights become these if the N channels of B and C, in in_proj, B_norm,
    C_norm, B_bias and C_bias, are taken in the order 0, N / 2, 1, N / 2 + 1, ... (`mimo_order`).

    Args:
        hidden_size: D.
        num_heads: H; None is the inner width by head_dim.
        head_dim: width of u's heads, 64 in the paper; None is the inner width by num_heads.
        state_size: N, rows of the state.
        n_groups: heads of B and C, a divisor of H.
        expand: inner width by D.
        mimo_rank: R, inputs and outputs of a token; 1 is SISO, without m, n and l.
        rotary_fraction: share of the N channels that are rotated.
        A_floor: least f(A).
        A_activation: f, "softplus", or "heavy_tail" (1 + A, and 1 / (1 - A) below 0), which
            mamba_ssm has after 2.3.2.
        norm_eps: of all norms.
        use_bias: whether W_in and W_out have a bias.
        output_norm: o_r is normalised, each head with a weight of its own, before its gate.
        mode, layer_idx: as Mixer.

    State: recurrent [sequences, H, N, P], key [sequences, H, R, N] and value [sequences, H, R, P]
    of the last token, and theta [sequences, H, pairs].
    Source: Mamba-3 (2026), as mamba_ssm 2.3 and flash-linear-attention 0.6.0 have it.
    """

    forms = chunk_mamba3, fused_recurrent_mamba3

    mimo_x: nn.Parameter | None
    mimo_z: nn.Parameter | None
    mimo_o: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        num_heads: int | None = None,
        head_dim: int | None = None,
        state_size: int = 128,
        n_groups: int = 1,
        expand: int = 2,
        mimo_rank: int = 1,
        rotary_fraction: float = 0.5,
        norm_eps: float = 1e-5,
        mode: str | None = None,
        layer_idx: int = 0,
        *,
        A_floor: float = 1e-4,
        A_activation: str = "softplus",
        use_bias: bool = False,
        output_norm: bool = False,
    ) -> None:
        super().__init__(mode, layer_idx)
        self.inner = expand * hidden_size
        num_heads = heads_of_inner(self.inner, num_heads, head_dim, n_groups)
        self.pairs = int(state_size * rotary_fraction) // 2
        if not 0 < self.pairs <= state_size // 2:
            raise ValueError(
                f"rotary_fraction: want a share of {state_size} channels with a pair at least, "
                f"got {rotary_fraction}"
            )
        self.num_heads, self.state_size, self.n_groups = num_heads, state_size, n_groups
        if mimo_rank < 1:
            raise ValueError(f"mimo_rank: want at least 1, got {mimo_rank}")
        if A_activation not in _ACTIVATIONS:
            raise ValueError(f"A_activation: want one of {[*_ACTIVATIONS]}, got {A_activation!r}")
        self.mimo_rank, self.norm_eps, self.A_floor = mimo_rank, norm_eps, A_floor
        self.A_activation = A_activation
        self.in_proj = nn.Linear(hidden_size, sum(self.sizes), bias=use_bias)
        self.out_proj = nn.Linear(self.inner, hidden_size, bias=use_bias)
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        self.D = nn.Parameter(torch.empty(num_heads))
        self.B_bias, self.C_bias = (
            nn.Parameter(torch.empty(num_heads, mimo_rank, state_size)) for _ in "BC"
        )
        self.B_norm, self.C_norm = (nn.Parameter(torch.empty(state_size)) for _ in "BC")
        width = self.inner // num_heads
        for name in ("mimo_x", "mimo_z", "mimo_o"):
            weight = None if mimo_rank == 1 else torch.empty(num_heads, mimo_rank, width)
            self.register_parameter(name, None if weight is None else nn.Parameter(weight))
        norm_weight = nn.Parameter(torch.empty(num_heads, width)) if output_norm else None
        self.register_parameter("norm_weight", norm_weight)
        self.reset_parameters()

    @property
    def sizes(self) -> list[int]:
        """The sizes of in_proj's outputs: z, u, b, c, dt, a, trap and angle."""
        groups, H = self.n_groups * self.mimo_rank * self.state_size, self.num_heads
        return [self.inner, self.inner, groups, groups, H, H, H, self.pairs]

    def reset_parameters(self) -> None:
        step = torch.empty(self.dt_bias.shape, device=self.dt_bias.device)
        step = step.uniform_(math.log(1e-3), math.log(1e-1)).exp()
        assign(self.dt_bias, step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
        for weight in (self.D, self.B_bias, self.C_bias, self.B_norm, self.C_norm):
            nn.init.ones_(weight)
        for weight in (self.mimo_x, self.mimo_o):
            if weight is not None:
                nn.init.constant_(weight, 1 / self.mimo_rank)
        for weight in (self.mimo_z, self.norm_weight):
            if weight is not None:
                nn.init.ones_(weight)

    def _mix_tokens(self, x: Tensor, call: MixerCall) -> Mixed:
        z, u, b, c, dt, a, trap, angle = self.in_proj(x).split(self.sizes, dim=-1)
        step = F.softplus(_fp32.widen(dt) + self.dt_bias)
        rate = _ACTIVATIONS[self.A_activation](_fp32.widen(a)).clamp(min=self.A_floor)
        angles = math.pi * step[..., None] * torch.tanh(_fp32.widen(angle))[:, :, None]
        u, z = self._of_ranks(u, self.mimo_x), self._of_ranks(z, self.mimo_z)
        o, after = self._scan(
            x,
            call,
            q=self._of_heads(c, self.C_norm, self.C_bias),
            k=self._of_heads(b, self.B_norm, self.B_bias),
            v=u,
            g=-rate * step,
            dt=step,
            trap=torch.sigmoid(_fp32.widen(trap)),
            angles=angles,
            initial_state=call.pasts("recurrent", "key", "value", "theta"),
        )
        o = o + self.D[:, None, None].to(o.dtype) * u
        if self.norm_weight is not None:
            o = norm.rms_norm(o, eps=self.norm_eps) * self.norm_weight[:, None].to(o.dtype)
        o = o * F.silu(z)
        if self.mimo_o is not None:
            o = o * self.mimo_o.to(o.dtype)
        y = self.out_proj(o.sum(3).flatten(2))
        S, key, value, theta = after or (None,) * 4
        return y, call.new_state(recurrent=S, key=key, value=value, theta=theta)

    def _of_heads(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """B or C [B, T, R G N] -> [B, T, H, R, N], normalised and with its bias."""
        x = x.unflatten(-1, (self.mimo_rank, self.n_groups, self.state_size))
        x = norm.rms_norm(x, weight, eps=self.norm_eps).transpose(2, 3)
        x = x.repeat_interleave(self.num_heads // self.n_groups, dim=2)
        return x + bias.to(x.dtype)

    def _of_ranks(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """[B, T, H P] -> [B, T, H, R, P]"""
        x = x.unflatten(-1, (self.num_heads, 1, -1))
        return x if weight is None else x * weight.to(x.dtype)


def mimo_order(state_size: int) -> Tensor:
    """Index of mamba_ssm's channel of B and C for each of ours, with several ranks."""
    return torch.arange(state_size, device="cpu").view(2, -1).T.flatten()


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softplus": F.softplus,
    "heavy_tail": lambda x: torch.where(x > 0, 1 + x, 1 / (1 - x.clamp(max=0))),
}
