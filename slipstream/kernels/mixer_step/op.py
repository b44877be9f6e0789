"""slipstream::_mixer_step, which writes into y and into the pools. It has no gradient."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.mixer_step.eager import step_eager
from slipstream.kernels.mixer_step.inputs import StepInputs, StepOptions
from slipstream.runtime import kernel_pair, numeric_probe, token_ids
from slipstream.runtime.custom_op import KernelOp, schema_of
from slipstream.runtime.size_ladder import AtSizes, Size

_LAUNCH = "slipstream.kernels.mixer_step.triton.launch"
# what a probe makes in other ways
_NOT_FLOATING = ("state_indices", "num_accepted")


def mixer_step(
    out: Tensor, inputs: StepInputs, options: StepOptions, counters: Tensor | None, impl: str
) -> None:
    """impl: triton, eager, or triton|eager. counters: as `counters` has them, or None."""
    _call(out, *inputs, counters, *options, impl=impl)


def counters(inputs: StepInputs, options: StepOptions) -> Tensor | None:
    """The counters of the kernel's programs, where it has some."""
    return kernel_pair.launch_of(f"{_LAUNCH}:counters")(inputs, options)


def kind(inputs: StepInputs) -> KernelKey:
    """The calls that share a verdict on the kernel."""
    decay = None if inputs.g is None else "channel" if inputs.g.dim() == 4 else "scalar"
    terms = tuple(x is not None for x in (inputs.beta, inputs.write, inputs.conv_state, inputs.z))
    drafts = None if inputs.num_accepted is None else "drafts"
    q, state = inputs.q, inputs.state
    widths = q.shape[3], inputs.v.shape[3]
    return ("mixer_step.triton", q.dtype, state.dtype, *widths, decay, *terms, drafts)


def _plain(out: Tensor, inputs: StepInputs, _: Tensor | None, options: StepOptions) -> None:
    if _is_empty(inputs.q, inputs.v):
        out.zero_()
        return
    if inputs.state_indices is not None:
        token_ids.expect_unique("state_indices", inputs.state_indices, "slot")
    step_eager(out, inputs, options)


def _is_empty(q: Tensor, v: Tensor) -> bool:
    return 0 in (q.numel(), v.numel())


def _mismatch(inputs: StepInputs, options: StepOptions) -> str | None:
    """The probe: two sequences of a pool of three, with what the call has and the same heads."""
    like, device = inputs, inputs.q.device
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
    f"(Tensor(a!) out, {schema_of(StepInputs, state='Tensor(b!)', conv_state='Tensor(c!)?')}, "
    f"Tensor(d!)? counters, {schema_of(StepOptions, pending='SymInt', norm_group_size='SymInt')}, "
    "str impl) -> ()",
    fake=lambda *args: None,
    kernel=f"{_LAUNCH}:step",
    plain=_plain,
    kind=kind,
    probe=_mismatch,
    packed={"inputs": StepInputs, "options": StepOptions},
    in_torch_if=_is_empty,
    replay=True,
    at_sizes=AtSizes(tokens=(0, *_BY_TOKEN), states=_BY_SEQUENCE, steps=(Size(1, 0), Size(2, 0))),
)
