"""The delta rule's backward in one walk on sm_90: its launch, and what it goes through at a time.

It leaves S of chunks in memory and nothing else: dv comes where w was. Rows of the batch go one
after the other where those at a time keep all multiprocessors, and spans of tokens where that
still is too much; packed sequences all at once in spans of chunks (delta_windows.py). Then forward
leaves the states between spans, or they are made here once more.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.kept import kept
from slipstream.kernels.linear.hopper import delta_launch as sm90
from slipstream.kernels.linear.hopper.delta_back import delta_back_sm90_kernel
from slipstream.kernels.linear.hopper.delta_launch import (
    TILE_K,
    sizes_of,
    tiles_of,
    window_and_begin,
)
from slipstream.kernels.linear.hopper.delta_windows import (
    PROGRAMS,
    Cut,
    Window,
    cut_for,
    windows,
)
from slipstream.kernels.linear.hopper.plan import CHUNK
from slipstream.kernels.linear.slices import COUNT, LITTLE, MOST, WHOLE, fitting, part_of
from slipstream.kernels.linear.terms import Terms
from slipstream.kernels.linear.triton.delta_launch import Solved
from slipstream.kernels.linear.triton.delta_plan import states_like
from slipstream.kernels.linear.triton.heads import sum_heads

Span = tuple[int, int] | Window  # of rows of the batch its first token and its tokens
Spans = list[slice] | Cut

STAGES = 2
# By V: registers of all warps, of those of the gradients, and of those that load and write.
BACK: dict[int, dict[str, Any]] = {
    64: {"num_warps": 4, "maxnreg": 168, "REGISTERS": 208, "FEW": 32},
    128: {"num_warps": 8, "maxnreg": 128, "REGISTERS": 192, "FEW": 32},
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
    span: Span | None = None,
    skip: bool = False,
) -> None:
    """What sm90.walk_back and sm90.grads do. Into made, as those have it; that of v comes where w
    is. span: as sm90.walk_wide has it."""
    HV, V = terms.v.shape[2:]
    H, K = terms.q.shape[2:]
    heads = made["q"].shape[2]
    turns: Any = {"dtype": torch.int32, "device": do.device}
    window, begin = window_and_begin(terms, span)
    launch: Any = kept(delta_back_sm90_kernel)[(HV * terms.sequences,)]
    launch(
        *(tiles_of(x, H * K, CHUNK, K) for x in (terms.q, terms.k)),
        tiles_of(do, HV * V, CHUNK, V),
        tiles_of(solved.r, HV * CHUNK, CHUNK, CHUNK),
        tiles_of(w, HV * V, CHUNK, V),
        tiles_of(states, K, V, K),
        *(tiles_of(made[name], heads * K, CHUNK, K) for name in "qk"),
        made["q"],
        made["k"],
        w,
        solved.rows,
        made["beta"],
        made.get("g"),
        s_in,
        s_out,
        terms.cu_seqlens,
        *window,
        torch.zeros(solved.rows.shape[0], heads, **turns) if heads < HV else None,
        scale,
        *sizes_of(terms, None)[:4],
        HV // heads,
        *begin,
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
        CUT=isinstance(span, Window),
        **BACK[V],
    )


def spans_of(terms: Terms) -> tuple[int, Spans]:
    """Rows of the batch at a time, and spans of tokens, none if whole: by shapes alone, so that
    what there is beyond arguments and results stays below MOST percent of those."""
    B, T, HV, V = terms.v.shape
    K, E = terms.q.shape[3], terms.q.element_size()
    if terms.cu_seqlens is not None:
        return B, cut_for(terms) or []
    given = sum(x.numel() * x.element_size() for x in terms if x is not None)
    allowed = (given + B * T * HV * V * E) * 2 * int(10 * MOST) // 1000
    border = prod(terms.state_shape) * 4
    allowed -= B * T * HV * (CHUNK * E + 8) + border  # R, beta and G, of all; the final state
    states = B * -(-T // CHUNK) * HV * K * V * E
    if states <= max(allowed, LITTLE):
        return B, []
    wanted = -(-states // max(allowed, 1))
    rows = max(-(-B // wanted), min(B, -(-PROGRAMS // HV)))
    rows = -(-B // -(-B // rows))
    states = states * rows // B
    # at each border there is a state
    count = next((n for n in range(1, COUNT) if states // n + (n - 1) * border <= allowed), 1)
    if count == 1 or V < 2 * sm90.TILE_V:
        return rows, []
    each = -(-T // (count * CHUNK)) * CHUNK
    return rows, [slice(t, min(t + each, T)) for t in range(0, T, each)]


def walk_spans(
    terms: Terms, solved: Solved, scale: float, o: Tensor, final: Tensor, spans: Spans
) -> list[Tensor]:
    """Forward; the states between spans [spans - 1, N, HV, K, V]. Of packed sequences [spans - 1,
    rows, HV, K, V], and the windows."""
    if isinstance(spans, Cut):
        return _walk_windows(terms, solved, scale, o, final, spans)
    marks = final.new_empty(len(spans) - 1, *final.shape)
    state = terms.initial_state
    for i, tokens in enumerate(spans):
        after = final if i == len(spans) - 1 else marks[i]
        ends = {"s_in": state, "s_out": after}
        span = tokens.start, tokens.stop - tokens.start
        sm90.walk_wide(terms, solved.r, solved.rows, scale, o, **ends, span=span)
        state = after
    return [marks]


def _walk_windows(
    terms: Terms, solved: Solved, scale: float, o: Tensor, final: Tensor, cut: Cut
) -> list[Tensor]:
    marks = final.new_empty(cut.spans - 1, cut.rows, *final.shape[1:])
    table = windows(terms, cut)
    ends = {"s_in": terms.initial_state, "s_out": final}
    sm90.walk_wide(terms, solved.r, solved.rows, scale, o, **ends, marks=(table, marks))
    return [marks, table]


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
    left: Sequence[Tensor] = (),
    spends: bool = False,
    skip: bool = False,
) -> dict[str, Tensor]:
    """As portable.backward has them, into dstate too.

    Args:
        walk: of whole sequences.
        together: value heads whose gradients of q and k are added up at once.
        left: of walk_spans.
        spends: nobody wants what is left afterwards.
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
    if spans and not left:
        spends = True
        final = solved.rows.new_empty(terms.state_shape)
        left = walk_spans(terms, solved, scale, made["v"], final, spans)
        del final
    each = -(-T // CHUNK)
    for first in range(0, B, rows):
        part, own, here = terms, solved, WHOLE.rows
        if rows < B:
            here = slice(first, first + rows)
            state = None if terms.initial_state is None else terms.initial_state[here]
            part = part_of(terms, here, WHOLE.tokens, state)
            chunks = slice(first * each, (first + rows) * each)
            own = Solved(solved.r[here], solved.rows[chunks])
        ends = [None if x is None else x[here] for x in (dfinal, dstate)]
        into = {name: x[here] for name, x in made.items()}
        if isinstance(spans, Cut):
            _windows_back(part, do[here], own, scale, into, ends, spans, left, spends)
        elif spans:
            _spans_back(part, do[here], own, scale, into, ends, spans, left[0][:, here])
        else:
            _walk_back(part, do[here], own, scale, into, ends, walk, skip)
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
    marks: Tensor,
) -> None:
    after, dstate = ends
    (HV, V), K = terms.v.shape[2:], terms.q.shape[-1]
    chunks = terms.sequences * max(-(-(x.stop - x.start) // CHUNK) for x in spans)
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


def _windows_back(
    terms: Terms,
    do: Tensor,
    solved: Solved,
    scale: float,
    made: dict[str, Tensor],
    ends: Ends,
    cut: Cut,
    left: Sequence[Tensor],
    spends: bool,
) -> None:
    marks, table = left
    (HV, V), K = terms.v.shape[2:], terms.q.shape[-1]
    states = terms.v.new_empty(cut.room, HV, V, K)
    # gradients at a border come where its states were, which the walk has read by then
    gradients = marks if spends else marks.new_empty(min(2, len(marks)), *marks.shape[1:])
    w = made["v"]
    for i in reversed(range(cut.spans)):
        before = marks[max(i - 1, 0)]  # nobody looks there before the first
        window = Window(table[i], before, before)
        sm90.walk_wide(
            terms, solved.r, solved.rows, scale, w,
            states=states, s_in=terms.initial_state, span=window,
        )  # fmt: skip
        after, before = (gradients[x % len(gradients)] for x in (i, i - 1))
        span = Window(table[i], after, before)
        launch_back(
            terms, do, solved, scale, w, states, made, s_in=ends[0], s_out=ends[1], span=span
        )
