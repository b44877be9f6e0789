"""SGLang's functions of Mamba-2 and of lightning attention by slipstream.

Its backends of these have no dispatcher: a mixer calls mamba_chunk_scan_combined and
selective_state_update, a backend seg_la_fwd. hooks() has what goes around these functions; a call
that slipstream does not take goes on to SGLang's function.
"""

import functools
from collections.abc import Callable
from contextvars import ContextVar
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from slipstream.integrations import serving, usage
from slipstream.kernels.elementwise.copy_states import copy_states
from slipstream.ops import chunk_simple_gla, mixer_step
from slipstream.runtime import consistent

_ATTENTION = "sglang.srt.layers.attention"
_LIGHTNING = f"{_ATTENTION}.linear.lightning_backend"
# a module, the class that is replaced in it, and the functions that SGLang's files call
KINDS: dict[str, tuple[str, str, dict[str, tuple[str, ...]]]] = {
    "mamba2": (
        f"{_ATTENTION}.hybrid_linear_attn_backend",
        "Mamba2AttnBackend",
        {f"{_ATTENTION}.mamba.mamba": ("mamba_chunk_scan_combined", "selective_state_update")},
    ),
    "lightning": (_LIGHTNING, "LightningAttentionBackend", {_LIGHTNING: ("seg_la_fwd",)}),
}
# whether the forward pass that runs now is one of those that Mamba-2's prefill does not take
_is_tracked: ContextVar[bool] = ContextVar("_is_tracked", default=False)


def or_theirs(ours: Callable[..., Any], theirs: Callable[..., Any] | None) -> Callable[..., Any]:
    """ours, and where it refuses a call by NotImplementedError, before it has written anything,
    theirs."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return ours(*args, **kwargs)
        except NotImplementedError:
            if theirs is None:
                raise
        return theirs(*args, **kwargs)

    return call


def own_slots(slots: Tensor) -> Tensor:
    """-1 for slot 0, which SGLang keeps for padded rows, any number of them: on the host a slot
    that comes twice would be refused. A device does not ask."""
    return slots.masked_fill(slots == 0, -1) if slots.is_cpu else slots


def hooks(kind: str, replace: Any, around: Any) -> list[tuple[str, Callable[..., Any], Any]]:
    """Names in SGLang, what goes there and how."""
    module, name, functions = KINDS[kind]
    made: list[tuple[str, Callable[..., Any], Any]] = [
        (f"{module}.{name}", _backend(kind), replace)
    ]
    for place, names in functions.items():
        for function in names:
            getattr(import_module(place), function)  # an AttributeError here, not in a hook
            made.append((f"{place}.{function}", _around(name, function), around))
    return made


@functools.cache
def _around(backend: str, function: str) -> Callable[..., Any]:
    where = "sglang", f"{backend}.{function}"
    usage.site(*where)
    ours = usage.counted(*where)(globals()[function])

    def hook(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return or_theirs(ours, theirs)(*args, **kwargs)

    return hook


@functools.cache
def _backend(kind: str) -> type:
    """SGLang's class, which says before a forward pass what is not taken."""
    module, name, _ = KINDS[kind]
    base: Any = getattr(import_module(module), name)

    class Mamba2(base):
        is_tracked = False

        def init_forward_metadata(self, forward_batch: Any) -> None:
            super().init_forward_metadata(forward_batch)
            masked = forward_batch.mamba_track_mask is not None
            self.is_tracked = masked and self.forward_metadata.num_prefills > 0

        def init_forward_metadata_out_graph(self, *args: Any, **kwargs: Any) -> None:
            super().init_forward_metadata_out_graph(*args, **kwargs)
            self.is_tracked = False

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            token = _is_tracked.set(self.is_tracked)
            try:
                return super().forward(*args, **kwargs)
            finally:
                _is_tracked.reset(token)

    class Lightning(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if self.linear_backend != "seg_la":
                why = f"{name}: linear_backend {self.linear_backend!r} is SGLang's own"
                usage.refuse("sglang", why)

    made = Mamba2 if kind == "mamba2" else Lightning
    made.__name__ = made.__qualname__ = name
    return made


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    out: Tensor | None = None,
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    return_intermediate_states: bool = False,
    state_dtype: torch.dtype | None = None,
    return_track_states: bool = False,
    track_seq_idx: Tensor | None = None,
    track_end_locs: Tensor | None = None,
) -> Any:
    """Mamba-2's prompts, packed: y goes to out.

    Args:
        x, z, out: [1, T, H, P]. dt: [1, T, H]. A, dt_bias: [H]. B, C: [1, T, G, N]. D: [H] or
            [H, P]. initial_states: [S, H, P, N] of the S sequences of cu_seqlens [S + 1].
        chunk_size, seq_idx, chunk_indices, chunk_offsets: no effect, cu_seqlens says it.

    Returns:
        The states after the sequences [S, H, P, N] in state_dtype, and in the places of those on
        the way None.

    Raises:
        NotImplementedError: states on the way are to be kept, or no sequences are given.
    """
    if _is_tracked.get():
        raise NotImplementedError("mamba_track_mask: slipstream leaves no states on Mamba-2's way")
    if not return_varlen_states or return_final_states or cu_seqlens is None or out is None:
        raise NotImplementedError("return_varlen_states: slipstream returns these states alone")
    y, states = serving.mamba2(
        chunk_simple_gla,
        *(x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit),
        initial_state=None if initial_states is None else initial_states.float(),
        output_final_state=True,
        cu_seqlens=cu_seqlens,
    )
    assert states is not None
    out.copy_(y)
    states = states.to(C.dtype if state_dtype is None else state_dtype)
    if return_track_states:
        return None, states, None
    return (None, states) if return_intermediate_states else states


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    out: Tensor | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    **others: Any,
) -> None:
    """A token of Mamba-2 for each of N sequences, or T drafts in a chain; y goes to out.

    Args:
        state: the pool [slots, H, P, S]. state_batch_indices: [N], pad_slot_id for none.
        x, dt, out: [N, H, P], or drafts [N, T, H, P]. A: [H, P, S], dt_bias and D [H, P], a number
            a head, expanded as dt is. B, C: [N, G, S] or [N, T, G, S].
        intermediate_states_buffer: [rows, steps, H, P, S], which gets the state after each draft
            in the rows intermediate_state_indices [N]; the pool then stays as it is.

    Raises:
        NotImplementedError: rates a channel (Mamba-1), a gate, a tree of drafts, or an argument
            that slipstream does not know.
    """
    asked = {"z": z, "retrieve_parent_token": retrieve_parent_token, **others}
    for name, value in asked.items():
        if isinstance(value, Tensor) or value:
            raise NotImplementedError(f"{name}: slipstream has no such call of Mamba's update")
    a_head = [t for t in (A[..., 0], dt, dt_bias, D) if t is not None]
    if any(t.dim() < 2 or t.stride(-1) for t in a_head) or A.stride(-1) or not dt_softplus:
        raise NotImplementedError("A, dt, dt_bias, D: want a number a head, expanded, and softplus")
    if state_batch_indices is None or out is None:
        raise NotImplementedError("state_batch_indices, out: want both")
    drafts = intermediate_states_buffer if x.dim() == 4 else None
    if (drafts is not None) != disable_state_update or x.dim() != (3 if drafts is None else 4):
        raise NotImplementedError("intermediate_states_buffer: want it for drafts, and only then")
    options: dict[str, Any] = {
        "A": A[:, 0, 0],
        "dt_bias": None if dt_bias is None else dt_bias[:, 0],
        "D": None if D is None else D[:, 0],
    }
    slots = state_batch_indices
    if pad_slot_id != -1:
        slots = torch.where(slots == pad_slot_id, -1, slots)
    parts = [C, B, x, dt[..., 0]]
    if drafts is None:
        parts = [t[:, None] for t in parts]
        slots = own_slots(slots)
        _mamba_step(*parts, states=state, slots=slots, out=out[:, None], **options)
        return
    rows = slots if intermediate_state_indices is None else intermediate_state_indices
    y = serving.step_drafts(
        parts,
        states=state,
        slots=slots,
        into=drafts.flatten(0, 1),
        into_slots=_rows_of_drafts(rows[: x.shape[0]], x.shape[1], drafts.shape[1]),
        one=_mamba_step,
        **options,
    )
    out.copy_(y)


def _mamba_step(
    q: Tensor, k: Tensor, v: Tensor, dt: Tensor, *, states: Tensor, slots: Tensor, **options: Any
) -> Tensor:
    """q, k = C, B [N, 1, G, S], v = x [N, 1, H, P], dt raw [N, 1, H]; states [.., H, P, S]."""
    return mixer_step(
        q, k, v, state=states, state_indices=slots, g=dt, dt_scales_v=True, scale=1.0,
        state_v_first=True, **options,
    )  # fmt: skip


def _rows_of_drafts(rows: Tensor, tokens: int, steps: int) -> Tensor:
    """[N, T] in a buffer of `steps` states a row, -1 where there is no row."""
    at = rows[:, None] * steps + torch.arange(tokens, device=rows.device)
    return at.masked_fill(rows[:, None] < 0, -1)


def seg_la_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    decay_scales: Tensor,
    meta: Any,
    caches: Tensor | None = None,
    cache_indices: Tensor | None = None,
    track_lens: Tensor | None = None,
    track_state_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    decouple: bool = False,
) -> Tensor:
    """Lightning attention of packed tokens: a token each, drafts in a chain, or prompts.

    Args:
        q, k, v: [T, H, D]. s: the pool [slots, H, D, D], the keys' channels first.
        decay_scales: [H], of any shape: the log decay, negated.
        meta: SegLaMeta. q_offsets [N + 1]; s_offsets, the slots [N], -1 for none; s_scales [N], 0
            where a prompt has no state yet, which a token alone is taken to have.
        caches: [rows, T / N, H, D, D] for the state after each draft, in the rows cache_indices
            [N]; the pool then stays as it is.
        track_lens, track_state_indices: [N]: the state after the first track_lens tokens of a
            prompt goes to the slot track_state_indices, if it is not -1.
        decouple: no effect.

    Raises:
        NotImplementedError: a tree of drafts, or lengths to track that are no multiples of 64.
    """
    if meta.mask is not None:
        raise NotImplementedError("mask: slipstream takes chains of drafts, no trees")
    N, slots = meta.batch_size, meta.s_offsets[: meta.batch_size]
    gamma = -decay_scales.flatten().float()
    if q.shape[0] > N and caches is None:
        return _lightning_prompts(
            q, k, v, s, gamma, meta, track_lens, track_state_indices, softmax_scale
        )
    options = {"gamma": gamma, "scale": softmax_scale}
    parts = [t.unflatten(0, (N, -1)) for t in (q, k, v)]
    if caches is None or q.shape[0] <= N:
        return _lightning_step(*parts, states=s, slots=own_slots(slots), **options).flatten(0, 1)
    assert cache_indices is not None
    steps = q.shape[0] // N
    y = serving.step_drafts(
        parts,
        states=s,
        slots=slots,
        into=caches.flatten(0, 1),
        into_slots=_rows_of_drafts(cache_indices[:N], steps, caches.shape[1]),
        one=_lightning_step,
        **options,
    )
    return y.flatten(0, 1)


def _lightning_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    states: Tensor,
    slots: Tensor,
    gamma: Tensor,
    scale: float | None,
) -> Tensor:
    g = gamma.expand(q.shape[0], 1, -1)
    return mixer_step(q, k, v, state=states, state_indices=slots, g=g, scale=scale)


def _lightning_prompts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    gamma: Tensor,
    meta: Any,
    track_lens: Tensor | None,
    track_slots: Tensor | None,
    scale: float | None,
) -> Tensor:
    N, T = meta.batch_size, q.shape[0]
    offsets, into, rows = meta.q_offsets[: N + 1], None, None
    if track_lens is not None and track_slots is not None:
        unit = import_module(_LIGHTNING).mamba_cache_chunk_size()
        if unit % consistent.BLOCK:
            raise NotImplementedError(f"track_lens: want multiples of 64, got those of {unit}")
        into = s.new_empty(N, *s.shape[1:], dtype=torch.float32)
        chunks = torch.where(track_slots < 0, -1, track_lens // consistent.BLOCK)
        rows = serving.rows_of_chunks(chunks, offsets, T)
    o = serving.prefill(
        chunk_simple_gla,
        *(x[None] for x in (q, k, v)),
        states=s.mT,
        slots=meta.s_offsets,
        cu_seqlens=offsets,
        has_state=meta.s_scales,
        into=into,
        rows=rows,
        g_gamma=gamma,
        scale=scale,
    )
    if into is not None:
        copy_states(into.mT, s, target_indices=track_slots)
    return o[0]
