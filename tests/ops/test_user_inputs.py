"""Every operator with inputs as users have them (views, subclasses, other dtypes, fake tensors) and
in settings of torch that it has not made: the same numbers, or an error that names the argument."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support import user_inputs
from tests.support.derivatives import CASES, Case, Problem, assert_near
from tests.support.user_inputs import LAYOUTS, NAMED, READS_OUTPUTS, default_dtype, negated, stepped

pytestmark = pytest.mark.filterwarnings("ignore:.*prototype stage.*:UserWarning")
# those of the default run: one of each Function
SAMPLE = {"chunk_gla", "chunk_linear_attn-normalize", "fused_recurrent_hgrn", "chunk_mamba3-mimo"}
SAMPLE |= {"chunk_rwkv4", "selective_scan", "rms_norm-residual", "short_convolution-packed"}
SAMPLE |= {"glu_linear-geglu", "cross_entropy-mean", "linear_kl_div-mean", "attention-packed"}
SAMPLE |= {"attention-square", "rotary_embedding-positions", "matmul-silu", "attnres"}
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
sample = pytest.mark.sample(which=lambda case, **_: case.name in SAMPLE)


def each(change: Callable[[Tensor], Tensor], x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(each(change, y) for y in x)
    return change(x) if isinstance(x, Tensor) else x


def changed(case: Case, change: Callable[[Tensor], Tensor]) -> Case:
    """With other inputs."""
    args = {name: each(change, x) for name, x in case.inputs().items()}
    return Case(case.name, case.call, lambda: args)


def in_dtype(case: Case, dtype: torch.dtype) -> Case:
    return changed(case, lambda x: x.to(dtype) if x.is_floating_point() else x)


# ---- where their numbers lie


@every_case
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.sample(which=lambda case, layout: layout == "stepped" or case.name in SAMPLE)
def test_inputs_of_any_layout(case: Case, layout: str) -> None:
    user_inputs.expect_any_layout(case, layout, 1e-9)


@every_case
@sample
def test_gradients_of_any_layout_come_in(case: Case) -> None:
    problem = Problem(case)

    def grads(*of_outputs: Tensor) -> list[Tensor]:
        given = problem.leaves()
        outputs = problem.run(*given)
        found = torch.autograd.grad(outputs, given, of_outputs, allow_unused=True)
        return [x for x in found if x is not None]

    w = problem.weights
    assert_near(grads(*(stepped(user_inputs.transposed(x)) for x in w)), grads(*w))
    ones = [torch.ones_like(x) for x in w]
    for view in (user_inputs.one_value, negated):
        assert_near(grads(*map(view, ones)), grads(*ones))


# ---- what is asked of them


@every_case
@sample
def test_gradient_of_each_alone(case: Case) -> None:
    problem = Problem(case)
    want, h = problem.gradient(), 1e-5
    for i, gradient in enumerate(want):
        given = [x.clone().requires_grad_(i == j) for j, x in enumerate(problem.inputs)]
        assert_near(list(torch.autograd.grad(problem.value(*given), given[i])), [gradient])
    for k, w in enumerate(problem.weights):
        given = problem.leaves()
        y = problem.run(*given)[k]
        if y.requires_grad:
            grads = torch.autograd.grad((w * y).sum(), given, materialize_grads=True)
            along = sum((g * d).sum() for g, d in zip(grads, problem.directions))
            ends = [(w * problem.run(*problem.moved(s))[k]).sum() for s in (h, -h)]
            torch.testing.assert_close(along, (ends[0] - ends[1]) / (2 * h), rtol=1e-4, atol=1e-6)


@every_case
@sample
def test_outputs_share_no_memory(case: Case) -> None:
    problem = Problem(case)
    given = problem.leaves()
    problem.value(*given).backward()
    with torch.no_grad():
        outputs = problem.run(*given)
    for x, want in zip(given, problem.inputs):
        assert x._version == 0 and torch.equal(x, want)
        memory = x.untyped_storage().data_ptr()
        assert all(y.untyped_storage().data_ptr() != memory for y in outputs)


@every_case
@sample
def test_outputs_may_be_changed_in_place(case: Case) -> None:
    user_inputs.expect_changes_of_outputs(case, 1e-8)


@every_case
@pytest.mark.parametrize("of", ["input", "output"])
@sample
def test_change_before_backward_is_seen(case: Case, of: str) -> None:
    user_inputs.expect_change_is_seen(case, of, 1e-8)


# ---- tensors of other kinds


@every_case
@sample
def test_fake_tensors_have_real_shapes(case: Case) -> None:
    problem = Problem(case)
    real = problem.run(*problem.inputs)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        run, inputs = changed(case, mode.from_tensor).flat()
        given = [x.requires_grad_() for x in inputs]
        outputs = run(*given)
        total = sum(x.sum() for x in outputs if x.requires_grad)
        assert isinstance(total, Tensor)
        grads = torch.autograd.grad(total, given, materialize_grads=True)
    for x, y in zip((*outputs, *grads), (*real, *problem.inputs), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
    for x, y in zip(outputs, real):
        steps = [[s for s, n in zip(z.stride(), z.shape) if n > 1] for z in (x, y)]
        assert steps[0] == steps[1]


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse": lambda x: x.to_sparse(),
    "complex": lambda x: x.to(torch.complex128),
    "integer": lambda x: x.long(),
    "quantized": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
    "nested": lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged),
}
# which torch's own operations take as they take dense ones
DENSE_OR_NOT = ("sparse", "nested")


@every_case
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@sample
def test_other_kind_is_refused_by_name(case: Case, kind: str) -> None:
    if case.name == "short_convolution-operator":
        return  # whose caller has looked
    problem = Problem(case)
    want = problem.run(*problem.inputs)
    for i, x in enumerate(problem.inputs):
        if kind == "nested" and x.dim() < 2:
            continue
        given = list(problem.inputs)
        given[i] = KINDS[kind](x)
        try:
            got = problem.run(*given)
        except (TypeError, ValueError, NotImplementedError) as error:
            if not re.match(NAMED, str(error)):
                raise
            continue
        assert kind in DENSE_OR_NOT
        if not any(x.is_nested for x in got):
            assert_near([x.to_dense() if x.is_sparse else x for x in got], list(want))


@every_case
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@sample
def test_one_input_of_another_dtype(case: Case, dtype: torch.dtype) -> None:
    """Refused by name, or near what one dtype gives, with gradients in the inputs' own."""
    problem = Problem(in_dtype(case, torch.float32))
    want = problem.run(*problem.inputs)
    for i in range(len(problem.inputs)):
        given = problem.leaves()
        given[i] = given[i].detach().to(dtype).requires_grad_()
        try:
            got = problem.run(*given)
            total = sum(x.double().sum() for x in got if x.requires_grad)
            assert isinstance(total, Tensor)
            grads = torch.autograd.grad(total, given, allow_unused=True)
        except (TypeError, ValueError, NotImplementedError) as error:
            if not re.match(NAMED, str(error)):
                raise
            continue
        assert_near([x.double() for x in got], [x.double() for x in want], 0.1)
        assert all(g is None or g.dtype == x.dtype for g, x in zip(grads, given))


# ---- settings of torch


SETTINGS: dict[str, Callable[[], Any]] = {
    "bfloat16 by default": lambda: default_dtype(torch.bfloat16),
    "float64 by default": lambda: default_dtype(torch.float64),
    # what an operator makes for itself may not go where users make theirs
    "meta by default": lambda: torch.device("meta"),
    "anomalies looked for": lambda: torch.autograd.set_detect_anomaly(True),
}


@every_case
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
@sample
def test_same_numbers_in_a_setting(case: Case, setting: str) -> None:
    wide, narrow = Problem(case), Problem(in_dtype(case, torch.float32))
    want, floats = wide.gradient(), narrow.run(*narrow.inputs)
    with SETTINGS[setting]():
        given = wide.leaves()
        outputs = wide.run(*given)
        loss = sum((w * (x + x.square())).sum() for x, w in zip(outputs, wide.weights))
        assert isinstance(loss, Tensor)
        assert_near(list(torch.autograd.grad(loss, given)), want)
        got = narrow.run(*narrow.inputs)
    assert_near(list(got), list(floats), 1e-5)
    assert [x.dtype for x in got] == [x.dtype for x in floats]


# in plain torch, whose own backward autocast changes like this
PLAIN_TORCH = {"chunk_mamba3", "chunk_mamba3-mimo", "fused_recurrent_mamba3", "latent_attention"}


@every_case
@sample
def test_backward_within_autocast(case: Case) -> None:
    """A forward where autocast is off, whose backward is called where it is on."""
    problem = Problem(in_dtype(case, torch.float32))
    given, weights = problem.leaves(), [w.float() for w in problem.weights]
    outputs = problem.run(*given)
    loss = sum((w * (x + x.square())).sum() for x, w in zip(outputs, weights))
    assert isinstance(loss, Tensor)
    want = torch.autograd.grad(loss, given, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = torch.autograd.grad(loss, given)
    assert_near(list(got), list(want), 0.05 if case.name in PLAIN_TORCH else 1e-4)


@every_case
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@sample
def test_vmap_is_a_loop_or_refused_by_name(case: Case) -> None:
    if case.name == "short_convolution-operator":
        return  # which torch cannot call in a loop; the public function is another row
    problem = Problem(case)
    both = problem.inputs, problem.moved(1e-3)
    for dim in (0, -1):
        try:
            got = torch.func.vmap(problem.run, dim)(*(torch.stack(x, dim) for x in zip(*both)))
        except NotImplementedError as error:
            if not re.match(case.public_name, str(error)):
                raise
            continue
        for k, given in enumerate(both):
            assert_near([x[k] for x in got], list(problem.run(*given)), 1e-9)


def test_samples_are_rows() -> None:
    names = {case.name for case in CASES}
    assert names >= SAMPLE | READS_OUTPUTS | PLAIN_TORCH
