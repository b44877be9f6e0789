"""compiler/known_bugs.py knows of each kernel what its Triton IR says. The patterns are found where
they are planted."""

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import slipstream
from slipstream.compiler import known_bugs
from slipstream.compiler import trace as tracing
from slipstream.compiler.aot import Job
from slipstream.compiler.compiler_state import CompilerState
from slipstream.compiler.known_bugs import KNOWN_BUGS
from slipstream.compiler.trace import PlainTorch, trace
from slipstream.tools.catalog import SAMPLES, Sample, Shape, chosen
from tests.support import planted_bugs, wants
from tests.support.ir_patterns import kernel_ir, patterns, products
from tests.support.scripts import script

pytestmark = wants.compiler
slow = pytest.mark.slow
LAYER_SAMPLES = script("tools/layer_samples").LAYER_SAMPLES
# those that the IR shows; the others are found by compiling (tools/matrix.py)
KNOWN = {"dot", "fp8_dot", "chained_64_dots", "tf32x3", "narrow_dot", "transposed_dot"}


def row_of(op: str) -> int:
    """An operator's first sample."""
    return SAMPLES.index(chosen([op])[0])


SHAPES = (Shape(K=128, V=128), Shape(K=64, V=64, dtype=torch.float32, packed=True, state=True))


@cache
def found(arch: str, row: int, shape: Shape, impl: str | None) -> tuple[frozenset[str], set]:
    """The patterns of an operator's kernels, and the triggers of their kinds."""
    sample = SAMPLES[row]
    compilers = {"triton": "3.6.0", "ptxas": "13.1.80", "ptxas_blackwell": "13.1.80"}
    here = _Noting(arch, "3.6.0", "13.1.80", passive=True, remembers=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracing, "state_for", lambda *args: here)
        try:
            jobs = trace(_call(sample, shape, impl), arch, True, compilers=compilers)
        except PlainTorch:
            return frozenset(), set()
    has = frozenset().union(*(_patterns(x) for x in jobs))
    return has, {y for x in here.accepted for y in known_bugs.features_of(x)}


class _Noting(CompilerState):
    """Looks at every kind, and lets each pass."""

    def _settle(self) -> None:
        self.unguarded = False


def _call(sample: Sample, shape: Shape, impl: str | None) -> Any:
    return lambda device: sample.call(sample.inputs(shape, device, blank=True), impl)


_IR: dict[str, frozenset[str]] = {}


def _patterns(job: Job) -> frozenset[str]:
    if job.key not in _IR:
        _IR[job.key] = patterns(kernel_ir(job), job.warps)
    return _IR[job.key]


QUICK = {
    "sm_90": ("chunk_kda", "chunk_simple_gla", "attention"),
    "sm_100": ("chunk_gla",),
    "gfx942": ("chunk_delta_rule",),
}
CASES = [
    pytest.param(arch, row, marks=[] if row in map(row_of, names) else [slow], id=f"{arch}-{x.op}")
    for arch, names in QUICK.items()
    for row, x in enumerate(SAMPLES)
]


@pytest.mark.parametrize(("arch", "row"), CASES)
def test_kinds_own_up_to_the_patterns_of_their_kernels(arch: str, row: int) -> None:
    """So that plans know of them."""
    on = {x.trigger for x in KNOWN_BUGS if arch in x.archs} | {"dot"}
    for shape in SHAPES:
        has, said = found(arch, row, shape, None)
        assert (has & KNOWN & on) - said == set(), str(shape)


@pytest.mark.parametrize("name", ["chunk_kda", "chunk_gla"])
def test_portable_kinds_own_up_to_their_patterns(name: str) -> None:
    """Those that a default on sm_90 does not run."""
    has, said = found("sm_90", row_of(name), SHAPES[0], "triton")
    assert (has & {"narrow_dot", "transposed_dot"}) - said == set()


def job(name: str, tensors: dict[str, str], constants: dict[str, Any], **rest: Any) -> Job:
    given = {"scalars": {}, "warps": 4, "stages": 3, "options": {}, "arch": "sm_90", **rest}
    return Job(f"{planted_bugs.__name__}:{name}", tensors, constants, **given)


@pytest.mark.parametrize(
    ("which", "M", "N", "warps", "has"),
    [
        ("turned", 64, 64, 4, {"transposed_dot", "chained_64_dots"}),
        ("narrow", 64, 32, 4, {"narrow_dot"}),
        ("narrow", 64, 64, 4, set()),
        ("narrow", 32, 32, 4, set()),  # too few rows for wgmma
        ("narrow", 64, 32, 2, set()),
    ],
)
def test_patterns_are_found_where_they_are(
    which: str, M: int, N: int, warps: int, has: set[str]
) -> None:
    tensors = {"x_ptr": "*bf16", "y_ptr": "*bf16", "o_ptr": "*fp32"}
    made = job(f"{which}_kernel", tensors, {"M": M, "N": N}, warps=warps)
    text = kernel_ir(made)
    looked_for = {"narrow_dot", "transposed_dot", "chained_64_dots"}
    assert patterns(text, warps) & looked_for == has
    assert {"dot", "dot16"} <= patterns(text, warps)
    assert all(x.dtype == "bf16" for x in products(text))


def test_patterns_tell_precisions() -> None:
    wide = {f"{x}_ptr": "*fp32" for x in ("x", "y", "o")}
    plain = patterns(kernel_ir(job("product_kernel", wide, {"N": 64, "PRECISION": "tf32x3"})), 4)
    assert plain & {"tf32x3", "dot16"} == {"tf32x3"}


def spread(x: ast.expr) -> bool:
    """Whether a block of two dimensions is given a third here, as in x[:, :, None]."""
    if not isinstance(x, ast.Subscript) or not isinstance(x.slice, ast.Tuple):
        return False
    kinds = [isinstance(i, ast.Constant) and i.value is None for i in x.slice.elts]
    return len(kinds) == 3 and sum(kinds) == 1


def hidden_products(source: str) -> list[int]:
    """Lines with a sum of two such blocks' products: Triton makes it a product in tf32."""
    calls = [x for x in ast.walk(ast.parse(source)) if isinstance(x, ast.Call)]
    sums = [x for x in calls if ast.unparse(x.func) in ("tl.sum", "tl.reduce")]
    return [
        x.lineno
        for x in sums
        for y in ast.walk(x)
        if isinstance(y, ast.BinOp) and isinstance(y.op, ast.Mult)
        if spread(y.left) and spread(y.right)
    ]


def test_no_sum_of_float32_becomes_a_product_in_tf32() -> None:
    tensors = {f"{name}_ptr": "*fp32" for name in ("x", "y", "o")}
    made = job("broadcast_sum_kernel", tensors, {"N": 32})
    assert [x.dtype for x in products(kernel_ir(made))] == ["f32"]  # the source has none
    assert len(hidden_products(Path(planted_bugs.__file__).read_text())) == 1
    kernels = [x for x in Path(slipstream.__file__).parent.rglob("*.py") if "tl." in x.read_text()]
    assert len(kernels) > 50
    assert {x.name: found for x in kernels if (found := hidden_products(x.read_text()))} == {}


def test_every_kind_has_a_family_of_kernels() -> None:
    from slipstream.compiler.compiler_state import families

    for name in {x.name for x in known_bugs.FEATURE_RULES}:
        assert known_bugs.family((name,)) in families()
    known = {x.trigger for x in KNOWN_BUGS}
    # "dot" is what interpreted_bf16 follows from
    assert {y for x in known_bugs.FEATURE_RULES for y in x.triggers} <= known | {"dot"}


# of linear attention: operators by the first of their rows, and what splits sequences
LINEAR = {x.op: x for x in reversed(SAMPLES) if x.op.startswith("chunk_")}
LINEAR |= {x.name: x for x in LAYER_SAMPLES if x.name == "delta_rule_across_ranks"}
_SOUND: set[str] = set()


def compile_to_gpu_ir(sample: Sample, arch: str, shapes: Iterable[Shape], backward: bool) -> None:
    """Compiles as far as Triton may refuse a kernel: the assemblers take most of the time."""
    for shape in shapes:
        try:
            jobs = trace(_call(sample, shape, None), arch, backward)
        except PlainTorch:
            continue
        for made in jobs:
            if made.key not in _SOUND:
                kernel_ir(made, gpu_too=True)
                _SOUND.add(made.key)


@pytest.mark.parametrize(
    ("arch", "name", "shape"),
    [
        ("sm_80", "chunk_simple_gla", SHAPES[0]),
        ("sm_100", "chunk_kda", SHAPES[0]),
        ("sm_100", "chunk_gla", SHAPES[0]),
        ("gfx942", "delta_rule_across_ranks", SHAPES[1]),
    ],
)
def test_forward_of_linear_attention_compiles_on(arch: str, name: str, shape: Shape) -> None:
    """sm_100: a product's minimum by one axis after the other; gfx942: it has no tf32x3."""
    compile_to_gpu_ir(LINEAR[name], arch, [shape], backward=False)
