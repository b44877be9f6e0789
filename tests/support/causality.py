"""Whether an operator's early outputs keep their bits when later tokens and gates change."""

import itertools
from dataclasses import replace

import torch
from torch import Tensor

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.tools.catalog import CPU, Sample, flat
from tests.support.operators import Size, has_time

# Of the first chunk within a sub-chunk and past its middle, of the second, and near the end.
CUTS = (5, 21, 40, 66)
SIZE = Size(B=1, T=70, H=1, HV=2, K=16, V=16)
# gates of the call, and of what its future becomes
GATES = (("weak", "weak"), ("weak", "strong"), ("strong", "weak"), ("mixed", "mixed"))
# keys, and what free transitions write
KEYS = ("k", "b")


def changed_bits(
    op: Sample,
    impl: str | None = None,
    size: Size = SIZE,
    cuts: tuple[int, ...] = CUTS,
    gates: tuple[tuple[str, str], ...] = GATES,
    device: torch.device = CPU,
    seeds: tuple[int, ...] = (0,),
    small: float = 1.0,
) -> list[str]:
    """Where bits of the past have changed, in words. small: what keys are multiplied by."""
    found = []
    options = {} if impl is None else {"impl": impl}
    for (gate, other), seed in itertools.product(gates, seeds):
        torch.manual_seed(seed)
        args = op.inputs(replace(size, gate=gate), device)
        future = op.inputs(replace(size, gate=other), device)
        for given, name in itertools.product((args, future), KEYS):
            if name in given:
                given[name] = given[name] * small
        with torch.no_grad():
            before = bits(flat(op(args, **options))[0])
            for cut in cuts:
                after = bits(flat(op(with_future(op, args, future, cut), **options))[0])
                same = (before[:, :cut] == after[:, :cut]).flatten(2).all(-1).all(0)
                if not same.all():
                    first = int((~same).nonzero()[0])
                    found.append(f"token {first}, where {gate} gates are {other} from {cut} on")
    return found


def bits(x: Tensor) -> Tensor:
    """As integers: -0 is not 0, and what is not a number is itself."""
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def with_future(op: Sample, args: dict, future: dict, cut: int) -> dict:
    """args up to token `cut`, and the tokens of `future` from there on."""
    mixed = dict(args)
    for name, letters in op.dims.items():
        if has_time(op, name):
            at = cut * (2 if "R" in letters else 1)
            mixed[name] = torch.cat([args[name][:, :at], future[name][:, at:]], dim=1)
    return mixed


def with_other_future(terms: LinearInputs, cut: int, strength: float = 1.0) -> LinearInputs:
    """The tokens from `cut` on are those of the sequence read backwards, their gates times
    `strength`."""
    changed = {}
    for name in ("q", "k", "v", "g", "beta", "a", "b"):
        x = getattr(terms, name)
        if x is not None:
            future = x.flip(1)[:, cut:] * (strength if name == "g" else 1)
            changed[name] = torch.cat([x[:, :cut], future], 1)
    return terms._replace(**changed)
