"""The functions that the linear layers of transformers' models call, on Slipstream's operators.

Each function here has the arguments of transformers' own function of that purpose, by its names,
and its results. FUNCTIONS says under which name transformers looks it up in fla, causal_conv1d or
mamba_ssm. An argument that transformers passes on to every layer (use_cache, position_ids) is in
kwargs and not read, apart from those that say where packed sequences begin.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from slipstream.integrations import serving
from slipstream.ops import conv, delta_rule, kda, simple_gla, steps
from slipstream.ops._fp32 import widen
from slipstream.ops.causal_conv1d import causal_conv1d_fn as conv_fn
from slipstream.ops.causal_conv1d import causal_conv1d_update as conv_update
from slipstream.ops.mamba import selective_scan
from slipstream.runtime import trees
from slipstream.runtime.context_parallel import ContextParallel

# of a packed row of prefix trees, as TRL's trainer has it
TREE_FIELDS = ("tree_cu_seqlens_q", "tree_kv_index", "tree_cu_seqlens_k")


class Now:
    """What runs, as far as functions are not told.

    of_model, of_layer: the sequences packed in the rows of a model and one of its layers, [B, T].
    real_of_model, real_of_layer: where there is no padding, if there is any and layers ask, [B, T].
    mixer, cache: the module that calls the functions, and the cache that it was called with; scans:
        how often it has called selective_scan_fn.
    """

    def __init__(self) -> None:
        self.of_model: Tensor | None = None
        self.of_layer: Tensor | None = None
        self.real_of_model: Tensor | None = None
        self.real_of_layer: Tensor | None = None
        self.mixer: Any = None
        self.cache: Any = None
        self.scans = 0

    def rows(self) -> tuple[Tensor | None, ...]:
        return self.of_model, self.of_layer, self.real_of_model, self.real_of_layer

    def put(self, *rows: Tensor | None) -> None:
        self.of_model, self.of_layer, self.real_of_model, self.real_of_layer = rows


class Running(threading.local):
    """now: of this thread. An object of its own: where a graph of torch.compile breaks, what it has
    set of a threading.local itself is forgotten."""

    def __init__(self) -> None:
        self.now = Now()


running = Running()


def captured(function: Callable) -> Callable:
    """The function with the sequences of this moment, whenever and in whichever thread it runs."""
    now = running.now.rows()

    def with_them(*args: Any, **kwargs: Any) -> Any:
        outer = running.now.rows()
        running.now.put(*now)
        try:
            return function(*args, **kwargs)
        finally:
            running.now.put(*outer)

    return with_them


def context_of(kwargs: dict[str, Any]) -> ContextParallel | None:
    """A context, or the tree that TRL's fields describe."""
    fields = [kwargs.get(name) for name in TREE_FIELDS]
    if any(x is None for x in fields):
        return kwargs.get("context")
    return trees.eagerly(trees.tree_of_paths, *fields)


def sequences_of(kwargs: dict[str, Any], B: int, T: int) -> Tensor | None:
    """Which of the packed sequences each token belongs to, int [B, T], or None if none is packed.

    seq_idx says so itself; cu_seqlens and cu_seq_lens_q are offsets into the B rows laid one behind
    the other. Without any of them they are the layer's. A context has those of its rank itself.
    """
    if context_of(kwargs) is not None:
        return None
    if (seq_idx := kwargs.get("seq_idx")) is not None:
        return seq_idx
    cuts = kwargs.get("cu_seqlens")
    cuts = kwargs.get("cu_seq_lens_q") if cuts is None else cuts
    if cuts is None:
        return running.now.of_layer
    token = torch.arange(B * T, device=cuts.device, dtype=cuts.dtype)
    seq_idx = torch.searchsorted(cuts[1:].contiguous(), token, right=True).view(B, T)
    return seq_idx.int()


def is_unreadable(x: Tensor) -> bool:
    """The host cannot wait for its numbers: torch.compile traces, or a graph is being captured."""
    if torch.compiler.is_compiling() or x.is_meta:
        return True
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def sequences_of_positions(
    positions: Any, real: Tensor | None = None, counted: bool = False
) -> Tensor | None:
    """seq_idx [B, T] of position_ids [B, T], or of tables of them [R, B, T] (text_table); None if
    they are one sequence a row, or cannot be looked at. The host waits for them.

    Args:
        real: bool [B, T], where there is no padding, if there is any.
        counted: a sequence begins wherever positions do not count on, as in transformers' own
            masks; else where they do not rise.

    Raises:
        ValueError: tables that differ, of several sequences.
    """
    if type(positions) is not Tensor or positions.dim() not in (2, 3) or positions.shape[-1] < 2:
        return None
    if is_unreadable(positions):
        return None
    table = text_table(positions)
    if table is None:
        # within an image a table may stay or fall back, but not all of them
        begins = (positions.diff() < 0).all(0)
    else:
        begins = table.diff() != 1 if counted else table.diff() <= 0
    if real is not None:
        begins = begins & real[:, 1:] & real[:, :-1]
    if not bool(begins.any()):
        return None
    if table is None:
        raise ValueError(
            "position_ids: want seq_idx or cu_seq_lens_q beside tables that differ and fall back "
            f"together, which do not say where sequences begin, got {tuple(positions.shape)}"
        )
    return F.pad(begins.cumsum(1), (1, 0)).int()


def text_table(positions: Tensor) -> Tensor | None:
    """The positions of the text, [B, T], among tables [R, B, T] of models that also have positions
    of images: the first of four, or any of equal ones; None of others."""
    if positions.dim() == 2:
        return positions
    first = positions[0]
    return first if len(positions) == 4 or bool((positions == first).all()) else None


def own_sequences(
    module: Any, q: Tensor, offsets: Tensor | None, seq_idx: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Offsets and seq_idx as far as a layer's tokens are meant, q [B, H, T, D]. Models hand those
    of the text on to the layers of images too, whose configurations have no vocabulary."""
    config = getattr(module, "config", None)
    if config is None or hasattr(config, "vocab_size"):
        return offsets, seq_idx
    B, _, T, _ = q.shape
    if offsets is not None and not is_unreadable(offsets) and int(offsets[-1]) != B * T:
        offsets = None
    return offsets, None if seq_idx is None or seq_idx.shape != (B, T) else seq_idx


def offsets_of(seq_idx: Tensor) -> Tensor:
    """Offsets of the sequences in the rows of seq_idx [B, T] laid one behind the other.

    They are kept with the tensor: all layers ask, and the host waits for their number.
    """
    if is_unreadable(seq_idx) or seq_idx.is_inference():
        return _find_offsets(seq_idx)
    cached = getattr(seq_idx, "slipstream_offsets", None)
    if cached is None or cached[0] != seq_idx._version:
        cached = seq_idx._version, _find_offsets(seq_idx)
        seq_idx.slipstream_offsets = cached  # pyright: ignore[reportAttributeAccessIssue]
    return cached[1]


def _find_offsets(seq_idx: Tensor) -> Tensor:
    starts = torch.ones_like(seq_idx, dtype=torch.bool)
    starts[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return offsets_of_starts(starts.flatten())


def offsets_of_starts(starts: Tensor) -> Tensor:
    """Offsets of sequences that begin where `starts`, bool [tokens], says so; as many as tokens
    where the host cannot know their number, the last ones empty."""
    total = starts.shape[0]
    if is_unreadable(starts):
        places = torch.arange(total, device=starts.device)
        begins = torch.where(starts, places, total).sort().values
    else:
        begins = starts.nonzero().flatten()
    return torch.cat([begins, begins.new_full((1,), total)])


def _run(
    op: Callable,
    tensors: tuple[Tensor, ...],
    initial_state: Tensor | None,
    output_final_state: bool,
    seq_idx: Tensor | None,
    context: ContextParallel | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """op on tensors [B, T, ...]; the states are those before and after a row."""
    if context is not None:
        options["context"] = context
    options["output_final_state"] = output_final_state
    if initial_state is not None:
        initial_state = widen(initial_state)
    if seq_idx is None:
        return op(*tensors, initial_state=initial_state, **options)
    B, T = tensors[0].shape[:2]
    cuts = offsets_of(seq_idx)
    rows = torch.arange(B + 1, device=cuts.device) * T
    if initial_state is not None:
        first = torch.searchsorted(cuts[:-1].contiguous(), rows[:-1])
        before = initial_state.new_zeros(cuts.shape[0] - 1, *initial_state.shape[1:])
        initial_state = before.index_copy(0, first, initial_state)
    flat = (x.reshape(1, B * T, *x.shape[2:]) for x in tensors)
    o, state = op(*flat, initial_state=initial_state, cu_seqlens=cuts, **options)
    if state is not None:
        state = state[torch.searchsorted(cuts, rows[1:]) - 1]
    return o.reshape(B, T, *o.shape[2:]), state


def _delta(op: Callable) -> Callable:
    """A delta rule with gates: query, key [B, T, H, K], value [B, T, HV, V] -> o and the state."""

    def delta_rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        seq_idx = sequences_of(kwargs | {"cu_seqlens": cu_seqlens}, *query.shape[:2])
        tensors = (query, key.to(query.dtype), value.to(query.dtype), widen(g), beta)
        norm, context = use_qk_l2norm_in_kernel, context_of(kwargs)
        apart = seq_idx is not None or context is not None or initial_state is None
        if query.shape[1] == 1 and not (apart or torch.is_grad_enabled() or is_compiling()):
            q, k, v, g, beta = tensors
            options = {"state": initial_state, "use_qk_l2norm_in_kernel": norm}
            # in place: the cache that it is of would have the new one copied there
            return steps.recurrent_step(q, k, v, g=g, beta=beta, **options), initial_state
        return _run(
            op, tensors, initial_state, output_final_state, seq_idx, context,
            use_qk_l2norm_in_kernel=norm,
        )  # fmt: skip

    return delta_rule


def causal_conv1d_fn(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """hidden_states [B, D, T], weight [D, W] -> [B, D, T]

    With a cache transformers puts earlier inputs before those of the call, so that T is more than
    the tokens that seq_idx or offsets speak of.
    """
    x = hidden_states.to(weight.dtype)
    B, D, T = x.shape
    context = context_of(kwargs)
    if context is not None:
        y, _ = conv.short_convolution(x.mT, weight, bias, activation=activation, context=context)
        return y.mT.to(hidden_states.dtype)
    seq_idx = sequences_of(kwargs, B, T)
    if seq_idx is None:
        return conv_fn(x, weight, bias, activation=activation).to(hidden_states.dtype)
    if earlier := T - seq_idx.shape[1]:
        before = seq_idx[:, :1].expand(-1, earlier)
        seq_idx = torch.cat([before, seq_idx], 1)
    rows = x.mT.reshape(1, B * T, D).mT
    y = conv_fn(rows, weight, bias, activation=activation, cu_seqlens=offsets_of(seq_idx))
    return y.mT.reshape(B, T, D).mT.to(hidden_states.dtype)


def causal_conv1d_update(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """The next token hidden_states [B, D, 1] or [B, D]; conv_state [B, D, S] moves on in place."""
    x = hidden_states.to(weight.dtype)
    one = x.dim() == 3 and x.shape[2] == 1 and conv_state.shape[1:] == weight.shape
    update = conv.short_convolution_update if one else conv_update
    y = update(x[..., 0] if one else x, conv_state, weight, bias, activation=activation)
    return (y[..., None] if one else y).to(hidden_states.dtype)


def mamba_chunk_scan_combined(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    z: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """Mamba-2: hidden_states [B, T, H, P], dt [B, T, H], A [H], B, C [B, T, G, N], z as
    hidden_states, D [H] or [H, P] -> [B, T, H, P], and the states [B, H, P, N]."""
    seq_idx = sequences_of(kwargs, *hidden_states.shape[:2])
    given = initial_states, return_final_states, seq_idx, context_of(kwargs)
    y, state = serving.mamba2(
        lambda *terms, **options: _run(simple_gla.chunk_simple_gla, terms, *given, **options),
        *(hidden_states, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit),
    )
    return (y, state) if return_final_states else y


def selective_state_update(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    **kwargs: Any,
) -> Tensor:
    """The next token of Mamba-2, hidden_states [B, H, P]; state [B, H, P, N] moves on in place. The
    mixer's limit of dt, which transformers passes with a prompt alone, holds for it too.

    dt [B, H, P], A [H, P, N], dt_bias and D [H, P] are a number a head, expanded; B, C [B, G, N].
    If they are a number a channel, or there are no heads as in Mamba-1, plain torch does it.
    """
    x, heads = hidden_states, (dt, dt_bias, D)
    a_channel = x.dim() != 3 or any(A.stride()[1:]) or not dt_softplus
    if not a_channel and all(t is None or not t.stride(-1) for t in heads):
        bias, D = (None if t is None else t[..., 0] for t in heads[1:])
        limit: Any = getattr(running.now.mixer, "time_step_limit", None)
        q, k, v, g = (t[:, None] for t in (C.to(x.dtype), B, x, dt[..., 0]))
        v_first = state.stride(-1) == 1  # a cache lies as the states of a prompt did
        options = {"state": state if v_first else state.mT, "state_v_first": v_first, "scale": 1.0}
        options |= {"g": g, "A": A[:, 0, 0], "dt_bias": bias, "dt_limit": limit, "D": D}
        z = None if z is None else z[:, None]
        return steps.mixer_step(q, k, v, z=z, dt_scales_v=True, **options)[:, 0]
    # of which a launch of ours would keep the host as busy as all of torch's
    u, step = widen(x).flatten(1), widen(dt).flatten(1)
    step = step if dt_bias is None else step + dt_bias.flatten()
    step = F.softplus(step) if dt_softplus else step
    n = u.shape[1]
    B, C = (t[:, None] if t.dim() < 3 else t.repeat_interleave(n // t.shape[1], 1) for t in (B, C))
    decayed = widen(state).flatten(1, -2) * torch.exp(step[..., None] * widen(A).flatten(0, -2))
    final = torch.addcmul(decayed, (step * u)[..., None], widen(B))
    state.copy_(final.detach().view(state.shape))
    y = (final * C).sum(-1)
    y = y if D is None else y + u * D.flatten()
    y = y if z is None else y * F.silu(widen(z).flatten(1))
    return y.view(x.shape).to(x.dtype)


def selective_scan_fn(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    use_mambapy: bool = False,
    use_associative_scan: bool = False,
    **kwargs: Any,
) -> Any:
    """Mamba-1: hidden_states, dt, z [B, D, T], A [D, N], B, C [B, N, T] or [B, G, N, T], D [D]
    -> [B, D, T], and the last states [B, D, N]. They go on from those of the mixer's cache, which
    transformers does not pass."""
    if A.is_complex() or B.dim() < 3 or C.dim() < 3:
        raise NotImplementedError("A, B, C: want a real A, and B and C for each token")
    u = hidden_states.mT
    B, C = (x.movedim(-1, 1) for x in (B, C))
    tensors = (u, dt.mT, B, C) if z is None else (u, dt.mT, B, C, z.mT)

    def scan(
        u: Tensor, delta: Tensor, B: Tensor, C: Tensor, z: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        return selective_scan(u, delta, A, B, C, D, z, delta_bias, delta_softplus, **options)

    seq_idx = sequences_of(kwargs, *u.shape[:2])
    given = _state_before_scan(), return_last_state, seq_idx, context_of(kwargs)
    y, state = _run(scan, tensors, *given)
    return (y.mT, state) if return_last_state else y.mT


def _state_before_scan() -> Tensor | None:
    """[B, D, N] of the cache of the mixer that runs; a mixer with heads scans one after another."""
    if running.now.cache is None:
        return None
    index = running.now.scans
    running.now.scans += 1
    state = running.now.cache.layers[running.now.mixer.layer_idx].recurrent_states[0]
    return state if state is None or state.dim() == 3 else state[:, index]


def not_fused(*args: Any, **kwargs: Any) -> None:
    """A whole layer in one function: transformers then calls the functions of its parts."""


FUNCTIONS: dict[str, Callable] = {
    "causal_conv1d_fn": causal_conv1d_fn,
    "causal_conv1d_update": causal_conv1d_update,
    "chunk_gated_delta_rule": _delta(delta_rule.chunk_gated_delta_rule),
    "fused_recurrent_gated_delta_rule": _delta(
        lambda q, k, v, g, beta, **options: delta_rule.fused_recurrent_gated_delta_rule(
            q, k, v, g, beta=beta, **options
        )
    ),
    "chunk_kda": _delta(kda.chunk_kda),
    "fused_recurrent_kda": _delta(kda.fused_recurrent_kda),
    "mamba_chunk_scan_combined": mamba_chunk_scan_combined,
    "mamba_split_conv1d_scan_combined": not_fused,
    "mamba_inner_fn": not_fused,
    "selective_scan_fn": selective_scan_fn,
    "selective_state_update": selective_state_update,
}
