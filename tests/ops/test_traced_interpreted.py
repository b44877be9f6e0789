"""torch.jit.trace of operators that run kernels, as on a GPU: sizes are tensors to it."""

import pytest

from tests.support.derivatives import CASES
from tests.support.interpreted import run

# one of each way from the public function to a launch
SOME = ["chunk_gla", "chunk_delta_rule", "chunk_gdn2", "chunk_gated_delta_product", "chunk_gsa"]
SOME += ["chunk_lightnet", "chunk_rwkv7", "attention-packed", "latent_attention"]
SOME += ["rms_norm_gated-mamba2", "short_convolution-packed", "cross_entropy-mean"]


@pytest.mark.parametrize(
    "names", [SOME, pytest.param([], marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_traced_kernels_take_other_inputs(names: list[str]) -> None:
    assert set(names) <= {c.name for c in CASES}
    run(*names, script="tests.support.traced_interpreted")
