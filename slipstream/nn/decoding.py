"""One token for each of N sequences, on states that are updated in place: parts of layers' decode.

On CUDA, and where torch.compile traces, the operators run. On a CPU in float32 or float64 (host.py)
the same formulas run as few calls of torch, without the operators' checks, which the first tokens
of the sequences have passed.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling

from slipstream.common.checks import plain_int
from slipstream.nn import rounded
from slipstream.nn.conv import ShortConvolution
from slipstream.nn.host import host_rms_norm, inverse_norm, on_host
from slipstream.nn.linear import Embedding, is_hooked
from slipstream.ops.conv import short_convolution_update
from slipstream.ops.mixer_step import mixer_step
from slipstream.ops.norm import l2_norm, rms_norm, rms_norm_gated
from slipstream.ops.recurrent_step import recurrent_step
from slipstream.ops.rotary import rotary_embedding, rotary_tables

# arguments of mixer_step with a row for each token, beside q, k and v
OF_TOKENS = ("g", "beta", "write", "z")
GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


def embedded(table: nn.Module, input_ids: Tensor) -> Tensor:
    """table(input_ids); on a CPU by torch, which refuses an id outside of a table too."""
    host = input_ids.device.type == "cpu" and not torch.is_grad_enabled()
    if type(table) is Embedding and host and not is_hooked(table) and not is_compiling():
        return F.embedding(input_ids, table.weight)
    return table(input_ids)


def convolution(conv: ShortConvolution | None, x: Tensor, state: Tensor | None) -> Tensor:
    """x [N, 1, D], state [N, D, W] -> y [N, 1, D]; without a convolution silu alone"""
    if conv is None or state is None:
        return F.silu(x)
    if not on_host(x):
        return short_convolution_update(
            x, state, conv.weight, conv.bias, activation=conv.activation
        )
    if state.shape[-1] != conv.width:  # a sum of other widths may be taken all the same
        raise ValueError(f"state['conv']: want a width of {conv.width}, got {state.shape[-1]}")
    state.copy_(torch.cat((state[..., 1:], x.mT), -1))
    y = (state * conv.weight).sum(-1)
    if conv.bias is not None:
        y = y + conv.bias
    return (y if conv.activation is None else F.silu(y))[:, None]


def mixer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Mapping[str, Tensor],
    conv: ShortConvolution | None,
    **options: Any,
) -> Tensor:
    """A layer's step between its projections in one launch, where that is not on_host.

    q, k [N, 1, H, K] and v [N, 1, HV, V] as projected, options as ops.mixer_step has them ->
    [N, 1, HV V]
    """
    if conv is not None:
        options |= {"conv_state": state["conv"], "conv_weight": conv.weight}
        options |= {"conv_bias": conv.bias, "conv_activation": conv.activation}
    drafts = _STEP.drafts
    if drafts is not None:
        tokens = {"q": q, "k": k, "v": v}
        tokens |= {name: options.pop(name) for name in OF_TOKENS if options.get(name) is not None}
        return drafts.mixer(tokens, **rounded.of_step(state), **options).flatten(-2)
    return mixer_step(q, k, v, **rounded.of_step(state), **options).flatten(-2)


def unit(x: Tensor, eps: float = 1e-6) -> Tensor:
    """As ops.l2_norm."""
    if not on_host(x):
        return l2_norm(x, eps=eps)
    return x * inverse_norm(x, eps)


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Mapping[str, Tensor],
    *,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    a: Tensor | None = None,
    b: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """As ops.recurrent_step: q, k, a, b [N, 1, H, K], v [N, 1, HV, V], the recurrent state
    [N, HV, K, V] of a layer's, g [N, 1, HV] or [N, 1, HV, K], beta [N, 1, HV] -> o [N, 1, HV, V]"""
    S = state[rounded.RECURRENT]
    if not on_host(q) or S.dtype != q.dtype or not S.is_contiguous():
        options: dict[str, Any] = {"g": g, "beta": beta, "a": a, "b": b, "scale": scale}
        return recurrent_step(q, k, v, **rounded.of_step(state), **options)
    N, HV, K, V = S.shape
    S = S.view(N * HV, K, V)

    def rows(x: Tensor) -> Tensor:
        if x.shape[0] == x.shape[2] == 1:
            return x[0].expand(HV, 1, -1)
        x = x if x.shape[2] == HV else x.repeat_interleave(plain_int(HV // x.shape[2]), 2)
        return x.reshape(N * HV, 1, x.shape[-1])

    q, k, v = rows(q), rows(k), rows(v)
    read = None if a is None else torch.bmm(rows(a), S)
    if g is not None:
        S.mul_(g.to(S.dtype).exp().reshape(N * HV, K if g.dim() == 4 else 1, 1))
    if beta is not None:
        v = torch.baddbmm(v, k, S, alpha=-1) * beta.reshape(N * HV, 1, 1)
    S.addcmul_(k.mT, v)
    if read is not None and b is not None:
        S.addcmul_(rows(b).mT, read)
    o = torch.baddbmm(v, q, S, beta=0, alpha=K**-0.5 if scale is None else scale)
    return o.view(N, 1, HV, V)


def norm(x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool = False) -> Tensor:
    """As ops.rms_norm."""
    if not on_host(x):
        return rms_norm(x, weight, eps=eps, zero_centered=zero_centered)
    weight = 1 + weight if zero_centered and weight is not None else weight
    return host_rms_norm(x, weight, eps)


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, activation: str = "silu"
) -> Tensor:
    """As ops.rms_norm_gated: the norm first, then the gate."""
    if not on_host(x):
        return rms_norm_gated(x, gate, weight, eps=eps, activation=activation)
    return host_rms_norm(x, weight, eps) * GATES[activation](gate)


def output_norm(
    o: Tensor, gate: Tensor | None, weight: Tensor | None, eps: float, activation: str = "silu"
) -> Tensor:
    """The norm of each head of o [B, T, H, V], by f(gate) [B, T, H V] if there is a gate."""
    if gate is None:
        return norm(o, weight, eps)
    return gated_norm(o, gate.view_as(o), weight, eps, activation)


def norm_of_gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int) -> Tensor:
    """As ops.rms_norm_gated with the gate first, of each group alone."""
    if not on_host(x):
        options = {"norm_before_gate": False, "group_size": group_size}
        return rms_norm_gated(x, gate, weight, eps=eps, **options)  # pyright: ignore[reportArgumentType]
    x = x * F.silu(gate)
    if group_size == x.shape[-1]:
        return host_rms_norm(x, weight, eps)
    groups = host_rms_norm(x.unflatten(-1, (-1, group_size)), None, eps)
    return groups.flatten(-2) * weight


class Drafts:
    """The last call's tokens, kept until it is known how many of them were right.

    pending: how many there are, the size of the largest call. accepted: [1], how many were right.
    """

    def __init__(self, pending: int) -> None:
        self.pending = pending
        self.accepted: Tensor | None = None
        self._of_layer: dict[int, dict[str, Tensor]] = {}

    def are_of(self, states: Iterable[Tensor]) -> bool:
        """Whether all are of these states."""
        return self._of_layer.keys() <= {x.data_ptr() for x in states}

    def mixer(self, tokens: dict[str, Tensor], *, state: Tensor, **options: Any) -> Tensor:
        """mixer_step of tokens that follow those accepted. tokens: tensors [N, T, ...] by name."""
        drafts = self._of_layer.setdefault(state.data_ptr(), {})
        both = {}
        for name, x in tokens.items():
            if name not in drafts:
                with torch.inference_mode(False):  # it outlives the caller's
                    drafts[name] = x.new_zeros(x.shape[0], self.pending, *x.shape[2:])
            both[name] = torch.cat([drafts[name], x], 1)
        assert self.accepted is not None
        accepted = self.accepted.expand(state.shape[0])
        options |= {"num_pending": self.pending, "num_accepted": accepted}
        y = mixer_step(**both, state=state, **options)
        for name, x in tokens.items():
            drafts[name][:, : x.shape[1]].copy_(x)
        return y


class _Step(threading.local):
    def __init__(self) -> None:
        # in each thread's own dictionary from the start: torch.compile guards on its being there
        self.tables: dict[Any, Any] | None = None
        self.drafts: Drafts | None = None


_STEP = _Step()


@contextmanager
def step(drafts: Drafts | None = None) -> Iterator[None]:
    """A step of a model's layers, within which tables of the same positions are made once.

    With drafts, of a few tokens that are not yet known to be right."""
    before = _STEP.tables, _STEP.drafts
    _STEP.tables, _STEP.drafts = {}, drafts
    try:
        yield
    finally:
        _STEP.tables, _STEP.drafts = before


@contextmanager
def shared_tables() -> Iterator[None]:
    """A forward of a model's layers, within which tables of the same positions are made once."""
    before = _STEP.tables
    _STEP.tables = {}
    try:
        yield
    finally:
        _STEP.tables = before


def _known_tables() -> dict[Any, Any] | None:
    """Nothing where a layer is compiled: its graph would hold what other layers' found, and be
    compiled anew in each place; a graph makes equal tables once anyway. And nothing where a mode
    looks at each operation: selective checkpointing wants the same ones again, of a layer alone."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return None
    return _STEP.tables


def first_positions(tokens: int, device: torch.device) -> Tensor:
    """Positions 0, 1, ... [1, T], made once on the device of the tables."""
    known = _known_tables()
    if known is None:
        return torch.arange(tokens, device=device)[None]
    key = (tokens, device)
    if key not in known:
        known[key] = torch.arange(tokens, device=device)[None]
    return known[key]


def verifies() -> bool:
    """Whether the step that runs is one of drafts."""
    return _STEP.drafts is not None


def tables(positions: Tensor, dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As ops.rotary_tables; positions must not change within a step."""
    known = _known_tables()
    if known is None:
        return rotary_tables(positions, dim, base=base, dtype=dtype)
    key = (id(positions), dim, base, dtype)
    if key not in known:
        # with the positions, lest others get their id
        made = rotary_tables(positions, dim, base=base, dtype=dtype)
        known[key] = positions, made
    return known[key][1]


def rotary(x: Tensor, positions: Tensor, dim: int, base: float) -> Tensor:
    """x [N, 1, H, K], positions [1 or N, 1] -> the first `dim` features of x turned"""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = tables(positions, dim, base, wide)
    if not on_host(x):
        return rotary_embedding(x, cos, sin)
    cos, sin = cos[:, :, None], sin[:, :, None]
    first, second = x[..., : dim // 2], x[..., dim // 2 : dim]
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned if dim == x.shape[-1] else (*turned, x[..., dim:]), -1)


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, window: int | None
) -> Tensor | None:
    """q [N, 1, H, K] on the first lengths [N] of the keys [N, S, HKV, K]; None off the host."""
    if not on_host(q):
        return None
    at = torch.arange(k.shape[1], device=k.device)
    seen = at < lengths[:, None]
    if window is not None:
        seen &= at >= lengths[:, None] - window
    o = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=seen[:, None, None],
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return o.transpose(1, 2)


def decay_gate(
    x: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None = None
) -> Tensor:
    """As ops._preprocess.delta_gate: x [N, 1, HV] or [N, 1, HV, K] -> log decays"""
    x = x if x.dtype == torch.float64 else x.float()
    x = x + dt_bias.to(x.dtype).view(x.shape[2:])
    rate = A_log.to(x.dtype).exp()
    rate = rate if x.dim() == 3 else rate[:, None]
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(rate * x)
    return -rate * F.softplus(x)
