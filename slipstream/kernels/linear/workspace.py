"""Long calls one slice after the other, so that kernels leave each other a bounded workspace.

A call may take 512 MiB of workspace, or half of the bytes of its arguments, results and gradients
if that is more. A call that would take more is cut into slices: a few rows of the batch, or a time
slice of a single row. The state is passed from slice to slice; backward, its gradient is, and each
slice starts from the state at its border, a checkpoint that forward left.

A time slice of packed sequences is a packed call itself (varlen_slices.py), in which most of
the N have no tokens. Their states stay where they are, [N, HV, K, V], changed in place by the
slices that have tokens of theirs; one sequence crosses a border, and a checkpoint is its state
alone. Chunks begin where a slice does, so that results are rounded otherwise than those of the
sequence alone. Each slice has room for N chunks more and programs for all N: sequences of few
tokens on average are not cut.

Workspace in bytes a token and value head, at E bytes an element, W the power of two of K, C tokens
a chunk:

    gla, rwkv6          forward 2 W E + C E: q and k with their decays, scores
    delta, one gate     backward V E + 2 K V E / C: w, S and dS' of chunks; R, C E, is whole.
                        In one kernel as sm90/delta/bwd_schedule.py says
    kda, dplr           with 1 or 2 for D: forward (2 + D) W E + D C E + 4 V: q, w, b and k, scores
                        and u; backward 2 D C E + V E + K V E / C: scores, x and S; and the larger
                        of D W E + 4 V: b and k, u; and of D W E + V E + K V E / C, with y and dS'.
                        q and w are where their gradients go later. Of few heads forward up to
                        4 K (K + V) / (8 C) more: two states of segments, of 8 chunks at least

No transition and at most one gate a token need next to nothing. A forward pass with a transition
whose backward pass follows is not cut: it only leaves checkpoints.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.common.checks import plain_int
from slipstream.kernels.linear.backend import BackendCapabilities, SavedWY
from slipstream.kernels.linear.inputs import DIFFERENTIABLE, TOKEN_TERMS, LinearInputs
from slipstream.kernels.linear.segments import num_fused_bwd, uses_fused_bwd
from slipstream.kernels.linear.varlen_slices import VarlenSlices, make_varlen_slices
from slipstream.runtime.backends import sm90_unsupported

NO_OUTPUTS: Mapping[str, Tensor] = MappingProxyType({})  # no memory is given for results
# What kernels may leave for each other: so many bytes, or so many percent of arguments, results
# and gradients, whichever is more. 512 MiB and 50 are promised: slices end where a chunk does, and
# small tensors are not counted.
MIN_WORKSPACE_BYTES = 480 << 20
MAX_WORKSPACE_PCT = 48
# Of backward: states at the borders of slices, and gradients of states.
BORDER_STATES = 4
MAX_SLICES = 8
# Tokens of a slice, at least, for each of the packed sequences.
MIN_SLICE_TOKENS = 256
# Tokens a chunk, at most, and those of slices long enough to be cut into segments.
CHUNK, LONG_SLICE_TOKENS = 64, 1024
# Value heads, at least, of a group with an exchange of its own, of up to 64 columns and of more:
# with fewer, scans leave a GPU idle: kda in groups of 6 takes 1.20 of its time on two H100s.
MIN_GROUP_HEADS = 10, 8
# Programs of a scan, one for 64 columns of V of a head, that keep a GPU busy.
MIN_ACTIVE_PROGRAMS = 128
# Those of the packed sequences that have tokens in a slice, at least: five slices of kda at 4x8192
# with 32 heads take a tenth longer than two on an H200.
MIN_PACKED_PROGRAMS = 48


class BatchTimeSlice(NamedTuple):
    rows: slice
    tokens: slice


WHOLE = BatchTimeSlice(slice(None), slice(None))


def num_slices(terms: LinearInputs, impl: str) -> int:
    """How many slices of tokens a forward pass is cut into whose backward pass follows."""
    if impl.startswith(("eager", "reference")) or not _can_slice(terms):
        return 1
    if impl.startswith("sm90") and bwd_unsliced(terms):
        return 1
    return _num_slices(terms, True)


def bwd_unsliced(terms: LinearInputs) -> bool:
    """Whether sm90/delta/bwd_fused_launch.py takes a call, and cuts it itself."""
    return num_fused_bwd(terms) > 1 or uses_fused_bwd(terms)


def fwd_unsliced(terms: LinearInputs, impl: str) -> bool:
    """Whether a forward pass is cut where no backward pass follows, and only there."""
    if impl.startswith(("eager", "reference")) or terms.transition == "none":
        return False
    return _workspace_bytes(terms, False) > 0


def fwd_slices(terms: LinearInputs, count: int = 0) -> list[BatchTimeSlice]:
    """count: at least so many, if any are wanted; 0 where no backward pass follows."""
    if count == 1 and terms.transition != "none":
        return [WHOLE]
    return _make_slices(terms, count if count > 1 else _num_slices(terms, False))


def bwd_slices(terms: LinearInputs, checkpoints: Tensor | None) -> list[BatchTimeSlice]:
    """checkpoints: of forward, which went in one slice more."""
    if terms.q.shape[0] > 1:
        return _make_slices(terms, _num_slices(terms, True))
    return _make_slices(terms, 1 if checkpoints is None else checkpoints.shape[0] + 1)


def forward(
    run: Callable[..., Any],
    terms: LinearInputs,
    scale: float,
    slices: Sequence[BatchTimeSlice],
    dtype: torch.dtype | None = None,
    count: int = 0,
    out: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, ...]:
    """o, the final state, and the states between `count` slices, of checkpoints_shape; then what
    run leaves for backward, slice after slice.

    Args:
        run: called as run(terms, scale, out=(o, final)), of one slice; it may return a SavedWY
            after o and the final state.
        dtype: of o; q's if None.
        count: 0 or 1 where the states are not wanted.
        out: memory for o and the final state.
    """
    o = reuse_or_empty(out[0], terms.v.shape, dtype or terms.v.dtype, terms.v.device)
    final = reuse_or_empty(out[1], terms.state_shape, terms.dtype, terms.v.device)
    checkpoints = final.new_empty(checkpoints_shape(terms, count))
    state, saved = terms.initial_state, []
    goes_on, borders = slices[0].tokens.stop is not None, _borders(terms, slices)
    if borders is not None and state is not None:
        state = final.copy_(state)
    elif goes_on and state is None:
        state = final.zero_()
    for i, (rows, tokens) in enumerate(slices):
        leaves_state = count > 1 and i < len(slices) - 1
        after = checkpoints[i] if leaves_state and borders is None else final[rows]
        entry = None if state is None else state[rows]
        inputs = slice_inputs(terms, rows, tokens, entry)
        if borders is not None:
            inputs = inputs._replace(cu_seqlens=borders.local[i])
        results = run(inputs, scale, out=(o[rows, tokens], after))
        saved += results[2] or () if len(results) > 2 else ()
        if borders is not None and leaves_state:
            borders.save_carry(final, checkpoints[i], i + 1)
        elif goes_on:
            state = after
    return o, final, checkpoints, *saved


def backward(
    run: Callable[..., Any],
    terms: LinearInputs,
    dout: Tensor | None,
    dfinal: Tensor | None,
    scale: float,
    slices: Sequence[BatchTimeSlice],
    checkpoints: Tensor | None,
    saved: Sequence[SavedWY] = (),
) -> dict[str, Tensor]:
    """Gradients by the name of the term.

    Args:
        run: called as run(terms, dout, dfinal, scale, out=grads), of one slice; what it leaves
            elsewhere is copied to where grads say.
        checkpoints: of forward, where the slices are of tokens.
        saved: what forward left, which run takes of each slice; of packed sequences one a slice.
    """
    named = [(name, getattr(terms, name)) for name in DIFFERENTIABLE]
    given = {name: x for name, x in named if x is not None}
    # one number a token is made in float32, and rounded once
    small = [n for n, x in given.items() if x.dim() == 3 and x.dtype != torch.float32]
    grads = {
        name: x.new_empty(x.shape, dtype=torch.float32 if name in small else None)
        for name, x in given.items()
    }
    in_time, borders = slices[0].tokens.stop is not None, _borders(terms, slices)
    state, dstate, begins = terms.initial_state, grads.get("initial_state"), None
    if in_time:
        wide: dict[str, Any] = {"dtype": torch.float32, "device": terms.q.device}
        if dstate is None or dstate.dtype != torch.float32:  # it is rounded once
            dstate = torch.empty(terms.state_shape, **wide)
        if borders is not None:
            begins = None if state is None else state.contiguous()
            entry = torch.empty(terms.state_shape, **wide)
            state = entry.zero_() if begins is None else entry.copy_(begins)
            dfinal = dstate.zero_() if dfinal is None else dstate.copy_(dfinal)
        elif state is None or dfinal is None:
            zeros = torch.zeros(terms.state_shape, **wide)
            state = zeros if state is None else state
            dfinal = zeros if dfinal is None else dfinal
    for i, (rows, tokens) in reversed(list(enumerate(slices))):
        entry = None if state is None else state[rows]
        inputs = slice_inputs(terms, rows, tokens, entry)
        if borders is not None:
            assert state is not None and checkpoints is not None
            borders.load_carry(state, begins, checkpoints, i)
            inputs = inputs._replace(cu_seqlens=borders.local[i])
        elif in_time and i:
            assert checkpoints is not None
            inputs = inputs._replace(initial_state=checkpoints[i - 1])
        grads_slice = {n: x[rows, tokens] for n, x in grads.items() if n in TOKEN_TERMS}
        if dstate is not None:
            grads_slice["initial_state"] = dstate[rows]
        do = None if dout is None else dout[rows, tokens]
        after = None if dfinal is None else dfinal[rows]
        more = {}
        if saved and in_time:
            more["saved"] = _of_tokens(saved[0], tokens) if borders is None else saved[i]
        copy_into(run(inputs, do, after, scale, out=grads_slice, **more), grads_slice)
        if in_time:
            dfinal = dstate
    if dstate is not None and "initial_state" in grads and dstate is not grads["initial_state"]:
        grads["initial_state"].copy_(dstate)
    return grads | {name: grads[name].to(given[name].dtype) for name in small}


def iter_slices(
    terms: LinearInputs, o: Tensor, final: Tensor, checkpoints: Tensor | None
) -> Iterator[tuple[slice, LinearInputs, Tensor, Tensor]]:
    """Slices of tokens, of a pass that leaves the states between them: the tokens, the terms with
    the state before them, and where o and the state after them go. One without checkpoints."""
    if checkpoints is None:
        yield WHOLE.tokens, terms, o, final
        return
    state = final.zero_() if terms.initial_state is None else terms.initial_state
    cuts = time_slices(terms.q.shape[1], checkpoints.shape[0] + 1)
    for i, tokens in enumerate(cuts):
        after = final if i == len(cuts) - 1 else checkpoints[i]
        yield tokens, slice_inputs(terms, WHOLE.rows, tokens, state), o[:, tokens], after
        state = after


def checkpoints_shape(terms: LinearInputs, count: int) -> tuple[int, ...]:
    """The shape of the states between slices: for packed sequences one, of that which crosses."""
    N, *state = terms.state_shape
    return max(count - 1, 0), N if terms.cu_seqlens is None else 1, *state


def slice_chunks(tokens: slice, C: int) -> slice:
    """The chunks of a slice of tokens of a single row."""
    return tokens if tokens.stop is None else slice(tokens.start // C, -(-tokens.stop // C))


def copy_into(grads: dict[str, Tensor], out: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """grads, copied to where `out` says unless they are there."""
    for name, x in (out or {}).items():
        if name in grads and grads[name].data_ptr() != x.data_ptr():
            grads[name] = x.copy_(grads[name])
    return grads


def cast_gate_grads(
    grads: dict[str, Tensor], given: LinearInputs, out: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """grads, with those of g and beta in the shape and, unless they are in out, the dtype of what
    was given: they are made in float32, and a slice of a call rounds them on their way."""
    for name in ("g", "beta"):
        if name in grads:
            like = getattr(given, name)
            grads[name] = grads[name].view(like.shape)
            if name not in out:
                grads[name] = grads[name].to(like.dtype)
    return grads


def reuse_or_empty(
    given: Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Memory for a result: that which is given for it, where it is of its shape and dtype."""
    if given is not None and given.shape == tuple(shape) and given.dtype == dtype:
        return given
    return torch.empty(shape, dtype=dtype, device=device)


def sum_grouped_heads(x: Tensor, H: int, out: Tensor | None = None) -> Tensor:
    """x [B, T, HV, K], a gradient for each value head, to [B, T, H, K], that of the heads of q and
    k which they share. out: memory for it, which is taken if it fits."""
    B, T, HV, K = x.shape
    if HV == H:
        return x
    y = reuse_or_empty(out, (B, T, H, K), x.dtype, x.device)
    return torch.sum(x.view(B, T, H, HV // H, K), 3, out=y)


def with_active_count(
    run: Callable,
    terms: LinearInputs,
    slices: Sequence[BatchTimeSlice],
    capabilities: BackendCapabilities,
) -> Callable:
    """run, with how many packed sequences have tokens in a slice, about, where it takes that."""
    packed = terms.cu_seqlens is not None and slices[0].tokens.stop is not None
    if not (packed and capabilities.skips_empty):
        return run
    return partial(run, active=max(1, terms.sequences // len(slices)))


def _borders(terms: LinearInputs, slices: Sequence[BatchTimeSlice]) -> VarlenSlices | None:
    """Where packed sequences are cut into slices."""
    if terms.cu_seqlens is None or slices[0].tokens.stop is None:
        return None
    return make_varlen_slices(terms.cu_seqlens, [x.tokens for x in slices])


def _of_tokens(saved: SavedWY, tokens: slice) -> SavedWY:
    """Those of a slice of a single row, which has no states of chunks."""
    chunks = slice_chunks(tokens, saved.r.shape[-1])
    lognorm = saved.transition_lognorm
    return SavedWY(
        saved.r[:, tokens],
        saved.beta_gate[chunks],
        None if lognorm is None else lognorm[chunks],
        None,
    )


def slice_inputs(
    terms: LinearInputs, rows: slice, tokens: slice, state: Tensor | None
) -> LinearInputs:
    return terms.of_tokens(lambda x: x[rows, tokens])._replace(initial_state=state)


def writes_into(out: tuple[Tensor | None, Tensor | None] | None, can: BackendCapabilities) -> bool:
    """Whether a back end writes results where they are wanted."""
    dense = out is None or out[0] is None or out[0].is_contiguous()
    return can.writes_out and (dense or can.takes_heads)


def head_groups(terms: LinearInputs, tokens: int) -> list[tuple[int, int]]:
    """Where groups of q's heads begin and end of a forward pass that is not cut in time, since its
    state comes from other ranks. tokens: the most that a rank has, so that all cut alike."""
    (B, _, H), (HV, V) = terms.q.shape[:3], terms.v.shape[2:]
    most = min(H, HV // MIN_GROUP_HEADS[V > 64])
    if terms.transition == "none" or terms.q.element_size() != 2:
        most = 1
    if most < 2 or sm90_unsupported(terms.q):  # other kernels would copy a group's inputs
        return [(0, H)]
    given = (x for n in TOKEN_TERMS if (x := getattr(terms, n)) is not None)
    io = sum(prod(x.shape[2:]) * x.element_size() for x in (*given, terms.v))
    allowed = allowed_bytes(B * tokens * io)
    count = -(-B * tokens * HV * _workspace_bytes(terms, False) // allowed)
    each = -(-H // max(min(count, most), 1))
    return [(h, min(h + each, H)) for h in range(0, H, each)]


def _make_slices(terms: LinearInputs, count: int) -> list[BatchTimeSlice]:
    B, T = terms.q.shape[:2]
    if count == 1:
        return [WHOLE]
    if B > 1:
        busy = -(-MIN_ACTIVE_PROGRAMS // (terms.v.shape[2] * -(-terms.v.shape[3] // 64)))
        each = max(-(-B // count), busy)
        return [BatchTimeSlice(slice(b, b + each), WHOLE.tokens) for b in range(0, B, each)]
    return [BatchTimeSlice(WHOLE.rows, x) for x in time_slices(T, count)]


def time_slices(T: int, count: int) -> list[slice]:
    """At most `count` slices of T tokens, of about the same size."""
    unit = LONG_SLICE_TOKENS if count * 16 * LONG_SLICE_TOKENS <= T else CHUNK
    each = -(-T // (count * unit)) * unit
    return [slice(t, t + each) for t in range(0, T, each)]


def _can_slice(terms: LinearInputs) -> bool:
    """Whether backward may be cut into slices: a single row of what leaves much for each other,
    whose scans of a slice do not leave a GPU idle."""
    if terms.transition == "none" or terms.q.shape[0] > 1:
        return False
    if terms.cu_seqlens is not None:
        return True  # _max_slices
    HV, V = terms.v.shape[2:]
    return 2 * HV * -(-V // 64) >= MIN_ACTIVE_PROGRAMS


def allowed_bytes(io_bytes: int) -> int:
    """The largest workspace of a call that reads and writes io_bytes."""
    return max(MIN_WORKSPACE_BYTES, io_bytes * MAX_WORKSPACE_PCT // 100)


def _max_slices(terms: LinearInputs) -> int:
    """The largest number of slices with which the packed sequences in each keep a GPU busy."""
    T, HV, V = terms.v.shape[1:]
    N, programs = terms.sequences, HV * -(-V // 64)
    if terms.cu_seqlens is None or N == 0:
        return MAX_SLICES
    busy = MAX_SLICES
    if programs < MIN_ACTIVE_PROGRAMS:
        busy = min(busy, programs * N // MIN_PACKED_PROGRAMS)
    return max(1, min(busy, T // (MIN_SLICE_TOKENS * N)))


def _num_slices(terms: LinearInputs, grads: bool) -> int:
    B, T, HV, V = terms.v.shape
    H, K, E = terms.q.shape[2], terms.q.shape[3], terms.q.element_size()
    packed, each = terms.cu_seqlens is not None, _workspace_bytes(terms, grads)
    if grads and H != HV and terms.transition != "none":
        of_keys = (terms.q, terms.k, terms.p, terms.a, terms.b)
        each += sum(x is not None for x in of_keys) * K * E  # gradients for each value head
    io_bytes = sum(x.numel() * x.element_size() for x in terms if x is not None)
    io_bytes += B * T * HV * V * E
    allowed = allowed_bytes(io_bytes * (2 if grads else 1))
    states = prod(terms.state_shape) * 4
    if packed:
        allowed -= terms.sequences * CHUNK * HV * each
        allowed -= 2 * states + MAX_SLICES * HV * K * V * 4 if grads else 0
    elif grads and B == 1:
        allowed -= BORDER_STATES * states
    if grads and terms.transition == "delta" and terms.decay != "channel":
        allowed -= B * T * HV * CHUNK * E  # R, of all slices
    wanted = -(-B * T * HV * each // max(allowed, 1))
    return int(max(1, min(_max_slices(terms), wanted)))


def _workspace_bytes(terms: LinearInputs, grads: bool) -> int:
    """Bytes a token and value head."""
    K, V = plain_int(terms.q.shape[-1]), plain_int(terms.v.shape[-1])
    E, W, C = terms.q.element_size(), 1 << (K - 1).bit_length(), CHUNK
    if terms.transition == "none":
        channels = terms.decay == "channel" or terms.u is not None
        if terms.gv is not None:
            channels, W = True, 1 << (V - 1).bit_length()
        return 2 * W * E + C * E if channels and not grads else 0
    if terms.transition == "delta" and terms.decay != "channel":
        return V * E + 2 * K * V * E // C if grads else 0
    more = 1 if terms.transition == "delta" else 2
    if not grads:
        return (2 + more) * W * E + more * C * E + 4 * V + _segment_bytes(terms)
    saved = 2 * more * C * E + V * E + K * V * E // C
    if terms.cu_seqlens is not None:
        saved += 2 * W * E  # of more chunks than their gradients have room for
    return saved + more * W * E + max(4 * V, V * E + K * V * E // C)


def _segment_bytes(terms: LinearInputs) -> int:
    B, _, HV, V = terms.v.shape
    if 2 * B * HV * -(-V // 64) >= MIN_ACTIVE_PROGRAMS:
        return 0
    K = terms.q.shape[-1]
    return 4 * K * (K + V) // (8 * CHUNK)
