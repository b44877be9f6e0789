"""Operators on a CUDA device with inputs as users have them: tests/ops/test_user_inputs.py's table
of layouts, changes in place, settings and backwards within autocast, in float32."""

import re

import pytest
import torch

from tests.support import user_inputs
from tests.support.derivatives import ON_CUDA, Case, Problem, assert_near
from tests.support.user_inputs import LAYOUTS, NAMED, expect_any_layout, expect_change_is_seen

pytestmark = pytest.mark.filterwarnings("ignore::slipstream.runtime.dispatch.FallbackWarning")
# whose gradients are plain torch's
PLAIN = {"short_convolution_update-bias", "latent_attention"}
every_case = pytest.mark.parametrize("case", ON_CUDA, ids=lambda case: case.name)
# of float32 products in three parts of TF32, summed in another order
NEAR = 1e-3


@pytest.fixture(autouse=True)
def _plain_torch_where_there_is_no_kernel(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if request.node.callspec.params["case"].name in PLAIN:
        monkeypatch.setenv("SLIPSTREAM_FALLBACK", "warn")


@every_case
@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_of_any_layout_on_cuda(case: Case, layout: str) -> None:
    expect_any_layout(case, layout, NEAR)


@every_case
def test_outputs_change_in_place_on_cuda(case: Case) -> None:
    user_inputs.expect_changes_of_outputs(case, NEAR)


@every_case
@pytest.mark.parametrize("of", ["input", "output"])
def test_change_before_backward_is_seen_on_cuda(case: Case, of: str) -> None:
    expect_change_is_seen(case, of, NEAR)


@every_case
def test_default_device_and_dtype(case: Case) -> None:
    """Three calls: the third is played from the record of the second."""
    problem = Problem(case)
    want = problem.gradient()
    torch.set_default_device("cuda")
    torch.set_default_dtype(torch.bfloat16)
    try:
        for _ in range(3):
            given = problem.leaves()
            outputs = problem.run(*given)
            loss = problem.of_outputs(outputs)
            assert_near(list(torch.autograd.grad(loss, given)), want, NEAR)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


@every_case
def test_backward_within_autocast_on_cuda(case: Case) -> None:
    problem = Problem(case)
    given = problem.leaves()
    loss = problem.of_outputs(problem.run(*given))
    want = torch.autograd.grad(loss, given, retain_graph=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        got = torch.autograd.grad(loss, given)
    plain = case.name in PLAIN or case.name.endswith("mamba3") or "mimo" in case.name
    assert_near(list(got), list(want), 0.05 if plain else NEAR)


@every_case
def test_sparse_inputs_are_refused_on_cuda(case: Case) -> None:
    problem = Problem(case)
    for i in range(len(problem.inputs)):
        given = list(problem.inputs)
        given[i] = given[i].to_sparse()
        try:
            problem.run(*given)
        except (TypeError, ValueError, NotImplementedError) as error:
            if not re.match(NAMED, str(error)):
                raise
