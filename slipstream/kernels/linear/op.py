"""The linear family as torch.library operators, and its gradient.

slipstream::linear_forward and slipstream::linear_backward take the terms in their order; `chunk` is
the chunk size, 0 for token by token; `impl` names the implementation, or several to try in order,
"triton|eager"; `wide` asks for o in float32. Outputs have a fixed number: o, the final state; and
the gradients of the differentiable terms given, in their order. linear_spans is linear_forward that
goes through the tokens in `spans` spans, and also returns the states between them, for backward.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from slipstream.kernels.linear import probe, workspace
from slipstream.kernels.linear.eager.chunk import chunk_forward
from slipstream.kernels.linear.eager.chunk_backward import chunk_backward
from slipstream.kernels.linear.eager.recurrent import recurrent_forward
from slipstream.kernels.linear.eager.recurrent_backward import recurrent_backward
from slipstream.kernels.linear.inputs import DIFFERENTIABLE, Terms
from slipstream.kernels.linear.sm90.vector_decay import schedule
from slipstream.kernels.linear.triton.plan import kind, only_by_token
from slipstream.runtime import guarded_launch
from slipstream.runtime.autograd import Function, Saved, needs_autograd, once_differentiable
from slipstream.runtime.custom_op import define, direct, replayed, shortcut
from slipstream.runtime.gradient import set_gradient

# Up to so many tokens fused_recurrent in Triton takes one after the other in registers instead of
# in chunks. On an H200 16 take 15 to 21 us, in chunks 6 (retention) to 87 (kda): docs/log.md.
STEP_TOKENS = 16

# Arguments of linear_backward, but for the states between spans.
BACKWARD = len(Terms._fields) + 6
Outputs = tuple[Tensor | None, Tensor | None] | None
_TERMS = ", ".join(f"Tensor{'' if name in 'qkv' else '?'} {name}" for name in Terms._fields)


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    o, final, *_ = spans_forward(*args, 0)
    return o, final


def spans_forward(*args: Any, out: Outputs = None, keep: bool = False) -> tuple[Tensor, ...]:
    """o, the final state, the states between spans, of which 0 says that no backward follows.

    Args:
        out: memory for o and the final state.
        keep: also what the launches leave for `gradients`, of each slice as many tensors.
    """
    *given, scale, chunk, impl, wide, spans = args
    terms = Terms(*given)
    if terms.v.numel() == 0 or terms.q.shape[-1] == 0:
        o, final = _empty_forward(terms, wide)
        return o, final, final.new_zeros(workspace.marks_shape(terms, spans))
    impl, _, rest = impl.partition("|")
    by_token = only_by_token(terms) or (chunk == 0 and terms.q.shape[1] <= STEP_TOKENS)

    def run(terms: Terms, scale: float) -> tuple[Tensor, ...]:
        if impl == "eager":
            eager = partial(_eager, chunk=chunk)
            terms = _in_float32(terms) if wide else terms
            return _in_slices(eager, terms, scale, wide, spans, out)
        launches = _launches(impl, terms, by_token)
        wider = wide and not getattr(launches, "WIDE", False)
        terms = _in_float32(terms) if wider else terms
        forward = getattr(launches, "forward_kept", None) if keep else None
        forward = forward or launches.forward
        return _in_slices(forward, terms, scale, wide, spans, out, launches)

    if impl == "eager":
        return run(terms, scale)

    def instead(terms: Terms, scale: float) -> tuple[Tensor, ...]:
        return spans_forward(*terms, scale, chunk, rest, wide, spans, out=out, keep=keep)

    return guarded_launch.attempt(
        lambda: kind(terms, impl, by_token),
        terms.q.device,
        partial(_widened, run, wide) if guarded_launch.widens(terms.q) else run,
        instead if rest else None,
        (terms, scale),
        lambda: probe.mismatch(terms, impl, by_token, linear),
    )


def _eager(terms: Terms, scale: float, chunk: int) -> tuple[Tensor, Tensor]:
    if chunk == 0:
        return recurrent_forward(terms, scale)
    return chunk_forward(terms, scale, chunk)


def _in_slices(
    forward: Callable,
    terms: Terms,
    scale: float,
    wide: bool,
    spans: int,
    out: Outputs,
    launches: Any = None,
) -> tuple[Tensor, ...]:
    """launches: those that forward is of; what has IN_SLICES writes to where it is told."""
    able = getattr(launches, "IN_SLICES", False)
    more = {"dtype": torch.float32} if wide and getattr(launches, "WIDE", False) else {}
    cut = spans > 1 or (able and out is None)  # with out it is a slice already
    parts = workspace.of_forward(terms, spans) if cut else [workspace.WHOLE]
    if spans > 1 and terms.cu_seqlens is None and getattr(launches, "MARKS", False):
        marks = terms.v.new_empty(workspace.marks_shape(terms, spans), dtype=torch.float32)
        o, final, *kept = forward(terms, scale, marks=marks)
        return o, final, marks, *(kept[0] if kept else ())
    if len(parts) == 1 and out is None:
        o, final, *kept = forward(terms, scale, **more)
        marks = final.new_empty(workspace.marks_shape(terms, spans))
        return o, final, marks, *(kept[0] if kept else ())
    forward = workspace.told(forward, terms, parts, launches)
    run = forward if able else partial(_copied, forward)
    dtype = torch.float32 if wide else None
    memory, plain = out or (None, None), launches is None
    return workspace.forward(run, terms, scale, parts, dtype, spans, memory, plain)


def _copied(
    forward: Callable, terms: Terms, scale: float, out: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    for x, y in zip(out, forward(terms, scale)):
        x.copy_(y)
    return out


def _launches(impl: str, terms: Terms, by_token: bool = False) -> Any:
    """The launches of a transition; Triton is imported only here, once they are wanted."""
    if by_token:
        from slipstream.kernels.linear.triton import decode_launch

        return decode_launch
    if impl == "sm90":
        if terms.transition == "none" and schedule.takes(terms):
            from slipstream.kernels.linear.sm90.vector_decay import backend as channel_sm90

            return channel_sm90
        if terms.transition == "none":
            from slipstream.kernels.linear.sm90.scalar_decay import backend as scalar_decay_backend

            return scalar_decay_backend
        from slipstream.kernels.linear.sm90.delta import backend as sm90_backend

        return sm90_backend
    assert impl == "triton", impl
    channel = terms.transition == "delta" and terms.decay == "channel"
    if channel or terms.transition == "dplr":
        from slipstream.kernels.linear.triton.dplr import backend

        return backend
    if terms.transition == "delta":
        from slipstream.kernels.linear.triton.delta import backend as delta_backend

        return delta_backend
    if terms.decay == "channel" or terms.gv is not None or terms.u is not None:
        from slipstream.kernels.linear.triton.vector_decay import backend as vector_decay_backend

        return vector_decay_backend
    from slipstream.kernels.linear.triton.scalar_decay import launch

    return launch


def _widened(run: Callable, wide: bool, terms: Terms, scale: float) -> tuple[Tensor, ...]:
    """With products of float32 operands, where the compiler can do no others."""
    o, *states = run(_in_float32(terms), scale)
    return o if wide else o.to(terms.q.dtype), *states


def _in_float32(terms: Terms) -> Terms:
    wide = (x if x is None or not x.is_floating_point() else x.float() for x in terms)
    return Terms(*cast(Any, wide))


def _empty_forward(terms: Terms, wide: bool) -> tuple[Tensor, Tensor]:
    """No tokens, no sequences or no width: the state stays, nothing is read."""
    o = terms.q.new_zeros(terms.v.shape, dtype=terms.dtype if wide else None)
    state = terms.v.new_zeros(terms.state_shape, dtype=terms.dtype)
    return o, state if terms.initial_state is None else state.copy_(terms.initial_state)


def _backward(*args: Any) -> list[Tensor]:
    *given, dout, dfinal, scale, chunk, impl, gate_gradient = args[:BACKWARD]
    marks, kept = args[BACKWARD] if len(args) > BACKWARD else None, args[BACKWARD + 1 :]
    terms = Terms(*given)
    if terms.v.numel() == 0 or terms.q.shape[-1] == 0:
        grads = {name: torch.zeros_like(x) for name, x in terms._asdict().items() if x is not None}
        if terms.initial_state is not None and dfinal is not None:
            grads["initial_state"].copy_(dfinal)
    else:
        options = scale, chunk, impl, gate_gradient
        grads = gradients(terms, dout, dfinal, *options, marks, kept=kept)
    return [grads[name] for name in _with_gradient(terms, gate_gradient)]


def gradients(
    terms: Terms,
    dout: Tensor | None,
    dfinal: Tensor | None,
    scale: float,
    chunk: int,
    impl: str,
    gate_gradient: bool,
    marks: Tensor | None,
    out: Mapping[str, Tensor] | None = None,
    kept: Sequence[Tensor] = (),
    spends_q: bool = False,
) -> dict[str, Tensor]:
    """By the name of the term; those of `out` are there, and the others anywhere.

    Args:
        marks, kept: of spans_forward.
        spends_q: nobody wants q afterwards, so that its memory may take a gradient.
    """
    impl, _, rest = impl.partition("|")
    if impl == "eager" or only_by_token(terms):
        if chunk == 0:
            return workspace.placed(recurrent_backward(terms, dout, dfinal, scale), out)
        return workspace.placed(chunk_backward(terms, dout, dfinal, scale, chunk), out)

    def run() -> dict[str, Tensor]:
        launches = _launches(impl, terms)
        skips = {} if gate_gradient else getattr(launches, "NO_GATE_GRADIENT", {})
        wider = guarded_launch.widens(terms.q)
        wide, do = (_in_float32(terms), dout) if wider else (terms, dout)
        if wider and do is not None:
            do = do.float()
        able = getattr(launches, "IN_SLICES", False)
        whole = not able or (impl == "sm90" and workspace.goes_back_whole(wide))
        parts = [workspace.WHOLE] if whole else workspace.of_backward(wide, marks)
        more = {"out": out} if able and out is not None else {}
        left = kept if hasattr(launches, "forward_kept") else ()
        if len(parts) == 1:
            more |= {"kept": left} if left else {}
            more |= {"spends_q": True} if spends_q and getattr(launches, "SPENDS_Q", False) else {}
            grads = launches.backward(wide, do, dfinal, scale, **skips, **more)
        else:
            run = workspace.told(launches.backward, terms, parts, launches)
            grads = workspace.backward(run, wide, do, dfinal, scale, parts, marks, left)
        if wider:
            grads = {name: x.to(getattr(terms, name).dtype) for name, x in grads.items()}
        return workspace.placed(grads, out)

    def instead() -> dict[str, Tensor]:
        given = terms, dout, dfinal, scale, chunk, rest, gate_gradient, marks, out, kept
        return gradients(*given, spends_q)

    return guarded_launch.attempt(
        lambda: kind(terms, impl),
        terms.q.device,
        run,
        instead if rest else None,
        (),
        lambda: probe.mismatch(terms, impl, False, linear),
    )


def _kept(*args: Any) -> tuple[Tensor, ...]:
    return spans_forward(*args, keep=True)


def _fake_forward(*args: Any) -> tuple[Tensor, Tensor]:
    return _fake_spans(*args, 1)[:2]


def _fake_spans(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    terms, wide, spans = Terms(*args[: len(Terms._fields)]), *args[-2:]
    o = terms.q.new_empty(terms.v.shape, dtype=terms.dtype if wide else None)
    final = terms.q.new_empty(terms.state_shape, dtype=terms.dtype)
    return o, final, final.new_empty(workspace.marks_shape(terms, spans))


def _fake_backward(*args: Any) -> list[Tensor]:
    terms = Terms(*args[: len(Terms._fields)])
    given = (getattr(terms, name) for name in _with_gradient(terms, args[BACKWARD - 1]))
    return [x.new_empty(x.shape) for x in given]


def _with_gradient(terms: Terms, gate_gradient: bool) -> list[str]:
    """What backward returns, in order. The gradient of g may cost as much as all others."""
    given = (name for name in DIFFERENTIABLE if getattr(terms, name) is not None)
    return [name for name in given if gate_gradient or name != "g"]


_OPTIONS = "float scale, int chunk, str impl"
_forward_op: Callable = define(
    "linear_forward",
    f"({_TERMS}, {_OPTIONS}, bool wide) -> (Tensor, Tensor)",
    _forward,
    _fake_forward,
)
_spans_op: Callable = define(
    "linear_spans",
    f"({_TERMS}, {_OPTIONS}, bool wide, int spans) -> (Tensor, Tensor, Tensor)",
    spans_forward,
    _fake_spans,
)
_backward_op: Callable = define(
    "linear_backward",
    f"({_TERMS}, Tensor? dout, Tensor? dfinal, {_OPTIONS}, bool gate_gradient, "
    "Tensor? marks=None) -> Tensor[]",
    _backward,
    _fake_backward,
)


def _gradient_follows(args: tuple, results: tuple[Tensor, ...]) -> None:
    """Of o alone, as most calls have it."""
    width = len(Terms._fields)
    given, options = args[:width], args[width : width + 3]
    g = Terms(*given).g
    gate_gradient = g is not None and g.requires_grad
    _backward(*given, torch.empty_like(results[0]), None, *options, gate_gradient, *results[2:])


_call_forward = shortcut(_forward_op, replays=True)
_call_trained = shortcut(_forward_op, replays=True, follows=_gradient_follows)
_call_spans = shortcut(_spans_op, replays=True, follows=_gradient_follows)
_call_kept = replayed(_kept, _gradient_follows)
_call_backward_kept = replayed(_backward)
_call_backward = shortcut(_backward_op, replays=True)


class _Linear(Function):
    operator = "slipstream::linear"

    @staticmethod
    def forward(ctx: Any, scale: float, chunk: int, impl: str, wide: bool, *given: Any) -> Any:
        ctx.options = (scale, chunk, impl)
        ctx.set_materialize_grads(False)
        terms = Terms(*given)
        spans, kept = workspace.spans_of(terms, impl), []
        if impl.startswith("sm90") and terms.transition == "delta" and direct(terms.q):
            o, final, *kept = _call_kept(*given, scale, chunk, impl, wide, spans)
        elif spans > 1 or workspace.trains_whole(terms, impl):
            o, final, *kept = _call_spans(*given, scale, chunk, impl, wide, spans)
        else:
            o, final = _call_trained(*given, scale, chunk, impl, wide)
        ctx.save_for_backward(*given, *kept)
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, saved: Saved, dout: Tensor | None, dfinal: Tensor | None) -> Any:
        given, kept = saved[: len(Terms._fields)], saved[len(Terms._fields) :]
        if dout is None and dfinal is None:
            return (None,) * (4 + len(given))
        terms = Terms(*given)
        gate_gradient = ctx.needs_input_grad[4 + Terms._fields.index("g")]
        args = (*given, dout, dfinal, *ctx.options, gate_gradient, *kept)
        if len(kept) <= 1:
            grads = _call_backward(*args)
        else:
            grads = _call_backward_kept(*args)
        named = dict(zip(_with_gradient(terms, gate_gradient), grads))
        by_term = [named.get(name) for name in DIFFERENTIABLE]
        return (None, None, None, None, *by_term, None)


def _of_operator(*args: Any) -> tuple[Tensor, Tensor]:
    """As slipstream::linear_forward is called."""
    width = len(Terms._fields)
    return _Linear.apply(*args[width : width + 4], *args[:width])


set_gradient(_forward_op, _of_operator)
set_gradient(_spans_op, _of_operator)


def linear(
    terms: Terms, scale: float, chunk: int, impl: str, wide: bool = False
) -> tuple[Tensor, Tensor]:
    """o [B, T, HV, V] in q's dtype, or wide in float32 for q of 16 bits, and the final state
    [N, HV, K, V], with gradients."""
    if needs_autograd(*terms):
        return _Linear.apply(scale, chunk, impl, wide, *terms)
    return _call_forward(*terms, scale, chunk, impl, wide)
