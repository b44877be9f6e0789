"""The rotation's cos and sin of large angles on a CUDA device."""

import pytest
import torch

from tests.support.large_angles import check_large_angles

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_large_angles_are_exact() -> None:
    check_large_angles("cuda")
