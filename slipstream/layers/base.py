"""Shared by the layers: how a model calls them, when they go token by token, positions of tokens.

Every layer mixes tokens, [B, T, D] to [B, T, D], and is called the same way:

    y, state = layer(x, cu_seqlens=, context=, positions=, state=, use_cache=)

    x           [B, T, D]
    cu_seqlens  int32 or int64 [N+1]: N sequences packed in B = 1; without it N = B
    parents     int32 or int64 [N], the sequence at whose end each goes on, -1 for none (PrefixTree)
    context     a slipstream.parallel.ContextParallel instead of cu_seqlens: x are its rank's tokens
    positions   int64 [1 or B, T], for what looks at them; None counts on from `state`
    state       the dict of an earlier call, N rows in every tensor; None is the start
    use_cache   whether to return the state after the last token, else None

A call in two halves with the state handed over gives what one call gives. The given state is
never changed: what is returned are new tensors. A layer's own part is `_mix_tokens(x, call)`, where
call has these options (call.py).

    y = layer.step(x, state, positions=)

is the same call for tokens [N, T, D] that follow those in `state`, whose tensors are updated in
place, without gradients. A decoding step (T = 1) runs `decode`, which layers override.
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.common import checks
from slipstream.kernels.elementwise.decay_gate import decay_gate
from slipstream.layers.call import Mixed, MixerCall, State
from slipstream.nn import decoding, linear, projections, rounded
from slipstream.nn.conv import ShortConvolution as ShortConvolution
from slipstream.ops import _fp32, _preprocess, norm
from slipstream.runtime import autograd, consistent, context_exchange, context_parallel, trees

MODES = ("chunk", "fused_recurrent", None)
# on one CPU core at B 1, D 256, H 4 token by token is faster up to 16 tokens, chunks from 32 on
RECURRENT_UP_TO = 16
# of a state: how many tokens each sequence has had, its only integers
LENGTH, LENGTH_DTYPES = "length", (torch.int64, torch.int32)

FEATURE_MAPS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda x: x,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "elu_plus_one": lambda x: F.elu(x) + 1,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
"""What queries and keys can go through."""


def expect_inputs(
    x: object, state: object = None, positions: object = None, cu_seqlens: object = None
) -> None:
    """Types, dtypes and shapes that all layers want; the rest is for each one's operators."""
    checks.expect_tensor("x", x)
    assert isinstance(x, Tensor)
    checks.expect_rank("x", x, 3, "[B, T, D]")
    checks.expect_floating({"x": x})
    rows = x.shape[0]
    if cu_seqlens is not None:
        checks.expect_tensor("cu_seqlens", cu_seqlens)
        assert isinstance(cu_seqlens, Tensor)
        rows = cu_seqlens.shape[0] - 1 if cu_seqlens.dim() else rows
    if state is not None:
        expect_state(state, rows)
    if positions is None:
        return
    checks.expect_tensor("positions", positions)
    assert isinstance(positions, Tensor)
    if positions.is_floating_point() or positions.dtype == torch.bool:
        raise TypeError(f"positions: want int64, got {positions.dtype}")
    (B, T, _), found = x.shape, tuple(positions.shape)
    if found not in ((1, T), (B, T)):
        raise ValueError(f"positions: want shape (1, {T}) or ({B}, {T}), got {found}")


def expect_first_value(x: Tensor, first_value: Tensor | None, channels: int) -> None:
    """The values of an earlier layer, [B, T, channels]."""
    if first_value is not None:
        checks.expect_shape("first_value", first_value, (*x.shape[:2], channels))
        checks.expect_floating({"first_value": first_value})
        checks.expect_one_device({"x": x, "first_value": first_value})


def expect_state(state: object, rows: int) -> None:
    """Refuses states for which a call would give other numbers; a call refuses others itself."""
    if not isinstance(state, dict):
        raise TypeError(f"state: want the dict of an earlier call, got {type(state).__name__}")
    for name, tensor in () if torch.compiler.is_compiling() else state.items():
        if not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
            raise TypeError(f"state[{name!r}]: want a torch.Tensor, got {kind}")
        if tensor.shape[:1] != (rows,):
            shape = tuple(tensor.shape)
            raise ValueError(f"state[{name!r}]: want {rows} rows, one a sequence, got {shape}")
        if name == LENGTH:
            if tensor.dtype not in LENGTH_DTYPES:
                raise TypeError(f"state[{name!r}]: want int64, got {tensor.dtype}")
        elif not tensor.is_floating_point() and not _in_8_bits(state, name):
            raise TypeError(f"state[{name!r}]: want a floating dtype, got {tensor.dtype}")


def _in_8_bits(state: State, name: str) -> bool:
    return rounded.is_rounded(state, name) or name.endswith(rounded.SCALE)


def _blame(
    layer: "Mixer", x: Tensor, call: MixerCall, error: Exception, written: bool, options: Any
) -> None:
    """Raises what is wrong with the state that a call failed with, if that is known. Nobody asks
    before a call fails, which costs nothing."""
    state = call.state
    if state is None or isinstance(error, NotImplementedError) or str(error).startswith("state["):
        return
    own = _state_of_a_token(layer, x, options)
    if isinstance(error, KeyError) and error.args and error.args[0] in own.keys() - state.keys():
        text = f"state: want a tensor {error.args[0]!r} too, got {sorted(state)}"
        raise ValueError(text) from error
    for name, tensor in state.items():
        text = f"state[{name!r}]: want"
        if tensor.device != x.device:
            raise ValueError(f"{text} a tensor on {x.device}, got {tensor.device}") from error
        if name == LENGTH or _in_8_bits(state, name):
            continue
        # the layer's own dtype, which autocast may choose
        wanted = [own[name].dtype if name in own else x.dtype]
        wanted += [] if name in layer.token_states else [torch.float32, x.dtype]
        if tensor.dtype not in wanted:
            names = " or ".join(sorted({str(dtype) for dtype in wanted}))
            raise TypeError(f"{text} {names}, got {tensor.dtype}") from error
        if written and any(s == 0 < n - 1 for s, n in zip(tensor.stride(), tensor.shape)):
            text += " memory that a step can write into, got an expanded view"
            raise ValueError(f"{text}; clone it") from error
    for name in layer.token_states if written and isinstance(error, IndexError) else ():
        used, places = int(state[LENGTH].max()), state[name].shape[1]
        if used + x.shape[1] > places:
            text = f"state[{name!r}]: want room for {x.shape[1]} more tokens"
            raise ValueError(f"{text}, got {places} places, {used} of them used") from error
    for name, like in own.items():
        found, shape = state.get(name), [*like.shape]
        if found is None or _in_8_bits(state, name):
            continue
        # of tokens there may be any number
        shape[0] = len(found)
        shape[1:2] = found.shape[1:2] if name in layer.token_states else shape[1:2]
        if [*found.shape] != shape:
            text = f"state[{name!r}]: want shape {tuple(shape)}, got {tuple(found.shape)}"
            raise ValueError(text) from error


def _state_of_a_token(layer: "Mixer", x: Tensor, options: Any) -> State:
    """The state that the layer itself makes of a token; none if that fails too."""
    try:
        first = {n: t[:1, :1] if isinstance(t, Tensor) else t for n, t in options.items()}
        with torch.no_grad():
            after = layer._mix_tokens(x[:1, :1].clone(), MixerCall(use_cache=True), **first)[1]
    except Exception:  # of any kind: it is not the state
        return {}
    return after or {}


class Mixer(nn.Module):
    """A layer that mixes tokens.

    Args:
        mode: "chunk" or "fused_recurrent" to always use that form; None chooses by length.
        layer_idx: where in the model it stands.
    """

    # whether forward takes `first_value`, which the first such layer of a model returns as a third
    # result if called with output_value=True
    takes_first_value = False
    # tensors of the state that grow with the tokens, [N, S, ...]
    token_states: ClassVar[tuple[str, ...]] = ()
    # whether `step` takes drafts (nn/decoding.py) where it is fused
    verifies_drafts: ClassVar[bool] = False
    # whether a call leaves its states on the way (runtime/consistent.py); those of tokens are
    # cut instead
    leaves_states: ClassVar[bool] = False
    # tensors of token_states that a cache may keep in 8 bits
    rounded_keys: ClassVar[tuple[str, ...]] = ()
    # of tensor parallelism (models/tensor_parallel.py): which part of the heads this rank has, and
    # whether the norm of the output is over the channels of all ranks
    head_shard: context_exchange.HeadShard | None = None
    norms_across = False
    norm_weight: Any  # of _add_norm
    # its operator chunkwise, and token by token
    forms: ClassVar[tuple[Callable[..., tuple[Tensor, Any]], ...]] = ()

    def __init__(self, mode: str | None = None, layer_idx: int = 0) -> None:
        super().__init__()
        if mode not in MODES:
            raise ValueError(f"mode: want one of {MODES}, got {mode!r}")
        if not isinstance(layer_idx, int) or layer_idx < 0:
            raise ValueError(f"layer_idx: want an int, at least 0, got {layer_idx!r}")
        self.mode, self.layer_idx = mode, layer_idx

    def _add_norm(self, channels: int | None) -> None:
        """Adds the last parameter: norm_weight [channels], or none."""
        weight = None if channels is None else nn.Parameter(torch.empty(channels))
        self.register_parameter("norm_weight", weight)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises the parameters that this module owns itself; its submodules have the same
        method for theirs."""
        if (weight := getattr(self, "norm_weight", None)) is not None:
            nn.init.ones_(weight)

    def recurrent(self, x: Tensor, context: context_parallel.ContextParallel | None = None) -> bool:
        """Whether to run token by token: if mode says so, or x is short and needs no gradient; not
        where bits have to be those of chunks."""
        if consistent.consistent_scope.on:
            return False
        if self.mode is not None:
            return self.mode == "fused_recurrent"
        if context is not None or torch.is_grad_enabled():
            return False
        # of any number of tokens, a graph would hold for a few of them alone
        return x.shape[1] <= (1 if torch.compiler.is_exporting() else RECURRENT_UP_TO)

    def _scan(self, x: Tensor, call: MixerCall, *terms: Any, **options: Any) -> tuple[Tensor, Any]:
        """One of the operator's forms, from the call's state on if options have none."""
        if "initial_state" not in options:
            options["initial_state"] = call.past("recurrent")
        chunk, recurrent = self.forms
        # no index: while a length is symbolic, so is the answer
        form = recurrent if self.recurrent(x, call.context) else chunk
        return form(*terms, **{**call.sequence(None), **options})

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        parents: Tensor | None = None,
        context: context_parallel.ContextParallel | None = None,
        positions: Tensor | None = None,
        state: State | None = None,
        use_cache: bool = False,
    ) -> Mixed:
        packed = trees.context_of(cu_seqlens, parents, context)
        return self._mixed(x, MixerCall(*packed, positions, state, use_cache))

    def _mixed(self, x: Tensor, call: MixerCall, **options: Any) -> Any:
        """`_mix_tokens`; what no layer takes is refused before anything else looks at it."""
        expect_inputs(x, call.state, call.positions, call.cu_seqlens)
        if call.state is None or torch.compiler.is_compiling():
            return self._mix_tokens(x, call, **options)
        try:
            return self._mix_tokens(x, call, **options)
        except Exception as error:
            _blame(self, x, call, error, False, options)
            raise

    def _mix_tokens(self, x: Tensor, call: MixerCall) -> Mixed:
        """Computes what forward returns: each layer's own part."""
        raise NotImplementedError

    def step(
        self, x: Tensor, state: State, *, positions: Tensor | None = None, **options: Any
    ) -> Any:
        """The next T tokens of each of N sequences; `state` is updated in place.

        Args:
            x: [N, T, D].
            state: as forward returned it, N rows. Tensors of a number for every token (k, v and
                latent of softmax layers) have room for T more; on CUDA it may be the next call
                that raises where they have not.
            positions: as forward. options: of RWKV7.forward, without effect on others.

        Returns:
            y [N, T, D]; with output_value=True also v, as forward.
        """
        if state is None:
            raise TypeError("state: want the dict of an earlier call, got None")
        expect_inputs(x, state, positions)
        try:
            if linear.is_hooked(self) or linear.is_hooked(getattr(self, "conv", None)):
                return self._call_in_place(x, state, positions, **options)
            return self._advance(x, state, positions, **options)
        except Exception as error:
            _blame(self, x, MixerCall(positions=positions, state=state), error, True, options)
            raise

    def _advance(
        self, x: Tensor, state: State, positions: Tensor | None = None, **options: Any
    ) -> Any:
        """`step` where nobody waits for a call of this module or of its convolution."""
        short = (x.shape[1] == 1 and self.mode != "chunk") or decoding.verifies()
        if short:
            return self.decode(x, state, positions, **options)
        return self._call_in_place(x, state, positions, **options)

    def decode(
        self, x: Tensor, state: State, positions: Tensor | None = None, **options: Any
    ) -> Any:
        """`step` of one token, T = 1."""
        return self._call_in_place(x, state, positions, **options)

    def fuses(self, x: Tensor) -> bool:
        """Whether `step` of x [N, 1, D] takes `norm` and `residual` too, and returns
        residual + the step of norm(x): parts of its linear layers' launches."""
        return (
            self.mode != "chunk"
            and projections.fuses(x)
            and not linear.is_hooked(self)
            and not linear.is_hooked(getattr(self, "conv", None))
            and self.has_fused_step()
        )

    def has_fused_step(self) -> bool:
        """Whether `decode` takes `norm` and `residual` too."""
        return False

    @property
    def first_head(self) -> int:
        """The first head of this rank, which has num_heads of them."""
        shard: Any = self.head_shard
        heads: Any = getattr(self, "num_heads", 0)
        return 0 if shard is None else shard.rank * heads

    def _norm_of_all_heads(
        self,
        o: Tensor,
        gate: Tensor | None = None,
        residual: Tensor | None = None,
        *,
        norm_before_gate: bool = True,
        group_size: int | None = None,
    ) -> Tensor:
        """rms_norm, or with a gate rms_norm_gated with silu, of o + residual [B, T, channels], by
        norm_weight and norm_eps; over the channels of all ranks where these have a part of the
        heads each."""
        own: Any = self
        weight, eps, shard = self.norm_weight, own.norm_eps, self.head_shard
        if shard is None or not self.norms_across:
            if gate is None:
                return norm.rms_norm(o, weight, residual=residual, eps=eps)
            order: dict[str, Any] = {"norm_before_gate": norm_before_gate, "group_size": group_size}
            return norm.rms_norm_gated(o, gate, weight, eps=eps, residual=residual, **order)
        o = o if residual is None else o + residual
        y = o if gate is None or norm_before_gate else _fp32.widen(o) * F.silu(_fp32.widen(gate))
        y = context_exchange.norm_of_parts(y, eps, shard)
        y = y if weight is None else y * weight
        y = y * F.silu(_fp32.widen(gate)) if gate is not None and norm_before_gate else y
        return y.to(o.dtype)

    def _call_in_place(
        self, x: Tensor, state: State, positions: Tensor | None, **options: Any
    ) -> Any:
        start = rounded.wide(state, x.dtype)
        y, after, *value = self(x, positions=positions, state=start, use_cache=True, **options)
        if start is not state:
            after = rounded.rounded(after, rounded.key_dtype_of(state), self.rounded_keys)
        for name, tensor in after.items():
            of_tokens = name.removesuffix(rounded.SCALE) in self.token_states
            used = tensor[:, : state[name].shape[1]] if of_tokens else tensor
            state[name].copy_(used)
        return (y, *value) if value else y


def heads_of(channels: int, named: str, num_heads: int | None, head_dim: int | None) -> int:
    """The number of heads. Without num_heads and head_dim, heads have 64 channels.

    Args:
        named: what errors call the channels.
    """
    if num_heads is None:
        head_dim = head_dim or 64
        expect_divisor("head_dim", head_dim, named, channels)
        num_heads = channels // head_dim
    expect_divisor("num_heads", num_heads, named, channels)
    if head_dim is not None and num_heads * head_dim != channels:
        raise ValueError(
            f"head_dim: want {named} / num_heads = {channels // num_heads}, got {head_dim}"
        )
    return num_heads


def heads_of_inner(inner: int, num_heads: int | None, head_dim: int | None, n_groups: int) -> int:
    """Mamba's heads, of expand * hidden_size channels."""
    num_heads = heads_of(inner, "expand * hidden_size", num_heads, head_dim)
    expect_divisor("n_groups", n_groups, "num_heads", num_heads)
    return num_heads


def expect_feature_map(name: str | None) -> None:
    if name not in FEATURE_MAPS:
        known = ", ".join(str(x) for x in FEATURE_MAPS)
        raise ValueError(f"feature_map: want one of {known}, got {name!r}")


def log_sigmoid_decay(layer: nn.Linear, x: Tensor, heads: int, normalizer: float) -> Tensor:
    """logsigmoid(layer(x)) / normalizer as [B, T, heads, channels], in float32 at least."""
    narrow = x.dtype.itemsize == 2
    usual = (
        x.shape[1] > 1
        and normalizer > 0
        and not autograd.by_operation()
        and checks.autocast_dtype(x) is None
    )
    if not (narrow and usual and linear.plain_linear(layer) and layer.weight.dtype == x.dtype):
        raw = _fp32.widen(layer(x)).unflatten(-1, (heads, -1))
        return F.logsigmoid(raw) / normalizer
    # -softplus(-y) / normalizer: the decay gate's kernel, once y's sign is the weight's
    raw = F.linear(x, -layer.weight).unflatten(-1, (heads, -1))
    A_log = _preprocess.per_head(raw, _log_rate, normalizer)
    return decay_gate(raw, A_log, None if layer.bias is None else -layer.bias, None)


def _log_rate(heads: Tensor, normalizer: float) -> Tensor:
    return torch.full_like(heads, -math.log(normalizer))


def expect_gate_activation(activation: str) -> None:
    if activation not in ("silu", "sigmoid"):
        raise ValueError(f"gate_activation: want 'silu' or 'sigmoid', got {activation!r}")


class XavierLinear(nn.Linear):
    """A linear layer whose weight starts as RetNet's and GLA's, and whose bias starts at 0.

    Args:
        gain: of the weight; a small one keeps the state of the first steps small.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, gain: float = 2**-2.5
    ) -> None:
        self.gain = gain
        super().__init__(in_features, out_features, bias)

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.weight, self.gain)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class NormalLinear(nn.Linear):
    """A linear layer whose weight starts as Qwen3-Next's, Kimi Linear's and most softmax models',
    and whose bias, if it has one, starts at 0."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


def reset_decay(A_log: Tensor, dt_bias: Tensor) -> None:
    """Initialises the parameters of a decay -exp(A_log) softplus(x + dt_bias) as Mamba-2 does.

    exp(A_log) is uniform in [1, 16], the step softplus(dt_bias) log-uniform in [1e-3, 1e-1].
    """
    step = torch.empty(dt_bias.shape, dtype=torch.float32, device=dt_bias.device)
    step = step.uniform_(math.log(1e-3), math.log(1e-1)).exp()
    assign(dt_bias, step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
    rate = torch.empty(A_log.shape, dtype=torch.float32, device=A_log.device).uniform_(1, 16)
    assign(A_log, rate.log())


@torch.no_grad()
def assign(parameter: Tensor, value: Tensor) -> None:
    """Copies an initial value, unless transformers has loaded the parameter from a checkpoint.

    The functions of nn.init need no such care: transformers guards them itself.
    """
    if getattr(parameter, "_is_hf_initialized", False):
        return
    if isinstance(getattr(parameter, "placements", None), tuple):  # a DTensor, as of FSDP2
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(parameter, DTensor)
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
    parameter.copy_(value)


def expect_divisor(name: str, value: int, of_name: str, of: int) -> None:
    if value < 1 or of % value:
        raise ValueError(f"{name}: want a divisor of {of_name} = {of}, got {value}")
