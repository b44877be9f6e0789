"""The table of operators that drives the property tests: a new operator is a new row."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream import ops


@dataclass(frozen=True)
class Size:
    """B batch, T tokens, H heads of q and k, HV of v, K and V widths, M slots, D channels."""

    B: int = 2
    T: int = 37
    H: int = 2
    HV: int = 4
    K: int = 16
    V: int = 24
    M: int = 8
    lengths: tuple[int, ...] | None = None  # of packed sequences

    @property
    def sequences(self) -> int:
        return self.B if self.lengths is None else len(self.lengths)


def packed(size: Size, *lengths: int) -> Size:
    return replace(size, B=1, T=sum(lengths), lengths=lengths)


Maker = Callable[[Size, torch.dtype, str], Tensor]


def _normal(*dims: str) -> Maker:
    return lambda n, dtype, gate: torch.randn([getattr(n, d) for d in dims], dtype=dtype)


def _unit(*dims: str) -> Maker:
    return lambda n, dtype, gate: F.normalize(
        torch.randn([getattr(n, d) for d in dims], dtype=torch.float64), dim=-1
    ).to(dtype)


def _positive(*dims: str) -> Maker:
    return lambda n, dtype, gate: torch.rand([getattr(n, d) for d in dims], dtype=dtype) + 0.1


def _beta(*dims: str) -> Maker:
    return lambda n, dtype, gate: torch.rand([getattr(n, d) for d in dims], dtype=dtype)


def _gate(*dims: str) -> Maker:
    """Log decays: "zero", "weak" of a few percent a token, "strong" down to -50, "mixed"."""

    def make(n: Size, dtype: torch.dtype, gate: str) -> Tensor:
        dtype = torch.float64 if dtype == torch.float64 else torch.float32
        x = torch.rand([getattr(n, d) for d in dims], dtype=dtype)
        if gate == "zero":
            return torch.zeros_like(x)
        if gate == "mixed":
            return -torch.where(torch.rand_like(x) < 0.2, 50 * x, 0.1 * x)
        return -50 * x if gate == "strong" else -0.1 * x

    return make


def _removal(*dims: str) -> tuple[Maker, Maker]:
    """a and b of a transition whose rank-one part erases: b = -a * strength, |a| = 1."""
    directions: dict[tuple, Tensor] = {}

    def a(n: Size, dtype: torch.dtype, gate: str) -> Tensor:
        shape = tuple(getattr(n, d) for d in dims)
        directions[shape] = F.normalize(torch.randn(shape, dtype=torch.float64), dim=-1)
        return directions[shape].to(dtype)

    def b(n: Size, dtype: torch.dtype, gate: str) -> Tensor:
        x = directions.pop(tuple(getattr(n, d) for d in dims))
        return (-x * torch.rand(*x.shape[:-1], 1, dtype=torch.float64)).to(dtype)

    return a, b


@dataclass(frozen=True)
class Operator:
    """One public function.

    makers: of each tensor argument, by name. state: dims of the initial state, or of each of a
    tuple of them. per_token: how many places of the argument belong to one token (Householder).
    """

    fn: Callable[..., Any]
    makers: Mapping[str, Maker]
    options: Mapping[str, Any] = field(default_factory=dict)
    state: tuple[Any, ...] = ("sequences", "HV", "K", "V")
    per_token: Mapping[str, int] = field(default_factory=dict)
    no_time: tuple[str, ...] = ()
    grouped: bool = True
    label: str = ""

    @property
    def name(self) -> str:
        return self.label or self.fn.__name__

    def inputs(
        self, size: Size, dtype: torch.dtype = torch.float32, gate: str = "weak", state: bool = True
    ) -> dict[str, Any]:
        """Fresh arguments; initial states are of the size that outputs have."""
        if not self.grouped:
            size = replace(size, HV=size.H)
        args: dict[str, Any] = {}
        for name, make in self.makers.items():
            n = self.per_token.get(name, 1)
            args[name] = make(replace(size, T=size.T * n), dtype, gate)
        if state:
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            states = self.state if isinstance(self.state[0], tuple) else (self.state,)
            made = tuple(
                torch.rand(
                    [d if isinstance(d, int) else getattr(size, d) for d in dims], dtype=wide
                )
                for dims in states
            )
            args["initial_state"] = made if isinstance(self.state[0], tuple) else made[0]
        if size.lengths is not None:
            args["cu_seqlens"] = offsets(size.lengths)
        return args

    def __call__(self, args: Mapping[str, Any], **options: Any) -> tuple[Tensor, Any]:
        return self.fn(**args, **{**self.options, "output_final_state": True, **options})

    def over_time(self, args: Mapping[str, Any], begin: int, end: int) -> dict[str, Any]:
        """The arguments of tokens begin .. end-1, without state and packing."""
        cut = {}
        for name in self.makers:
            n = self.per_token.get(name, 1)
            x = args[name]
            cut[name] = x if name in self.no_time else x[:, begin * n : end * n]
        return cut


def offsets(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


QKV = {
    "q": _normal("B", "T", "H", "K"),
    "k": _normal("B", "T", "H", "K"),
    "v": _normal("B", "T", "HV", "V"),
}
UNIT = {**QKV, "q": _unit("B", "T", "H", "K"), "k": _unit("B", "T", "H", "K")}
SCALAR, CHANNEL = _gate("B", "T", "HV"), _gate("B", "T", "HV", "K")
VALUE = _gate("B", "T", "HV", "V")
BETA = _beta("B", "T", "HV")
A, B_ = _removal("B", "T", "H", "K")
RWKV = {"r": QKV["q"], "w": CHANNEL, "k": QKV["k"], "v": QKV["v"]}
HOUSEHOLDER = {"k": 2, "v": 2, "beta": 2}


def _both(suffix: str, makers: Mapping[str, Maker], **row: Any) -> list[Operator]:
    return [
        Operator(getattr(ops, f"{path}_{suffix}"), makers, **row)
        for path in ("chunk", "fused_recurrent")
    ]


OPERATORS: list[Operator] = [
    *_both("linear_attn", QKV, options={"normalize": False}),
    *_both("retention", QKV),
    *_both("lightning_attn", QKV, options={"layer_idx": 1, "num_layers": 4}),
    *_both("simple_gla", {**QKV, "g": SCALAR}),
    Operator(ops.chunk_gla, {**QKV, "g": CHANNEL}),
    Operator(ops.fused_recurrent_gla, {**QKV, "gk": CHANNEL, "gv": VALUE}),
    *_both("rwkv6", {**RWKV, "u": _normal("HV", "K")}, no_time=("u",)),
    *_both(
        "gsa",
        {
            "q": QKV["q"],
            "k": QKV["k"],
            "v": _normal("B", "T", "H", "V"),
            "s": _normal("B", "T", "H", "M"),
            "g": _gate("B", "T", "H", "M"),
        },
        state=(("sequences", "H", "K", "M"), ("sequences", "H", "M", "V")),
        grouped=False,
    ),
    *_both("delta_rule", {**UNIT, "beta": BETA}),
    Operator(ops.chunk_gated_delta_rule, {**UNIT, "g": SCALAR, "beta": BETA}),
    Operator(ops.fused_recurrent_gated_delta_rule, {**UNIT, "g": SCALAR, "beta": BETA}),
    *_both("kda", {**UNIT, "g": CHANNEL, "beta": BETA}),
    *_both("comba", {**UNIT, "p": UNIT["k"], "g": SCALAR, "beta": BETA}),
    *_both("iplr_delta_rule", {**UNIT, "a": A, "b": B_}),
    *_both("dplr_delta_rule", {**UNIT, "a": A, "b": B_, "gk": CHANNEL}),
    *_both("rwkv7", {**RWKV, "a": A, "b": B_}),
    *_both(
        "gated_delta_product",
        {**UNIT, "g": SCALAR, "beta": BETA},
        options={"num_householder": 2},
        per_token=HOUSEHOLDER,
    ),
    *_both(
        "hgrn",
        {"x": _normal("B", "T", "K"), "g": _gate("B", "T", "K")},
        state=("sequences", "K"),
        grouped=False,
    ),
    Operator(  # normalised: positive queries and keys, two states
        ops.chunk_linear_attn,
        {**QKV, "q": _positive("B", "T", "H", "K"), "k": _positive("B", "T", "H", "K")},
        options={"normalize": True},
        state=(("sequences", "HV", "K", "V"), ("sequences", 1, "HV", "K")),
        label="chunk_linear_attn-normalize",
    ),
    Operator(  # both decays of the gated rule's recurrent form, beta for each column
        ops.fused_recurrent_gated_delta_rule,
        {**UNIT, "g": SCALAR, "gk": CHANNEL, "gv": VALUE, "beta": _beta("B", "T", "HV", "V")},
        label="fused_recurrent_gated_delta_rule-all",
    ),
]


def leaves(args: Mapping[str, Any]) -> tuple[dict[str, Any], list[Tensor]]:
    """The arguments with gradients asked for, and the list of those that take one."""
    out: dict[str, Any] = {}
    flat: list[Tensor] = []

    def own(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(own(y) for y in x)
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        x = x.detach().clone().requires_grad_()
        flat.append(x)
        return x

    for name, x in args.items():
        out[name] = own(x)
    return out, flat


def widen(args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments in float64."""

    def wide(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(wide(y) for y in x)
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    return {name: wide(x) for name, x in args.items()}


def flat(outputs: Any) -> list[Tensor]:
    """Output and states as one list."""
    o, state = outputs
    return [o, *(state if isinstance(state, tuple) else [state])]


def relative_error(got: Tensor, want: Tensor) -> float:
    """Root mean square of the difference over that of what was wanted; nan if got has a NaN."""
    want = want.double()
    error = (got.double() - want).square().mean().sqrt().item() if want.numel() else 0.0
    size = want.square().mean().sqrt().item() if want.numel() else 0.0
    if error == 0.0:
        return 0.0
    return error / size if size > 0 else math.inf


EPS = {torch.float64: 2.2e-16, torch.float32: 1.2e-7, torch.float16: 9.8e-4, torch.bfloat16: 7.8e-3}


CHUNK = 64


def budget(dtype: torch.dtype) -> float:
    """Of relative RMS errors: a chunk of C tokens sums C products, outputs are rounded once."""
    return 4 * CHUNK * EPS[dtype] if dtype in (torch.float32, torch.float64) else 0.75 * EPS[dtype]


def assert_near(op: Operator, got: list[Tensor], want: list[Tensor], tolerance: float, what: str):
    for i, (x, y) in enumerate(zip(got, want, strict=True)):
        assert x.shape == y.shape, (op.name, what, i, x.shape, y.shape)
        error = relative_error(x, y)
        assert error <= tolerance, f"{op.name} {what} {i}: {error:.2e} > {tolerance:.2e}"
