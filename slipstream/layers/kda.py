"""Kimi delta attention, the linear layer of Kimi Linear, and Gated DeltaNet-2: decays by channel,
in the latter erase and write too.
"""

from torch import Tensor, nn

from slipstream.layers.base import NormalLinear, ShortConvolution
from slipstream.layers.call import Mixed, MixerCall, State
from slipstream.layers.delta_heads import StepInputs, SteppedDeltaHeads
from slipstream.nn import decoding, linear, projections, recompute
from slipstream.ops._preprocess import delta_gate
from slipstream.ops.kda import chunk_gdn2, chunk_kda, fused_recurrent_gdn2, fused_recurrent_kda


class KimiDeltaAttention(SteppedDeltaHeads):
    """The delta rule with a decay per channel, behind short convolutions.

        q, k, v = silu(conv(x W_qkv));  q, k = l2_norm(q), l2_norm(k)
        g = -exp(A_log) softplus(x W_f1 W_f2 + dt_bias);  beta = sigmoid(x W_b)
        y = (rms_norm_per_head(kda(q, k, v, g, beta)) * sigmoid(x W_g1 W_g2)) W_o

    With lower_bound g = lower_bound sigmoid(exp(A_log) (x W_f1 W_f2 + dt_bias)).

    Args:
        hidden_size: D.
        num_heads: H, heads of queries and keys.
        head_dim: K; None is D / H.
        head_v_dim: V; None is K.
        conv_size: taps of the convolution; None leaves it out, and silu stays.
        num_v_heads: HV, heads of values and gates, a multiple of H; None is H.
        conv_bias: whether the convolution has a bias.
        gate_bias: whether W_g2 has one, as fla's has.
        gate_low_rank_dim: rank of the two gates; None is K.
        allow_neg_eigval: beta in (0, 2).
        lower_bound: of g, below 0; None is none.
        norm_eps: of the norm, whose weight [V] the heads share.
        mode, layer_idx: as Mixer.

    State: recurrent [N, HV, K, V] and conv [N, 2 H K + HV V, W].
    Source: Kimi Team, Kimi Linear, 2025, section 4.
    """

    leaves_states = True
    forms = chunk_kda, fused_recurrent_kda

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        head_dim: int | None = None,
        head_v_dim: int | None = None,
        conv_size: int | None = 4,
        norm_eps: float = 1e-5,
        mode: str | None = None,
        layer_idx: int = 0,
        *,
        num_v_heads: int | None = None,
        conv_bias: bool = False,
        gate_bias: bool = False,
        allow_neg_eigval: bool = False,
        lower_bound: float | None = None,
        gate_low_rank_dim: int | None = None,
    ) -> None:
        heads = num_heads, head_dim, head_v_dim, num_v_heads
        super().__init__(hidden_size, *heads, norm_eps, mode, layer_idx)
        self.allow_neg_eigval, self.lower_bound = allow_neg_eigval, lower_bound
        gates, rank = self.num_v_heads * self.head_dim, gate_low_rank_dim or self.head_dim
        self.qkv_proj = NormalLinear(hidden_size, self.channels)
        self.f_down = NormalLinear(hidden_size, rank)
        self.f_up = NormalLinear(rank, gates)
        self.b_proj = NormalLinear(hidden_size, self.num_v_heads)
        self.g_down = NormalLinear(hidden_size, rank)
        self.g_up = NormalLinear(rank, self.values, bias=gate_bias)
        self.o_proj = NormalLinear(self.values, hidden_size)
        self.conv = ShortConvolution(self.channels, conv_size, conv_bias) if conv_size else None
        self._add_decay_and_norm(self.num_v_heads, gates)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.lower_bound is not None:
            nn.init.zeros_(self.A_log)

    def _mix_tokens(self, x: Tensor, call: MixerCall) -> Mixed:
        layers = self.qkv_proj, self.f_down, self.b_proj, self.g_down
        qkv, f, beta, z = linear.linears(x, layers)
        f, conv = self.f_up(f).unflatten(-1, (self.num_v_heads, self.head_dim)), None
        if (placed := self._block_terms(qkv, f, beta, self.lower_bound)) is not None:
            terms, conv = placed
            o, recurrent = chunk_kda(
                *terms, initial_state=call.past("recurrent"), output_final_state=call.use_cache
            )
            return self._output(o, self.g_up(z)), call.new_state(recurrent=recurrent, conv=conv)
        sizes = (self.keys, self.keys, self.values)
        A_log, dt_bias = self.A_log, self.dt_bias
        convolve, elements = call.convolution_in_parts(self.conv, qkv, sizes, self.head_dim)

        def prepare() -> list[Tensor]:
            nonlocal conv
            (q, k, v, *before), conv = convolve(qkv)
            g = delta_gate(f, A_log, dt_bias, self.lower_bound)
            return [*before, q, k, v, g]

        # every fourth layer keeps them: what is made again takes time, what is kept memory
        if elements and self.layer_idx % 4 == 0:  # not read under torch.compile, one graph for all
            elements = 0
        with recompute.Recompute(prepare, elements) as (*_, q, k, v, g):
            o, recurrent = self._scan(
                x,
                call,
                *self._split_heads(q, k, v),
                g,
                beta,
                use_beta_sigmoid_in_kernel=True,
                allow_neg_eigval=self.allow_neg_eigval,
            )
        return self._output(o, self.g_up(z)), call.new_state(recurrent=recurrent, conv=conv)

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        f = self.f_up(self.f_down(x)).unflatten(-1, (self.num_v_heads, self.head_dim))
        beta = self.b_proj(x).sigmoid()
        g = decoding.decay_gate(f, self.A_log, self.dt_bias, self.lower_bound)
        return g, 2 * beta if self.allow_neg_eigval else beta

    def _step_inputs(self, x: Tensor, norm: nn.Module | None) -> StepInputs:
        layers = self.qkv_proj, self.b_proj, self.f_down, self.g_down
        qkv, beta, f, z = projections.linears(x, layers, norm)
        g = projections.by_rows(f, self.f_up).unflatten(-1, (self.num_v_heads, self.head_dim))
        z = projections.by_rows(z, self.g_up)
        terms = {"g": g, "lower_bound": self.lower_bound, "beta": beta}
        return qkv, z, terms


class GatedDeltaNet2(SteppedDeltaHeads):
    """The delta rule whose decay, erase and write are gates of channels, behind convolutions.

        q, k, v = silu(conv(x W_qkv));  q, k = l2_norm(q), l2_norm(k)
        g = -exp(A_log) softplus(x W_f1 W_f2 + dt_bias)
        b = sigmoid(x W_b);  w = sigmoid(x W_w)
        y = (rms_norm_per_head(gdn2(q, k, v, g, b, w)) * sigmoid(x W_g1 W_g2)) W_o

    Args:
        hidden_size: D.
        num_heads: H, heads of queries, keys, g and b.
        head_dim: K; None is D / H.
        head_v_dim: V; None is K.
        conv_size: taps of the convolution; None leaves it out, and silu stays.
        norm_eps: of the norm, whose weight [V] the heads share.
        num_v_heads: HV, heads of values and w, a multiple of H; None is H.
        conv_bias: whether the convolution has a bias.
        gate_bias: whether W_g2 has one, as fla's has.
        allow_neg_eigval: b in (0, 2).
        gate_low_rank_dim: rank of g and of the output's gate; None is V.
        mode, layer_idx: as Mixer.

    State: recurrent [N, HV, K, V] and conv [N, 2 H K + HV V, W].
    Source: the layer of flash-linear-attention 0.6.0, fla/layers/gdn2.py.
    """

    forms = chunk_gdn2, fused_recurrent_gdn2

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        head_dim: int | None = None,
        head_v_dim: int | None = None,
        conv_size: int | None = 4,
        norm_eps: float = 1e-5,
        mode: str | None = None,
        layer_idx: int = 0,
        *,
        num_v_heads: int | None = None,
        conv_bias: bool = False,
        gate_bias: bool = False,
        allow_neg_eigval: bool = False,
        gate_low_rank_dim: int | None = None,
    ) -> None:
        heads = num_heads, head_dim, head_v_dim, num_v_heads
        super().__init__(hidden_size, *heads, norm_eps, mode, layer_idx)
        self.allow_neg_eigval = allow_neg_eigval
        rank = gate_low_rank_dim or self.head_v_dim
        self.qkv_proj = NormalLinear(hidden_size, self.channels)
        self.f_down = NormalLinear(hidden_size, rank)
        self.f_up = NormalLinear(rank, self.keys)
        self.bw_proj = NormalLinear(hidden_size, self.keys + self.values)
        self.g_down = NormalLinear(hidden_size, rank)
        self.g_up = NormalLinear(rank, self.values, bias=gate_bias)
        self.o_proj = NormalLinear(self.values, hidden_size)
        self.conv = ShortConvolution(self.channels, conv_size, conv_bias) if conv_size else None
        self._add_decay_and_norm(num_heads, self.keys)

    def _mix_tokens(self, x: Tensor, call: MixerCall) -> Mixed:
        qkv, conv = call.convolved(self.conv, self.qkv_proj(x))
        q, k, v = self._heads_of(qkv)
        g, b, w = self._gates(x)
        g, b = self._of_values(g), self._of_values(b)
        o, recurrent = self._scan(x, call, q, k, v, g, b, w, use_qk_l2norm_in_kernel=True)
        return self._output(o, self._gate_of(x)), call.new_state(recurrent=recurrent, conv=conv)

    def _recurrence(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, state: State) -> Tensor:
        g, b, w = self._gates(x)
        return decoding.recurrence(
            q, k, w * v, state,
            g=self._of_values(g), a=(g.exp() * b * k).to(k.dtype), b=-k,
        )  # fmt: skip

    def _step_inputs(self, x: Tensor, norm: nn.Module | None) -> StepInputs:
        layers = self.qkv_proj, self.bw_proj, self.f_down, self.g_down
        qkv, bw, f, z = projections.linears(x, layers, norm)
        b, w = bw.split([self.keys, self.values], dim=-1)
        f = projections.by_rows(f, self.f_up)
        f, b = (y.unflatten(-1, (self.num_heads, self.head_dim)) for y in (f, b))
        A_log, dt_bias = self.A_log, self.dt_bias
        if (group := self.num_v_heads // self.num_heads) > 1:
            A_log = A_log.repeat_interleave(group)
            dt_bias = dt_bias.view(self.num_heads, -1).repeat_interleave(group, 0)
        terms = {"A_log": A_log, "dt_bias": dt_bias}
        terms |= {"g": self._of_values(f), "beta": self._of_values(b)}
        terms |= {"write": w.unflatten(-1, (self.num_v_heads, self.head_v_dim))}
        z = projections.by_rows(z, self.g_up)
        return qkv, z, terms

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """g, b [B, T, H, K] and w [B, T, HV, V]"""
        f = self.f_up(self.f_down(x)).unflatten(-1, (self.num_heads, self.head_dim))
        b, w = self.bw_proj(x).sigmoid().split([self.keys, self.values], dim=-1)
        b = b.unflatten(-1, (self.num_heads, self.head_dim))
        w = w.unflatten(-1, (self.num_v_heads, self.head_v_dim))
        g = decoding.decay_gate(f, self.A_log, self.dt_bias)
        return g, 2 * b if self.allow_neg_eigval else b, w

    def _of_values(self, x: Tensor) -> Tensor:
        """x [B, T, H, K] for each head of values."""
        group = self.num_v_heads // self.num_heads
        return x if group == 1 else x.repeat_interleave(group, dim=2)
