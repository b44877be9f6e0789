"""The delta rule's backward in one walk on sm_90: its launch, and what it goes through at a time.

It leaves S of chunks in memory and nothing else: dv comes where w was. Rows of the batch go one
after the other where those at a time keep all multiprocessors, and spans of tokens where that
still is too much. Then forward leaves the states between spans, or they are made here once more.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.kept import kept
from slipstream.kernels.linear.hopper import delta_launch as sm90
from slipstream.kernels.linear.hopper.delta_back import delta_back_sm90_kernel
from slipstream.kernels.linear.hopper.delta_launch import TILE_K, _sizes, _tiles
from slipstream.kernels.linear.hopper.plan import CHUNK
from slipstream.kernels.linear.slices import COUNT, LITTLE, MOST, WHOLE, _part, fitting
from slipstream.kernels.linear.terms import Terms
from slipstream.kernels.linear.triton.delta_launch import Solved
from slipstream.kernels.linear.triton.delta_plan import states_like
from slipstream.kernels.linear.triton.heads import sum_heads

STAGES = 2
PROGRAMS = 128  # that keep all multiprocessors, about
# By V: registers of all warps, and of those of the gradients.
BACK: dict[int, dict[str, Any]] = {
    64: {"num_warps": 4, "maxnreg": 168, "REGISTERS": 208},
    128: {"num_warps": 8, "maxnreg": 128, "REGISTERS": 192},
}


def launch_back(
    terms: Terms,
    do: Tensor,
    solved: Solved,
    scale: float,
    w: Tensor,
    states: Tensor,
    made: dict[str, Tensor],
    *,
    s_in: Tensor | None,
    s_out: Tensor | None,
    span: tuple[int, int] | None = None,
    skip: bool = False,
) -> None:
    """What sm90.walk_back and sm90.grads do. Into made, as those have it; that of v comes where w
    is. span: as sm90.walk_wide has it."""
    T, HV, V = terms.v.shape[1:]
    H, K = terms.q.shape[2:]
    heads = made["q"].shape[2]
    turns: Any = {"dtype": torch.int32, "device": do.device}
    launch: Any = kept(delta_back_sm90_kernel)[(HV * terms.sequences,)]
    launch(
        *(_tiles(x, H * K, CHUNK, K) for x in (terms.q, terms.k)),
        _tiles(do, HV * V, CHUNK, V),
        _tiles(solved.r, HV * CHUNK, CHUNK, CHUNK),
        _tiles(w, HV * V, CHUNK, V),
        _tiles(states, K, V, K),
        *(_tiles(made[name], heads * K, CHUNK, K) for name in "qk"),
        made["q"],
        made["k"],
        w,
        solved.rows,
        made["beta"],
        made.get("g"),
        s_in,
        s_out,
        terms.cu_seqlens,
        torch.zeros(solved.rows.shape[0], heads, **turns) if heads < HV else None,
        scale,
        *_sizes(terms, None)[:4],
        HV // heads,
        *(span or (0, T)),
        K=K,
        V=V,
        BK=TILE_K,
        C=CHUNK,
        ST=STAGES,
        WARPS=V // 16,
        HAS_GATE=terms.g is not None,
        HAS_S_IN=s_in is not None,
        HAS_S_OUT=s_out is not None,
        PACKED=terms.cu_seqlens is not None,
        SHARED=heads < HV,
        SKIP=skip,
        **BACK[V],
    )


def spans_of(terms: Terms) -> tuple[int, list[slice]]:
    """Rows of the batch at a time, and spans of tokens: by shapes alone, so that what there is
    beyond arguments and results stays below MOST percent of those."""
    B, T, HV, V = terms.v.shape
    K, E = terms.q.shape[3], terms.q.element_size()
    if terms.cu_seqlens is not None:
        return B, [WHOLE.tokens]  # slices.py has cut it
    given = sum(x.numel() * x.element_size() for x in terms if x is not None)
    allowed = (given + B * T * HV * V * E) * 2 * int(10 * MOST) // 1000
    border = prod(terms.state_shape) * 4
    allowed -= B * T * HV * (CHUNK * E + 8) + border  # R, beta and G, of all; the final state
    states = B * -(-T // CHUNK) * HV * K * V * E
    if states <= max(allowed, LITTLE):
        return B, [WHOLE.tokens]
    wanted = -(-states // max(allowed, 1))
    rows = max(-(-B // wanted), min(B, -(-PROGRAMS // HV)))
    rows = -(-B // -(-B // rows))
    states = states * rows // B
    # at each border there is a state
    count = next((n for n in range(1, COUNT) if states // n + (n - 1) * border <= allowed), 1)
    if count == 1 or V < 2 * sm90.TILE_V:
        return rows, [WHOLE.tokens]
    each = -(-T // (count * CHUNK)) * CHUNK
    return rows, [slice(t, min(t + each, T)) for t in range(0, T, each)]


def walk_spans(
    terms: Terms, solved: Solved, scale: float, o: Tensor, final: Tensor, spans: Sequence[slice]
) -> Tensor:
    """Forward; the states between spans [spans - 1, N, HV, K, V]."""
    marks = final.new_empty(len(spans) - 1, *final.shape)
    state = terms.initial_state
    for i, tokens in enumerate(spans):
        after = final if i == len(spans) - 1 else marks[i]
        ends = {"s_in": state, "s_out": after}
        span = tokens.start, tokens.stop - tokens.start
        sm90.walk_wide(terms, solved.r, solved.rows, scale, o, **ends, span=span)
        state = after
    return marks


def backward(
    terms: Terms,
    do: Tensor,
    dfinal: Tensor | None,
    solved: Solved,
    scale: float,
    dstate: Tensor | None,
    out: Mapping[str, Tensor],
    *,
    walk: Callable[..., None],
    together: int,
    marks: Tensor | None = None,
    skip: bool = False,
) -> dict[str, Tensor]:
    """As portable.backward has them, into dstate too.

    Args:
        walk: of whole sequences.
        together: value heads whose gradients of q and k are added up at once.
        marks: of walk_spans.
    """
    B, T, HV = terms.v.shape[:3]
    H, K = terms.q.shape[2:]
    like = (B, T, HV // together, K), do.dtype, do.device
    made = {name: fitting(out.get(name), *like) for name in "qk"}
    for name in ("beta", "g"):
        if getattr(terms, name) is not None:
            made[name] = fitting(out.get(name), (B, T, HV), torch.float32, do.device)
    made["v"] = fitting(out.get("v"), do.shape, do.dtype, do.device)
    rows, spans = spans_of(terms)
    if marks is None and len(spans) > 1:
        final = solved.rows.new_empty(terms.state_shape)
        marks = walk_spans(terms, solved, scale, made["v"], final, spans)
    each = -(-T // CHUNK)
    for first in range(0, B, rows):
        part, own, here = terms, solved, WHOLE.rows
        if rows < B:
            here = slice(first, first + rows)
            state = None if terms.initial_state is None else terms.initial_state[here]
            part = _part(terms, here, WHOLE.tokens, state)
            chunks = slice(first * each, (first + rows) * each)
            own = Solved(solved.r[here], solved.rows[chunks])
        ends = [None if x is None else x[here] for x in (dfinal, dstate)]
        between = None if marks is None else marks[:, here]
        into = {name: x[here] for name, x in made.items()}
        if len(spans) == 1:
            _walk_back(part, do[here], own, scale, into, ends, walk, skip)
        else:
            _spans_back(part, do[here], own, scale, into, ends, spans, between)
    return made | {name: sum_heads(made[name], H, out.get(name)) for name in "qk"}


Ends = list[Tensor | None]  # gradients of the states after the last and before the first token


def _walk_back(
    terms: Terms,
    do: Tensor,
    solved: Solved,
    scale: float,
    made: dict[str, Tensor],
    ends: Ends,
    walk: Callable[..., None],
    skip: bool,
) -> None:
    states = states_like(terms)
    walk(terms, solved, scale, made["v"], states=states, s_in=terms.initial_state)
    launch_back(
        terms, do, solved, scale, made["v"], states, made, s_in=ends[0], s_out=ends[1], skip=skip
    )


def _spans_back(
    terms: Terms,
    do: Tensor,
    solved: Solved,
    scale: float,
    made: dict[str, Tensor],
    ends: Ends,
    spans: Sequence[slice],
    marks: Tensor | None,
) -> None:
    assert marks is not None
    after, dstate = ends
    (HV, V), K = terms.v.shape[2:], terms.q.shape[-1]
    chunks = terms.sequences * -(-spans[0].stop // CHUNK)
    states = terms.v.new_empty(chunks, HV, V, K)
    goes_on = dstate
    if dstate is None or dstate.dtype != torch.float32:
        goes_on = torch.empty_like(marks[0])
    for i, tokens in reversed(list(enumerate(spans))):
        start = terms.initial_state if i == 0 else marks[i - 1]
        span = tokens.start, tokens.stop - tokens.start
        w = made["v"]
        sm90.walk_wide(terms, solved.r, solved.rows, scale, w, states=states, s_in=start, span=span)
        before = dstate if i == 0 else goes_on
        launch_back(terms, do, solved, scale, w, states, made, s_in=after, s_out=before, span=span)
        after = goes_on
