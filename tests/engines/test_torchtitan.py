"""slipstream.compat.install("fla") for torchtitan's Qwen3.5, in its own file, and for what others
import of fla.

Of torchtitan's model.py what is absent is the rest of torchtitan and spmd_types, whose decorators
leave a function as it is on one process.
"""

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from slipstream import ops
from slipstream.compat import install
from tests.support.engines import folder, loaded

pytestmark = pytest.mark.slow
TORCHTITAN = "torchtitan-0.3.0"


def test_gated_delta_net_of_torchtitan() -> None:
    q, k, v = torch.randn(1, 12, 1, 8), torch.randn(1, 12, 1, 8), torch.randn(1, 12, 2, 8)
    g, beta = F.logsigmoid(torch.randn(1, 12, 2)), torch.rand(1, 12, 2)
    offsets, x, weight = torch.tensor([0, 5, 12]), torch.randn(1, 12, 6), torch.randn(6, 1, 4)
    packed: dict[str, Any] = {"cu_seqlens": offsets, "cu_seqlens_cpu": offsets}
    with install("fla"), loaded(TORCHTITAN, "torchtitan.models.qwen3_5.model") as (model,):
        for name in ("ChunkGatedDeltaRuleFunction", "FusedRecurrentFunction"):
            assert getattr(model, name).__module__.startswith("slipstream.compat.fla")
        y = model._causal_conv1d_varlen(x, weight, offsets, offsets)
        expected = ops.conv.short_convolution(
            x, weight.squeeze(1), activation="silu", cu_seqlens=offsets
        )
        torch.testing.assert_close(y, expected[0])
        for backend in ("fla_chunked", "fla_fused_recurrent"):
            kernel = SimpleNamespace(backend=backend)
            given = packed if backend == "fla_chunked" else {"cu_seqlens": offsets}
            o = model.GatedDeltaKernel.forward(kernel, q, k, v, g, beta, **given)
            want, _ = ops.chunk_gated_delta_rule(
                q, k, v, g, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=offsets
            )
            torch.testing.assert_close(o, want)


def test_example_imports_what_torchtitan_has() -> None:
    """tests/parallel/test_torchtitan.py trains it, where torchtitan is installed."""
    source = Path(__file__).parents[2] / "examples/torchtitan/hybrid.py"
    root, seen = folder(TORCHTITAN), 0
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchtitan"):
            path = root / str(node.module).replace(".", "/")
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            names = set()
            for x in ast.parse(file.read_text()).body:
                names |= {getattr(x, "name", None)}
                if isinstance(x, ast.ImportFrom):
                    names |= {y.asname or y.name for y in x.names}
                if isinstance(x, ast.Assign):
                    names |= {ast.unparse(y) for y in x.targets}
            assert {x.name for x in node.names} <= names, node.module
            seen += len(node.names)
    assert seen > 10
