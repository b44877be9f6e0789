"""slipstream::_mixer_step, which writes into y and into the pools. It has no gradient."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.mixer_step.counters import counters_of
from slipstream.kernels.mixer_step.eager import step_eager
from slipstream.kernels.mixer_step.inputs import StepInputs, StepOptions
from slipstream.runtime import numeric_probe
from slipstream.runtime.custom_op import KernelOp
from slipstream.runtime.guarded_launch import Guard
from slipstream.runtime.size_ladder import AtSizes, Size
from slipstream.runtime.token_ids import expect_unique

_COUNT = len(StepInputs._fields)
# what a probe makes in other ways
_NOT_FLOATING = ("state_indices", "num_accepted")


def mixer_step(
    out: Tensor, inputs: StepInputs, options: StepOptions, counters: Tensor | None, impl: str
) -> None:
    """impl: triton, eager, or triton|eager. counters: as `counters` has them, or None."""
    _call(out, *inputs, counters, *options, impl=impl)


def counters(inputs: StepInputs, options: StepOptions) -> Tensor | None:
    """The counters of the kernel's programs, where it has some."""
    each = _triton().counters_per_slot(inputs, options)
    return None if each is None else counters_of(inputs.state, each)


def kind(inputs: StepInputs) -> KernelKey:
    """The calls that share a verdict on the kernel."""
    decay = None if inputs.g is None else "channel" if inputs.g.dim() == 4 else "scalar"
    terms = tuple(x is not None for x in (inputs.beta, inputs.write, inputs.conv_state, inputs.z))
    drafts = None if inputs.num_accepted is None else "drafts"
    q, state = inputs.q, inputs.state
    widths = q.shape[3], inputs.v.shape[3]
    return ("mixer_step.triton", q.dtype, state.dtype, *widths, decay, *terms, drafts)


def _step(out: Tensor, *args: Any) -> None:
    inputs, counter = StepInputs(*args[:_COUNT]), args[_COUNT]
    options, impl = StepOptions(*args[_COUNT + 1 : -1]), args[-1]
    if inputs.v.numel() == 0 or inputs.q.numel() == 0:
        out.zero_()
        return
    if inputs.state_indices is not None:
        expect_unique("state_indices", inputs.state_indices, "slot")
    with Guard(
        impl, out.device, lambda: kind(inputs), lambda: _mismatch(inputs, options)
    ) as usable:
        if usable:
            if counter is None:
                counter = counters(inputs, options)
            _triton().step(out, inputs, counter, options)
            return
    step_eager(out, inputs, options)


@cache
def _triton() -> Any:
    """Triton is imported only here, once it is wanted."""
    from slipstream.kernels.mixer_step.triton import launch

    return launch


def _mismatch(like: StepInputs, options: StepOptions) -> str | None:
    """The probe: two sequences of a pool of three, with what the call has and the same heads."""
    device = like.q.device
    sizes = dict.fromkeys(("q", "k", "v", "g", "beta", "write", "z"), 2)
    sizes |= {"state": 3, "conv_state": 3}
    probe_inputs: dict[str, Tensor] = {}
    for name, x in like._asdict().items():
        if x is not None and name not in _NOT_FLOATING:
            shape = (sizes[name], *x.shape[1:]) if name in sizes else x.shape
            values = torch.randn(shape, device=device)
            values = -values.abs() if name in ("g", "A_log") else values
            probe_inputs[name] = (0.1 * values if name == "state" else values).to(x.dtype)

    def run(impl: str) -> Callable[[numeric_probe.Given], Any]:
        def call(tensors: numeric_probe.Given) -> tuple[Tensor, ...]:
            indices = torch.tensor([2, 0], device=device)
            counts = None if like.num_accepted is None else torch.tensor([0, 1], device=device)
            chosen = {"state_indices": indices, "num_accepted": counts}
            inputs = like._replace(**{**tensors, **chosen})
            rows = inputs.v[:, options.pending :]
            out = torch.empty_like(rows, dtype=inputs.q.dtype)
            mixer_step(out, inputs, options, None, impl)
            return out, *(x for x in (inputs.state, inputs.conv_state) if x is not None)

        return call

    # states and windows are rounded to their own dtypes
    pools = (x.dtype for x in (like.state, like.conv_state) if x is not None)
    minimum_bar = max(numeric_probe.BARS[x][0] if x in numeric_probe.BARS else 0.0 for x in pools)
    return numeric_probe.mismatch(
        run("triton|eager"), run("eager"), probe_inputs, gradients=False, minimum_bar=minimum_bar
    )


# One row, of which a launch prefetches, and more (begin_ahead.py: PREFETCH_ROWS).
_BY_TOKEN = tuple(
    1 + StepInputs._fields.index(x) for x in ("q", "k", "v", "g", "beta", "write", "z")
)
_BY_SEQUENCE = tuple(
    1 + StepInputs._fields.index(x)
    for x in ("state", "state_indices", "num_accepted", "conv_state")
)
_call = KernelOp(
    "mixer_step",
    "(Tensor(a!) out, Tensor q, Tensor k, Tensor v, Tensor(b!) state, Tensor? state_indices, "
    "Tensor? num_accepted, Tensor(c!)? conv_state, Tensor? conv_weight, Tensor? conv_bias, "
    "Tensor? g, Tensor? A_log, Tensor? dt_bias, Tensor? beta, Tensor? write, Tensor? D, Tensor? z, "
    "Tensor? norm_weight, Tensor(d!)? counters, float scale, SymInt pending, bool state_v_first, "
    "str channel_order, bool conv_silu, float? lower_bound, float? gate_logit_normalizer, "
    "float dt_min, float dt_max, bool use_beta_sigmoid, bool allow_neg_eigval, bool qk_l2norm, "
    "bool dt_scales_v, float? norm_eps, SymInt norm_group_size, bool norm_before_gate, "
    "bool z_silu, str impl) -> ()",
    _step,
    lambda *args: None,
    replay=True,
    at_sizes=AtSizes(tokens=(0, *_BY_TOKEN), states=_BY_SEQUENCE, steps=(Size(1, 0), Size(2, 0))),
)
