"""Operators for serving engines: pools [slots, HV, V, K] by index, raw gates, packed tokens.

A slot below 0 stands for no state: nothing is read or written for its row. None of this waits for
the device, so all of it can be captured in a CUDA graph.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.elementwise.copy_states import copy_states
from slipstream.kernels.elementwise.mamba_terms import mamba_terms
from slipstream.kernels.linear.prefix_states import PrefixStates
from slipstream.ops import mixer_step
from slipstream.ops._fp32 import widen
from slipstream.runtime import consistent, token_ids

_OF_POOL = "states of the pool"


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    states: Tensor,
    slots: Tensor,
    lower_bound: float | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    use_beta_sigmoid_in_kernel: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """One token of each sequence by the delta rule, in one launch; its state moves on in place.

    Args:
        q, k: [N, 1, H, K] and v [N, 1, HV, V], after the convolution.
        a: raw gates [N, 1, HV] (Gated DeltaNet) or [N, 1, HV, K] (KDA), or without A_log the log
            decay. b: raw beta [N, 1, HV], or without use_beta_sigmoid_in_kernel beta itself; None:
            no delta rule, k v^T is added.
        A_log: [HV] or any shape of as many. dt_bias: as a's gates of one token.
        states: the pool [slots, HV, V, K]. slots: int32 or int64 [N].
        lower_bound: of KDA's decay. scale: K^-0.5 if None. out: [N, 1, HV, V].

    Returns:
        o [N, 1, HV, V].
    """
    bias = None if dt_bias is None else dt_bias.reshape(a.shape[2:])
    return mixer_step(
        q,
        k,
        v,
        state=states,
        state_indices=slots,
        g=a,
        A_log=None if A_log is None else A_log.reshape(-1),
        dt_bias=bias,
        lower_bound=lower_bound,
        beta=b,
        use_beta_sigmoid_in_kernel=b is not None and use_beta_sigmoid_in_kernel,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        scale=scale,
        state_v_first=True,
        out=out,
    )


def step_drafts(
    tokens: list[Tensor],
    *,
    states: Tensor,
    slots: Tensor,
    into: Tensor,
    into_slots: Tensor,
    one: Callable[..., Tensor] = step,
    **options: Any,
) -> Tensor:
    """As `step`, or another function of one token, of T tokens, that leaves the state after each:
    into_slots [N, T] of the pool `into`, which may be `states`. A launch and a copy of states a
    token.

    Args:
        tokens: q, k, v, a and, if there is one, b of N sequences, [N, T, ...], or those of `one`.
        slots: [N], of the states before the first token.
        options: of `one`.

    Returns:
        o [N, T, HV, V].
    """
    outputs, before, at = [], states, slots_of(states, slots)
    into_slots = slots_of(into, into_slots, "into_slots")
    for t in range(into_slots.shape[1]):
        after = torch.where(at < 0, -1, into_slots[:, t])
        copy_states(before, into, source_indices=at, target_indices=after)
        parts = [x[:, t : t + 1] for x in tokens]
        outputs.append(one(*parts, states=into, slots=after, **options))
        before, at = into, after
    return torch.cat(outputs, 1)


def prefill(
    rule: Callable[..., tuple[Tensor, Tensor | None]],
    *tensors: Tensor,
    states: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    in_place: bool = True,
    has_state: Tensor | None = None,
    into: Tensor | None = None,
    rows: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """A chunk operator on packed sequences [1, T, ...], from states of a pool and into it, which
    get no gradient.

    Args:
        rule: chunk_gated_delta_rule, chunk_kda or chunk_simple_gla, its tensors and options.
        slots: [N], or longer than there are sequences.
        in_place: whether the states after the tokens are written.
        has_state: [N], whether a sequence has one yet; all if None. Without it begins with zeros.
        into, rows: for states on the way, a pool [.., HV, V, K] and the rows [N, 1 + chunks] of it
            for the states before the first, second, ... 64 tokens, as rows_of_starts and
            rows_of_chunks make them. Without gradients.

    Raises:
        ValueError: a slot past the pool; on CUDA the next call does, and this one has no state.
    """
    slots = slots[: cu_seqlens.shape[0] - 1]
    token_ids.expect_below("slots", slots, states.shape[0], _OF_POOL)
    pool, (HV, V, K) = states.detach(), states.shape[1:]
    # K first, as kernels index them
    before = torch.empty(slots.shape[0], HV, K, V, dtype=torch.float32, device=pool.device)
    first = slots if has_state is None else slots.where(has_state[: len(slots)] > 0, -1)
    copy_states(pool, before.mT, source_indices=first)
    if into is not None and rows is not None:
        copy_states(before.mT, into, target_indices=rows[:, 0])
        options["prefix_states"] = PrefixStates(into, rows[:, 1:])
    o, final = rule(
        *tensors,
        initial_state=before,
        output_final_state=in_place,
        cu_seqlens=cu_seqlens,
        **options,
    )
    if final is not None:
        copy_states(final.detach().mT, pool, target_indices=slots)
    return o


def mamba2(
    scan: Callable[..., tuple[Tensor, Tensor | None]],
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Mamba-2 by chunk_simple_gla or what calls it. x, z [B, T, H, P], dt [B, T, H], A, dt_bias
    [H], B, C [B, T, G, N], D [H] or [H, P] -> y as x, and the states [.., H, P, N]."""
    if D is not None:
        D = (D[:, None] if D.dim() == 1 else D).expand(x.shape[-2:])
    if dt_softplus:
        none = torch.zeros_like(A)  # g is less the step, then times A
        v, skip, g = mamba_terms(x, dt, none, none if dt_bias is None else dt_bias, D, dt_limit)
        g = g * -widen(A)
    else:
        step = (widen(dt) if dt_bias is None else widen(dt) + widen(dt_bias)).clamp(*dt_limit)
        v, g = (widen(x) * step[..., None]).to(x.dtype), step * widen(A)
        skip = x if D is None else (x * D).to(x.dtype)
    given = C.to(x.dtype), B.to(x.dtype), v, g
    y, states = scan(*given, scale=1.0, state_v_first=True, **options)
    y = y if D is None else y + skip
    return y if z is None else (y * F.silu(z)).to(x.dtype), states


def rows_of_starts(cu_seqlens: Tensor, total: int) -> Tensor:
    """Rows for prefill's states before every 64 tokens of each sequence, one sequence after the
    other. Of `total` tokens these are total // 64 + N states at the most."""
    counts = (cu_seqlens.diff() + consistent.BLOCK - 1) // consistent.BLOCK
    first = counts.cumsum(0) - counts
    chunk = _chunks(cu_seqlens, total)
    return torch.where(chunk < counts[:, None], first[:, None] + chunk, -1).int()


def rows_of_chunks(chunks: Tensor, cu_seqlens: Tensor, total: int) -> Tensor:
    """Rows for prefill's state before chunk chunks[n] of 64 tokens: row n. None if it is -1."""
    n = torch.arange(cu_seqlens.shape[0] - 1, device=cu_seqlens.device)[:, None]
    return torch.where(_chunks(cu_seqlens, total) == chunks[: len(n), None], n, -1).int()


def _chunks(cu_seqlens: Tensor, total: int) -> Tensor:
    return torch.arange(1 - -total // consistent.BLOCK, device=cu_seqlens.device)


def slots_of(pool: Tensor, slots: Tensor, name: str = "slots") -> Tensor:
    """The slots; -1 for those past the pool, of which the next call tells on CUDA."""
    token_ids.expect_below(name, slots, pool.shape[0], _OF_POOL)
    return slots if slots.device.type == "cpu" else slots.masked_fill(slots >= len(pool), -1)


def unpacked(x: Tensor, cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Packed [1, total, ...] as [N, T, ...]; where a sequence has fewer than T, other tokens."""
    at = cu_seqlens[:-1, None] + torch.arange(tokens, device=x.device)
    return x[0].index_select(0, at.flatten().clamp(0, x.shape[1] - 1)).unflatten(0, at.shape)


def packed(x: Tensor, cu_seqlens: Tensor, total: int) -> Tensor:
    """[N, T, ...] as [1, total, ...]: what `unpacked` has taken apart."""
    at = torch.arange(total, device=x.device)
    n = torch.searchsorted(cu_seqlens[1:].contiguous(), at, right=True).clamp(max=x.shape[0] - 1)
    t = (at - cu_seqlens.index_select(0, n)).clamp(0, x.shape[1] - 1)
    return x.flatten(0, 1).index_select(0, n * x.shape[1] + t)[None]
