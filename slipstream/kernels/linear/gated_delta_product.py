"""Several Householder steps a token, each as a token of the gated delta rule, slice after slice.

The first of a token's n steps decays and its last reads: q and g are zero at the others, and o is
thrown away there (householder.py). Of a long row a slice of tokens at a time is laid out like that
(workspace.py), so that it takes little memory; what is kept for backward are the states between
slices.
"""

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.linear import op, workspace
from slipstream.kernels.linear.householder import deinterleave, interleave
from slipstream.kernels.linear.inputs import BackwardCall, ForwardCall, LinearInputs
from slipstream.runtime.autograd import Function, Saved, needs_autograd, once_differentiable, save
from slipstream.runtime.backends import is_plain_call
from slipstream.runtime.custom_op import DirectCall, KernelOp, schema_of

# Steps of a slice, at least, where scans leave half of a GPU idle unless cut into segments.
MIN_SLICE_STEPS = 4096


class Steps(NamedTuple):
    """q [B, T, H, K]; k [B, T n, H, K], v [B, T n, HV, V], beta [B, T n, HV]; g [B, T, HV]; the
    state before the first token [N, HV, K, V]."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    g: Tensor | None = None
    state: Tensor | None = None

    @property
    def n(self) -> int:
        return self.k.shape[1] // self.q.shape[1]

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        return (self.q.shape[0], self.v.shape[2], self.q.shape[3], self.v.shape[3])

    def terms(self, tokens: slice, state: Tensor | None, impl: str) -> LinearInputs:
        """The terms of a slice, each step a token."""
        return self.laid(tokens, state, impl, None)[0]

    def laid(
        self, tokens: slice, state: Tensor | None, impl: str, do: Tensor | None
    ) -> tuple[LinearInputs, Tensor | None]:
        """Those, and the slice's gradient of o by steps."""
        n, g = self.n, None if self.g is None else self.g[:, tokens]
        k, v, beta = (x[:, _of_steps(tokens, n)] for x in (self.k, self.v, self.beta))
        do = None if do is None else do[:, tokens]
        q, g, do = interleave(self.q[:, tokens], g, do, n, impl)
        return LinearInputs(q, k, v, g=g, beta=beta, initial_state=state), do


def _of_steps(tokens: slice, n: int) -> slice:
    return slice(tokens.start * n, tokens.stop * n)


def num_slices(given: Steps, impl: str) -> int:
    """So many that a slice, which backward takes most for, takes what workspace.allowed_bytes says,
    but no more than leave slices long; one except for a single row."""
    (B, R, HV, V), E = given.v.shape, given.q.element_size()
    programs = HV * -(-V // 64)
    if B > 1 or 2 * programs < workspace.MIN_ACTIVE_PROGRAMS:
        return 1
    max_slices = (
        workspace.MAX_SLICES
        if programs >= workspace.MIN_ACTIVE_PROGRAMS
        else max(1, R // MIN_SLICE_STEPS)
    )
    size = sum(x.numel() * x.element_size() for x in given if x is not None)
    size += given.v.numel() * E // given.n  # o
    allowed = workspace.allowed_bytes(2 * size)
    allowed -= workspace.BORDER_STATES * prod(given.state_shape) * 4
    return int(min(max_slices, -(-R * HV * _workspace_bytes(given, impl) // max(allowed, 1))))


def _workspace_bytes(given: Steps, impl: str) -> int:
    """Bytes a step and value head of a slice's backward pass: q, do, R and states of chunks; and
    where these have no room in q or in the gradient of k, w and gradients of q and k."""
    (HV, V), (H, K), E = given.v.shape[2:], given.q.shape[2:], given.q.element_size()
    lean = (K * H // HV + V + workspace.CHUNK) * E + 2 * K * V * E // workspace.CHUNK
    if not impl.startswith("sm90"):
        return lean + (K + V) * E
    w = 0 if K == V else V * E
    return lean + w + (0 if H == HV else 2 * K * E)


def _like(given: Steps, count: int) -> tuple[Tensor, Tensor, Tensor]:
    wide: dict[str, Any] = {"dtype": torch.float32}
    (B, T), size = given.q.shape[:2], given.state_shape
    v = given.v
    states = (v.new_empty(size, **wide), v.new_empty(count - 1, *size, **wide))
    return v.new_empty(B, T, *v.shape[2:]), *states


def _forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """o [B, T, HV, V], the final state, and those between slices."""
    *tensors, scale, chunk, impl, count = args
    given = Steps(*tensors)
    o, final, checkpoints = _like(given, count)
    before = given.state
    if before is None and count > 1:  # alone, a scan may still read it where another has written
        before = final.zero_()
    cuts = workspace.time_slices(given.q.shape[1], count)
    for i, tokens in enumerate(cuts):
        after = final if i == len(cuts) - 1 else checkpoints[i]
        tokens = slice(tokens.start, min(tokens.stop, o.shape[1]))
        terms = given.terms(tokens, before, impl)
        call = ForwardCall(scale, chunk, impl, False, 1)
        wide, *_ = op.forward_impl(*terms, *call, out=(None, after))
        deinterleave(wide, None, given.n, o[:, tokens], None, impl)
        before = after
        del terms, wide  # before there are the next slice's
    return o, final, checkpoints


def _fake_forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _like(Steps(*args[: len(Steps._fields)]), args[-1])


def _backward(*args: Any) -> list[Tensor]:
    """Gradients of q, k, v, beta, that of g and of the state: where there is none, of a zero."""
    *tensors, checkpoints, do, dfinal, scale, chunk, impl = args
    given = Steps(*tensors)
    n, cuts = given.n, workspace.time_slices(given.q.shape[1], checkpoints.shape[0] + 1)
    grads = dict(zip(Steps._fields, _fake_backward(*args)))
    beta = given.beta  # its gradient is rounded once, at the end
    exact = torch.float32 if beta.element_size() < 4 else beta.dtype
    grads["beta"] = beta.new_empty(beta.shape, dtype=exact)
    after, entry = dfinal, given.state
    if len(cuts) > 1 and (after is None or entry is None):
        zeros = torch.zeros_like(grads["state"])
        after, entry = (zeros if x is None else x for x in (after, entry))
    for i, tokens in reversed(list(enumerate(cuts))):
        tokens = slice(tokens.start, min(tokens.stop, given.q.shape[1]))
        terms, d = given.laid(tokens, checkpoints[i - 1] if i else entry, impl, do)
        out = {name: grads[name][:, _of_steps(tokens, n)] for name in ("k", "v", "beta")}
        out["initial_state"] = grads["state"]
        call = BackwardCall(d, after, scale, chunk, impl)
        found = op.backward_impl(*terms, *call, out=out, overwrite_q=True)
        slice_grads = op.by_name(terms, True, found)
        g, g_to = (slice_grads["g"], grads["g"][:, tokens]) if given.g is not None else (None, None)
        deinterleave(slice_grads["q"], g, n, grads["q"][:, tokens], g_to, impl)
        after = grads["state"]
        del terms, d, call, found, slice_grads, g  # as above
    grads["beta"] = grads["beta"].to(beta.dtype)
    return list(grads.values())


def _fake_backward(*args: Any) -> list[Tensor]:
    given = Steps(*args[: len(Steps._fields)])
    of = [given.q.new_empty(0) if x is None else x.new_empty(x.shape) for x in given[:5]]
    return [*of, given.v.new_empty(given.state_shape, dtype=torch.float32)]


_TENSORS = schema_of(Steps)
_OPTIONS = "float scale, int chunk, str impl"
_call_forward = KernelOp(
    "steps_forward",
    f"({_TENSORS}, {_OPTIONS}, int spans) -> (Tensor, Tensor, Tensor)",
    _forward,
    _fake_forward,
    replay=True,
)
_call_backward = KernelOp(
    "steps_backward",
    f"({_TENSORS}, Tensor marks, Tensor? dout, Tensor? dfinal, {_OPTIONS}) -> Tensor[]",
    _backward,
    _fake_backward,
    replay=True,
)
_call_alone: Callable = DirectCall(lambda *args: _forward(*args)[:2])


class _Steps(Function):
    operator = "slipstream::gated_delta_product"

    @staticmethod
    def forward(ctx: Any, options: tuple, *tensors: Any) -> Any:
        o, final, checkpoints = _call_forward(
            *tensors, *options, spans=num_slices(Steps(*tensors), options[-1])
        )
        save(ctx, *tensors, checkpoints)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, saved: Saved, dout: Tensor | None, dfinal: Tensor | None) -> Any:
        if dout is None and dfinal is None:
            return (None,) * len(saved)
        grads = _call_backward(*saved, dout, dfinal, *ctx.options)
        return (None, *(x if y is not None else None for x, y in zip(grads, saved)))


def _of_operator(*args: Any) -> Any:
    """As slipstream::_steps_forward is called."""
    width = len(Steps._fields)
    return _Steps.apply(args[width:-1], *args[:width])


_call_forward.set_gradient(_of_operator)


def product(given: Steps, *options: Any) -> tuple[Tensor, Tensor]:
    """o [B, T, HV, V] and the final state, float32, with gradients.

    Args:
        options: scale, tokens a chunk (0: token by token), implementation.
    """
    if needs_autograd(*given):
        return _Steps.apply(options, *given)
    args = *given, *options, num_slices(given, options[-1])
    if given.q.is_cuda and is_plain_call(given.q):
        return _call_alone(*args)
    return _call_forward(*args)[:2]
