"""Kinds of kernels: what a verdict is about, their families, and what in them compilers fail at.

A kind is a name and what its kernels are compiled or computed differently for:

    ("linear.triton", "delta", "scalar", torch.bfloat16, 128, 128)
"""

from collections.abc import Hashable
from typing import NamedTuple

Kind = tuple[Hashable, ...]

# The family of the kernels in core.
CORE = "core"
# Kinds that are not called by their family.
_FAMILIES = {
    "glu": "pointwise",
    "glu_again": "pointwise",
    "rotary": "pointwise",
    "token_shift": "pointwise",
    "embedding": "pointwise",
    "cross_entropy": "loss",
    "linear_kl_div": "loss",
    "ids": CORE,
}


class Trait(NamedTuple):
    """Kinds of this name with all of `given` among their words have these triggers of faults."""

    name: str
    given: tuple[str, ...]
    triggers: tuple[str, ...]


_16 = ("float16", "bfloat16")
_FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
_MATMUL = ("matmul.triton", "matmul.sm90")
# tests/compiler/test_known_bug_patterns.py finds the same in what the kernels are compiled to
TRAITS = (
    Trait("linear.triton", (), ("dot", "decayed_dot", "chained_64_dots", "tensor_descriptor")),
    Trait("linear.triton", ("float32",), ("fp32_tma_dot",)),
    Trait("linear.triton", ("none", "channel"), ("disable_licm",)),
    Trait("linear.sm90", (), ("dot", "chained_64_dots")),
    Trait("attention.triton", (), ("dot", "chained_64_dots")),
    Trait("attention.decode", (), ("dot", "chained_64_dots")),
    Trait("attention.sm90", (), ("dot", "chained_64_dots")),
    Trait("attention.latent", (), ("dot", "dot16", "chained_64_dots")),
    *(Trait(x, (), ("dot", "dependent_launch")) for x in _MATMUL),
    *(Trait(x, (y,), ("dot16",)) for x in _MATMUL for y in _16),
    *(Trait(x, (y,), ("fp8_dot",)) for x in _MATMUL for y in _FLOAT8),
    Trait("matmul.triton", ("float32", "tf32x3"), ("tf32x3",)),
)


def family(kind: Kind) -> str:
    """ "linear" of ("linear.triton", ...): a folder of slipstream/kernels, or CORE."""
    name = str(kind[0]).partition(".")[0]
    return _FAMILIES.get(name, name)


def in_words(kind: Kind) -> str:
    """ "linear.triton delta bfloat16 128 128" """
    return " ".join(_words(kind))


def _words(kind: Kind) -> list[str]:
    return [str(x).removeprefix("torch.") for x in kind if x not in (None, False, "")]


def triggers(kind: Kind) -> frozenset[str]:
    """What compiler/known_bugs.py calls the features of such kernels."""
    words = _words(kind)
    found = {y for x in TRAITS if x.name == words[0] and {*x.given} <= {*words} for y in x.triggers}
    if "dot" in found and "bfloat16" in words:
        found.add("interpreted_bf16")
    return frozenset(found)
