"""The step of a mixer: checks, choice, call.

slipstream::_mixer_step writes into y and into the pools. It has no gradient.
"""

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.mixer_step import eager
from slipstream.kernels.mixer_step.inputs import MAX_TAPS, StepInputs, StepOptions
from slipstream.runtime import autograd, backends, dispatch, guarded_launch, kernel_pair, token_ids
from slipstream.runtime.compile_ahead import AtSizes, Size
from slipstream.runtime.custom_op import KernelOp, schema_of
from slipstream.runtime.token_ids import expect_below

_LAUNCH = "slipstream.kernels.mixer_step.triton.launch"


def mixer_step(
    out: Tensor, inputs: StepInputs, options: StepOptions, counters: Tensor | None, impl: str
) -> None:
    """impl: triton, eager, or triton|eager. counters: as `counters` has them, or None."""
    _call(out, *inputs, counters, *options, impl=impl)


def counters_of_step(inputs: StepInputs, options: StepOptions) -> Tensor | None:
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
    eager.step_eager(out, inputs, options)


def _is_empty(q: Tensor, v: Tensor) -> bool:
    return 0 in (q.numel(), v.numel())


# One row, of which a launch prefetches, and more (primitives/device.py: PREFETCH_ROWS).
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
    # two sequences of a pool of three, with what the call has and the same heads
    probe={
        **dict.fromkeys(("out", "q", "k", "v", "beta", "write", "z"), (2, ...)),
        "state": lambda state: 0.1 * kernel_pair.random_like(state, 3, *state.shape[1:]),
        "state_indices": lambda q: torch.tensor([2, 0], device=q.device),
        "num_accepted": lambda q, num_accepted: (
            None if num_accepted is None else torch.tensor([0, 1], device=q.device)
        ),
        "conv_state": (3, ...),
        "g": lambda g: None if g is None else -kernel_pair.random_like(g, 2, *g.shape[1:]).abs(),
        "A_log": lambda A_log: None if A_log is None else -torch.randn_like(A_log).abs(),
        "counters": None,
    },
    packed={"inputs": StepInputs, "options": StepOptions},
    in_torch_if=_is_empty,
    replay=True,
    at_sizes=AtSizes(tokens=(0, *_BY_TOKEN), states=_BY_SEQUENCE, steps=(Size(1, 0), Size(2, 0))),
)

MAX_K = 1024  # all rows of a state are in one program's registers


def _unsupported_reason(inputs: StepInputs) -> str | None:
    """Why the Triton kernel can't take this call, or None if it can."""
    for name, x in inputs._asdict().items():
        if x is not None and x.dtype == torch.float64:
            return f"it computes in float32, and {name} is float64"
    if inputs.q.shape[-1] > MAX_K:
        return f"K may be at most {MAX_K}"
    if inputs.conv_weight is not None and inputs.conv_weight.shape[1] > MAX_TAPS:
        return f"it takes at most {MAX_TAPS} taps"
    if inputs.state.stride()[-2:] != (inputs.state.shape[-1], 1):
        return "the last two dimensions of state are not contiguous"
    return None


_CANDIDATES = _call.candidates(_unsupported_reason, asks_interpreter=True)
_PLANS = dispatch.ValidationCache()


def run(inputs: StepInputs, options: StepOptions, out: Tensor | None, impl: str | None) -> Tensor:
    """y [B, T, HV, V], in out if that is given; the pools are updated."""
    key = dispatch.signature((*inputs, out), *options, impl)
    if key is not None:
        key = (*key, inputs.state.stride())
    tensors = (*inputs, out)
    plan = _PLANS.get(key, lambda: _plan(inputs, options, out, impl), tensors)
    autograd.refuse_gradients("mixer_step", *tensors)
    if out is None:
        out = inputs.q.new_empty(_output_shape(inputs, options))
    # in a graph that is captured it would be one more launch
    if not torch.compiler.is_compiling() and not guarded_launch.is_capturing(inputs.q.device):
        expect_below("state_indices", inputs.state_indices, inputs.state.shape[0], "slots")
    if plan.impl == "reference":
        eager.step_reference(out, inputs, options)
        return out
    counters = None
    # a graph of torch.jit.trace would keep them; the operator finds its own
    if plan.impl == "triton" and backends.is_plain_call(inputs.q) and not autograd.is_tracing():
        counters = counters_of_step(inputs, options)
    mixer_step(out, inputs, options, counters, plan.impls)
    return out


def _plan(
    inputs: StepInputs, options: StepOptions, out: Tensor | None, impl: str | None
) -> dispatch.Selection:
    """Checks the arguments and chooses; looks at nothing but shapes, strides, dtypes, devices."""
    check(inputs, options, out)
    return dispatch.choose(_CANDIDATES, (inputs,), impl, "mixer_step", inputs.q)


def check(inputs: StepInputs, options: StepOptions, out: Tensor | None) -> None:
    q, v = inputs.q, inputs.v
    checks.expect_rank("q", q, 4, "[B, T, H, K]")
    checks.expect_rank("v", v, 4, "[B, T, HV, V]")
    B, T, H, HV, K, V = inputs.sizes
    checks.expect_shape("k", inputs.k, q.shape)
    checks.expect_shape("v", v, (B, T, HV, V))
    if not 0 <= options.pending <= T or (options.pending > 0 and inputs.num_accepted is None):
        raise ValueError(
            f"num_pending: want 0, or with num_accepted up to the {T} tokens given, got "
            f"{options.pending}"
        )
    checks.expect_multiple("heads of v", HV, "heads of q", H)
    state, indices = inputs.state, inputs.state_indices
    v_first = options.state_v_first
    checks.expect_rank("state", state, 4, "[slots, HV, V, K]" if v_first else "[slots, HV, K, V]")
    cache_slots = B if indices is None else state.shape[0]
    checks.expect_shape("state", state, (cache_slots, HV, *((V, K) if v_first else (K, V))))
    _check_convolution(inputs, cache_slots)
    _check_gates(inputs, options)
    shapes = {
        "state_indices": (indices, (B,)),
        "beta": (inputs.beta, (B, T, HV) if inputs.write is None else (B, T, HV, K)),
        "write": (inputs.write, v.shape),
        "D": (inputs.D, (HV,)),
        "z": (inputs.z, v.shape),
        "num_accepted": (inputs.num_accepted, (B,)),
        "out": (out, _output_shape(inputs, options)),
    }
    for name, (x, shape) in shapes.items():
        if x is not None:
            checks.expect_shape(name, x, shape)
    _check_norm(inputs, options)
    tensors = {**inputs._asdict(), "out": out}
    if options.a_is_rate:
        tensors["A"] = tensors.pop("A_log")
    checks.expect_one_device(tensors)
    for name in ("state_indices", "num_accepted"):
        checks.expect_index(name, tensors.pop(name))
    checks.expect_floating(tensors)


def _output_shape(inputs: StepInputs, options: StepOptions) -> tuple[int, ...]:
    B, T, *_ = inputs.sizes
    return (B, T - options.pending, *inputs.v.shape[2:])


def _check_convolution(inputs: StepInputs, cache_slots: int) -> None:
    state, weight, bias = inputs.conv_state, inputs.conv_weight, inputs.conv_bias
    if (state is None) != (weight is None):
        raise ValueError("conv_state: wants conv_weight too, or neither")
    if state is None or weight is None:
        if bias is not None:
            raise ValueError("conv_bias: wants conv_state and conv_weight too")
        return
    channels = inputs.channels
    checks.expect_rank("conv_weight", weight, 2, "[C, W]")
    W = weight.shape[1]
    checks.expect_shape("conv_weight", weight, (channels, max(W, 1)))
    checks.expect_rank("conv_state", state, 3, "[slots, C, W]")
    if state.shape[2] != W - 1:
        checks.expect_shape("conv_state", state, (cache_slots, channels, W))
    checks.expect_shape("conv_state", state, (cache_slots, channels, state.shape[2]))
    if bias is not None:
        checks.expect_shape("conv_bias", bias, (channels,))


def _check_gates(inputs: StepInputs, options: StepOptions) -> None:
    g, rate, bias = inputs.g, inputs.A_log, inputs.dt_bias
    B, T, _, HV, K, _ = inputs.sizes
    checks.expect_lower_bound(options.lower_bound)
    of_rate = "A" if options.a_is_rate else "A_log"
    if g is None:
        if rate is not None or bias is not None:
            raise ValueError(f"{of_rate if rate is not None else 'dt_bias'}: wants g too")
    elif g.dim() == 4:
        checks.expect_shape("g", g, (B, T, HV, K))
    else:
        checks.expect_shape("g", g, (B, T, HV))
    if rate is not None:
        checks.expect_shape(of_rate, rate, (HV,))
        if options.gate_logit_normalizer is not None:
            raise ValueError("gate_logit_normalizer: wants g alone, and A_log is given too")
        if options.a_is_rate and options.lower_bound is not None:
            raise ValueError("A: has no lower_bound, which wants A_log")
    if bias is not None and g is not None:
        if rate is None and options.lower_bound is None:
            raise ValueError("dt_bias: wants A_log or lower_bound too")
        flat = g.dim() == 4 and bias.dim() == 1  # as layers keep it
        checks.expect_shape("dt_bias", bias, (HV * K,) if flat else g.shape[2:])
    discretised = rate is not None and options.lower_bound is None
    if options.dt_scales_v and not (discretised and g is not None and g.dim() == 3):
        raise ValueError("dt_scales_v: wants g [B, T, HV] and A_log, and no lower_bound")
    if not 0 <= options.dt_min <= options.dt_max:
        raise ValueError(
            f"dt_limit: want 0 <= least <= largest, got {(options.dt_min, options.dt_max)}"
        )
    if inputs.beta is None and inputs.write is not None:
        raise ValueError("write: wants beta [B, T, HV, K] too")
    if inputs.beta is None and options.use_beta_sigmoid:
        raise ValueError("use_beta_sigmoid_in_kernel: wants beta too")
    if options.allow_neg_eigval and not options.use_beta_sigmoid:
        raise ValueError(
            "allow_neg_eigval: doubles the sigmoid of use_beta_sigmoid_in_kernel=True, which is "
            "off; pass beta in (0, 2) itself"
        )


def _check_norm(inputs: StepInputs, options: StepOptions) -> None:
    *_, HV, _, V = inputs.sizes
    weight, size = inputs.norm_weight, options.norm_group_size
    if weight is not None:
        if options.norm_eps is None:
            raise ValueError("norm_weight: wants norm_eps too")
        checks.expect_shape("norm_weight", weight, (V,) if weight.dim() == 1 else (HV, V))
    if size < 1 or size % max(V, 1) or (HV * V) % size:
        raise ValueError(
            f"norm_group_size: want a multiple of V = {V} that divides HV V = {HV * V}, got {size}"
        )
