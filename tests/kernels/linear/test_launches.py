"""What op.py asks of all launches alike, of whatever takes a call when another gave way."""

import inspect
from importlib import import_module
from typing import get_args, get_type_hints

import pytest
import torch
from torch import Tensor

from slipstream.core.trace import trace
from slipstream.kernels.launching import HAVE_TRITON, INTERPRETED
from slipstream.kernels.linear import op
from tests.kernels.linear.test_peak_memory import make

pytestmark = pytest.mark.skipif(not HAVE_TRITON or INTERPRETED, reason="wants Triton's JIT")
MODULES = [
    "triton.launch", "triton.channel_launch", "triton.delta_launch", "triton.dplr_launch",
    "triton.step_launch", "hopper.launch", "hopper.additive_launch", "hopper.channel_launch",
]  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_what_forward_leaves_backward_takes(name: str) -> None:
    """Forward of one implementation, backward of the next: it gets nothing that it does not know.

    The delta rule's raised a TypeError where its kernels in Gluon gave way between the two.
    """
    module = import_module(f"slipstream.kernels.linear.{name}")
    assert hasattr(module, "forward")
    leaves = hasattr(module, "forward_kept")
    takes = hasattr(module, "backward") and "kept" in inspect.signature(module.backward).parameters
    assert leaves == takes
    if leaves:
        assert get_args(get_type_hints(module.forward_kept)["return"])[-1] == list[Tensor]


@pytest.mark.parametrize("kind", ["delta_rule", "gated"])
def test_the_portable_backward_follows_a_forward_in_gluon(kind: str) -> None:
    def call(device: torch.device) -> None:
        terms = make(kind, (8192,), 32, device)
        o, _, marks, *kept = op.spans_forward(*terms, 0.1, 64, "hopper", False, 1, keep=True)
        assert kept
        more = {"marks": None if not marks.numel() else marks, "kept": kept}
        grads = op.gradients(terms, o, None, 0.1, 64, "triton", terms.g is not None, **more)
        assert grads["q"].shape == terms.q.shape

    names = [x.name for x in trace(call, "sm_90", backward=False)]
    assert any("sm90" in x for x in names) and "delta_walk_back_kernel" in names
