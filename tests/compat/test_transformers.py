"""transformers looks functions up in fla when a modeling module is imported: it finds ours."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import inspect
import torch
from slipstream.compat import install

install("fla")
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

torch.manual_seed(0)
config = Qwen3NextConfig(
    hidden_size=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
    linear_value_head_dim=8, num_hidden_layers=1, layer_types=["linear_attention"],
)
layer, x = qwen.Qwen3NextGatedDeltaNet(config, 0), torch.randn(2, 30, 32)
used = inspect.getclosurevars(qwen.torch_chunk_gated_delta_rule).nonlocals["implementation"]
assert used.__module__ == "slipstream.compat.fla.ops.gated_delta_rule.chunk", used.__module__
got = layer(x)
qwen.torch_chunk_gated_delta_rule = inspect.unwrap(qwen.torch_chunk_gated_delta_rule)
torch.testing.assert_close(got, layer(x), rtol=1e-4, atol=1e-5)
"""


@pytest.mark.slow
def test_transformers_finds_the_functions_of_fla() -> None:
    # a process of its own: in this one the module may be imported already
    command = [sys.executable, "-c", SCRIPT]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr[-2000:]
