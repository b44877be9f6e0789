"""Parts of layers' decode: one token for each of N sequences, on states updated in place."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from slipstream.kernels.elementwise.decay_gate import plain as gate_in_torch
from slipstream.nn.conv import ShortConvolution
from slipstream.ops import norm, steps
from slipstream.ops.conv import short_convolution_update
from slipstream.ops.rotary import packed_positions as positions_of
from slipstream.ops.rotary import rotary_embedding, rotary_tables
from slipstream.runtime import backends

Made = TypeVar("Made")

# arguments of mixer_step with a row for each token, beside q, k and v
OF_TOKENS = ("g", "beta", "write", "z")


def convolution(conv: ShortConvolution | None, x: Tensor, state: Tensor | None) -> Tensor:
    """x [N, 1, D], state [N, D, W] -> y [N, 1, D]; without a convolution silu alone"""
    if conv is None or state is None:
        return torch.nn.functional.silu(x)
    return short_convolution_update(x, state, conv.weight, conv.bias, activation=conv.activation)


def mixer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Mapping[str, Tensor],
    conv: ShortConvolution | None,
    **options: Any,
) -> Tensor:
    """A layer's step between its projections in one launch.

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
        return drafts.mixer(tokens, state=state["recurrent"], **options).flatten(-2)
    return steps.mixer_step(q, k, v, state=state["recurrent"], **options).flatten(-2)


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
    options: dict[str, Any] = {"g": g, "beta": beta, "a": a, "b": b, "scale": scale}
    return steps.recurrent_step(q, k, v, state=state["recurrent"], **options)


def output_norm(
    o: Tensor, gate: Tensor | None, weight: Tensor | None, eps: float, activation: str = "silu"
) -> Tensor:
    """The norm of each head of o [B, T, H, V], by f(gate) [B, T, H V] if there is a gate."""
    if gate is None:
        return norm.rms_norm(o, weight, eps=eps)
    return norm.rms_norm_gated(o, gate.view_as(o), weight, eps=eps, activation=activation)


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
        y = steps.mixer_step(**both, state=state, **options)
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


def shared_tables() -> AbstractContextManager:
    """A forward of a model's layers, within which tables of the same positions are made once."""
    return nullcontext() if torch.compiler.is_compiling() else _with_tables({})


def own_tables() -> AbstractContextManager:
    """A call within such a forward that makes its tables itself, and leaves none."""
    return _with_tables(None)


@contextmanager
def _with_tables(tables: dict[Any, Any] | None) -> Iterator[None]:
    before = _STEP.tables
    _STEP.tables = tables
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


def _once(kind: tuple, of: Any, make: Callable[[], Made]) -> Made:
    """make(), or what it made in this forward for the same kind and the same `of`."""
    known = _known_tables()
    if known is None:
        return make()
    key = (id(of), *kind)
    if key not in known:
        known[key] = of, make()  # with it, lest others get its id
    return known[key][1]


def first_positions(tokens: int, device: torch.device) -> Tensor:
    """Positions 0, 1, ... [1, T], made once on the device of the tables."""
    return _once((tokens, device), None, lambda: torch.arange(tokens, device=device)[None])


def packed_positions(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """As ops.packed_positions; offsets must not change within a forward."""
    return _once((tokens,), cu_seqlens, lambda: positions_of(cu_seqlens, tokens))


def sequence_starts(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """uint8 [T], 1 where a packed sequence begins; offsets must not change within a forward."""
    return _once(
        ("starts", tokens),
        cu_seqlens,
        lambda: (packed_positions(cu_seqlens, tokens)[0] == 0).byte(),
    )


def verifies() -> bool:
    """Whether the step that runs is one of drafts."""
    return _STEP.drafts is not None


def tables(positions: Tensor, dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As ops.rotary_tables, in float32 for 16 bits; positions must not change within a step."""
    dtype = torch.float64 if dtype == torch.float64 else torch.float32
    kind = dim, base, dtype
    return _once(kind, positions, lambda: rotary_tables(positions, dim, base=base, dtype=dtype))


def first_tables(x: Tensor, dim: int, base: float) -> tuple[Tensor, Tensor]:
    """`tables` of positions 0, 1, ... of x [B, T, ...], of kept ones where these are not long and
    no graph or tracer would own them."""
    tokens, most = x.shape[1], 1 << 14
    captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
    if captured or not backends.is_plain_call(x) or tokens > most:
        return tables(first_positions(tokens, x.device), dim, base, x.dtype)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = 1 << 12 if tokens <= 1 << 12 else most
    cos, sin = _lasting_tables(rows, x.device, dim, base, dtype)
    return cos[:, :tokens], sin[:, :tokens]


@lru_cache(64)
def _lasting_tables(
    rows: int, device: torch.device, dim: int, base: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False), torch._C.DisableTorchFunction():
        at = torch.arange(rows, device=device)[None]
        made = rotary_tables(at, dim, base=base, dtype=dtype)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # any stream may read them
    return made


def rotary(x: Tensor, positions: Tensor, dim: int, base: float) -> Tensor:
    """x [N, 1, H, K], positions [1 or N, 1] -> the first `dim` features of x turned"""
    return rotary_embedding(x, *tables(positions, dim, base, x.dtype))


def decay_gate(
    x: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None = None
) -> Tensor:
    """As ops._preprocess.delta_gate: x [N, 1, HV] or [N, 1, HV, K] -> log decays"""
    return gate_in_torch(x, A_log, dt_bias, lower_bound)
