"""A cache filled without a GPU: the first call on one compiles nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

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
