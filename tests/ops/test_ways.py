"""Every operator in every way of differentiating it: right, or NotImplementedError by name. Those
that update a tensor in place: autograd and torch.jit.trace see it, also where memory holds the
negative."""

import ast
import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import slipstream
from slipstream import ops
from slipstream.common import checks
from slipstream.ops import recurrent_step, short_convolution_update
from slipstream.ops.steps import mixer_step
from slipstream.tools.catalog import OPERATORS, Sample
from tests.support.derivatives import CASES, WAYS, Case, Problem, assert_near
from tests.support.interpreted import interpreted
from tests.support.operators import LINEAR
from tests.support.user_inputs import negated
from tests.support.writing_rows import ROWS, check_refused, check_traced, check_versions

# those of the default run: one of each Function
SAMPLE = {"chunk_gla", "chunk_linear_attn-normalize", "chunk_gsa", "fused_recurrent_hgrn"}
SAMPLE |= {"chunk_gated_delta_product", "rms_norm-residual", "layer_norm", "short_convolution"}
SAMPLE |= {"short_convolution-packed", "short_convolution-operator", "token_shift-state"}
SAMPLE |= {"rotary_embedding-positions", "selective_scan", "linear_log_probs"}
SAMPLE |= {"swiglu", "glu_linear", "embedding", "cross_entropy-mean", "linear_cross_entropy-mean"}
SAMPLE |= {"linear_cross_entropy-none", "attention-packed", "matmul-silu", "linear_kl_div-mean"}

every_case = pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=c.name, marks=() if c.name in SAMPLE else pytest.mark.slow) for c in CASES],
)

TRANSFORMS = {"grad", "jvp", "dual"}
SECOND = {"second", "second-beside-first"}
# why a row may raise NotImplementedError, and in which ways
OPAQUE = "an operator that torch does not look into, whose backward is another"
BY_HAND = "its backward on a CPU is written by hand; transforms get torch's operations instead"
PRODUCT = "an operator that torch does not look into, whose backward is made of itself"
BACKWARD_ALONE = "in plain torch, but for a choice of kernels that has a backward alone"
IN_TORCH = "torch's own attention on a CPU has no such derivative"
REFUSES = {OPAQUE: TRANSFORMS | SECOND, BY_HAND: SECOND, PRODUCT: TRANSFORMS}
REFUSES[BACKWARD_ALONE] = {"jvp", "dual"}
REFUSES[IN_TORCH] = {"jvp", "dual", *SECOND}
PERMITTED: dict[str, str] = {
    **{op.name: OPAQUE for op in LINEAR},
    "short_convolution-stateless": OPAQUE,
    "short_convolution-operator": OPAQUE,
    "embedding": OPAQUE,
    **{f"linear_cross_entropy-{x}": OPAQUE for x in ("mean", "sum", "none")},
    "linear_cross_entropy": OPAQUE,
    **dict.fromkeys(("linear_log_probs", "linear_log_probs-entropy"), OPAQUE),
    **dict.fromkeys(("selective_scan", "selective_scan-gated", "selective_scan-groups"), OPAQUE),
    **{f"linear_kl_div-{x}": OPAQUE for x in ("mean", "none")},
    "attention": OPAQUE,
    **{f"attention-{x}": OPAQUE for x in ("full", "longer", "window", "lengths")},
    **{f"attention-{x}": OPAQUE for x in ("packed", "packed-cache")},
    "attention-square": IN_TORCH,
    **dict.fromkeys(("flash_attn_func", "flash_attn_varlen_func"), OPAQUE),
    "latent_attention": BACKWARD_ALONE,
    "causal_conv1d_fn": BY_HAND,
    "matmul": PRODUCT,
    "matmul-silu": PRODUCT,
    **dict.fromkeys(("rms_norm", "rms_norm-bare", "rms_norm-residual", "l2_norm"), BY_HAND),
    "group_norm-rms": BY_HAND,
    **dict.fromkeys(("rms_norm_gated", "rms_norm_gated-sigmoid", "rms_norm_gated-mamba2"), BY_HAND),
    **dict.fromkeys(("short_convolution", "short_convolution-residual"), BY_HAND),
    "short_convolution-packed": BY_HAND,
    **dict.fromkeys(("rotary_embedding-positions", "rotary_embedding-interleaved"), BY_HAND),
    **dict.fromkeys(("glu_linear", "glu_linear-geglu", "glu_linear-squared_relu"), BY_HAND),
    **dict.fromkeys(("cross_entropy", "cross_entropy-mean", "cross_entropy-none"), BY_HAND),
}

# public functions that no row differentiates, and why
NO_GRADIENTS = {
    "mixer_step": "refuses inputs with gradients: a decoding step",
    "projection_step": "refuses inputs with gradients: a decoding step",
    "rwkv7_step": "refuses inputs with gradients: a decoding step",
    "token_mix_step": "refuses inputs with gradients: a decoding step",
    "recurrent_step": "refuses inputs with gradients: the state is overwritten",
    "flash_attn_with_kvcache": "a decoding step, without gradients in flash_attn too",
    "causal_conv1d_update": "a decoding step: the state is overwritten",
    "packed_positions": "makes integers",
    "index": "makes integers",
    "rotary_tables": "makes tables of torch's own operations",
}


def test_every_operator_is_differentiated() -> None:
    public = {name for name, fn in vars(ops).items() if inspect.isfunction(fn)}
    rows = {case.name.partition("-")[0] for case in CASES}
    assert public == rows | NO_GRADIENTS.keys()
    assert not rows & NO_GRADIENTS.keys()


def test_permitted_refusals_name_rows() -> None:
    assert PERMITTED.keys() <= {case.name for case in CASES}
    assert {case.name for case in CASES} >= SAMPLE


@every_case
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_gradient_under_activation_checkpointing(case: Case, reentrant: bool) -> None:
    """Without reentry torch also refuses a second read of what was saved."""
    problem = Problem(case)
    given = problem.leaves()
    outputs = checkpoint(problem.run, *given, use_reentrant=reentrant)
    assert isinstance(outputs, tuple)
    problem.of_outputs(outputs).backward()
    assert_near([x.grad for x in given if x.grad is not None], problem.gradient())


@every_case
@pytest.mark.parametrize("way", WAYS)
def test_derivative_is_right_or_refused_by_name(case: Case, way: str) -> None:
    problem = Problem(case)
    reason = PERMITTED.get(case.name)
    if reason is None or way not in REFUSES[reason]:
        assert_near(*WAYS[way](problem), tolerance=1e-6)
        return
    with pytest.raises(NotImplementedError, match=rf"^{case.public_name}: "):
        WAYS[way](problem)


# a Function each of operators, of plain torch, and of a loss that makes gradients in its forward
EXPORTED = {"chunk_gla", "embedding", "matmul-silu", "short_convolution-packed"}
EXPORTED |= {"linear_cross_entropy-mean", "attention-packed"}


@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=c.name, marks=() if c.name in EXPORTED else pytest.mark.slow)
     for c in CASES],
)  # fmt: skip
def test_gradient_of_a_strict_export(case: Case) -> None:
    """Dynamo traces the forward of a Function under no_grad: none may be in the graph."""
    problem = Problem(case)
    given = problem.leaves()

    class Module(torch.nn.Module):
        def forward(self, given: list[Tensor]) -> tuple[Tensor, ...]:
            return problem.run(*given)

    exported = torch.export.export(Module(), (given,), strict=True).module()
    outputs = exported(given)
    grads = torch.autograd.grad(problem.of_outputs(tuple(outputs)), given)
    assert_near(list(grads), problem.gradient())


@every_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_gradients_under_autocast_are_those_of_16_bits(case: Case, dtype: torch.dtype) -> None:
    args = case.inputs()
    narrow = {
        name: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in args.items()
        if not isinstance(x, tuple)
    }
    narrow |= {n: tuple(y.float() for y in x) for n, x in args.items() if isinstance(x, tuple)}
    problem = Problem(Case(case.name, case.call, lambda: narrow))
    want = problem.gradient()
    given = problem.leaves()
    with torch.autocast("cpu", dtype=dtype):
        outputs = problem.run(*given)
    problem.of_outputs(outputs).backward()
    for x, y in zip(given, want, strict=True):
        assert x.grad is not None and x.grad.dtype == torch.float32
        assert float((x.grad - y).norm()) <= 0.05 * float(y.norm()) + 1e-3


def test_vmap_without_gradients_matches_a_loop() -> None:
    x = torch.randn(3, 2, 5, 6)
    calls: list[Callable[[Tensor], Tensor]] = [
        lambda x: ops.rms_norm(x),
        lambda x: ops.swiglu(x, 2 * x),
        lambda x: ops.token_shift(x)[0],
    ]
    for call in calls:
        want = torch.stack([call(y) for y in x])
        torch.testing.assert_close(torch.func.vmap(call)(x), want)


def test_functions_share_a_base() -> None:
    root = Path(slipstream.__file__).parent
    readers: list[str] = []
    # the base itself, and the operators alone
    outside = ("runtime/autograd.py", "runtime/autograd.py")
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        text = path.read_text()
        if "autograd" not in text and "saved_tensors" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and name not in outside:
                assert "torch.autograd.Function" not in map(ast.unparse, node.bases), node.name
                if "Function" in map(ast.unparse, node.bases):
                    assert any(ast.unparse(x).startswith("operator = ") for x in node.body)
            if isinstance(node, ast.Attribute) and node.attr == "saved_tensors":
                readers.append(name)
    # what the others get is read by once_differentiable; compiler/trace.py sets its own
    once = {"runtime/autograd.py", "kernels/matmul/op.py", "compiler/trace.py"}
    assert sorted(readers) == sorted(once)


def _recurrent(state: Tensor) -> Tensor:
    q, k, v = torch.randn(3, 2, 1, 2, 8, generator=torch.Generator().manual_seed(1))
    return recurrent_step(q, k, v, state=state)


def _mixer(state: Tensor) -> Tensor:
    q, k, v = torch.randn(3, 2, 1, 2, 8, generator=torch.Generator().manual_seed(1))
    return mixer_step(q, k, v, state=state)


def _convolution(state: Tensor) -> Tensor:
    x = torch.randn(2, 1, 6, generator=torch.Generator().manual_seed(1))
    return short_convolution_update(x, state, torch.ones(6, 4))


WRITTEN: list[tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = [
    (_recurrent, (2, 2, 8, 8)),
    (_mixer, (2, 2, 8, 8)),
    (_convolution, (2, 6, 4)),
]


@pytest.mark.parametrize(("call", "shape"), WRITTEN, ids=[call.__name__ for call, _ in WRITTEN])
def test_negated_state_is_written(call: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> None:
    before = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    plain, view = before.clone(), negated(before)
    assert view.is_neg()
    want, y = call(plain), call(view)
    assert not torch.equal(plain, before)
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(view, plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("row", OPERATORS, ids=lambda row: row.name)
def test_versions_rise_of_what_is_written(row: Sample) -> None:
    check_versions(row, "eager")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_backward_through_overwritten_values_is_refused(row: Sample) -> None:
    check_refused(row, "eager")


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_traced_calls_write_other_inputs(row: Sample) -> None:
    check_traced(row, "eager")


@interpreted
def test_kernels_write_in_sight() -> None:
    for row in ROWS:
        check_versions(row, "triton")
        if row.variant in ("", "mamba2"):  # the interpreter is slow; mamba2 has counters
            check_refused(row, "triton")
            check_traced(row, "triton")


def test_one_number_of_a_dimension_has_any_stride() -> None:
    """Of a state of one row, which expand gives the stride 0."""
    checks.expect_own_memory("state", torch.empty_strided((1, 3, 2), (0, 1, 3)))
    with pytest.raises(ValueError, match=r"^state: is written in place"):
        checks.expect_own_memory("state", torch.empty_strided((2, 3, 2), (0, 1, 3)))
