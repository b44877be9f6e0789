"""What the activations refuse; what they compute is in test_blocks.py."""

import pytest
import torch

from slipstream.ops.activation import squared_relu, swiglu


def test_activations_reject_faults_by_name() -> None:
    x = torch.randn(2, 3)
    for call, error, word in [
        (lambda: swiglu(x, x[:, :2]), ValueError, "up: want shape"),
        (lambda: swiglu(x, x.double()), TypeError, "up: want torch.float32"),
        (lambda: squared_relu(x.long()), TypeError, "x: want a floating dtype"),
    ]:
        with pytest.raises(error, match=word):
            call()
