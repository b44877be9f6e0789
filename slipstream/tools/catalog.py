"""Every operator with sample inputs, as a table: what matrix, precompile, doctor and explain call.

A new operator is a new row. "q=BTHK:unit" is an argument q of dims B, T, H, K filled as FILL says;
without a fill it is normal. Letters: B batch, T tokens, R = T times the Householder steps, H heads
of q and k, G of v and gates, K and V widths, P = K / 2, M slots, N sequences, D channels, C = 3D,
L channels too many for one tile, Q = 512 + 64 of a latent, Z vocabulary, W taps.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """grouped: twice as many heads of v as of q. packed: N sequences in one row."""

    B: int = 2
    T: int = 100
    H: int = 2
    K: int = 128
    V: int = 128
    grouped: bool = False
    packed: bool = False
    state: bool = False
    dtype: torch.dtype = torch.bfloat16

    def dims(self) -> dict[str, int]:
        tokens, rows = (self.B * self.T, 1) if self.packed else (self.T, self.B)
        heads = 2 * self.H if self.grouped else self.H
        width = self.H * self.V
        return {
            "B": rows,
            "T": tokens,
            "R": 2 * tokens,
            "H": self.H,
            "G": heads,
            "X": 72,  # so many that a walk has more programs than an H200 multiprocessors
            "K": self.K,
            "V": self.V,
            "P": self.K // 2,
            "M": 64,
            "N": self.B,
            "D": width,
            "C": 3 * width,
            "L": 1 << 16,
            "Q": 576,
            "Z": 1000,
            "W": 4,
            "1": 1,
        }

    def offsets(self, device: torch.device, blank: bool = False) -> Tensor:
        """Of B sequences of different lengths in one row."""
        if blank:
            return torch.empty(self.B + 1, dtype=torch.int32, device=device)
        total, n = self.B * self.T, self.B
        cuts = [0, *(total * (3 * i + 1) // (3 * n) for i in range(1, n)), total]
        return torch.tensor(cuts, dtype=torch.int32).to(device)

    def __str__(self) -> str:
        text = f"B={self.B} T={self.T} H={self.H} K={self.K} V={self.V} {name_of(self.dtype)}"
        flags = [x for x in ("grouped", "packed", "state") if getattr(self, x)]
        return " ".join([text, *flags])


def _unit(shape: list[int], device: torch.device) -> Tensor:
    return F.normalize(torch.randn(shape, device=device), dim=-1)


FILL: Mapping[str, Callable[[list[int], torch.device], Tensor]] = {
    "normal": lambda shape, device: torch.randn(shape, device=device),
    "unit": _unit,
    "erase": lambda shape, device: -0.5 * _unit(shape, device),
    "positive": lambda shape, device: torch.rand(shape, device=device) + 0.1,
    "beta": lambda shape, device: torch.rand(shape, device=device),
    "gate": lambda shape, device: -0.1 * torch.rand(shape, device=device),
    "narrow": lambda shape, device: -0.1 * torch.rand(shape, device=device),
    "bounded": lambda shape, device: -0.6 * torch.rand(shape, device=device),
    "state": lambda shape, device: 0.1 * torch.randn(shape, device=device),
    "one": lambda shape, device: 1 + 0.1 * torch.randn(shape, device=device),
    "ids": lambda shape, device: torch.randint(0, 1000, shape, device=device),
    "lengths": lambda shape, device: torch.randint(0, 50, shape, device=device).int(),
    # of a cache with twice as many rows as there are new keys, one or more
    "prefixes": lambda shape, device: torch.randint(0, 2, shape, device=device).int(),
}
# Fills that are float32 whatever the operator computes in.
_WIDE = ("gate", "bounded", "state")
_INTEGERS = {"ids": torch.int64, "lengths": torch.int32, "prefixes": torch.int32}


@dataclass(frozen=True)
class Sample:
    """tensors: as the module says. states: dims of the initial state, a tuple of them for several.

    options: further arguments. grouped: takes more heads of v than of q. fixed: names of arguments
    that get no gradient.
    """

    op: str
    tensors: str
    states: str | tuple[str, ...] = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    grouped: bool = True
    fixed: str = ""

    @property
    def fn(self) -> Callable[..., Any]:
        from slipstream import ops

        return getattr(ops, self.op)

    @property
    def takes(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.fn).parameters

    def inputs(self, shape: Shape, device: torch.device, blank: bool = False) -> dict[str, Any]:
        """Fresh random arguments; blank: nothing in them, for where only shapes matter."""
        if not self.grouped:
            shape = replace(shape, grouped=False)
        packed = shape.packed and "cu_seqlens" in self.takes
        dims = replace(shape, packed=packed).dims()
        args: dict[str, Any] = {}
        for word in self.tensors.split():
            name, _, rest = word.partition("=")
            letters, _, fill = rest.partition(":")
            args[name] = _make(letters, fill or "normal", dims, shape.dtype, device, blank)
        if shape.state and self.states:
            states = (self.states,) if isinstance(self.states, str) else self.states
            made = tuple(_make(x, "state", dims, shape.dtype, device, blank) for x in states)
            args["initial_state"] = made[0] if isinstance(self.states, str) else made
        if packed:
            args["cu_seqlens"] = shape.offsets(device, blank)
        return args

    def call(self, args: Mapping[str, Any], impl: str | None = None) -> list[Tensor]:
        """Its outputs, states too, as one list."""
        options = dict(self.options)
        args = {**args, **{name: args[name].detach() for name in self.fixed.split()}}
        if impl is not None and "impl" in self.takes:
            options["impl"] = impl
        if "output_final_state" in self.takes:
            options["output_final_state"] = True
        return flat(self.fn(**args, **options))


def _make(
    letters: str,
    fill: str,
    dims: Mapping[str, int],
    dtype: torch.dtype,
    device: torch.device,
    blank: bool,
) -> Tensor:
    shape = [dims[c] for c in letters]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    kind = _INTEGERS.get(fill) or (wide if fill in _WIDE else dtype)
    return (
        torch.empty(shape, dtype=kind, device=device)
        if blank
        else FILL[fill](shape, device).to(kind)
    )


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


SAMPLES = [
    *_both("linear_attn", _QKV, options={"normalize": False}),
    *_both("retention", _QKV),
    *_both("lightning_attn", _QKV, options={"layer_idx": 1, "num_layers": 4}),
    *_both("simple_gla", f"{_QKV} g=BTG:gate"),
    Sample("chunk_gla", f"{_QKV} g=BTGK:gate", _S),
    Sample("fused_recurrent_gla", f"{_QKV} gk=BTGK:gate", _S),
    *_both("rwkv6", f"{_RWKV} u=GK"),
    # gates in the dtype of q: kernels of their own
    Sample("chunk_gla", f"{_QKV} g=BTGK:narrow", _S),
    Sample("chunk_rwkv6", "r=BTHK w=BTGK:narrow k=BTHK v=BTGV u=GK", _S),
    *_both("gsa", "q=BTHK k=BTHK v=BTHV s=BTHM g=BTHM:gate", ("NHKM", "NHMV"), grouped=False),
    *_both("hgrn", "x=BTD g=BTD:gate", "ND"),
    *_both("delta_rule", f"{_UNIT} beta=BTG:beta"),
    *_both("gated_delta_rule", f"{_UNIT} g=BTG:gate beta=BTG:beta"),
    *_both("kda", f"{_UNIT} g=BTGK:gate beta=BTG:beta"),
    *_both("comba", f"{_UNIT} p=BTHK:unit g=BTG:gate beta=BTG:beta"),
    *_both("iplr_delta_rule", f"{_UNIT} a=BTHK:unit b=BTHK:erase"),
    *_both("dplr_delta_rule", f"{_UNIT} a=BTHK:unit b=BTHK:erase gk=BTGK:gate"),
    *_both("rwkv7", f"{_RWKV} a=BTHK:unit b=BTHK:erase"),
    Sample("chunk_kda", f"{_UNIT} g=BTGK:narrow beta=BTG:beta", _S),
    Sample("chunk_rwkv7", "r=BTHK w=BTGK:narrow k=BTHK v=BTGV a=BTHK:unit b=BTHK:erase", _S),
    # packed calls of many heads
    Sample(
        "chunk_gated_delta_rule",
        "q=BTXK:unit k=BTXK:unit v=BTXV g=BTX:gate beta=BTX:beta",
        "NXKV",
    ),
    Sample("chunk_delta_rule", "q=BTXK:unit k=BTXK:unit v=BTXV beta=BTX:beta", "NXKV"),
    *_both(
        "gated_delta_product",
        "q=BTHK:unit k=BRHK:unit v=BRGV g=BTG:gate beta=BRG:beta",
        options={"num_householder": 2},
    ),
    Sample("attention", "q=BTGK k=BTHK v=BTHV"),
    Sample("attention", "q=BTGK k=BTHK v=BTHV g=BTG:gate sinks=G"),
    Sample("attention", "q=BTGK k=BTHK v=BTHV", options={"window_size": (60, 9), "causal": False}),
    Sample(
        "flash_attn_with_kvcache",
        "q=BTHK k_cache=BRHK v_cache=BRHV k=BTHK v=BTHV cache_seqlens=B:prefixes",
        options={"causal": True},
        grouped=False,
        fixed="q k_cache v_cache k v",
    ),
    Sample(
        "latent_attention",
        "q=BTHQ latent=BRQ lengths=B:lengths",
        options={"width": 512, "scale": 0.05},
        grouped=False,
        fixed="q latent",
    ),
    Sample("rotary_embedding", "x=BTHK cos=TP sin=TP", fixed="cos sin"),
    Sample("rms_norm", "x=BTD weight=D:one"),
    Sample("rms_norm", "x=1TL weight=L:one"),
    Sample("rms_norm_gated", "x=BTD gate=BTD weight=D:one"),
    Sample("layer_norm", "x=BTD weight=D:one bias=D"),
    Sample("group_norm", "x=BTD weight=D:one", options={"num_groups": 2}),
    Sample("l2_norm", "x=BTHK"),
    Sample("short_convolution", "x=BTD weight=DW", "NDW", options={"activation": "silu"}),
    Sample("short_convolution_update", "x=ND state=NDW weight=DW", fixed="x state weight"),
    Sample("swiglu", "gate=BTC up=BTC"),
    Sample("geglu", "gate=BTC up=BTC"),
    Sample("sigmoid_glu", "gate=BTC up=BTC"),
    Sample("squared_relu", "x=BTC"),
    Sample("glu_linear", "gate=BTC up=BTC weight=DC"),
    Sample("token_shift", "x=BTD"),
    Sample("cross_entropy", "logits=TZ target=T:ids"),
    Sample("cross_entropy", "logits=TZ target=T:ids", options={"reduction": "none"}),
    Sample("linear_cross_entropy", "hidden=TD weight=ZD target=T:ids"),
    Sample(
        "linear_kl_div",
        "student=TD student_weight=ZD teacher=TD teacher_weight=ZD",
        fixed="teacher teacher_weight",
    ),
    Sample("matmul", "a=TD b=DC"),
    Sample("embedding", "input_ids=BT:ids weight=ZD"),
]

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


def _family(op: str) -> str:
    return op.removeprefix("chunk_").removeprefix("fused_recurrent_")


def chosen(names: list[str] | None) -> list[Sample]:
    """The rows of these operators, all of them for none; "kda" stands for both of its forms."""
    if not names:
        return SAMPLES
    found: list[Sample] = []
    for name in names:
        rows = [x for x in SAMPLES if name in (x.op, _family(x.op))]
        if not rows:
            known = ", ".join(dict.fromkeys(x.op for x in SAMPLES))
            raise ValueError(f"operator: want one of {known}; got {name!r}")
        found += rows
    return found
