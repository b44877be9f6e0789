"""DeltaNet: the delta rule behind short convolutions."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.layers import base
from slipstream.layers.call import Mixed, MixerCall, State
from slipstream.nn import decoding, projections
from slipstream.ops.delta_rule import chunk_delta_rule, fused_recurrent_delta_rule
from slipstream.ops.norm import l2_norm


class DeltaNet(base.Mixer):
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

    verifies_drafts = True
    leaves_states = True

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
        super().__init__(mode, layer_idx)
        if head_dim is None:
            base.expect_divisor("num_heads", num_heads, "hidden_size", hidden_size)
            head_dim = hidden_size // num_heads
        self.num_heads, self.head_dim, self.head_v_dim = num_heads, head_dim, head_v_dim or head_dim
        self.allow_neg_eigval, self.norm_eps = allow_neg_eigval, norm_eps
        if qk_activation not in ("silu", "relu", "elu_plus_one", None):
            raise ValueError(
                f"qk_activation: want 'silu', 'relu', 'elu_plus_one' or None, got {qk_activation!r}"
            )
        if qk_norm not in ("l2", "sum"):
            raise ValueError(f"qk_norm: want 'l2' or 'sum', got {qk_norm!r}")
        self.qk_activation, self.qk_norm = qk_activation, qk_norm
        keys, values = num_heads * head_dim, num_heads * self.head_v_dim
        self.qkv_proj = base.NormalLinear(hidden_size, 2 * keys + values)
        self.b_proj = base.NormalLinear(hidden_size, num_heads) if use_beta else None
        self.g_proj = base.NormalLinear(hidden_size, values) if use_gate else None
        self.o_proj = base.NormalLinear(values, hidden_size)
        self.conv = None
        if conv_size:
            # one for all of q, k and v; where q and k have another activation, it comes after it
            f = "silu" if qk_activation == "silu" else None
            self.conv = base.ShortConvolution(2 * keys + values, conv_size, conv_bias, f)
        self.norm_weight = nn.Parameter(torch.empty(self.head_v_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.norm_weight)

    def _mix_tokens(self, x: Tensor, call: MixerCall) -> Mixed:
        qkv, conv = self.qkv_proj(x), None
        if self.conv is not None or self.qk_activation == "silu":
            qkv, conv = call.convolved(self.conv, qkv)
        q, k, v = self._heads(qkv)
        beta = self._beta(x)
        rule = fused_recurrent_delta_rule if self.recurrent(x, call.context) else chunk_delta_rule
        o, recurrent = rule(q, k, v, beta, **call.sequence(call.past("recurrent")))
        gate = None if self.g_proj is None else self.g_proj(x)
        o = decoding.output_norm(o, gate, self.norm_weight, self.norm_eps)
        return self.o_proj(o.flatten(-2)), call.new_state(recurrent=recurrent, conv=conv)

    def decode(
        self, x: Tensor, state: State, positions: Tensor | None = None, **options: Any
    ) -> Tensor:
        if self.conv is not None and self.has_fused_step():
            return self._fused_step(x, state, self.conv, **options)
        qkv = self.qkv_proj(x)
        if self.conv is not None or self.qk_activation == "silu":
            qkv = decoding.convolution(self.conv, qkv, state.get("conv"))
        q, k, v = self._heads(qkv)
        o = decoding.recurrence(q, k, v, state, beta=self._beta(x))
        gate = None if self.g_proj is None else self.g_proj(x)
        o = decoding.output_norm(o, gate, self.norm_weight, self.norm_eps)
        return self.o_proj(o.flatten(-2))

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys = self.num_heads * self.head_dim
        qk, v = qkv.split([2 * keys, self.num_heads * self.head_v_dim], dim=-1)
        qk = qk.unflatten(-1, (2 * self.num_heads, self.head_dim))
        if self.qk_activation != "silu":
            qk, v = base.FEATURE_MAPS[self.qk_activation](qk), F.silu(v)
        qk = l2_norm(qk) if self.qk_norm == "l2" else qk / qk.sum(-1, keepdim=True)
        q, k = qk.chunk(2, dim=2)
        return q, k, v.unflatten(-1, (self.num_heads, self.head_v_dim))

    def _beta(self, x: Tensor) -> Tensor:
        """[B, T, H]"""
        if self.b_proj is None:
            beta = x.new_ones(*x.shape[:2], self.num_heads)
        else:
            beta = self.b_proj(x).sigmoid()
        return 2 * beta if self.allow_neg_eigval else beta

    def has_fused_step(self) -> bool:
        usual = self.qk_activation == "silu" and self.qk_norm == "l2"
        return self.conv is not None and usual

    def _fused_step(
        self,
        x: Tensor,
        state: State,
        conv: base.ShortConvolution,
        norm: nn.Module | None = None,
        residual: projections.Residual = None,
    ) -> Any:
        keys = self.num_heads * self.head_dim
        qkv, beta, z = projections.linears(x, (self.qkv_proj, self.b_proj, self.g_proj), norm)
        q, k, v = qkv.split([keys, keys, self.num_heads * self.head_v_dim], dim=-1)
        v = v.unflatten(-1, (self.num_heads, self.head_v_dim))
        y = decoding.mixer(
            q.unflatten(-1, (self.num_heads, self.head_dim)),
            k.unflatten(-1, (self.num_heads, self.head_dim)),
            v,
            state,
            conv,
            beta=x.new_ones(*x.shape[:2], self.num_heads) if beta is None else beta,
            use_beta_sigmoid_in_kernel=beta is not None,
            allow_neg_eigval=self.allow_neg_eigval and beta is not None,
            use_qk_l2norm_in_kernel=True,
            z=None if z is None else z.view_as(v),
            norm_weight=self.norm_weight,
            norm_eps=self.norm_eps,
        )
        return projections.projected(y, self.o_proj, residual)
