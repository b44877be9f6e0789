"""Operators for serving engines: pools [slots, HV, V, K] by index, raw gates, packed tokens.

A slot below 0 stands for no state: nothing is read or written for its row. None of this waits for
the device, so all of it can be captured in a CUDA graph.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.linear import prefix_states
from slipstream.kernels.pointwise.copy_states import copy_states
from slipstream.ops import mixer_step
from slipstream.runtime.token_ids import expect_below

_OF_POOL = "states of the pool"


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor | None,
    states: Tensor,
    slots: Tensor,
    lower_bound: float | None = None,
    scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """One token of each sequence by the delta rule, in one launch; its state moves on in place.

    Args:
        q, k: [N, 1, H, K] and v [N, 1, HV, V], after the convolution, without norms.
        a: raw gates [N, 1, HV] (Gated DeltaNet) or [N, 1, HV, K] (KDA). b: raw beta [N, 1, HV].
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
        A_log=A_log.reshape(-1),
        dt_bias=bias,
        lower_bound=lower_bound,
        beta=b,
        use_beta_sigmoid_in_kernel=True,
        use_qk_l2norm_in_kernel=True,
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
    **options: Any,
) -> Tensor:
    """As `step`, of T tokens, that leaves the state after each: into_slots [N, T] of the pool
    `into`, which may be `states`. A launch and a copy of states a token.

    Args:
        tokens: q, k, v, a and b of N sequences, [N, T, ...].
        slots: [N], of the states before the first token.
        options: of step.

    Returns:
        o [N, T, HV, V].
    """
    outputs, before, at = [], states, _slots_of(states, slots)
    into_slots = _slots_of(into, into_slots, "into_slots")
    for t in range(into_slots.shape[1]):
        after = torch.where(at < 0, -1, into_slots[:, t])
        copy_states(before, into, source_indices=at, target_indices=after)
        parts = [x[:, t : t + 1] for x in tokens]
        q, k, v, a, b = parts
        outputs.append(step(q, k, v, a, b, states=into, slots=after, **options))
        before, at = into, after
    return torch.cat(outputs, 1)


def prefill(
    rule: Callable[..., tuple[Tensor, Tensor | None]],
    *tensors: Tensor,
    states: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    in_place: bool = True,
    **options: Any,
) -> Tensor:
    """A chunk operator on packed sequences [1, T, ...], from states of a pool and into it, which
    get no gradient.

    Args:
        rule: chunk_gated_delta_rule or chunk_kda, with its tensors and options.
        in_place: whether the states after the tokens are written.

    Raises:
        ValueError: a slot past the pool; on CUDA the next call does, and this one has no state.
    """
    expect_below("slots", slots, states.shape[0], _OF_POOL)
    pool, (HV, V, K) = states.detach(), states.shape[1:]
    # K first, as kernels index them
    before = torch.empty(slots.shape[0], HV, K, V, dtype=torch.float32, device=pool.device)
    copy_states(pool, before.mT, source_indices=slots)
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


def prefill_with_states(
    rule: Callable[..., tuple[Tensor, Tensor | None]],
    *tensors: Tensor,
    states: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    every: int,
    count: int,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """As prefill, and the states on the way.

    Args:
        every: a multiple of 64.
        count: how many states that makes of all sequences: one after each `every` tokens, none
            after a remainder.

    Returns:
        o, and the states in float32 [count, HV, V, K], sequence by sequence.
    """
    v = tensors[2]
    pool = states.new_empty(count, *states.shape[1:], dtype=torch.float32)
    prefix = prefix_states.every(pool, cu_seqlens, v.shape[1], every)
    given: dict[str, Any] = {"states": states, "slots": slots, "cu_seqlens": cu_seqlens}
    with torch.no_grad():
        return prefill(rule, *tensors, prefix_states=prefix, **given, **options), pool


def _slots_of(pool: Tensor, slots: Tensor, name: str = "slots") -> Tensor:
    """The slots; -1 for those past the pool, of which the next call tells on CUDA."""
    expect_below(name, slots, pool.shape[0], _OF_POOL)
    return slots if slots.device.type == "cpu" else slots.masked_fill(slots >= len(pool), -1)


def unpacked(x: Tensor, cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Packed [1, total, ...] as [N, T, ...]; where a sequence has fewer than T, other tokens."""
    at = cu_seqlens[:-1, None] + torch.arange(tokens, device=x.device)
    return x[0].index_select(0, at.flatten().clamp(max=x.shape[1] - 1)).unflatten(0, at.shape)


def packed(x: Tensor, cu_seqlens: Tensor, total: int) -> Tensor:
    """[N, T, ...] as [1, total, ...]: what `unpacked` has taken apart."""
    at = torch.arange(total, device=x.device)
    n = torch.searchsorted(cu_seqlens[1:].contiguous(), at, right=True).clamp(max=x.shape[0] - 1)
    t = (at - cu_seqlens.index_select(0, n)).clamp(max=x.shape[1] - 1)
    return x.flatten(0, 1).index_select(0, n * x.shape[1] + t)[None]
