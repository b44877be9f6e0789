"""Gated DeltaNet, in the form that Qwen3-Next uses."""

from torch import Tensor, nn

from slipstream.layers.base import NormalLinear, ShortConvolution, expect_gate_activation
from slipstream.layers.call import Mixed, MixerCall
from slipstream.layers.delta_heads import StepInputs, SteppedDeltaHeads
from slipstream.nn import decoding, linear, projections, recompute
from slipstream.ops.delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule


class GatedDeltaNet(SteppedDeltaHeads):
    """The gated delta rule behind short convolutions, with a gated norm after it.

        q, k, v = silu(conv(x W_qkv));  q, k = l2_norm(q), l2_norm(k)
        g = -exp(A_log) softplus(x W_a + dt_bias);  beta = sigmoid(x W_b)
        y = (rms_norm_per_head(gated_delta_rule(q, k, v, g, beta)) * silu(x W_z)) W_o

    Args:
        hidden_size: D.
        num_heads: H, heads of queries and keys.
        num_v_heads: HV, heads of values, a multiple of H; None is H.
        head_dim: K; None is D / H.
        head_v_dim: V; None is K.
        conv_size: taps of the convolution; None leaves it out, and silu stays.
        allow_neg_eigval: beta in (0, 2).
        norm_eps: of the norm, whose weight [V] the heads share.
        use_gate: without, the norm is not multiplied by silu(x W_z).
        conv_bias: whether the convolution has a bias.
        gate_activation: of x W_z, "silu" or "sigmoid".
        mode, layer_idx: as Mixer.

    State: recurrent [N, HV, K, V] and conv [N, 2 H K + HV V, W].
    Source: Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024, section 3.4, and Qwen3-Next.
    """

    leaves_states = True

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        num_v_heads: int | None = None,
        head_dim: int | None = None,
        head_v_dim: int | None = None,
        conv_size: int | None = 4,
        allow_neg_eigval: bool = False,
        norm_eps: float = 1e-6,
        mode: str | None = None,
        layer_idx: int = 0,
        *,
        use_gate: bool = True,
        conv_bias: bool = False,
        gate_activation: str = "silu",
    ) -> None:
        heads = num_heads, head_dim, head_v_dim, num_v_heads
        super().__init__(hidden_size, *heads, norm_eps, mode, layer_idx)
        expect_gate_activation(gate_activation)
        self.allow_neg_eigval = allow_neg_eigval
        self.gate_activation = gate_activation
        self.qkv_proj = NormalLinear(hidden_size, self.channels)
        self.z_proj = NormalLinear(hidden_size, self.values) if use_gate else None
        self.ab_proj = NormalLinear(hidden_size, 2 * self.num_v_heads)
        self.o_proj = NormalLinear(self.values, hidden_size)
        self.conv = ShortConvolution(self.channels, conv_size, conv_bias) if conv_size else None
        self._add_decay_and_norm(self.num_v_heads, self.num_v_heads)

    def _mix_tokens(self, x: Tensor, call: MixerCall) -> Mixed:
        conv = None
        qkv, ab, z = linear.linears(x, (self.qkv_proj, self.ab_proj, self.z_proj))
        sizes = (self.keys, self.keys, self.values)
        convolve, elements = call.convolution_in_parts(self.conv, qkv, sizes, self.head_dim)

        def prepare() -> list[Tensor]:
            nonlocal conv
            (q, k, v, *before), conv = convolve(qkv)
            return [*before, q, k, v]

        a, b = ab.chunk(2, dim=-1)  # [B, T, HV]
        if (placed := self._block_terms(qkv, a, b)) is not None:
            terms, conv = placed
            o, recurrent = chunk_gated_delta_rule(
                *terms, initial_state=call.past("recurrent"), output_final_state=call.use_cache
            )
            return self._output(o, z), call.new_state(recurrent=recurrent, conv=conv)
        rule = (
            fused_recurrent_gated_delta_rule
            if self.recurrent(x, call.context)
            else chunk_gated_delta_rule
        )
        with recompute.Recompute(prepare, elements) as (*_, q, k, v):
            o, recurrent = rule(
                *self._split_heads(q, k, v),
                g=a,
                beta=b,
                use_gate_in_kernel=True,
                A_log=self.A_log,
                dt_bias=self.dt_bias,
                use_beta_sigmoid_in_kernel=True,
                allow_neg_eigval=self.allow_neg_eigval,
                **call.sequence(call.past("recurrent")),
            )
        return self._output(o, z), call.new_state(recurrent=recurrent, conv=conv)

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.ab_proj(x).chunk(2, dim=-1)
        beta = b.sigmoid()
        g = decoding.decay_gate(a, self.A_log, self.dt_bias)
        return g, 2 * beta if self.allow_neg_eigval else beta

    def _gate_of(self, x: Tensor) -> Tensor | None:
        return None if self.z_proj is None else self.z_proj(x)

    def _step_inputs(self, x: Tensor, norm: nn.Module | None) -> StepInputs:
        qkv, z, ab = projections.linears(x, (self.qkv_proj, self.z_proj, self.ab_proj), norm)
        a, b = ab.chunk(2, dim=-1)
        return qkv, z, {"g": a, "beta": b}
