"""Kernels that the matrix has verified run as they are; others are guarded, and are right."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slipstream.runtime.guarded_launch import run_isolated

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

CALLS = """
import warnings
import torch
from slipstream import ops
from slipstream.compiler import compile_worker, compiler_state
from slipstream.runtime import guarded_launch

VERIFIED = {}
starts = []
start = compile_worker.Worker._start

def noted(self):
    if self._process is None:
        starts.append("started")
    start(self)

compile_worker.Worker._start = noted
if VERIFIED:
    class Everything(dict):
        def get(self, key, other=None):
            return frozenset(compiler_state.families())
    compiler_state.verified = Everything
else:
    compiler_state.verified = dict
warnings.simplefilter("error", guarded_launch.KernelDisabledWarning)
x = torch.randn(300, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
y = ops.rms_norm(x, torch.ones_like(x[0]))
y.sum().backward()
q, k, v = (torch.randn(2, 300, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
o, _ = ops.chunk_retention(q, k, v)
want, _ = ops.chunk_retention(q, k, v, impl="eager")
assert (o.float() - want.float()).norm() < 0.02 * want.float().norm()
here = guarded_launch.compiler_state(x.device)
print(here.unguarded, len(starts), len(here.remembered.get("probed", {})))
"""


@pytest.mark.parametrize(("verified", "words"), [(True, "True 0 0"), (False, "False 1 2")])
def test_only_what_is_unverified_is_watched(verified: bool, words: str, tmp_path: Path) -> None:
    """No child, no probe and no warning for the one; one child and a probe a kind for the other."""
    given = {"TRITON_CACHE_DIR": str(tmp_path / "a"), "SLIPSTREAM_CACHE_DIR": str(tmp_path / "b")}
    env = {k: v for k, v in os.environ.items() if k not in ("SLIPSTREAM_GUARD", "SLIPSTREAM_PROBE")}
    code = CALLS.replace("VERIFIED = {}", f"VERIFIED = {verified}")
    out = subprocess.run(
        [sys.executable, "-c", code], env=env | given, capture_output=True, text=True
    )
    assert out.returncode == 0, out.stderr
    assert out.stdout.strip() == words


class _WithProbe(torch.autograd.Function):
    """Whose backward computes gradients as a probe does."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, dy: torch.Tensor) -> torch.Tensor:
        x = ctx.saved_tensors[0].detach().requires_grad_()

        def run() -> torch.Tensor:
            return torch.autograd.grad(x.square(), x, dy)[0]

        return run_isolated(run, dy.device)


@pytest.mark.timeout(60)
def test_gradients_of_a_probe_within_a_backward() -> None:
    """Autograd has one thread a device, which waits for the probe here."""
    x = torch.randn(5, device="cuda", requires_grad=True)
    _WithProbe.apply(x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())
