"""Every public operator with sample inputs, as a table: what matrix, precompile, doctor, explain,
the tests and the benchmarks call.

A new operator is a new row. "q=BTHK:unit" is an argument q of dims B, T, H, K filled as FILL says;
without a fill it is normal. Letters: B batch, T tokens, R = T times the Householder steps, H heads
of q and k, G of v and gates, K and V widths, P = K / 2, F = P - 1, M slots, N sequences, S = T + 3
keys, D channels, C = 3D, E channels of q, k and v, L channels too many for one tile, Q = 512 + 64
of a latent, Z vocabulary, W taps; a digit is itself.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream import ops

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    """grouped: twice as many heads of v as of q; HV: so many. packed: B sequences in one row;
    lengths: sequences of these lengths. D, C: channels. gate: how log decays are, see Gate."""

    B: int = 2
    T: int = 100
    H: int = 2
    K: int = 128
    V: int = 128
    grouped: bool = False
    packed: bool = False
    state: bool = False
    dtype: torch.dtype = torch.bfloat16
    HV: int | None = None
    M: int = 64
    D: int | None = None
    C: int | None = None
    Z: int = 1000
    lengths: tuple[int, ...] | None = None
    gate: str = "weak"

    @property
    def is_packed(self) -> bool:
        return self.packed or self.lengths is not None

    @property
    def sequences(self) -> int:
        return self.B if self.lengths is None else len(self.lengths)

    def dims(self) -> dict[str, int]:
        tokens, rows = self.T, self.B
        if self.is_packed:
            tokens, rows = (self.B * self.T if self.lengths is None else sum(self.lengths)), 1
        channels = self.H * self.V if self.D is None else self.D
        return {
            "B": rows,
            "T": tokens,
            "R": 2 * tokens,
            "S": tokens + 3,
            "H": self.H,
            "G": self.HV or (2 * self.H if self.grouped else self.H),
            "X": 72,  # so many that a walk has more programs than an H200 multiprocessors
            "K": self.K,
            "V": self.V,
            "P": self.K // 2,
            "F": self.K // 2 - 1,
            "M": self.M,
            "N": self.sequences,
            "D": channels,
            "C": 3 * channels if self.C is None else self.C,
            "E": 2 * self.H * self.K + (self.HV or self.H * (1 + self.grouped)) * self.V,
            "L": 1 << 16,
            "Q": 576,
            "Z": self.Z,
            "W": 4,
            **{str(n): n for n in range(1, 10)},
        }

    def offsets(self, device: torch.device, blank: bool = False) -> Tensor:
        """Of the sequences in one row, of different lengths."""
        n = self.sequences
        if blank:
            return torch.empty(n + 1, dtype=torch.int32, device=device)
        if self.lengths is not None:
            return torch.tensor([0, *self.lengths]).cumsum(0).int().to(device)
        total = n * self.T
        cuts = [0, *(total * (3 * i + 1) // (3 * n) for i in range(1, n)), total]
        return torch.tensor(cuts, dtype=torch.int32).to(device)

    def __str__(self) -> str:
        text = f"B={self.B} T={self.T} H={self.H} K={self.K} V={self.V} {name_of(self.dtype)}"
        flags = [x for x in ("grouped", "packed", "state") if getattr(self, x)]
        return " ".join([text, *flags])


class Making(NamedTuple):
    """What an argument may depend on: the call's shape, its dims, and the arguments before it."""

    shape: Shape
    dims: Mapping[str, int]
    args: Mapping[str, Tensor]
    device: torch.device

    def normal(self, size: list[int]) -> Tensor:
        return torch.randn(size, device=self.device)

    def uniform(self, size: list[int]) -> Tensor:
        return torch.rand(size, device=self.device)

    def unit(self, size: list[int]) -> Tensor:
        return F.normalize(self.normal(size), dim=-1)

    def integers(self, size: list[int], below: int) -> Tensor:
        return torch.randint(0, max(below, 1), size, device=self.device)

    def erase(self, size: list[int]) -> Tensor:
        """b of a transition whose part of rank one erases: against a, by some of its length."""
        return -self.args["a"].float() * self.uniform([*size[:-1], 1])

    def gate(self, size: list[int], weak: float) -> Tensor:
        """Log decays: "zero", "weak" (above -0.1 or -0.6), "strong" down to -50, or "mixed"."""
        x, kind = self.uniform(size), self.shape.gate
        if kind == "zero":
            return 0 * x
        if kind == "mixed":
            return -torch.where(self.uniform(size) < 0.2, 50 * x, 0.1 * x)
        return -50 * x if kind == "strong" else -weak * x

    def targets(self, size: list[int]) -> Tensor:
        """Classes, the second of them ignored."""
        found = self.integers(size, self.dims["Z"])
        if size[0] > 2:
            found[1] = -100
        return found

    def used(self, size: list[int]) -> Tensor:
        """Of S keys: as many as there are tokens, or some more."""
        return self.dims["S"] - 1 - 2 * (torch.arange(size[0], device=self.device) % 2)

    def cached(self, size: list[int]) -> Tensor:
        """Keys of packed sequences: their new ones, and up to three before."""
        more = torch.tensor([2, 3, 0, 1]).repeat(size[0])[: size[0]]
        return self.shape.offsets(self.device).diff().long() + more.to(self.device)


FILL: Mapping[str, Callable[[list[int], Making], Tensor]] = {
    "normal": lambda size, m: m.normal(size),
    "unit": lambda size, m: m.unit(size),
    "erase": lambda size, m: m.erase(size),
    "positive": lambda size, m: m.uniform(size) + 0.1,
    "beta": lambda size, m: m.uniform(size),
    "gate": lambda size, m: m.gate(size, 0.1),
    "narrow": lambda size, m: m.gate(size, 0.1),
    "bounded": lambda size, m: m.gate(size, 0.6),
    "rate": lambda size, m: -m.uniform(size) - 0.1,
    "state": lambda size, m: 0.1 * m.normal(size),
    "sum": lambda size, m: m.uniform(size),
    "one": lambda size, m: 1 + 0.1 * m.normal(size),
    "ids": lambda size, m: m.integers(size, m.dims["Z"]),
    "targets": lambda size, m: m.targets(size),
    "positions": lambda size, m: m.integers(size, m.dims["S"]),
    "lengths": lambda size, m: m.integers(size, 50),
    # of a cache with twice as many rows as there are new keys, one or more
    "prefixes": lambda size, m: m.integers(size, 2),
    "used": lambda size, m: m.used(size),
    "cached": lambda size, m: m.cached(size),
}
# Fills that are float32 whatever the operator computes in.
_WIDE = ("gate", "bounded", "state", "sum")
_INTEGERS = {
    **dict.fromkeys(("ids", "targets", "positions", "used", "cached"), torch.int64),
    **dict.fromkeys(("lengths", "prefixes"), torch.int32),
}


@dataclass(frozen=True)
class Sample:
    """A public operator and how it is called.

    tensors: as the module says. states: dims of the initial state, a tuple of them for several.
    options: further arguments. variant: what tells it from the operator's other rows. grouped:
    takes more heads of v than of q. packed: whatever the shape says. fixed: names of arguments
    that get no gradient; written: of those that it writes into, and gets a copy of. traced: the
    matrix compiles it and doctor runs it, unless it is random: two calls then differ. tested: the
    tests hold it against the reference.
    """

    op: str
    tensors: str
    states: str | tuple[str, ...] = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    variant: str = ""
    grouped: bool = True
    packed: bool = False
    fixed: str = ""
    written: str = ""
    traced: bool = True
    random: bool = False
    tested: bool = True

    @property
    def name(self) -> str:
        return f"{self.op}-{self.variant}" if self.variant else self.op

    @property
    def fn(self) -> Callable[..., Any]:
        return getattr(ops, self.op)

    @property
    def takes(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.fn).parameters

    @property
    def dims(self) -> dict[str, str]:
        """Letters of each tensor argument."""
        return {name: letters for name, letters, _ in map(_parsed, self.tensors.split())}

    def inputs(
        self, shape: Shape, device: torch.device = CPU, blank: bool = False
    ) -> dict[str, Any]:
        """Fresh random arguments; blank: nothing in them, for where only shapes matter."""
        if not self.grouped:
            shape = replace(shape, grouped=False, HV=None)
        if self.packed and not shape.is_packed:
            third, one = shape.T // 3, min(shape.T - shape.T // 3, 1)
            lengths = (third, 0, one, shape.T - third - one)
            shape = replace(shape, lengths=lengths)
        elif "cu_seqlens" not in self.takes:
            shape = replace(shape, packed=False, lengths=None)
        args: dict[str, Any] = {}
        making = Making(shape, shape.dims(), args, device)
        for word in self.tensors.split():
            name, letters, fill = _parsed(word)
            args[name] = _make(letters, fill or "normal", making, blank)
        if shape.state and self.states:
            states = (self.states,) if isinstance(self.states, str) else self.states
            words = [_parsed(f"={x}") for x in states]
            made = tuple(_make(x, fill or "state", making, blank) for _, x, fill in words)
            args["initial_state"] = made[0] if isinstance(self.states, str) else made
        if shape.is_packed:
            args["cu_seqlens"] = shape.offsets(device, blank)
        return args

    def __call__(self, args: Mapping[str, Any], **options: Any) -> Any:
        """What the function returns, its final states too."""
        final = {"output_final_state": True} if self.op in _RETURN_STATES else {}
        copies = {name: args[name].clone() for name in self.written.split()}
        return self.fn(**{**args, **copies}, **{**final, **self.options, **options})

    def call(self, args: Mapping[str, Any], impl: str | None = None) -> list[Tensor]:
        """Its outputs, states too, as one list."""
        args = {**args, **{name: args[name].detach() for name in self.fixed.split()}}
        return flat(
            self(args, **({} if impl is None or "impl" not in self.takes else {"impl": impl}))
        )


# Operators that return their state if asked; torch.compile can read this, but no signatures.
_RETURN_STATES = frozenset(
    name
    for name, fn in vars(ops).items()
    if inspect.isfunction(fn) and "output_final_state" in inspect.signature(fn).parameters
)


def _parsed(word: str) -> tuple[str, str, str]:
    """Name, letters and fill."""
    name, _, rest = word.partition("=")
    letters, _, fill = rest.partition(":")
    return name, letters, fill


def _make(letters: str, fill: str, making: Making, blank: bool) -> Tensor:
    size, dtype = [making.dims[c] for c in letters], making.shape.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    kind = _INTEGERS.get(fill) or (wide if fill in _WIDE else dtype)
    if blank:
        return torch.empty(size, dtype=kind, device=making.device)
    return FILL[fill](size, making).to(kind)


def flat(out: Any) -> list[Tensor]:
    if isinstance(out, Tensor):
        return [out]
    return [] if out is None else [y for x in out for y in flat(x)]


def name_of(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}.get(
        dtype, str(dtype).removeprefix("torch.")
    )


_QKV = "q=BTHK k=BTHK v=BTGV"
_UNIT = "q=BTHK:unit k=BTHK:unit v=BTGV"
_RWKV = "r=BTHK w=BTGK:bounded k=BTHK v=BTGV"
_S = "NGKV"


def _both(name: str, tensors: str, states: Any = _S, **row: Any) -> list[Sample]:
    paths = ("chunk", "fused_recurrent")
    return [Sample(f"{path}_{name}", tensors, states, **row) for path in paths]


def _traced(op: str, tensors: str, states: Any = "", variant: str = "", **row: Any) -> Sample:
    """Kernels of their own; what they compute is what another row's do."""
    return Sample(op, tensors, states, variant=variant, tested=False, **row)


def _tested(op: str, variant: str, tensors: str, states: Any = "", **row: Any) -> Sample:
    """Another way to call an operator, whose kernels the matrix has from its other rows."""
    return Sample(op, tensors, states, variant=variant, traced=False, **row)


def _step(tensors: str, variant: str = "", **options: Any) -> Sample:
    """A mixer's step, which has no gradients."""
    pools = "state=BGKV:state conv_state=BEW conv_weight=EW"
    tensors = f"q=B1HK k=B1HK v=B1GV {pools} A_log=G z=B1GV {tensors}"
    fixed = " ".join(name for name, _, _ in map(_parsed, tensors.split()))
    written = {"written": "state conv_state", "fixed": fixed}
    return _traced("mixer_step", tensors, variant=variant, options=options, **written)


_LINEAR = [
    *_both("linear_attn", _QKV, options={"normalize": False}),
    *_both("retention", _QKV),
    *_both("lightning_attn", _QKV, options={"layer_idx": 1, "num_layers": 4}),
    *_both("simple_gla", f"{_QKV} g=BTG:gate"),
    Sample("chunk_gla", f"{_QKV} g=BTGK:gate", _S),
    _traced("fused_recurrent_gla", f"{_QKV} gk=BTGK:gate", _S),
    *_both("rwkv6", f"{_RWKV} u=GK"),
    # gates in the dtype of q
    _traced("chunk_gla", f"{_QKV} g=BTGK:narrow", _S, "narrow"),
    _traced("chunk_rwkv6", "r=BTHK w=BTGK:narrow k=BTHK v=BTGV u=GK", _S, "narrow"),
    *_both("gsa", "q=BTHK k=BTHK v=BTHV s=BTHM g=BTHM:gate", ("NHKM", "NHMV"), grouped=False),
    *_both("hgrn", "x=BTD g=BTD:gate", "ND"),
    *_both("delta_rule", f"{_UNIT} beta=BTG:beta"),
    *_both("gated_delta_rule", f"{_UNIT} g=BTG:gate beta=BTG:beta"),
    *_both("kda", f"{_UNIT} g=BTGK:gate beta=BTG:beta"),
    *_both("comba", f"{_UNIT} p=BTHK:unit g=BTG:gate beta=BTG:beta"),
    *_both("iplr_delta_rule", f"{_UNIT} a=BTHK:unit b=BTHK:erase"),
    *_both("dplr_delta_rule", f"{_UNIT} a=BTHK:unit b=BTHK:erase gk=BTGK:gate"),
    *_both("rwkv7", f"{_RWKV} a=BTHK:unit b=BTHK:erase"),
    _traced("chunk_kda", f"{_UNIT} g=BTGK:narrow beta=BTG:beta", _S, "narrow"),
    _traced("chunk_rwkv7", "r=BTHK w=BTGK:narrow k=BTHK v=BTGV a=BTHK:unit b=BTHK:erase", _S,
            "narrow"),
    # packed calls of many heads
    _traced("chunk_gated_delta_rule",
            "q=BTXK:unit k=BTXK:unit v=BTXV g=BTX:gate beta=BTX:beta", "NXKV", "heads"),
    _traced("chunk_delta_rule", "q=BTXK:unit k=BTXK:unit v=BTXV beta=BTX:beta", "NXKV", "heads"),
    *_both("gated_delta_product", "q=BTHK:unit k=BRHK:unit v=BRGV g=BTG:gate beta=BRG:beta",
           options={"num_householder": 2}),
    _tested("chunk_gla", "values", f"{_QKV} g=BTGK:gate gv=BTGV:gate", _S),
    _tested("fused_recurrent_gla", "values", f"{_QKV} gk=BTGK:gate gv=BTGV:gate", _S),
    _tested("fused_recurrent_gated_delta_rule", "all",
            f"{_UNIT} g=BTG:gate gk=BTGK:gate gv=BTGV:gate beta=BTGV:beta", _S),
    _tested("chunk_linear_attn", "normalize", "q=BTHK:positive k=BTHK:positive v=BTGV",
            ("NGKV", "N1GK:sum"), options={"normalize": True}),
]  # fmt: skip

_ATTENTION = "q=BTGK k=BTHK v=BTHV"
_LONGER = "q=BTGK k=BSHK v=BSHV"
_NORM = "x=BTD weight=D:one bias=D"
_GATE = "x=BTD gate=BTD weight=D:one"
_GLU = "gate=BTC up=BTC"
_DELTA_STEP = "beta=B1G norm_weight=V:one"
_UNIT_STEP = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "norm_eps": 1e-6}
_SELECTIVE = "u=BTD delta=BTD A=D4:rate B=BT4 C=BT4"
_ROTARY = "x=BTHK cos=SF sin=SF positions=BT:positions"
_LOSS = "logits=TZ target=T:targets"
_LINEAR_LOSS = "hidden=TD weight=ZD target=T:targets"
_KL = "student=TD student_weight=ZD teacher=TD teacher_weight=ZD"
_EVERY = {"label_smoothing": 0.1, "softcap": 4.0, "z_loss": 1e-2, "logit_scale": 0.7}

OPERATORS = [
    *_LINEAR,
    Sample("attention", _ATTENTION),
    _traced("attention", f"{_ATTENTION} g=BTG:gate sinks=G", variant="gated"),
    _traced("attention", _ATTENTION, variant="both sides",
            options={"window_size": (60, 9), "causal": False}),
    # tests/ops/test_attention_dropout.py holds both back ends against each other
    _traced("attention", _ATTENTION, variant="dropout", options={"dropout_p": 0.1}, random=True),
    _tested("attention", "full", _LONGER, options={"causal": False}),
    _tested("attention", "longer", _LONGER),
    _tested("attention", "window", _LONGER, options={"window_size": 3}),
    _tested("attention", "lengths", f"{_LONGER} key_lengths=B:used"),
    _tested("attention", "packed", _ATTENTION, packed=True),
    _tested("attention", "packed-cache", "q=BTGK k=NSHK v=NSHV key_lengths=N:cached",
            options={"window_size": 4}, packed=True),
    _traced(
        "flash_attn_with_kvcache",
        "q=BTHK k_cache=BRHK v_cache=BRHV k=BTHK v=BTHV cache_seqlens=B:prefixes",
        options={"causal": True},
        grouped=False,
        fixed="q k_cache v_cache k v",
    ),
    _traced(
        "latent_attention",
        "q=BTHQ latent=BRQ lengths=B:lengths",
        options={"width": 512, "scale": 0.05},
        grouped=False,
        fixed="q latent",
    ),
    _traced("rotary_embedding", "x=BTHK cos=TP sin=TP", fixed="cos sin"),
    _tested("rotary_embedding", "positions", _ROTARY, fixed="cos sin"),
    _tested("rotary_embedding", "interleaved", _ROTARY, fixed="cos sin",
            options={"interleaved": True}),
    Sample("rms_norm", "x=BTD weight=D:one"),
    _traced("rms_norm", "x=1TL weight=L:one", variant="long"),
    _tested("rms_norm", "bare", "x=BTD"),
    _tested("rms_norm", "residual", f"{_NORM} residual=BTD",
            options={"prenorm": True, "zero_centered": True}),
    Sample("rms_norm_gated", _GATE),
    _tested("rms_norm_gated", "sigmoid", _GATE, options={"activation": "sigmoid"}),
    _tested("rms_norm_gated", "mamba2", _GATE,
            options={"norm_before_gate": False, "group_size": 3}),
    Sample("layer_norm", _NORM),
    Sample("group_norm", "x=BTD weight=D:one", options={"num_groups": 2}),
    _tested("group_norm", "rms", _NORM, options={"num_groups": 2, "rms": True}),
    Sample("l2_norm", "x=BTHK"),
    Sample("short_convolution", "x=BTD weight=DW", "NDW", options={"activation": "silu"}),
    _tested("short_convolution", "residual", "x=BTD weight=DW bias=D residual=BTD", "NDW",
            options={"activation": "silu"}),
    _tested("short_convolution", "packed", "x=BTD weight=D3", "ND3", packed=True),
    _tested("short_convolution", "stateless", "x=BTD weight=D2", packed=True,
            options={"output_final_state": False}),
    _traced("short_convolution_update", "x=ND state=NDW weight=DW", fixed="x state weight"),
    _tested("short_convolution_update", "bias", "x=TD state=TDW weight=DW bias=D",
            options={"activation": "silu"}, written="state"),
    # tests/kernels/mixer_step hold it against its formula
    _step(f"g=B1G dt_bias=G {_DELTA_STEP}", **_UNIT_STEP),
    _step(f"g=B1GK dt_bias=GK {_DELTA_STEP}", "channel", z_activation="sigmoid", **_UNIT_STEP),
    _step("g=B1G dt_bias=G D=G conv_bias=E norm_weight=GV:one", "mamba2", channel_order="vkq",
          dt_scales_v=True, norm_before_gate=False, norm_eps=1e-5, scale=1.0),
    Sample("selective_scan", _SELECTIVE, "ND4", options={"delta_softplus": True}),
    _tested("selective_scan", "gated", f"{_SELECTIVE} D=D z=BTD delta_bias=D", "ND4",
            options={"delta_softplus": True}),
    _tested("selective_scan", "groups", "u=BTD delta=BTD:positive A=D3:rate B=BT23 C=BT23", "ND3",
            packed=True),
    Sample("swiglu", _GLU),
    Sample("geglu", _GLU),
    Sample("sigmoid_glu", _GLU),
    Sample("squared_relu", "x=BTC"),
    Sample("glu_linear", f"{_GLU} weight=DC"),
    _tested("glu_linear", "geglu", f"{_GLU} weight=DC bias=D", options={"activation": "geglu"}),
    _tested("glu_linear", "squared_relu", "gate=BTC weight=DC",
            options={"up": None, "activation": "squared_relu"}),
    Sample("token_shift", "x=BTD"),
    _tested("token_shift", "state", "x=BTD", "ND:normal"),
    _tested("token_shift", "packed", "x=BTD", "ND:normal", packed=True),
    Sample("cross_entropy", _LOSS),
    _traced("cross_entropy", _LOSS, variant="rows", options={"reduction": "none"}),
    *[_tested("cross_entropy", x, _LOSS, options={**_EVERY, "reduction": x})
      for x in ("mean", "none")],
    Sample("linear_cross_entropy", _LINEAR_LOSS),
    *[_tested("linear_cross_entropy", x, f"{_LINEAR_LOSS} bias=Z",
              options={**_EVERY, "reduction": x}) for x in ("mean", "sum", "none")],
    _traced("linear_kl_div", _KL, fixed="teacher teacher_weight"),
    *[_tested("linear_kl_div", x, f"{_KL} student_bias=Z", fixed="teacher teacher_weight",
              options={"reduction": x}) for x in ("mean", "none")],
    Sample("matmul", "a=TD b=DC"),
    _tested("matmul", "silu", "a=TD b=DC bias=C residual=TC", options={"activation": "silu"}),
    Sample("embedding", "input_ids=BT:ids weight=ZD"),
]  # fmt: skip
SAMPLES = [x for x in OPERATORS if x.traced]


# One for each kind of kernel.
QUICK_OPERATORS = (
    "chunk_simple_gla",
    "chunk_gla",
    "chunk_gated_delta_rule",
    "chunk_rwkv7",
    "chunk_hgrn",
    "attention",
    "rms_norm",
    "short_convolution",
    "mixer_step",
    "selective_scan",
    "swiglu",
    "cross_entropy",
    "matmul",
    "embedding",
)
# Long enough for a sequence to be cut into segments.
LONG = 1 << 16
# What the matrix compiles: shapes that differ in what the kernels are compiled for.
_BF16, _FP32 = torch.bfloat16, torch.float32
REPRESENTATIVE = (
    Shape(K=128, V=128),
    Shape(K=64, V=64, dtype=torch.float16, grouped=True, packed=True, state=True),
    Shape(K=256, V=256, state=True),
    Shape(K=128, V=128, dtype=_FP32, grouped=True, packed=True, state=True),
    Shape(T=1, K=128, V=128, state=True),
    Shape(B=1, T=LONG, K=128, V=128),
    Shape(B=4, T=LONG // 8, K=128, V=128, packed=True, state=True),
)
FURTHER = (
    Shape(K=64, V=64, dtype=_FP32),
    Shape(K=256, V=256, dtype=_FP32, state=True),
    Shape(K=64, V=64, grouped=True, packed=True, state=True),
    Shape(K=100, V=60, packed=True, state=True),
    Shape(K=64, V=128, grouped=True),
)


def family(op: str) -> str:
    """Its name without the way that it goes, by chunks or token by token."""
    return op.removeprefix("chunk_").removeprefix("fused_recurrent_")


def chosen(names: list[str] | None) -> list[Sample]:
    """The rows of these operators, all of them for none; "kda" stands for both of its forms."""
    if not names:
        return SAMPLES
    found: list[Sample] = []
    for name in names:
        rows = [x for x in SAMPLES if name in (x.op, family(x.op))]
        if not rows:
            known = list(dict.fromkeys(x.op for x in SAMPLES))
            near = get_close_matches(name, [*known, *map(family, known)], n=3)
            advice = (
                f"did you mean {' or '.join(dict.fromkeys(near))}?"
                if near
                else (f"want one of {', '.join(known)}")
            )
            raise ValueError(f"operator: no {name!r}; {advice}")
        found += rows
    return found
