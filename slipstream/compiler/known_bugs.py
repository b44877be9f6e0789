"""Known faults of GPU compilers, as data: where, what triggers them, what happens, the way out.

Releases before 3.6, the oldest that the package takes, have no entries. The plan asks `blocking`
before it takes a kernel, with the triggers that features_of knows of it; the matrix and
`slipstream doctor` list what `applying` finds. What is done about a fault:

    (nothing said)    the plan refuses kernels with the trigger
    avoided           no kernel here has the pattern (tests/compiler/test_known_bug_patterns.py
                      looks)
    probed            it cannot be told from sound kernels, so that the first use of each is
                      compared with plain torch, verified by the matrix or not
    effect "slow"     results are right

Verdicts and triggers are about a kind of kernels, a KernelKey: its name, and what its kernels are
compiled or computed differently for,

    ("linear.triton", "delta", "scalar", torch.bfloat16, 128, 128)
"""

import functools
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import NamedTuple

from slipstream.compiler.arch import like

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
    FeatureRule("linear.triton", ("delta",), ("transposed_dot",)),
    FeatureRule("linear.sm90", ("delta",), ("narrow_dot",)),
    FeatureRule("linear.triton", ("delta", "256"), ("wide_delta",)),
    FeatureRule("linear.sm90", ("none", "channel"), ("sm90_vector_decay",)),
    FeatureRule("linear.sm90", ("delta", "scalar"), ("sm90_gated_delta",)),
    FeatureRule("attention.triton", (), ("dot", "chained_64_dots")),
    FeatureRule("attention.decode", (), ("dot", "chained_64_dots")),
    FeatureRule("attention.sm90", (), ("dot", "chained_64_dots")),
    FeatureRule("selected_attention.triton", (), ("dot", "chained_64_dots")),
    FeatureRule("attention.latent", (), ("dot", "dot16", "chained_64_dots")),
    *(FeatureRule(x, (), ("dot",)) for x in _PLAIN),
    *(FeatureRule(x, (y,), ("dot16",)) for x in (*_TRITON, *_PLAIN) for y in _16),
    FeatureRule("mixer_step.triton", ("drafts",), ("dot", "dot16", "narrow_dot")),
    *(FeatureRule(x, (y,), ("fp8_dot",)) for x in _MATMUL for y in _FLOAT8),
    FeatureRule("matmul.triton", ("float32", "tf32x3"), ("tf32x3",)),
    *(FeatureRule(x, (), ("dot",)) for x in ("hyper_connection.pre", "indexer")),
    *(FeatureRule("indexer", (x,), ("dot16",)) for x in _16),
    FeatureRule("hyper_connection.pre", ("bfloat16",), ("dot16",)),
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
    """The features of such kernels, as KNOWN_BUGS names them."""
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


@dataclass(frozen=True)
class KnownBug:
    """triton, ptxas: first and last release affected, inclusive; None: every one.

    trigger: the feature of a kernel, as features_of names it. effect: "crash", "wrong
    result",
    "refusal" or "slow". avoided, probed: as the module says. sound: (Triton,
    ptxas) with which every operator's GPU tests pass in spite of it.
    """

    name: str
    archs: tuple[str, ...]
    triton: tuple[str, str] | None
    ptxas: tuple[str, str] | None
    trigger: str
    pattern: str
    effect: str
    source: str
    way_out: str
    avoided: bool = False
    probed: bool = False
    sound: tuple[tuple[str, str | None], ...] = ()


_SM90 = ("sm_90",)
_BEFORE_AMPERE = ("sm_70", "sm_75")
# Not an architecture: the kernels under TRITON_INTERPRET=1.
INTERPRETER = "interpreter"

KNOWN_BUGS = (
    KnownBug(
        "narrow-dot",
        _SM90,
        None,
        ("12.8", "12.8.93"),
        "narrow_dot",
        "a wgmma of 16 or 32 columns beside other products",
        "wrong result",
        "pytorch/helion#1905, triton-lang/triton#11366",
        "ptxas 13 (pip install slipstream[cuda]), or tiles of 64 and more",
        probed=True,
    ),
    KnownBug(
        "transposed-dot",
        _SM90,
        ("3.4.0", "3.7.0"),
        None,
        "transposed_dot",
        "tl.dot(tl.trans(x), y) where x is itself a product",
        "wrong result",
        "fla-org/flash-linear-attention#640, #826",
        "Triton 3.7.1, or compute the transposed product",
        probed=True,
        # seen with ptxas 12.8.93 and 13.0.88; the fault is Triton's
        sound=(("3.6.0", None),),
    ),
    KnownBug(
        "chained-dots",
        _SM90,
        ("3.4.0", "3.7.1"),
        ("12.8", "13.0.88"),
        "chained_64_dots",
        "several chained dots of 64 x 64 with num_warps=4",
        "wrong result",
        "fla-org/flash-linear-attention#984, #1262",
        "ptxas 13.1 or later (pip install slipstream[cuda])",
        probed=True,
        sound=(("3.6.0", "13.0.88"),),
    ),
    KnownBug(
        "overwritten-tile",
        _SM90,
        None,
        None,
        "overwritten_tile",
        "a tile loaded ahead in a loop and read by registers and by products that go on meanwhile",
        "wrong result",
        "triton-lang/triton#6691, #7110; compiler/smem_hazards.py",
        "num_stages=1 for the loop, or a product after that one whose result the turn needs",
        avoided=True,
    ),
    KnownBug(
        "fp8-scaled-mm",
        _SM90,
        ("3.8.0", "3.8.0"),
        None,
        "fp8_dot",
        "scaled fp8 products",
        "wrong result",
        "triton-lang/triton#10787",
        "Triton 3.7.1 or 3.9.0",
    ),
    KnownBug(
        "fma-dots",
        _BEFORE_AMPERE,
        None,
        None,
        "dot16",
        "any dot: its tensor cores are no longer used",
        "slow",
        "triton-lang/triton, release 3.3",
        "none; results are right",
    ),
    KnownBug(
        "spilled-vector-decay",
        _SM90,
        ("3.9", "3.9"),
        None,
        "sm90_vector_decay",
        "sm_90's kernels of a gate a channel without a transition spill: 1.22 to 1.28 of the time "
        "forward, 1.04 to 1.16 with backward",
        "slow",
        "LLVM's SLP vectorizer, which Triton 3.8 leaves out (llvm-project#203741); measured "
        "beside Triton 3.6.0 (docs/dev/tried/compiler.md)",
        "Triton 3.6 to 3.8, for the time; results are right",
    ),
    KnownBug(
        "spilled-gated-delta",
        _SM90,
        ("3.9", "3.9"),
        None,
        "sm90_gated_delta",
        "sm_90's backward of the gated delta rule spills: 1.08 to 1.09 of the time with backward",
        "slow",
        "measured beside Triton 3.6.0 (docs/dev/tried/compiler.md)",
        "Triton 3.6 to 3.8, for the time; results are right",
    ),
    KnownBug(
        "spilled-wide-delta",
        _SM90,
        ("3.9", "3.9"),
        None,
        "wide_delta",
        "Triton's scans of the delta rules with heads of 256 spill: 1.16 to 1.27 of the time "
        "forward, 1.12 to 1.21 with backward",
        "slow",
        "ptxas 13.4.59; measured beside Triton 3.6.0 (docs/dev/tried/compiler.md)",
        "Triton 3.6 to 3.8, for the time; results are right",
    ),
    KnownBug(
        "two-axis-sum",
        ("sm_100",),
        ("3.6.0", "3.6.0"),
        None,
        "two_axis_sum",
        "one reduction over both axes of an accumulator, or one after the other over a product's",
        "refusal",
        "tools/matrix.py, Triton 3.6.0: parent layout must have at least rank >= 2",
        "reduce a flat tensor",
        avoided=True,
    ),
    KnownBug(
        "pipelined-store",
        ("sm_100",),
        ("3.6.0", "3.6.0"),
        None,
        "pipelined_store",
        "a store by a descriptor in a pipelined loop",
        "refusal",
        "tools/matrix.py: op pipeliner doesn't know how to predicate this op",
        "num_stages=1",
        avoided=True,
    ),
    KnownBug(
        "ptxas13-volta",
        ("sm_70",),
        None,
        ("13.0", "999"),
        "any",
        "any kernel: ptxas 13 has no sm_70",
        "refusal",
        "ptxas: sm_70 is not defined",
        "unset TRITON_PTXAS_PATH: Triton's own ptxas 12 takes sm_70",
    ),
    KnownBug(
        "tf32x3-on-hip",
        ("gfx942",),
        None,
        None,
        "tf32x3",
        "input_precision='tf32x3'",
        "refusal",
        "triton.compiler.errors.CompilationError",
        "input_precision='ieee'",
    ),
    KnownBug(
        "interpreter-bf16",
        (INTERPRETER,),
        ("3.6.0", "3.9.0"),
        None,
        "interpreted_bf16",
        "bf16 under TRITON_INTERPRET=1: dots, sums, products, negation and casts of integers take "
        "bits for numbers, from 3.9 on cumsum and argmax too; float32 subnormals become larger",
        "wrong result",
        "triton-lang/triton#11584",
        "interpret in float32 or float16",
    ),
    KnownBug(
        "interpreter-mask",
        (INTERPRETER,),
        ("3.9.0", "3.9.0"),
        None,
        "any",
        "a mask with a condition on a program's number, under TRITON_INTERPRET=1",
        "refusal",
        "seen with Triton 3.9.0: ValueError, mask has unsupported dtype, in a kernel of two lines",
        "Triton 3.6 to 3.8, to interpret kernels",
    ),
)


@functools.cache
def version(text: str) -> tuple[int, ...]:
    """(3, 6, 0) of "3.6.0", "3.6.0+git" ..."""
    numbers = []
    for field in text.split("+")[0].split("."):
        digits = "".join(c for c in field if c.isdigit())
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def _within(text: str | None, bounds: tuple[str, str] | None) -> bool:
    if bounds is None or text is None:
        return bounds is None
    first, last = map(version, bounds)
    parsed = version(text)
    # "12.8" is before "12.8.93", and "12.8.93" is within a range that ends in "12.8.93"
    return first <= parsed and parsed[: len(last)] <= last


def applying(arch: str, triton: str, ptxas: str | None = None) -> tuple[KnownBug, ...]:
    """The faults of this architecture (or INTERPRETER), Triton release and ptxas."""
    names = (arch, like(arch))
    return tuple(
        x
        for x in KNOWN_BUGS
        if any(y in x.archs for y in names)
        and _within(triton, x.triton)
        and _within(ptxas, x.ptxas)
    )


def blocking(
    arch: str, triton: str, ptxas: str | None, features: Collection[str]
) -> KnownBug | None:
    """The first fault that a kernel with these features meets; "any" is a feature of every one."""
    bugs = (x for x in applying(arch, triton, ptxas) if _blocks(x))
    return next((x for x in bugs if x.trigger == "any" or x.trigger in features), None)


def _blocks(x: KnownBug) -> bool:
    return not (x.avoided or x.probed or x.effect == "slow")


def suspected(
    arch: str, triton: str, ptxas: str | None, features: Collection[str]
) -> KnownBug | None:
    """The first fault that a kernel with these features may meet, as only its results can show."""
    bugs = (x for x in applying(arch, triton, ptxas) if x.probed and x.trigger in features)
    return next((x for x in bugs if not {(triton, ptxas), (triton, None)} & {*x.sound}), None)
