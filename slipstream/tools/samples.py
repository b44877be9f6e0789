"""A call of an operator as data: which tensors of which sizes and values, and with what options.

"q=BTHK:unit" is an argument q of dims B, T, H, K filled as FILL says; without a fill it is normal.
Letters: B batch, T tokens, R = T times the Householder steps, H heads of q and k, G of v and gates,
K and V widths, P = K / 2, F = P - 1, M slots, N sequences, S = T + 3 keys, D channels, C = 3D, L
channels too many for one tile, A = 512 of a wide head, Q = 512 + 64 of a latent, Z vocabulary, W
taps, I = 4D of 4 streams with U = 24 weights; a digit is itself.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream import ops

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    """grouped: twice as many heads of v as of q; HV: so many. packed: B sequences in one row;
    lengths: sequences of these lengths. keys: of a cache's sequence. D, C: channels. gate: how log
    decays are, see Gate."""

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
    keys: int | None = None
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
            "R": 2 * tokens if self.keys is None else self.keys,
            "S": tokens + 3 if self.keys is None else self.keys,
            "H": self.H,
            "G": self.HV or (2 * self.H if self.grouped else self.H),
            "X": 72,  # so many that a scan has more programs than an H200 multiprocessors
            "Y": 16,  # so few that a long sequence is cut into segments
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
            "A": 512,
            "Q": 576,
            "Z": self.Z,
            "W": 4,
            "U": 24,
            "I": 4 * channels,
            **{str(n): n for n in range(1, 10)},
        }

    def offsets(self, device: torch.device, blank: bool = False) -> Tensor:
        """Offsets of sequences of different lengths in one row."""
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
    """Values that an argument may depend on: the call's shape, dims, and earlier arguments."""

    shape: Shape
    dims: Mapping[str, int]
    args: Mapping[str, Tensor]
    device: torch.device

    def normal(self, size: list[int]) -> Tensor:
        return torch.randn(size, device=self.device)

    def uniform(self, size: list[int]) -> Tensor:
        return torch.rand(size, device=self.device)

    def unit(self, size: list[int]) -> Tensor:
        return torch.nn.functional.normalize(self.normal(size), dim=-1)

    def integers(self, size: list[int], below: int) -> Tensor:
        return torch.randint(0, max(below, 1), size, device=self.device)

    def erase(self, size: list[int]) -> Tensor:
        """b of a transition whose part of rank one erases: against a, by some of its length."""
        return -self.args["a"].float() * self.uniform([*size[:-1], 1])

    def gate(self, size: list[int], weak: float = 0.1) -> Tensor:
        """Log decays: "zero", "weak" (above -0.1 or -0.6), "strong" down to -50, or "mixed"."""
        x, kind = self.uniform(size), self.shape.gate
        if kind == "zero":
            return 0 * x
        if kind == "mixed":
            return -torch.where(self.uniform(size) < 0.2, 50 * x, 0.1 * x)
        return -50 * x if kind == "strong" else -weak * x

    def targets(self, size: list[int]) -> Tensor:
        """Class indices, of which the second is the ignored index."""
        found = self.integers(size, self.dims["Z"])
        if size[0] > 2:
            found[1] = -100
        return found

    def used(self, size: list[int]) -> Tensor:
        """How many of S keys are used: as many as there are tokens, or some more."""
        return self.dims["S"] - 1 - 2 * (torch.arange(size[0], device=self.device) % 2)

    def blocks(self, size: list[int], keys: int) -> Tensor:
        """Lists of blocks of so many keys, in any order, and some that are none."""
        return self.integers(size, -(-self.dims["T"] // keys) + 1) - 1

    def cached(self, size: list[int]) -> Tensor:
        """Keys of packed sequences: their new ones, and up to three before."""
        more = torch.tensor([2, 3, 0, 1]).repeat(size[0])[: size[0]]
        return self.shape.offsets(self.device).diff().long() + more.to(self.device)


FILL: Mapping[str, Callable[[Making, list[int]], Tensor]] = {
    "normal": Making.normal,
    "unit": Making.unit,
    "erase": Making.erase,
    "positive": lambda m, size: m.uniform(size) + 0.1,
    "beta": Making.uniform,
    "gate": Making.gate,
    "narrow": Making.gate,
    "bounded": lambda m, size: m.gate(size, 0.6),
    "rate": lambda m, size: -m.uniform(size) - 0.1,
    "state": lambda m, size: 0.1 * m.normal(size),
    "sum": Making.uniform,
    "one": lambda m, size: 1 + 0.1 * m.normal(size),
    "ids": lambda m, size: m.integers(size, m.dims["Z"]),
    "targets": Making.targets,
    "positions": lambda m, size: m.integers(size, m.dims["S"]),
    "lengths": lambda m, size: m.integers(size, 50),
    # of a cache with twice as many rows as there are new keys, one or more
    "prefixes": lambda m, size: m.integers(size, 2),
    # each sequence's own row, or page
    "rows": lambda m, size: torch.arange(size[0], device=m.device).view(size),
    "used": Making.used,
    "cached": Making.cached,
    "fours": lambda m, size: m.blocks(size, 4),
    "blocks": lambda m, size: m.blocks(size, 64),
    # keys and values in 8 bits
    "codes": lambda m, size: m.integers(size, 100),
    "float8": Making.normal,
}
# Fills that are float32 whatever the operator computes in.
_WIDE = ("gate", "bounded", "state", "sum")
# Fills of one dtype, which is part of a format.
_DTYPES = {
    **dict.fromkeys(("ids", "targets", "positions", "used", "cached"), torch.int64),
    **dict.fromkeys(("lengths", "prefixes", "rows", "fours", "blocks"), torch.int32),
    "codes": torch.int8,
    "float8": torch.float8_e4m3fn,
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

    @property
    def of_one_dtype(self) -> set[str]:
        """Names of arguments whose dtype is part of a format, whatever the operator computes in."""
        return {name for name, _, fill in map(_parsed, self.tensors.split()) if fill in _DTYPES}

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
        elif "cu_seqlens" not in self.takes or not any("T" in x for x in self.dims.values()):
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
        """The function's results, with its final states."""
        final = {"output_final_state": True} if self.op in _RETURN_STATES else {}
        copies = {name: args[name].clone() for name in self.written.split()}
        # to a trace each new tensor is one with gradients
        copies |= {name: copies[name].detach() for name in self.fixed.split() if name in copies}
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
    kind = _DTYPES.get(fill) or (wide if fill in _WIDE else dtype)
    if blank:
        return torch.empty(size, dtype=kind, device=making.device)
    return FILL[fill](making, size).to(kind)


def flat(out: Any) -> list[Tensor]:
    if isinstance(out, Tensor):
        return [out]
    return [] if out is None else [y for x in out for y in flat(x)]


def name_of(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}.get(
        dtype, str(dtype).removeprefix("torch.")
    )
