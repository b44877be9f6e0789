"""Operators on a GPU in ways of differentiating, and those that write in place."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from slipstream.runtime.dispatch import FALLBACK
from slipstream.tools.catalog import Sample
from tests.support.derivatives import ON_CUDA, WAYS, Case, Problem
from tests.support.writing_rows import ROWS, check_refused, check_traced, check_versions

# ---- Every operator on a CUDA device under activation checkpointing, and differentiated in the
# ways that its kernels refuse.


# the Functions of kernels, of which each refuses all but one backward
KERNELS = {"chunk_gla", "chunk_gsa", "chunk_gated_delta_product", "chunk_hgrn", "rms_norm"}
KERNELS |= {
    "rms_norm-residual",
    "short_convolution",
    "short_convolution-packed",
    "rotary_embedding-positions",
}
KERNELS |= {"token_shift-state", "swiglu", "glu_linear", "embedding", "cross_entropy-mean"}
KERNELS |= {"cross_entropy-none", "linear_cross_entropy-mean", "linear_cross_entropy-none"}
KERNELS |= {"attention", "linear_kl_div-mean", "short_convolution-stateless"}


@pytest.mark.filterwarnings("ignore::slipstream.runtime.dispatch.FallbackWarning")
@pytest.mark.parametrize("case", ON_CUDA, ids=lambda c: c.name)
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_gradient_under_activation_checkpointing(
    case: Case, reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # whose gradients are plain torch's
    if case.name in ("short_convolution_update-bias", "latent_attention"):
        monkeypatch.setenv(FALLBACK, "warn")
    problem = Problem(case)
    want = problem.gradient()
    given = problem.leaves()
    outputs = checkpoint(problem.run, *given, use_reentrant=reentrant)
    assert isinstance(outputs, tuple)
    problem.of_outputs(outputs).backward()
    for x, y in zip(given, want, strict=True):
        torch.testing.assert_close(x.grad, y)


@pytest.mark.parametrize("way", ["jvp", "dual", "second", "second-beside-first"])
@pytest.mark.parametrize("case", [c for c in ON_CUDA if c.name in KERNELS], ids=lambda c: c.name)
def test_other_derivatives_are_refused_by_name(case: Case, way: str) -> None:
    problem = Problem(case)
    with pytest.raises(NotImplementedError, match=rf"^{case.public_name}: "):
        WAYS[way](problem)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore::slipstream.runtime.dispatch.FallbackWarning")
@pytest.mark.parametrize("grads", [False, True], ids=["without gradients", "with gradients"])
@pytest.mark.parametrize("case", ON_CUDA, ids=lambda c: c.name)
def test_traced_calls_take_other_inputs(
    case: Case, grads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FALLBACK, "warn")
    Problem(case).expect_traced_is_the_call(grads)


# ---- Kernels that update a tensor in place, in first calls and in replayed ones: autograd and
# torch.jit.trace know of it.


CUDA = torch.device("cuda")
every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


@every_row
def test_versions_rise_of_what_is_written(row: Sample) -> None:
    check_versions(row, "triton", CUDA, calls=4)


@every_row
def test_backward_through_overwritten_values_is_refused(row: Sample) -> None:
    check_refused(row, "triton", CUDA)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@every_row
def test_traced_calls_write_other_inputs(row: Sample) -> None:
    check_traced(row, "triton", CUDA)
