"""The delta rule behind short convolutions: DeltaNet, and what others make of it.

Gated DeltaNet decays (in the form that Qwen3-Next uses), Comba erases under a key of its own and
corrects the read, Gated DeltaProduct takes several steps for each token.
"""

from typing import Any

import torch
from torch import Tensor, nn

from slipstream.layers import base, delta_heads
from slipstream.layers.call import Mixed, MixerCall, State
from slipstream.nn import decoding, linear, projections, recompute
from slipstream.ops import delta_rule as rules
from slipstream.ops import norm
from slipstream.ops.gated_delta_product import (
    chunk_gated_delta_product,
    fused_recurrent_gated_delta_product,
)


class DeltaNet(delta_heads.SteppedDeltaHeads):
    """The delta rule, with a norm after it.

        q, k, v = silu(conv(x W_qkv));  q, k = l2_norm(q), l2_norm(k);  beta = sigmoid(x W_b)
        y = rms_norm_per_head(delta_rule(q, k, v, beta)) W_o

    Args:
        hidden_size: D.
        num_heads: H.
        head_dim: K; None is D / H.
        head_v_dim: V; None is K.
        conv_size: taps of the convolution; None leaves it out, and silu stays.
        use_gate: multiplies the norm by silu(x W_g).
        allow_neg_eigval: beta in (0, 2).
        norm_eps: of the norm, whose weight [V] the heads share.
        use_beta: without, beta is 1.
        conv_bias: whether the convolution has a bias.
        qk_activation: of queries and keys, "silu", "relu", "elu_plus_one" or None; that of values
            is silu.
        qk_norm: "l2", or "sum": each head's features divided by their sum.
        mode, layer_idx: as Mixer.

    State: recurrent [N, H, K, V] and conv [N, H (2 K + V), W].
    Source: Yang et al., Parallelizing Linear Transformers with the Delta Rule, 2024, section 3.3.
    """

    leaves_states = True
    gate_activation = "silu"
    forms = rules.chunk_delta_rule, rules.fused_recurrent_delta_rule

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        head_dim: int | None = None,
        head_v_dim: int | None = None,
        conv_size: int | None = 4,
        use_gate: bool = False,
        allow_neg_eigval: bool = False,
        norm_eps: float = 1e-5,
        mode: str | None = None,
        layer_idx: int = 0,
        *,
        use_beta: bool = True,
        conv_bias: bool = False,
        qk_activation: str | None = "silu",
        qk_norm: str = "l2",
    ) -> None:
        heads = num_heads, head_dim, head_v_dim, None
        super().__init__(hidden_size, *heads, norm_eps, mode, layer_idx)
        self.allow_neg_eigval = allow_neg_eigval
        if qk_activation not in ("silu", "relu", "elu_plus_one", None):
            raise ValueError(
                f"qk_activation: want 'silu', 'relu', 'elu_plus_one' or None, got {qk_activation!r}"
            )
        if qk_norm not in ("l2", "sum"):
            raise ValueError(f"qk_norm: want 'l2' or 'sum', got {qk_norm!r}")
        self.qk_activation, self.qk_norm = qk_activation, qk_norm
        self.qkv_proj = base.NormalLinear(hidden_size, self.channels)
        self.b_proj = base.NormalLinear(hidden_size, num_heads) if use_beta else None
        self.g_proj = base.NormalLinear(hidden_size, self.values) if use_gate else None
        self.o_proj = base.NormalLinear(self.values, hidden_size)
        self.conv = None
        if conv_size:
            # one for all of q, k and v; where q and k have another activation, it comes after it
            f = "silu" if qk_activation == "silu" else None
            self.conv = base.ShortConvolution(self.channels, conv_size, conv_bias, f)
        self.A_log = self.dt_bias = None
        self._add_norm(self.head_v_dim)

    def _mix_tokens(self, x: Tensor, call: MixerCall) -> Mixed:
        qkv, conv = self.qkv_proj(x), None
        if self.conv is not None or self.qk_activation == "silu":
            qkv, conv = call.convolved(self.conv, qkv)
        q, k, v = self._activated(qkv)
        _, beta = self._gates(x)
        o, recurrent = self._scan(x, call, q, k, v, beta)
        after = call.new_state(recurrent=recurrent, conv=conv)
        return self._output(o, self._gate_of(x)), after

    def _heads_of_token(self, x: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor]:
        qkv = self.qkv_proj(x)
        if self.conv is not None or self.qk_activation == "silu":
            qkv = decoding.convolution(self.conv, qkv, state.get("conv"))
        return self._activated(qkv)

    def _activated(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The heads of what the convolution returns."""
        q, k, v = self._heads_of(qkv, self._normalised)
        return q, k, v if self.qk_activation == "silu" else nn.functional.silu(v)

    def _normalised(self, qk: Tensor) -> Tensor:
        if self.qk_activation != "silu":
            qk = base.FEATURE_MAPS[self.qk_activation](qk)
        return norm.l2_norm(qk) if self.qk_norm == "l2" else qk / qk.sum(-1, keepdim=True)

    def _gates(self, x: Tensor) -> tuple[None, Tensor]:
        if self.b_proj is None:
            beta = x.new_ones(*x.shape[:2], self.num_heads)
        else:
            beta = self.b_proj(x).sigmoid()
        return None, 2 * beta if self.allow_neg_eigval else beta

    def _gate_of(self, x: Tensor) -> Tensor | None:
        return None if self.g_proj is None else self.g_proj(x)

    def has_fused_step(self) -> bool:
        usual = self.qk_activation == "silu" and self.qk_norm == "l2"
        return self.conv is not None and usual

    def _step_inputs(self, x: Tensor, norm: nn.Module | None) -> delta_heads.StepInputs:
        qkv, beta, z = projections.linears(x, (self.qkv_proj, self.b_proj, self.g_proj), norm)
        terms: dict[str, Any] = {"beta": beta}
        if beta is None:
            terms["beta"] = x.new_ones(*x.shape[:2], self.num_heads)
            terms |= {"use_beta_sigmoid_in_kernel": False, "allow_neg_eigval": False}
        return qkv, z, terms


class GatedDeltaNet(delta_heads.SteppedDeltaHeads):
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
    forms = rules.chunk_gated_delta_rule, rules.fused_recurrent_gated_delta_rule

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
        base.expect_gate_activation(gate_activation)
        self.allow_neg_eigval = allow_neg_eigval
        self.gate_activation = gate_activation
        self.qkv_proj = base.NormalLinear(hidden_size, self.channels)
        self.z_proj = base.NormalLinear(hidden_size, self.values) if use_gate else None
        self.ab_proj = base.NormalLinear(hidden_size, 2 * self.num_v_heads)
        self.o_proj = base.NormalLinear(self.values, hidden_size)
        self.conv = (
            base.ShortConvolution(self.channels, conv_size, conv_bias) if conv_size else None
        )
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
            o, recurrent = rules.chunk_gated_delta_rule(
                *terms, initial_state=call.past("recurrent"), output_final_state=call.use_cache
            )
            return self._output(o, z), call.new_state(recurrent=recurrent, conv=conv)
        with recompute.Recompute(prepare, elements) as (*_, q, k, v):
            o, recurrent = self._scan(
                x,
                call,
                *self._split_heads(q, k, v),
                g=a,
                beta=b,
                use_gate_in_kernel=True,
                A_log=self.A_log,
                dt_bias=self.dt_bias,
                use_beta_sigmoid_in_kernel=True,
                allow_neg_eigval=self.allow_neg_eigval,
            )
        return self._output(o, z), call.new_state(recurrent=recurrent, conv=conv)

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.ab_proj(x).chunk(2, dim=-1)
        beta = b.sigmoid()
        g = decoding.decay_gate(a, self.A_log, self.dt_bias)
        return g, 2 * beta if self.allow_neg_eigval else beta

    def _gate_of(self, x: Tensor) -> Tensor | None:
        return None if self.z_proj is None else self.z_proj(x)

    def _step_inputs(self, x: Tensor, norm: nn.Module | None) -> delta_heads.StepInputs:
        qkv, z, ab = projections.linears(x, (self.qkv_proj, self.z_proj, self.ab_proj), norm)
        a, b = ab.chunk(2, dim=-1)
        return qkv, z, {"g": a, "beta": b}


class Comba(delta_heads.DeltaHeads):
    """Comba behind short convolutions, with a gated norm after it.

        q, k, v = silu(conv(x W_qkv));  q, k = l2_norm(q), l2_norm(k)
        p = sigmoid(erase) k;  q = q - correction k
        g = -exp(A_log) softplus(x W_a + dt_bias);  beta = sigmoid(x W_b)
        y = (rms_norm_per_head(comba(q, k, v, p, g, beta)) * sigmoid(x W_z)) W_o

    Args:
        hidden_size: D.
        num_heads: H, heads of queries and keys.
        num_v_heads: HV, heads of values, a multiple of H; None is H.
        head_dim: K; None is D / H.
        head_v_dim: V; None is K.
        conv_size: taps of the convolution.
        correction: what the factor of each head begins with.
        norm_eps: of the norm, whose weight [V] the heads share.
        mode, layer_idx: as Mixer.

    State: recurrent [N, HV, K, V] and conv [N, 2 H K + HV V, W].
    Source: Hu et al., Comba, 2025. fla's layer normalises p, which takes out the factor of the
    erase, and corrects q before it is normalised.
    """

    forms = rules.chunk_comba, rules.fused_recurrent_comba

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        num_v_heads: int | None = None,
        head_dim: int | None = None,
        head_v_dim: int | None = None,
        conv_size: int = 4,
        correction: float = 1.0,
        norm_eps: float = 1e-5,
        mode: str | None = None,
        layer_idx: int = 0,
    ) -> None:
        heads = num_heads, head_dim, head_v_dim, num_v_heads
        super().__init__(hidden_size, *heads, norm_eps, mode, layer_idx)
        self.initial_correction = correction
        self.qkv_proj = base.NormalLinear(hidden_size, self.channels)
        self.z_proj = base.NormalLinear(hidden_size, self.values)
        self.ab_proj = base.NormalLinear(hidden_size, 2 * self.num_v_heads)
        self.o_proj = base.NormalLinear(self.values, hidden_size)
        self.conv = base.ShortConvolution(self.channels, conv_size)
        self.erase = nn.Parameter(torch.empty(num_heads))
        self.correction = nn.Parameter(torch.empty(num_heads))
        self._add_decay_and_norm(self.num_v_heads, self.num_v_heads)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.ones_(self.erase)
        nn.init.constant_(self.correction, self.initial_correction)

    def _mix_tokens(self, x: Tensor, call: MixerCall) -> Mixed:
        qkv, conv = call.convolved(self.conv, self.qkv_proj(x))
        q, k, v = self._heads_of(qkv, norm.l2_norm)
        a, b = self.ab_proj(x).chunk(2, dim=-1)  # [B, T, HV]
        o, recurrent = self._scan(
            x,
            call,
            q=q - self.correction.to(k.dtype)[:, None] * k,
            k=k,
            v=v,
            p=self.erase.sigmoid().to(k.dtype)[:, None] * k,
            g=decoding.decay_gate(a, self.A_log, self.dt_bias),
            beta=b.sigmoid(),
        )
        after = call.new_state(recurrent=recurrent, conv=conv)
        return self._output(o, self.z_proj(x)), after


class GatedDeltaProduct(delta_heads.DeltaHeads):
    """Gated DeltaNet with n keys, values and steps a token, of which the first decays.

        q, k_1 .. k_n, v_1 .. v_n = silu(conv(x W_qkv));  beta = 2 sigmoid(x W_b)
        g = -exp(A_log) softplus(x W_a + dt_bias)
        y = (rms_norm_per_head(gated_delta_product(q, k, v, g, beta)) * silu(x W_z)) W_o

    Args:
        hidden_size: D.
        num_heads: H, heads of queries and keys.
        num_v_heads: HV, heads of values, a multiple of H; None is H.
        head_dim: K; None is D / H.
        head_v_dim: V; None is K.
        num_householder: n.
        conv_size: taps of the convolution.
        allow_neg_eigval: beta in (0, 2), else (0, 1).
        norm_eps: of the norm, whose weight [V] the heads share.
        mode, layer_idx: as Mixer.

    State: recurrent [N, HV, K, V] and conv [N, H K + n (H K + HV V), W].
    Source: Siems et al., DeltaProduct, 2025, section 3.
    """

    gate_activation = "silu"
    forms = chunk_gated_delta_product, fused_recurrent_gated_delta_product

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        num_v_heads: int | None = None,
        head_dim: int | None = None,
        head_v_dim: int | None = None,
        num_householder: int = 2,
        conv_size: int = 4,
        allow_neg_eigval: bool = True,
        norm_eps: float = 1e-5,
        mode: str | None = None,
        layer_idx: int = 0,
    ) -> None:
        if num_householder < 1:
            raise ValueError(f"num_householder: want at least 1, got {num_householder}")
        heads = num_heads, head_dim, head_v_dim, num_v_heads
        super().__init__(hidden_size, *heads, norm_eps, mode, layer_idx)
        self.num_householder, self.allow_neg_eigval = num_householder, allow_neg_eigval
        n = num_householder
        self.sizes = [self.keys, n * self.keys, n * self.values]
        self.qkv_proj = base.NormalLinear(hidden_size, sum(self.sizes))
        self.a_proj = base.NormalLinear(hidden_size, self.num_v_heads)
        self.b_proj = base.NormalLinear(hidden_size, n * self.num_v_heads)
        self.z_proj = base.NormalLinear(hidden_size, self.values)
        self.o_proj = base.NormalLinear(self.values, hidden_size)
        self.conv = base.ShortConvolution(sum(self.sizes), conv_size)
        self._add_decay_and_norm(self.num_v_heads, self.num_v_heads)

    def _mix_tokens(self, x: Tensor, call: MixerCall) -> Mixed:
        qkv, conv = call.convolved(self.conv, self.qkv_proj(x))
        q, k, v = qkv.split(self.sizes, dim=-1)
        q = norm.l2_norm(q.unflatten(-1, (self.num_heads, self.head_dim)))
        k = norm.l2_norm(self._steps(k, (self.num_heads, self.head_dim)))  # [B, T n, H, K]
        v = self._steps(v, (self.num_v_heads, self.head_v_dim))
        beta = self._steps(self.b_proj(x), (self.num_v_heads,)).sigmoid()
        g = decoding.decay_gate(self.a_proj(x), self.A_log, self.dt_bias)
        beta = 2 * beta if self.allow_neg_eigval else beta
        o, recurrent = self._scan(x, call, q, k, v, g, beta, self.num_householder)
        after = call.new_state(recurrent=recurrent, conv=conv)
        return self._output(o, self.z_proj(x)), after

    def _steps(self, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """[B, T, n * ...] -> [B, T n, ...]"""
        return x.unflatten(-1, (self.num_householder, *sizes)).flatten(1, 2)
