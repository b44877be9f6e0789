"""The recurrence of inputs.py for states that stay where they are: a pool, updated in place.

slipstream::_linear_step takes the terms in their order except the state before them, which is the
pool's: sequence n's is state[state_indices[n]], or state[n] without indices, and becomes that
after its tokens. Of states in int8 (common/int8_states.py) the pool is three tensors. It has no
gradient.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.common import checks, int8_states
from slipstream.common.checks import autocast_dtype, cast
from slipstream.common.int8_states import Int8State
from slipstream.common.pool_rows import PoolRows
from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.linear import probe
from slipstream.kernels.linear.dispatch import LinearOptions, as_autocast, check
from slipstream.kernels.linear.eager.recurrent import recurrent_forward
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.op import linear
from slipstream.kernels.linear.triton.plan import kind
from slipstream.runtime import numeric_probe
from slipstream.runtime.autograd import wants_gradient
from slipstream.runtime.backends import triton_unsupported
from slipstream.runtime.custom_op import KernelOp, schema_of
from slipstream.runtime.dispatch import Candidate, Selection, ValidationCache, choose, signature
from slipstream.runtime.guarded_launch import Guard, known_failure
from slipstream.runtime.token_ids import expect_below, expect_offsets, expect_unique

# of a token's terms: erase and write are a and b by then
_COUNT = LinearInputs._fields.index("erase")
MAX_K = 1024  # all rows of the state are in one program's registers


class Pool(NamedTuple):
    """state [slots, HV, K, V], or [slots, HV, V, K] if v_first; indices [N] or None.

    scale: [slots, HV, V], and residual: [slots, HV, 3 R, V], or [slots, HV, V, 3 R], of int8."""

    state: Tensor
    scale: Tensor | None
    residual: Tensor | None
    indices: Tensor | None
    v_first: bool

    @property
    def k_first(self) -> Tensor:
        """The same memory, [slots, HV, K, V]."""
        return _k_first(self.state, self.v_first)

    @property
    def int8(self) -> Int8State | None:
        """The same of a pool in int8."""
        if self.scale is None or self.residual is None:
            return None
        return Int8State(self.k_first, self.scale, _k_first(self.residual, self.v_first))


def _k_first(x: Tensor, v_first: bool) -> Tensor:
    return x.mT if v_first else x


def unsupported_reason(call: tuple[LinearInputs, Pool]) -> str | None:
    """Why the Triton kernel can't take this call, or None if it can."""
    terms, pool = call
    if reason := triton_unsupported(terms.q, "q"):
        return reason
    if pool.state.dtype == torch.float64:
        return "it computes in float32, and state is float64"
    if terms.q.shape[-1] > MAX_K:
        return f"K may be at most {MAX_K}"
    if all(x.stride()[-2:] != (x.shape[-1], 1) for x in (pool.state, pool.state.mT)):
        return "the last two dimensions of state are not contiguous"
    for name, x in (("state_scale", pool.scale), ("state_residual", pool.residual)):
        if x is not None and not x[0].is_contiguous():
            return f"a slot of {name} is not contiguous"
    return known_failure(lambda: _kind(terms, pool), terms.q.device)


def _kind(terms: LinearInputs, pool: Pool) -> KernelKey:
    plain = kind(terms, by_token=True)
    return plain if pool.scale is None else (*plain, "int8")


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
        dtype = autocast_dtype(terms.q)
        strides = [x.stride() for x in pool[:3] if x is not None]
        key = (*key, *strides, dtype)
    plan = _PLANS.get(key, lambda: plan_for(terms, pool, impl), (*terms, *pool[:-1]))
    if wants_gradient(*terms, pool.state, pool.scale):
        raise NotImplementedError(
            "recurrent_step: the state is overwritten, so there are no gradients; call it under "
            "torch.no_grad(), or a fused_recurrent operator"
        )
    if key is None or dtype is not None:
        terms = as_autocast(terms)
    scale = float(max(terms.q.shape[-1], 1) ** -0.5 if scale is None else scale)
    if terms.q.is_cuda:  # outside of what is replayed; on the CPU the operator looks
        expect_below("state_indices", pool.indices, pool.state.shape[0], "slots")
        if terms.cu_seqlens is not None:
            expect_offsets("cu_seqlens", terms.cu_seqlens, terms.q.shape[1])
    return _call(
        *pool, *terms[:_COUNT], terms.cu_seqlens, scale=scale, l2_norm=l2_norm, impl=plan.impls
    )


def plan_for(terms: LinearInputs, pool: Pool, impl: str | None) -> Selection:
    """Checks the arguments and chooses; looks at nothing but shapes, strides, dtypes, devices."""
    check(terms, {}, LinearOptions(), True)
    _check_pool(terms, pool)
    return choose(CANDIDATES, (as_autocast(terms), pool), impl, "recurrent_step", terms.q)


def _check_pool(terms: LinearInputs, pool: Pool) -> None:
    state, scale, residual, indices, v_first = pool
    if (terms.a is None) != (terms.b is None) or (terms.p is not None and terms.beta is None):
        name, other = ("p", "beta") if terms.p is not None else ("a", "b")
        raise ValueError(f"{name}: wants {other} too, or neither")
    checks.expect_rank("state", state, 4, "[slots, HV, V, K]" if v_first else "[slots, HV, K, V]")
    N, HV, K, V = terms.state_shape
    cache_slots = N if indices is None else state.shape[0]
    checks.expect_shape(
        "state", state, (cache_slots, HV, V, K) if v_first else (cache_slots, HV, K, V)
    )
    checks.expect_state(state, scale, residual, v_first)
    tensors = {"q": terms.q, "state": state, "state_indices": indices}
    checks.expect_one_device({**tensors, "state_scale": scale, "state_residual": residual})
    if indices is not None:
        checks.expect_shape("state_indices", indices, (N,))
        if indices.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"state_indices: want int32 or int64, got {indices.dtype}")


def _check_indices(indices: Tensor, cache_slots: int) -> None:
    """On the host: none past the last slot, none twice. On a device it would be a sync."""
    if indices.is_cpu:
        expect_below("state_indices", indices, cache_slots, "slots")
        expect_unique("state_indices", indices, "slot")


def _step(*args: Any) -> Tensor:
    count = len(Pool._fields)
    pool, (*given, cu_seqlens, scale, l2_norm, impl) = Pool(*args[:count]), args[count:]
    terms, state, indices = LinearInputs(*given, cu_seqlens=cu_seqlens), pool.state, pool.indices
    if terms.v.numel() == 0 or terms.q.shape[-1] == 0:
        return terms.q.new_zeros(terms.v.shape)
    if indices is not None:
        _check_indices(indices, state.shape[0])
    with Guard(
        impl,
        state.device,
        lambda: _kind(terms, pool),
        lambda: _mismatch(terms, pool, l2_norm),
    ) as usable:
        if usable:
            from slipstream.kernels.linear.triton import decode_launch

            states = pool.k_first, pool.scale, pool.residual
            return decode_launch.update(terms, *states, indices, scale, l2_norm)
    o = step_eager(_normalised(terms) if l2_norm else terms, pool, scale)
    return cast(o, terms.q.dtype)


def _mismatch(terms: LinearInputs, pool: Pool, l2_norm: bool) -> str | None:
    """The probe: of states in int8 the states after a few tokens, else o alone."""
    if pool.int8 is None:
        return probe.mismatch(terms, "triton", True, linear)
    like = probe.like(terms, probe.RECURRENT_TOKENS)
    shape = pool.k_first.shape[2:]
    start = torch.randn(like.sequences, like.v.shape[2], *shape, device=pool.state.device)

    def run(impl: str) -> Callable[[numeric_probe.Given], Any]:
        def call(given: numeric_probe.Given) -> tuple[Tensor, Tensor]:
            codes, scale, residual = int8_states.encode(start)
            codes, residual = (_k_first(x, pool.v_first).contiguous() for x in (codes, residual))
            states = Pool(codes, scale, residual, None, pool.v_first)
            few = LinearInputs(**given)
            o = _call(*states, *few[:_COUNT], few.cu_seqlens, scale=1.0, l2_norm=l2_norm, impl=impl)
            assert states.int8 is not None
            return o, int8_states.decode(states.int8)

        return call

    names = run("triton|eager"), run("eager")
    given = like._replace(initial_state=None)._asdict()
    bar = int8_states.ROUNDING
    return numeric_probe.mismatch(*names, given, gradients=False, minimum_bar=bar)


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
        state = pool.k_first if pool.int8 is None else int8_states.decode(pool.int8, terms.dtype)
        o, final = recurrent_forward(terms._replace(initial_state=state), scale)
        for target, x in zip(_tensors(pool), _stored(pool, final)):
            target.copy_(x if pool.int8 is None else _where_tokens(terms, x, target))
        return o
    rows = PoolRows(pool.indices, pool.state.shape[0])
    before = [rows.read(x) for x in _tensors(pool)]
    states = before[0]
    if pool.int8 is not None:
        states = int8_states.decode(Int8State(*before), terms.dtype)
    o, final = recurrent_forward(terms._replace(initial_state=states), scale)
    for target, x, old in zip(_tensors(pool), _stored(pool, final), before):
        rows.write(target, x if pool.int8 is None else _where_tokens(terms, x, old))
    live = rows.live
    if terms.cu_seqlens is None or live is None:
        return rows.or_zero(o)
    t = torch.arange(o.shape[1], device=live.device)
    # the sequence of each token
    owner = torch.searchsorted(terms.cu_seqlens[1:].long(), t, right=True)
    live = live.index_select(0, owner.clamp(max=terms.sequences - 1))[None]
    return torch.where(live[..., None, None], o, 0)


def _tensors(pool: Pool) -> tuple[Tensor, ...]:
    return (pool.k_first,) if pool.int8 is None else pool.int8


def _stored(pool: Pool, states: Tensor) -> tuple[Tensor, ...]:
    """States [N, HV, K, V] as the pool's tensors have them."""
    return (states,) if pool.int8 is None else int8_states.encode(states)


def _where_tokens(terms: LinearInputs, new: Tensor, old: Tensor) -> Tensor:
    """States of sequences without tokens are not rounded again."""
    if terms.cu_seqlens is None:
        return new
    some = terms.cu_seqlens.diff() > 0
    return torch.where(some.view(-1, *([1] * (new.dim() - 1))), new, old)


def _fake(*args: Any) -> Tensor:
    count = len(Pool._fields)
    terms = LinearInputs(*args[count : count + _COUNT])
    return terms.q.new_empty(terms.v.shape)


_TERMS = schema_of(LinearInputs, _COUNT)
_call = KernelOp(
    "linear_step",
    "(Tensor(a!) state, Tensor(b!)? state_scale, Tensor(c!)? state_residual, "
    f"Tensor? state_indices, bool v_first, {_TERMS}, Tensor? cu_seqlens, float scale, "
    "bool l2_norm, str impl) -> Tensor",
    _step,
    _fake,
    replay=True,
)
