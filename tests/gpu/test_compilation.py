"""What is compiled on a GPU, when, and what is examined of it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.runtime import compile_ahead
from slipstream.runtime.guarded_launch import run_isolated
from slipstream.tools.catalog import QUICK_OPERATORS, Sample, Shape
from tests.support.size_variants import CHUNKED, PACKED, WAYS

# ---- On a device, too, other sizes and other packed lengths find their kernels compiled.


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Names of the kernels that Triton compiles, or finds in its cache on disk, meanwhile."""
    from triton import knobs

    asked: list[str] = []

    def note(*, src: Any, **_: Any) -> None:
        asked.append(src.name)

    listening: Any = note
    before, knobs.compilation.listener = knobs.compilation.listener, listening
    try:
        yield asked
    finally:
        knobs.compilation.listener = before


def both(sample: Sample, size: tuple[int, int, int], packed: bool) -> None:
    B, T, H = size
    args = sample.inputs(Shape(B=B, T=T, H=H, packed=packed), torch.device("cuda"))
    leaves = [x.requires_grad_() for x in args.values() if x.is_floating_point()]
    o, *_ = sample.call(args)
    torch.autograd.grad(o, leaves, torch.randn_like(o), allow_unused=True)
    torch.cuda.synchronize()


@pytest.mark.parametrize("is_packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("sample", CHUNKED, ids=lambda x: x.op)
def test_other_sizes_compile_nothing(sample: Sample, is_packed: bool) -> None:
    first, *others = PACKED["few heads"] if is_packed else WAYS["few programs"]
    both(sample, first, is_packed)
    compile_ahead.finish()
    with compilations() as asked:
        for size in others:
            both(sample, size, is_packed)
    assert not asked, f"{sample.op}: after {first} these sizes compile {set(asked)}: {others}"


# ---- A cache filled without a GPU: the first call on one compiles nothing.


CALL = """
import torch, triton
from slipstream import ops
compiled = []
def listen(*, src, cache_hit, **_):
    if not cache_hit: compiled.append(src.name)
triton.knobs.compilation.listener = listen
q, k, v = (torch.randn(2, 300, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
           for _ in range(3))
g = torch.rand(2, 300, 4, device="cuda", requires_grad=True)
beta = torch.rand(2, 300, 4, device="cuda", dtype=torch.bfloat16, requires_grad=True)
ops.chunk_gated_delta_rule(q, k, v, -g, beta)[0].sum().backward()
torch.cuda.synchronize()
print(compiled)
"""


def test_first_call_after_precompile_compiles_nothing(tmp_path: Path) -> None:
    major, minor = torch.cuda.get_device_capability()
    # a probe would look at other shapes first
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "SLIPSTREAM_PROBE": "off"}
    run = ["-c", "from slipstream.cli import main; main()", "precompile", "chunk_gated_delta_rule"]
    run += ["--arch", f"sm_{major}{minor}", "--head-dim", "64", "--no-packed", "--no-grouped"]
    run += ["--jobs", "8"]
    blind = {**env, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, *run], env=blind, check=True, timeout=500)
    out = subprocess.run(
        [sys.executable, "-c", CALL], env=env, check=True, capture_output=True, text=True
    )
    assert out.stdout.strip() == "[]"


# ---- Kernels that the matrix has verified run as they are; others are guarded, and are right.


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


# ---- slipstream doctor on a device: every implementation of each kind of kernel agrees.


def test_doctor_agrees_on_the_device() -> None:
    run = [sys.executable, "-c", "from slipstream.cli import main; main()"]
    done = subprocess.run(
        [*run, "doctor", "--quick", "--json"], capture_output=True, text=True, timeout=550
    )
    report = json.loads(done.stdout)
    bad = [x for x in report["checks"] if not x["ok"]]
    assert done.returncode == 0 and not bad, (bad, done.stderr[-2000:])
    major, minor = torch.cuda.get_device_capability()
    assert report["device"]["arch"] == f"sm_{major}{minor}" and report["device"]["driver"]
    assert report["ptxas"]["version"] and report["triton"] and report["cuda"]
    assert {x["operator"].split("-")[0] for x in report["checks"]} == set(QUICK_OPERATORS)
    kernels = {
        x["operator"].split("-")[0] for x in report["checks"] if x["impl"] in ("triton", "sm90")
    }
    assert kernels >= {"chunk_simple_gla", "chunk_gated_delta_rule", "attention"}
