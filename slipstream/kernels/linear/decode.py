"""The recurrence of inputs.py for states that stay where they are: a pool, updated in place.

slipstream::_linear_step takes the terms in their order except the state before them, which is the
pool's: sequence n's is state[state_indices[n]], or state[n] without indices, and becomes that
after its tokens. It has no gradient.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.common import checks, pool_rows
from slipstream.kernels.linear import dispatch, op, probe
from slipstream.kernels.linear.eager.recurrent import recurrent_forward
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.modes import transforms
from slipstream.kernels.linear.plan import kind
from slipstream.runtime import autograd, backends, custom_op, guarded_launch, token_ids
from slipstream.runtime.dispatch import Candidate, Selection, ValidationCache, choose, signature

# of a token's terms: erase and write are a and b by then
_COUNT = LinearInputs._fields.index("erase")
MAX_K = 1024  # all rows of the state are in one program's registers


class Pool(NamedTuple):
    """state [slots, HV, K, V], or [slots, HV, V, K] if v_first; indices [N] or None."""

    state: Tensor
    indices: Tensor | None
    v_first: bool

    @property
    def k_first(self) -> Tensor:
        """The same memory, [slots, HV, K, V]."""
        return self.state.mT if self.v_first else self.state


def unsupported_reason(call: tuple[LinearInputs, Pool]) -> str | None:
    """Why the Triton kernel can't take this call, or None if it can."""
    terms, pool = call
    if reason := backends.triton_unsupported(terms.q, "q"):
        return reason
    if pool.state.dtype == torch.float64:
        return "it computes in float32, and state is float64"
    if terms.q.shape[-1] > MAX_K:
        return f"K may be at most {MAX_K}"
    if all(x.stride()[-2:] != (x.shape[-1], 1) for x in (pool.state, pool.state.mT)):
        return "the last two dimensions of state are not contiguous"
    return guarded_launch.known_failure(lambda: kind(terms, by_token=True), terms.q.device)


CANDIDATES = (
    Candidate("triton", "one Triton kernel, on CUDA", unsupported_reason),
    Candidate("eager", "plain torch, on any device"),
)
_PLANS = ValidationCache()


def run(
    terms: LinearInputs, pool: Pool, scale: float | None, l2_norm: bool, impl: str | None
) -> Tensor:
    """o [B, T, HV, V] in q's dtype; the pool's states are updated. Arguments as the user's."""
    key = signature((*terms, *pool[:-1]), pool.v_first, impl)
    dtype = None
    if key is not None and terms.q is not None and pool.state is not None:
        dtype = checks.autocast_dtype(terms.q)
        key = (*key, pool.state.stride(), dtype)
    plan = _PLANS.get(key, lambda: plan_for(terms, pool, impl), (*terms, *pool[:-1]))
    if autograd.wants_gradient(*terms, pool.state):
        raise NotImplementedError(
            "recurrent_step: the state is overwritten, so there are no gradients; call it under "
            "torch.no_grad(), or a fused_recurrent operator"
        )
    if key is None or dtype is not None:
        terms = transforms.as_autocast(terms)
    scale = float(max(terms.q.shape[-1], 1) ** -0.5 if scale is None else scale)
    if terms.q.is_cuda:  # outside of what is replayed; on the CPU the operator looks
        token_ids.expect_below("state_indices", pool.indices, pool.state.shape[0], "slots")
        if terms.cu_seqlens is not None:
            token_ids.expect_offsets("cu_seqlens", terms.cu_seqlens, terms.q.shape[1])
    return _call(
        *pool, *terms[:_COUNT], terms.cu_seqlens, scale=scale, l2_norm=l2_norm, impl=plan.impls
    )


def plan_for(terms: LinearInputs, pool: Pool, impl: str | None) -> Selection:
    """Checks the arguments and chooses; looks at nothing but shapes, strides, dtypes, devices."""
    dispatch.check(terms, {}, dispatch.LinearOptions(), True)
    _check_pool(terms, pool)
    return choose(
        CANDIDATES, (transforms.as_autocast(terms), pool), impl, "recurrent_step", terms.q
    )


def _check_pool(terms: LinearInputs, pool: Pool) -> None:
    state, indices, v_first = pool
    if (terms.a is None) != (terms.b is None) or (terms.p is not None and terms.beta is None):
        name, other = ("p", "beta") if terms.p is not None else ("a", "b")
        raise ValueError(f"{name}: wants {other} too, or neither")
    checks.expect_rank("state", state, 4, "[slots, HV, V, K]" if v_first else "[slots, HV, K, V]")
    N, HV, K, V = terms.state_shape
    cache_slots = N if indices is None else state.shape[0]
    checks.expect_shape(
        "state", state, (cache_slots, HV, V, K) if v_first else (cache_slots, HV, K, V)
    )
    checks.expect_floating({"state": state})
    checks.expect_one_device({"q": terms.q, "state": state, "state_indices": indices})
    checks.expect_index("state_indices", indices, (N,))


def _check_indices(indices: Tensor, cache_slots: int) -> None:
    """On the host: none past the last slot, none twice. On a device it would be a sync."""
    if indices.is_cpu:
        token_ids.expect_below("state_indices", indices, cache_slots, "slots")
        token_ids.expect_unique("state_indices", indices, "slot")


def _step(*args: Any) -> Tensor:
    count = len(Pool._fields)
    pool, (*given, cu_seqlens, scale, l2_norm, impl) = Pool(*args[:count]), args[count:]
    terms, state, indices = LinearInputs(*given, cu_seqlens=cu_seqlens), pool.state, pool.indices
    if terms.v.numel() == 0 or terms.q.shape[-1] == 0:
        return terms.q.new_zeros(terms.v.shape)
    if indices is not None:
        _check_indices(indices, state.shape[0])
    with guarded_launch.Guard(
        impl,
        state.device,
        lambda: kind(terms, by_token=True),
        lambda: probe.mismatch(terms, "triton", True, op.linear),
    ) as usable:
        if usable:
            from slipstream.kernels.linear.triton import decode as decode_launch

            return decode_launch.update(terms, pool.k_first, indices, scale, l2_norm)
    o = step_eager(_normalised(terms) if l2_norm else terms, pool, scale)
    return checks.cast(o, terms.q.dtype)


def _normalised(terms: LinearInputs) -> LinearInputs:
    """q, k and p as x / sqrt(sum x^2 + 1e-6), not rounded."""

    def unit(x: Tensor) -> Tensor:
        x = x.to(terms.dtype)
        return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()

    p = None if terms.p is None else unit(terms.p)
    return terms._replace(q=unit(terms.q), k=unit(terms.k), p=p)


def step_eager(terms: LinearInputs, pool: Pool, scale: float) -> Tensor:
    """In plain torch. A sequence without a slot takes what the first one with a slot does."""
    if pool.indices is None:
        o, final = recurrent_forward(terms._replace(initial_state=pool.k_first), scale)
        pool.k_first.copy_(final)
        return o
    rows = pool_rows.PoolRows(pool.indices, pool.state.shape[0])
    states = rows.read(pool.k_first)
    o, final = recurrent_forward(terms._replace(initial_state=states), scale)
    rows.write(pool.k_first, final)
    live = rows.live
    if terms.cu_seqlens is None or live is None:
        return rows.or_zero(o)
    t = torch.arange(o.shape[1], device=live.device)
    # the sequence of each token
    owner = torch.searchsorted(terms.cu_seqlens[1:].long(), t, right=True)
    live = live.index_select(0, owner.clamp(max=terms.sequences - 1))[None]
    return torch.where(live[..., None, None], o, 0)


def _fake(*args: Any) -> Tensor:
    count = len(Pool._fields)
    terms = LinearInputs(*args[count : count + _COUNT])
    return terms.q.new_empty(terms.v.shape)


_TERMS = custom_op.schema_of(LinearInputs, _COUNT)
_call = custom_op.KernelOp(
    "linear_step",
    f"(Tensor(a!) state, Tensor? state_indices, bool v_first, {_TERMS}, Tensor? cu_seqlens, "
    "float scale, bool l2_norm, str impl) -> Tensor",
    _step,
    _fake,
    replay=True,
)
