"""Kinds of kernels: what a verdict is about, their families, and what in them compilers fail at.

A kind is a name and what its kernels are compiled or computed differently for:

    ("linear.triton", "delta", "scalar", torch.bfloat16, 128, 128)
"""

from collections.abc import Hashable
from typing import NamedTuple

KernelKey = tuple[Hashable, ...]

# The family of the kernels in core.
CORE = "core"
# Kinds that are not called by their family.
_FAMILIES = {
    "glu_bwd_recompute": "glu",
    "token_mix": "time_mix",
    "rwkv7": "time_mix",
    "rwkv7_step": "time_mix",
    "low_rank_step": "time_mix",
    "token_mix_step": "time_mix",
    "cross_entropy": "loss",
    "linear_kl_div": "loss",
    "projection_norm_step": "projection_step",
    "ids": CORE,
}


class FeatureRule(NamedTuple):
    """Kinds of this name with all of `given` among their words have these triggers of faults."""

    name: str
    words_required: tuple[str, ...]
    triggers: tuple[str, ...]


_16 = ("float16", "bfloat16")
_FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
_TRITON = ("linear.triton", "attention.triton", "attention.decode")
_MATMUL = ("matmul.triton", "matmul.sm90", "projection_step.triton", "projection_norm_step.triton")
_PLAIN = (*_MATMUL, "low_rank_step.triton")
# tests/compiler/test_known_bug_patterns.py finds the same in what the kernels are compiled to
FEATURE_RULES = (
    FeatureRule("linear.triton", (), ("dot", "chained_64_dots")),
    FeatureRule("linear.sm90", (), ("dot", "chained_64_dots")),
    FeatureRule("linear.triton", ("delta", "256"), ("wide_delta",)),
    FeatureRule("linear.sm90", ("none", "channel"), ("sm90_vector_decay",)),
    FeatureRule("linear.sm90", ("delta", "scalar"), ("sm90_gated_delta",)),
    FeatureRule("attention.triton", (), ("dot", "chained_64_dots")),
    FeatureRule("attention.decode", (), ("dot", "chained_64_dots")),
    FeatureRule("attention.sm90", (), ("dot", "chained_64_dots")),
    FeatureRule("attention.latent", (), ("dot", "dot16", "chained_64_dots")),
    *(FeatureRule(x, (), ("dot",)) for x in _PLAIN),
    *(FeatureRule(x, (y,), ("dot16",)) for x in (*_TRITON, *_PLAIN) for y in _16),
    FeatureRule("mixer_step.triton", ("drafts",), ("dot", "dot16")),
    *(FeatureRule(x, (y,), ("fp8_dot",)) for x in _MATMUL for y in _FLOAT8),
    FeatureRule("matmul.triton", ("float32", "tf32x3"), ("tf32x3",)),
)


def family(kind: KernelKey) -> str:
    """ "linear" of ("linear.triton", ...): a folder of slipstream/kernels, a file of kernels of its
    folder elementwise, or CORE."""
    name = str(kind[0]).partition(".")[0]
    return _FAMILIES.get(name, name)


def describe(kind: KernelKey) -> str:
    """ "linear.triton delta bfloat16 128 128" """
    return " ".join(_words(kind))


def _words(kind: KernelKey) -> list[str]:
    return [str(x).removeprefix("torch.") for x in kind if x not in (None, False, "")]


def features_of(kind: KernelKey) -> frozenset[str]:
    """The features of such kernels, as compiler/known_bugs.py names them."""
    words = _words(kind)
    features = {
        y
        for x in FEATURE_RULES
        if x.name == words[0] and {*x.words_required} <= {*words}
        for y in x.triggers
    }
    if "dot" in features and "bfloat16" in words:
        features.add("interpreted_bf16")
    return frozenset(features)
