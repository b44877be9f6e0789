"""Time mixing of RWKV-7 (Goose)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.common.checks import expect_shape, expect_tensor
from slipstream.kernels.time_mix import rwkv7, token_mix
from slipstream.kernels.time_mix.rwkv7_step import LowRankInputs, low_rank
from slipstream.layers.base import Mixer, assign, expect_first_value, heads_of
from slipstream.layers.call import MixerCall, State
from slipstream.nn import decoding, linear, projections, recompute
from slipstream.nn.consistent import product
from slipstream.ops.activation import squared_relu
from slipstream.ops.rwkv import chunk_rwkv7, fused_recurrent_rwkv7
from slipstream.ops.steps import rwkv7_step, token_mix_step
from slipstream.ops.token_shift import token_shift
from slipstream.runtime import trees
from slipstream.runtime.consistent import consistent_scope, prefix_scope
from slipstream.runtime.context_parallel import ContextParallel

MIX_POWERS = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}
"""How unevenly each mix begins over the channels."""


class RWKV7(Mixer):
    """RWKV-7's time mixing: a generalised delta rule with a decay and a learning rate per channel.

        x_c = x + (shift(x) - x) mu_c                                     c in r, w, k, v, a, g
        r, k, v = x_r W_r, x_k W_k, x_v W_v
        w = -exp(-1/2) sigmoid(w0 + lora_w(x_w));  a = sigmoid(a0 + lora_a(x_a))
        v = v + (v_first - v) sigmoid(v0 + lora_v(x_v))                   but in the first layer
        kk = l2_norm_per_head(k k_k);  k = k (1 + (a - 1) k_a)
        o = rwkv7(r, w, k, v, a=-kk, b=kk a)
        y = (group_norm_per_head(o) + sum(r k r_k) v) lora_g(x_g) W_o

    v_first is the v of the first such layer, which returns it (`output_value`) for the others'
    `first_value`; without `first_value` the layer takes itself for the first.

    Args:
        hidden_size: D.
        num_heads: H; None is D / head_dim.
        head_dim: K = V, 64 in the paper; None is D / H.
        decay_low_rank_dim, a_low_rank_dim, v_low_rank_dim, gate_low_rank_dim: ranks of the four
            lora; None is the paper's rule for this D.
        num_layers: of the model, for the initial mixes; None begins all layers as the first.
        norm_eps: of the group norm, by K.
        mode, layer_idx: as Mixer.

    State: recurrent [N, H, K, K] and shift [N, D].
    Source: Peng et al., RWKV-7 Goose, 2025, section 4 and appendix.
    """

    takes_first_value = True
    leaves_states = True
    forms = chunk_rwkv7, fused_recurrent_rwkv7

    def __init__(
        self,
        hidden_size: int,
        num_heads: int | None = None,
        head_dim: int | None = None,
        decay_low_rank_dim: int | None = None,
        a_low_rank_dim: int | None = None,
        v_low_rank_dim: int | None = None,
        gate_low_rank_dim: int | None = None,
        num_layers: int | None = None,
        mode: str | None = None,
        layer_idx: int = 0,
        *,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__(mode, layer_idx)
        num_heads = heads_of(hidden_size, "hidden_size", num_heads, head_dim)
        self.num_heads, self.head_dim = num_heads, hidden_size // num_heads
        self.num_layers, self.norm_eps = num_layers, norm_eps
        # how deep the layer lies, 0 to 1
        ratio = layer_idx / (num_layers - 1) if num_layers and num_layers > 1 else 0.0
        root = hidden_size**0.5
        rank = _rank(1.8 * root)
        w_bias = partial(_slow_to_fast, power=0.85 + ratio**0.5)
        self.w_lora = Lora(hidden_size, decay_low_rank_dim or rank, torch.tanh, w_bias)
        self.a_lora = Lora(hidden_size, a_low_rank_dim or rank, None, torch.zeros_like)
        self.g_lora = Lora(hidden_size, gate_low_rank_dim or _rank(0.6 * root**1.6), torch.sigmoid)
        self.v_lora = None
        if layer_idx > 0:
            rank = v_low_rank_dim or _rank(1.3 * root)
            self.v_lora = Lora(hidden_size, rank, None, torch.ones_like)
        self.r_proj = UniformLinear(hidden_size, hidden_size, 0.5)
        self.k_proj = UniformLinear(hidden_size, hidden_size, 0.05)
        self.v_proj = UniformLinear(hidden_size, hidden_size, 0.5)
        self.o_proj = UniformLinear(hidden_size, hidden_size, 0.0)
        self.k_k = nn.Parameter(torch.empty(hidden_size))
        self.k_a = nn.Parameter(torch.empty(hidden_size))
        self.r_k = nn.Parameter(torch.empty(self.num_heads, self.head_dim))
        self.norm_weight = nn.Parameter(torch.empty(hidden_size))
        self.norm_bias = nn.Parameter(torch.empty(hidden_size))
        # [6, D], in the order of MIX_POWERS
        self.mix = nn.Parameter(torch.empty(len(MIX_POWERS), hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.k_k, 0.85)
        nn.init.ones_(self.k_a)
        nn.init.zeros_(self.r_k)
        nn.init.ones_(self.norm_weight)
        nn.init.zeros_(self.norm_bias)
        depth = self.layer_idx / self.num_layers if self.num_layers else 0.0
        size = self.mix.shape[1]
        channel = torch.arange(size, dtype=torch.float32, device=self.mix.device)
        mixes = [1 - (channel / size) ** (power * (1 - depth)) for power in MIX_POWERS.values()]
        assign(self.mix, torch.stack(mixes))

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        parents: Tensor | None = None,
        context: ContextParallel | None = None,
        positions: Tensor | None = None,
        state: State | None = None,
        use_cache: bool = False,
        first_value: Tensor | None = None,
        output_value: bool = False,
    ) -> Any:
        """Returns y and state as Mixer does, and with `output_value` v [B, T, D] as a third."""
        packed = trees.context_of(cu_seqlens, parents, context)
        call = MixerCall(*packed, positions, state, use_cache)
        return self._mixed(x, call, first_value=first_value, output_value=output_value)

    def _mix_tokens(
        self,
        x: Tensor,
        call: MixerCall,
        first_value: Tensor | None = None,
        output_value: bool = False,
    ) -> Any:
        expect_first_value(x, first_value, self.num_heads * self.head_dim)
        before, shift = shifted(x, call.past("shift"), call)
        r, v, gate, make = self._project(x, before, first_value, call.cu_seqlens)
        # of every other layer: the terms take six times the memory of x, and of all kernels here
        # those that make them are the slowest except for the recurrence
        elements = 0 if torch.compiler.is_compiling() or self.layer_idx % 2 == 0 else x.numel()
        with recompute.Recompute(make, elements) as made:
            w, k, a, b, v, k_read, v_read = _with_values(made, v)
            o, recurrent = self._scan(x, call, r=r, w=w, k=k, v=v, a=a, b=b)
            y = self._gated(o, r, k_read, v_read, gate)
        y, after = self.o_proj(y), call.new_state(recurrent=recurrent, shift=shift)
        return (y, after, v.flatten(-2)) if output_value else (y, after)

    def decode(
        self,
        x: Tensor,
        state: State,
        positions: Tensor | None = None,
        *,
        first_value: Tensor | None = None,
        output_value: bool = False,
    ) -> Any:
        expect_first_value(x, first_value, self.num_heads * self.head_dim)
        if first_value is None or not output_value:  # the mixed values stay within the launch
            fused = self._fused_step(x, state, first_value)
            if fused is not None:
                y, v = (z[:, None] for z in fused)
                return (self.o_proj(y), v) if output_value else self.o_proj(y)
        r, v, gate, make = self._project(x, state["shift"][:, None], first_value)
        w, k, a, b, v, *_ = _with_values(make(), v)
        state["shift"].copy_(x[:, 0])
        o = decoding.recurrence(r, k, v, state, g=w, a=a, b=b, scale=1.0)
        y = self.o_proj(self._gated(o, r, k, v, gate))
        return (y, v.flatten(-2)) if output_value else y

    def _fused_step(
        self, x: Tensor, state: State, first_value: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        """The input of o_proj and v [N, D], in one launch before the matrix products and two behind
        them; None where that cannot be."""
        v_lora: Any = self.v_lora if first_value is not None else None
        loras: list[Any] = [self.w_lora, self.a_lora, self.g_lora, *([v_lora] if v_lora else [])]
        matrices = [self.r_proj, self.k_proj, self.v_proj]
        if (
            not projections.takes_step(x)
            or (v_lora is None and first_value is not None)
            or not all(map(linear.plain_module, loras))
            or not all(map(_plain_matrix, matrices))
            or any(layer.weight.dtype != x.dtype for layer in matrices)
        ):
            return None
        r, w, k, v, a, g = token_mix_step(x[:, 0], self.mix, state=state["shift"])
        inner: list[Any] = [product(y, lora.down) for y, lora in zip((w, a, g, v), loras)]
        r, k, v = (F.linear(mix, layer.weight) for mix, layer in zip((r, k, v), matrices))
        ups: list[Any] = [lora.up.to(x.dtype) for lora in loras]
        none = [None] * (4 - len(loras))
        w, a, g, *gates = low_rank(LowRankInputs(*inner, *none, *ups, *none))
        options: dict[str, Any] = {}
        if v_lora is not None and first_value is not None:
            options = {"v_gate": gates[0], "v_bias": v_lora.bias, "first_value": first_value[:, 0]}
        y = rwkv7_step(
            r, w, k, v, a, g, state=state["recurrent"], w_bias=self.w_lora.bias,
            a_bias=self.a_lora.bias, k_k=self.k_k, k_a=self.k_a, r_k=self.r_k,
            norm_weight=self.norm_weight, norm_bias=self.norm_bias,
            norm_eps=self.head_dim * self.norm_eps, **options,
        )  # fmt: skip
        return y, v

    def _project(
        self,
        x: Tensor,
        before: Tensor | None,
        first_value: Tensor | None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Callable[[], list[Tensor]]]:
        """r and v [B, T, H, K], the gate [B, T, D], and what recurrence_terms makes."""
        values: list[Lora | nn.Linear] = [self.v_proj]
        if first_value is not None:
            if self.v_lora is None:
                raise ValueError(
                    f"first_value: want None for layer_idx {self.layer_idx}, which has no v_lora; "
                    "only the first RWKV7 layer of a model can have none"
                )
            values.append(self.v_lora)
        # of each mix what it goes through, in the order of MIX_POWERS
        layers = [self.r_proj], [self.w_lora], [self.k_proj], values, [self.a_lora], [self.g_lora]
        loras = (self.w_lora, self.a_lora, None if first_value is None else self.v_lora)
        # with what reads them, whose backward adds up their gradients
        apart = [lora for lora in loras if lora is not None and linear.plain_module(lora)]
        mixes = project_mixes(x, before, self.mix, layers, apart, cu_seqlens)
        r, w, k, v, *v_gate, a, gate = mixes
        biases = [lora.bias if lora in apart else None for lora in loras]
        mixed, heads = (None, None, None), (self.num_heads, self.head_dim)
        if first_value is not None:
            mixed = v, v_gate[0], first_value.to(v.dtype)
        inputs = rwkv7.TermsInputs(w, k, a, *mixed, self.k_k, self.k_a, *biases)
        make = partial(rwkv7.recurrence_terms, inputs, heads[0])
        return r.unflatten(-1, heads), v.unflatten(-1, heads), gate, make

    def _gated(self, o: Tensor, r: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        parameters = self.norm_weight, self.norm_bias, self.r_k
        inputs = rwkv7.OutputInputs(o, r, k, v, gate, *parameters)
        return rwkv7.output(inputs, self.head_dim * self.norm_eps)


def _with_values(made: list[Tensor], v: Tensor) -> list[Tensor]:
    """The results of recurrence_terms; those of a first layer, which have no values, with v."""
    if len(made) > 5:
        return made
    *terms, k = made
    return [*terms, v, k, v]


class RWKV7ChannelMix(nn.Module):
    """RWKV-7's feed-forward part, which sees the token before.

        y = relu((x + (shift(x) - x) mu) W_key)^2 W_value

    Args:
        hidden_size: D.
        intermediate_size: columns of W_key; None is 4 D.
        layer_idx, num_layers: for the initial mix, as RWKV7.

    State: shift [N, D].
    Source: Peng et al., RWKV-7 Goose, 2025, section 4.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int | None = None,
        layer_idx: int = 0,
        num_layers: int | None = None,
    ) -> None:
        super().__init__()
        inner = intermediate_size or 4 * hidden_size
        self.layer_idx, self.num_layers = layer_idx, num_layers
        self.mix = nn.Parameter(torch.empty(hidden_size))
        self.key = UniformLinear(hidden_size, inner, 0.5)
        self.value = UniformLinear(inner, hidden_size, 0.0)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        depth = self.layer_idx / self.num_layers if self.num_layers else 0.0
        size = self.mix.shape[0]
        channel = torch.arange(size, dtype=torch.float32, device=self.mix.device)
        assign(self.mix, 1 - (channel / size) ** (1 - depth) ** 4)

    def forward(
        self,
        x: Tensor,
        state: Tensor | None = None,
        use_cache: bool = False,
        cu_seqlens: Tensor | None = None,
        context: ContextParallel | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """x [B, T, D], the state [N, D] or None -> y [B, T, D] and the next state, if wanted."""
        before, after = shifted(x, state, MixerCall(cu_seqlens, context, use_cache=use_cache))
        layers = [[self.key]]
        (key,) = project_mixes(x, before, self.mix[None], layers, cu_seqlens=cu_seqlens)
        return self.value(F.relu(key).square()), after

    def step(self, x: Tensor, state: Tensor) -> Tensor:
        """The next tokens x [N, T, D] -> y; the state [N, D] is updated in place."""
        # a consistent model's bits, and the states that a prompt leaves, are those of forward
        by_parts = consistent_scope.on or consistent_scope.step or prefix_scope.prefixes is not None
        fused = projections.takes_step(x) and _plain_matrix(self.key)
        if by_parts or not fused or self.key.weight.dtype != x.dtype:
            y, after = self(x, state, True)
            state.copy_(after)
            return y
        (mix,) = token_mix_step(x[:, 0], self.mix[None], state=state)
        return self.value(squared_relu(F.linear(mix, self.key.weight)))[:, None]


class Lora(nn.Module):
    """f(x W_down) W_up + bias, where W_down starts at 0 and so the output as the bias.

    Args:
        size: D. rank: columns of W_down. f: a function of tensors; None is the identity.
        bias: what it starts as, a function of the channels' positions 0 to 1 [D]; None is no bias.
    """

    def __init__(
        self,
        size: int,
        rank: int,
        f: Callable[[Tensor], Tensor] | None,
        bias: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.f, self.initial_bias = f, bias
        self.down = nn.Parameter(torch.empty(size, rank))
        self.up = nn.Parameter(torch.empty(rank, size))
        self.bias = None if bias is None else nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.down)
        up = torch.empty(self.up.shape, dtype=torch.float32, device=self.up.device)
        assign(self.up, nn.init.orthogonal_(up, gain=0.1))
        if self.bias is not None and self.initial_bias is not None:
            size = self.bias.shape[0]
            channel = torch.arange(size, dtype=torch.float32, device=self.bias.device)
            assign(self.bias, self.initial_bias(channel / max(size - 1, 1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.from_inner(product(x, self.down))

    def from_inner(self, inner: Tensor, biased: bool = True) -> Tensor:
        """The result for x W_down, without the bias if it is not wanted."""
        inner = inner if self.f is None else self.f(inner)
        return product(inner, self.up, self.bias if biased else None)


def shifted(
    x: Tensor, state: Tensor | None, call: MixerCall
) -> tuple[Tensor | None, Tensor | None]:
    """The tokens before those of x, None where project_mixes finds them by itself, and the next
    state, if wanted."""
    expect_tensor("x", x)
    if state is None and call.context is None and not call.use_cache:
        return None, None
    step = consistent_scope.step
    if step is not None and state is not None:
        window = step.window(x, state[:, :, None])
        if window is not None:
            before = window.mT.clone()
            return before, window.copy_(x.mT)[:, :, 0]
    if prefix_scope.prefixes is not None and call.use_cache:
        prefix_scope.prefixes.add_last_tokens(x)
    return token_shift(x, **call.sequence(state))


def project_mixes(
    x: Tensor,
    before: Tensor | None,
    mu: Tensor,
    layers: Sequence[Sequence[Lora | nn.Linear]],
    unbiased: Sequence[Lora] = (),
    cu_seqlens: Tensor | None = None,
) -> list[Tensor]:
    """layer(x + (before - x) mu_m) of the layers of each mix m: x, before [B, T, D], mu [M, D];
    before None is x a token earlier in its sequence. unbiased: plain modules whose bias is left
    out."""
    # one channel would broadcast to all of mu
    expect_shape("x", x, (*x.shape[:2], mu.shape[1]))
    flat = [layer for row in layers for layer in row]
    if all(linear.plain_module(x) if isinstance(x, Lora) else _plain_matrix(x) for x in flat):
        weights = [
            [y.down.to(x.dtype).t() if isinstance(y, Lora) else y.weight for y in row]
            for row in layers
        ]
        starts = None
        if before is None and cu_seqlens is not None:
            starts = decoding.sequence_starts(cu_seqlens, x.shape[1])
        found = token_mix.mixed_projections(x, before, mu, weights, starts=starts)
        if found is not None:
            return [
                layer.from_inner(y, layer not in unbiased) if isinstance(layer, Lora) else y
                for layer, y in zip(flat, found)
            ]
    before = token_shift(x, cu_seqlens=cu_seqlens)[0] if before is None else before
    delta = before - x
    mixes = (torch.addcmul(x, delta, row).to(x.dtype) for row in mu)
    return [
        layer.from_inner(product(mix, layer.down), False)
        if isinstance(layer, Lora) and layer in unbiased
        else layer(mix)
        for mix, row in zip(mixes, layers)
        for layer in row
    ]


def _plain_matrix(layer: nn.Module) -> bool:
    """Whether the layer's weight is all there is to it."""
    return linear.plain_linear(layer) and layer.bias is None


class UniformLinear(nn.Linear):
    """A linear layer without a bias whose weight starts uniform, at most `bound` / sqrt(D)."""

    def __init__(self, in_features: int, out_features: int, bound: float) -> None:
        self.bound = bound
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        bound = self.bound * self.in_features**-0.5
        nn.init.uniform_(self.weight, -bound, bound)


def _slow_to_fast(channel: Tensor, power: float) -> Tensor:
    """w0: from a decay over thousands of tokens in channel 0 to a fast one in channel 1."""
    # the half undoes the softplus of the paper's w
    return -6.5 + 5 * channel**power


def _rank(size: float) -> int:
    """The multiple of 32 next to `size`, at least 32."""
    return max(32, round(size / 32) * 32)
