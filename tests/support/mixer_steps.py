"""Steps of mixers, on pools of states and of windows."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from slipstream.compiler.aot import Job
from slipstream.compiler.trace import trace
from slipstream.ops import mixer_step
from tests.support.operators import relative_error

SLOTS = 7
INDICES = (4, -1, 2)
B = len(INDICES)
# float32 against float64; sums of K products, then a norm
LIMIT = 3e-6
POOLS = ("state", "conv_state")


@dataclass(frozen=True)
class Kind:
    """The terms of a mixer. g: "head", "channel" or none. rates: A is given, no A_log."""

    g: str = ""
    beta: bool = False
    write: bool = False
    conv: bool = True
    z: bool = True
    raw: bool = True
    D: bool = False
    rates: bool = False
    weight: str = "shared"
    options: dict[str, Any] = field(default_factory=dict)


_RAW = {"use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": True, "norm_eps": 1e-6}
KINDS = {
    "gated_deltanet": Kind("head", beta=True, options=_RAW),
    "kda": Kind(
        "channel", beta=True, options={**_RAW, "z_activation": "sigmoid", "allow_neg_eigval": True}
    ),
    "gdn2": Kind(
        "channel",
        beta=True,
        write=True,
        options={**_RAW, "z_activation": "sigmoid", "allow_neg_eigval": True},
    ),
    "kda bounded": Kind("channel", beta=True, options={**_RAW, "lower_bound": -5.0}),
    "mamba2": Kind(
        "head",
        D=True,
        weight="own",
        options={
            "channel_order": "vkq",
            "dt_scales_v": True,
            "dt_limit": (0.01, 3.0),
            "scale": 1.0,
            "norm_before_gate": False,
            "norm_eps": 1e-5,
            "heads_together": 2,
        },
    ),
    "mamba2 of engines": Kind(
        "head", D=True, conv=False, z=False, weight="", rates=True, options={"dt_scales_v": True}
    ),
    "delta_net": Kind(beta=True, z=False, options=_RAW),
    "gla": Kind(
        "channel", conv=False, raw=False, options={"gate_logit_normalizer": 16.0, "norm_eps": 1e-5}
    ),
    "retention": Kind("head", conv=False, raw=False, weight="", options={"norm_eps": 1e-5}),
    "linear_attn": Kind(conv=False, z=False, weight=""),
    "conv without silu": Kind(z=True, weight="", options={"conv_activation": None}),
}


@dataclass(frozen=True)
class Sizes:
    """short: columns of a window less than taps. pending: of the T tokens."""

    T: int = 1
    H: int = 2
    HV: int = 4
    K: int = 20
    V: int = 33
    W: int = 4
    short: int = 0
    pending: int = 0
    dtype: torch.dtype = torch.float32
    pool_dtype: torch.dtype = torch.float32


def make(kind: Kind, n: Sizes, strength: float = 1.0) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Arguments, and options. strength: of the decays."""
    channels = 2 * n.H * n.K + n.HV * n.V
    shape = {"head": (n.HV,), "channel": (n.HV, n.K)}.get(kind.g, ())
    args = {
        "q": torch.randn(B, n.T, n.H, n.K),
        "k": torch.randn(B, n.T, n.H, n.K),
        "v": torch.randn(B, n.T, n.HV, n.V),
    }
    if kind.g:
        args["g"] = strength * torch.randn(B, n.T, *shape)
        if not kind.raw and "gate_logit_normalizer" not in kind.options:
            args["g"] = -args["g"].abs()
    if kind.beta:
        args["beta"] = torch.randn(B, n.T, n.HV, *([n.K] if kind.write else []))
    if kind.write:
        args["write"] = torch.randn(B, n.T, n.HV, n.V)
    if kind.z:
        args["z"] = torch.randn(B, n.T, n.HV, n.V)
    args = {name: x.to(n.dtype) for name, x in args.items()}
    if kind.g and kind.raw:
        rates = torch.rand(n.HV)
        args |= {"A": -rates} if kind.rates else {"A_log": rates.log()}
        args["dt_bias"] = torch.randn(shape)
    if kind.conv:
        args |= {"conv_weight": torch.randn(channels, n.W), "conv_bias": torch.randn(channels)}
        window = torch.randn(SLOTS, channels, n.W - n.short)
        args["conv_state"] = window.to(n.pool_dtype)
    if kind.D:
        args["D"] = torch.randn(n.HV)
    if kind.weight:
        args["norm_weight"] = torch.randn(*([] if kind.weight == "shared" else [n.HV]), n.V)
    args["state"] = torch.randn(SLOTS, n.HV, n.K, n.V).to(n.pool_dtype)
    options = dict(kind.options)
    if n.pending:
        options["num_pending"] = n.pending
        args["num_accepted"] = torch.tensor([n.pending, 1, n.pending // 2])
    if together := options.pop("heads_together", 0):
        options["norm_group_size"] = together * n.V
    return args, options


def expected(
    args: dict[str, Tensor], options: dict[str, Any], indices: Tensor | None
) -> dict[str, Tensor]:
    """y and the pools afterwards, in float64; states [slots, HV, K, V]."""
    # copies, also of the pools
    wide = {name: x.double() if x.is_floating_point() else x for name, x in args.items()}
    if "A" in wide:
        wide["A_log"] = (-wide.pop("A")).log()
    out = mixer_step(**wide, **options, state_indices=indices, impl="reference")
    return {"out": out, **{name: wide[name] for name in POOLS if name in wide}}


def check(
    kind: str,
    impl: str,
    n: Sizes,
    v_first: bool = False,
    limit: float = LIMIT,
    strength: float = 1.0,
    pool_limit: float | None = None,
) -> None:
    args, options = make(KINDS[kind], n, strength)
    at = torch.tensor(INDICES)
    want = expected(args, options, at)
    before = {name: args[name].clone() for name in POOLS if name in args}
    given = dict(args)
    if v_first:
        given["state"] = args["state"].mT.contiguous()
        options |= {"state_v_first": True}
    out = torch.full((B, n.T - n.pending, n.HV, n.V), torch.nan, dtype=n.dtype)
    y = mixer_step(**given, **options, state_indices=at, out=out, impl=impl)
    assert y is out
    found = {"out": out, **{name: given[name] for name in before}}
    if v_first:
        found["state"] = found["state"].mT
    for name, x in found.items():
        error = relative_error(x, want[name])
        most = limit if name == "out" or pool_limit is None else pool_limit
        assert error <= most, (kind, impl, n, v_first, name, error)
    untouched = [i for i in range(SLOTS) if i not in INDICES]
    assert all(torch.equal(found[name][untouched], x[untouched]) for name, x in before.items())
    assert not out[1].any()


def beside_nan(impl: str, n: Sizes, names: Iterable[str], place: tuple) -> Iterator[tuple]:
    """y and the arguments after calls without NaN and with it, at that place of those inputs."""
    args, options = make(KINDS["gated_deltanet"], n)
    for broken in (False, True):
        given = {name: x.clone() for name, x in args.items()}
        for name in names if broken else ():
            given[name][place] = torch.nan
        at = torch.tensor(INDICES)
        yield mixer_step(**given, **options, state_indices=at, impl=impl), given


def check_drafts_leave_no_trace(impl: str, n: Sizes) -> None:
    """NaN in a new draft changes no bit of the pools, nor of y before it."""
    runs = beside_nan(impl, n, "qkv", (slice(None), -1))
    found = [[y[:, :-1], *(given[name] for name in POOLS)] for y, given in runs]
    assert all(map(torch.equal, *found))
    assert all(bool(x.isfinite().all()) for x in found[1])


# Qwen3-Next's heads
LARGE = Sizes(H=16, HV=32, K=128, V=128, dtype=torch.bfloat16)


def job_of(kind: str, size: Sizes, arch: str = "sm_90", alone: bool = False, **more: Any) -> Job:
    """The one kernel of a call; alone: of one sequence, whose pool has nothing else; more: its
    options."""
    args, options = make(KINDS[kind], size)
    args = {n: x[:1] if alone and len(x) in (B, SLOTS) else x for n, x in args.items()}

    def call(device: torch.device) -> None:
        given = {n: torch.empty(x.shape, dtype=x.dtype, device=device) for n, x in args.items()}
        at = None if alone else torch.empty(B, dtype=torch.int32, device=device)
        mixer_step(**given, **{**options, **more}, state_indices=at, impl="triton")

    (job,) = (x for x in trace(call, arch, backward=False) if "mixer" in x.kernel)
    return job
