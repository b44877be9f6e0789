"""The table of building blocks around attention: how each is called and what it should give."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.attention.reference import attention_reference, visibility
from slipstream.kernels.conv.reference import conv_reference
from slipstream.kernels.loss.reference import LossInputs, rows_reference
from slipstream.kernels.norm.reference import layer_reference, rms_reference
from slipstream.kernels.pointwise.rotary import rotary_reference
from slipstream.kernels.pointwise.token_shift import shift_reference
from slipstream.ops.activation import geglu, glu_linear, sigmoid_glu, squared_relu, swiglu
from slipstream.ops.attention import attention
from slipstream.ops.conv import short_convolution, short_convolution_update
from slipstream.ops.embedding import embedding
from slipstream.ops.loss import cross_entropy, linear_cross_entropy
from slipstream.ops.norm import group_norm, l2_norm, layer_norm, rms_norm, rms_norm_gated
from slipstream.ops.rotary import rotary_embedding, rotary_tables
from slipstream.ops.token_shift import token_shift

Args = dict[str, Any]


@dataclass(frozen=True)
class Block:
    """call and reference take what `inputs(T, D)` makes, in any floating dtype.

    fixed: names of inputs whose shape does not grow with T.
    """

    name: str
    call: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: Callable[[int, int], Args]
    options: Args = field(default_factory=dict)

    def __call__(self, args: Args) -> list[Tensor]:
        return flat(self.call(**args, **self.options))

    def want(self, args: Args) -> list[Tensor]:
        return flat(self.reference(**args, **self.options))


def flat(outputs: Any) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else [x for x in outputs if x is not None]


def cast(args: Args, dtype: torch.dtype) -> Args:
    return {
        name: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in args.items()
    }


def leaves(args: Args) -> tuple[Args, list[Tensor]]:
    """Detached copies, the floating ones as leaves of autograd."""
    out, inputs = {}, []
    for name, x in args.items():
        if isinstance(x, Tensor) and x.is_floating_point() and name not in ("cos", "sin"):
            x = x.detach().clone().requires_grad_()
            inputs.append(x)
        out[name] = x
    return out, inputs


def offsets(T: int) -> Tensor:
    """Sequences of T // 3, none, one and the rest of T tokens."""
    third, one = T // 3, min(T - T // 3, 1)
    return torch.tensor([0, third, third, third + one, T], dtype=torch.int32)


def _norm(T: int, D: int) -> Args:
    return {"x": torch.randn(2, T, D), "weight": torch.rand(D) + 0.5, "bias": torch.randn(D)}


def _rms(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return rms_reference(x, weight, 1e-5) + bias


def _residual(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, **_: Any) -> Any:
    h = x + residual
    return rms_reference(h, weight + 1, 1e-5) + bias, h


def _groups(x: Tensor, weight: Tensor, bias: Tensor, num_groups: int, rms: bool = False) -> Tensor:
    groups = x.unflatten(-1, (num_groups, -1))
    y = rms_reference(groups, None, 1e-5) if rms else layer_reference(groups, None, None, 1e-5)
    return y.flatten(-2) * weight + bias


def _gated(x: Tensor, gate: Tensor, weight: Tensor, **options: Any) -> Tensor:
    f = torch.sigmoid if options.get("activation") == "sigmoid" else F.silu
    if not options.get("norm_before_gate", True):
        x = x * f(gate)
    size = options.get("group_size") or x.shape[-1]
    y = rms_reference(x.unflatten(-1, (-1, size)), None, 1e-5).flatten(-2) * weight
    return y * f(gate) if options.get("norm_before_gate", True) else y


def _conv(T: int, D: int) -> Args:
    return {
        "x": torch.randn(2, T, D),
        "weight": torch.randn(D, 4),
        "bias": torch.randn(D),
        "initial_state": torch.randn(2, D, 4),
        "residual": torch.randn(2, T, D),
    }


def _packed_conv(T: int, D: int) -> Args:
    return {
        "x": torch.randn(1, T, D),
        "weight": torch.randn(D, 3),
        "initial_state": torch.randn(4, D, 3),
        "cu_seqlens": offsets(T),
    }


def _conv_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    residual: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    y, state = conv_reference(x, weight, initial_state, cu_seqlens)
    if bias is not None:
        y = F.silu(y + bias)
    return (y if residual is None else y + residual), state


def _update(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return short_convolution_update(x, state.clone(), weight, bias, activation="silu")


def _update_reference(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> Any:
    y, _ = conv_reference(x[:, None], weight, state, None)
    return F.silu(y + bias)[:, 0]


def _rotary(T: int, D: int) -> Args:
    cos, sin = rotary_tables(torch.arange(T + 5), D - 2)
    return {
        "x": torch.randn(2, T, 3, D),
        "cos": cos,
        "sin": sin,
        "positions": torch.randint(0, T + 5, (2, T)),
    }


def _rotary_reference(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool
) -> Tensor:
    cos, sin = (table[positions][:, :, None] for table in (cos, sin))
    return rotary_reference(x, cos, sin, interleaved)


def _loss_inputs(T: int, D: int) -> Args:
    target = torch.randint(0, 11, (T,))
    if T > 2:
        target[1] = -100
    return {"logits": 3 * torch.randn(T, 11), "target": target}


def _linear_loss_inputs(T: int, D: int) -> Args:
    return {
        "hidden": torch.randn(T, D),
        "weight": torch.randn(11, D),
        "target": _loss_inputs(T, D)["target"],
        "bias": torch.randn(11),
    }


LOSS = {"label_smoothing": 0.1, "softcap": 4.0, "z_loss": 1e-2, "logit_scale": 0.7}


def _loss(logits: Tensor, target: Tensor, reduction: str = "mean", **options: Any) -> Tensor:
    rows = rows_reference(logits, target, LossInputs(**options))
    if reduction == "none":
        return rows
    return rows.sum() / (target != -100).sum().clamp(min=1) if reduction == "mean" else rows.sum()


def _linear_loss(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor, **o: Any) -> Tensor:
    return _loss(F.linear(hidden, weight, bias), target, **o)


def _attention(T: int, D: int, S: int | None = None, batch: int = 2) -> Args:
    S = T if S is None else S
    return {
        "q": torch.randn(batch, T, 4, D),
        "k": torch.randn(batch, S, 2, D),
        "v": torch.randn(batch, S, 2, D + 2),
    }


def _attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    window_size: int | None = None,
    cu_seqlens: Tensor | None = None,
    key_lengths: Tensor | None = None,
) -> Tensor:
    """Sequence by sequence."""
    if cu_seqlens is not None:
        bounds = list(zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:]))
        parts = [(q[:, a:b], k[:, a:b], v[:, a:b]) for a, b in bounds]
        if key_lengths is not None:
            parts = [(q[:, a:b], k[n : n + 1], v[n : n + 1]) for n, (a, b) in enumerate(bounds)]
        joined = 1
    else:
        parts = [(q[n : n + 1], k[n : n + 1], v[n : n + 1]) for n in range(q.shape[0])]
        joined = 0
    right = 0 if causal else -1 if window_size is None else window_size - 1
    window = (-1 if window_size is None else window_size - 1, right)
    outputs = []
    for n, (qn, kn, vn) in enumerate(parts):
        if key_lengths is not None:
            kn, vn = kn[:, : key_lengths[n]], vn[:, : key_lengths[n]]
        S, T = kn.shape[1], qn.shape[1]
        seen = visibility(torch.arange(S - T, S), torch.arange(S), window, None)
        if S == 0:
            outputs.append(vn.new_zeros(1, T, q.shape[2], v.shape[3]))
            continue
        outputs.append(attention_reference(qn, kn, vn, q.shape[-1] ** -0.5, seen[None]))
    return torch.cat(outputs, dim=joined)


def _packed_cache(T: int, D: int) -> Args:
    lengths = offsets(T).diff() + torch.tensor([2, 3, 0, 1])
    args = _attention(T, D, int(lengths.max()), 4)
    return {
        **args,
        "q": args["q"].flatten(0, 1)[None, :T],
        "cu_seqlens": offsets(T),
        "key_lengths": lengths,
    }


def _pair(T: int, D: int) -> Args:
    return {"gate": torch.randn(2, T, D), "up": torch.randn(2, T, D)}


def _pair_and_layer(T: int, D: int) -> Args:
    return {**_pair(T, D), "weight": torch.randn(7, D) / D**0.5, "bias": torch.randn(7)}


def _glu_linear(
    gate: Tensor,
    up: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "",
) -> Tensor:
    if up is None:
        return F.linear(F.relu(gate).square(), weight, bias)
    f = F.gelu(gate, approximate="tanh") if activation == "geglu" else F.silu(gate)
    return F.linear(f * up, weight, bias)


BLOCKS = [
    Block("rms_norm", rms_norm, _rms, _norm),
    Block("rms_norm-bare", rms_norm, lambda x: rms_reference(x, None, 1e-5),
          lambda T, D: {"x": torch.randn(2, T, D)}),
    Block("rms_norm-residual", rms_norm, _residual,
          lambda T, D: {**_norm(T, D), "residual": torch.randn(2, T, D)},
          {"prenorm": True, "zero_centered": True}),
    Block("layer_norm", layer_norm, lambda **a: layer_reference(**a, eps=1e-5), _norm),
    Block("l2_norm", l2_norm, lambda x: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt(),
          lambda T, D: {"x": torch.randn(2, T, D)}),
    Block("group_norm", group_norm, _groups, _norm, {"num_groups": 2}),
    Block("group_norm-rms", group_norm, _groups, _norm, {"num_groups": 2, "rms": True}),
    *[
        Block(f"rms_norm_gated-{name}", rms_norm_gated, _gated,
              lambda T, D: {"x": torch.randn(2, T, D), "gate": torch.randn(2, T, D),
                            "weight": torch.rand(D)}, options)
        for name, options in {
            "silu": {},
            "sigmoid": {"activation": "sigmoid"},
            "mamba2": {"norm_before_gate": False, "group_size": 3},
        }.items()
    ],
    Block("short_convolution", short_convolution, _conv_reference, _conv,
          {"activation": "silu", "output_final_state": True}),
    Block("short_convolution-packed", short_convolution, _conv_reference, _packed_conv,
          {"output_final_state": True}),
    Block("short_convolution-stateless", lambda **a: short_convolution(**a)[0],
          lambda **a: _conv_reference(**a)[0],
          lambda T, D: {"x": torch.randn(1, T, D), "weight": torch.randn(D, 2),
                        "cu_seqlens": offsets(T)}),
    Block("short_convolution_update", _update, _update_reference,
          lambda T, D: {"x": torch.randn(T, D), "state": torch.randn(T, D, 4),
                        "weight": torch.randn(D, 4), "bias": torch.randn(D)}),
    Block("rotary", rotary_embedding, _rotary_reference, _rotary, {"interleaved": False}),
    Block("rotary-interleaved", rotary_embedding, _rotary_reference, _rotary,
          {"interleaved": True}),
    Block("token_shift", token_shift,
          lambda x, initial_state, **_: shift_reference(x, initial_state, None),
          lambda T, D: {"x": torch.randn(2, T, D), "initial_state": torch.randn(2, D)},
          {"output_final_state": True}),
    Block("token_shift-packed", token_shift,
          lambda x, initial_state, cu_seqlens, **_: shift_reference(x, initial_state, cu_seqlens),
          lambda T, D: {"x": torch.randn(1, T, D), "initial_state": torch.randn(4, D),
                        "cu_seqlens": offsets(T)},
          {"output_final_state": True}),
    Block("swiglu", swiglu, lambda gate, up: gate * torch.sigmoid(gate) * up, _pair),
    Block("geglu", geglu, lambda gate, up: F.gelu(gate, approximate="tanh") * up, _pair),
    Block("sigmoid_glu", sigmoid_glu, lambda gate, up: up / (1 + torch.exp(-gate)), _pair),
    Block("squared_relu", squared_relu, lambda x: x * x * (x > 0),
          lambda T, D: {"x": torch.randn(2, T, D)}),
    Block("glu_linear", glu_linear, _glu_linear, _pair_and_layer),
    Block("glu_linear-geglu", glu_linear, _glu_linear, _pair_and_layer, {"activation": "geglu"}),
    Block("glu_linear-squared_relu", glu_linear, _glu_linear,
          lambda T, D: {"gate": torch.randn(2, T, D), "up": None, "weight": torch.randn(7, D)},
          {"activation": "squared_relu"}),
    Block("embedding", embedding, lambda input_ids, weight: weight[input_ids],
          lambda T, D: {"input_ids": torch.randint(0, 11, (2, T)), "weight": torch.randn(11, D)}),
    *[Block(f"cross_entropy-{r}", cross_entropy, _loss, _loss_inputs, {**LOSS, "reduction": r})
      for r in ("mean", "none")],
    Block("cross_entropy-plain", cross_entropy, _loss, _loss_inputs),
    *[Block(f"linear_cross_entropy-{r}", linear_cross_entropy, _linear_loss, _linear_loss_inputs,
            {**LOSS, "reduction": r}) for r in ("mean", "sum", "none")],
    Block("linear_cross_entropy-plain", linear_cross_entropy, _linear_loss, _linear_loss_inputs),
    Block("attention", attention, _attention_reference, _attention),
    Block("attention-full", attention, _attention_reference,
          lambda T, D: _attention(T, D, T + 3), {"causal": False}),
    Block("attention-longer", attention, _attention_reference,
          lambda T, D: _attention(T, D, T + 3)),
    Block("attention-window", attention, _attention_reference,
          lambda T, D: _attention(T, D, T + 1), {"window_size": 3}),
    Block("attention-lengths", attention, _attention_reference,
          lambda T, D: {**_attention(T, D, T + 3), "key_lengths": torch.tensor([T + 2, T])}),
    Block("attention-packed", attention, _attention_reference,
          lambda T, D: {**_attention(T, D, batch=1), "cu_seqlens": offsets(T)}),
    Block("attention-packed-cache", attention, _attention_reference, _packed_cache,
          {"window_size": 4}),
]  # fmt: skip
