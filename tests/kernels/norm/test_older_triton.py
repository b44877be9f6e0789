"""Kernels that Triton 3.3.1 refuses, found without it; with it, that all of them compile, by

tools/matrix.py rms_norm rms_norm_gated layer_norm group_norm l2_norm --triton 3.3.1
"""

import ast
from importlib.util import find_spec
from pathlib import Path


def refused(source: str) -> list[str]:
    """`a = b = x`, and variables that are None first, and a tensor later, in a loop."""
    found = []
    for loop in (x for x in ast.walk(ast.parse(source)) if isinstance(x, ast.For)):
        for step in (x for x in ast.walk(loop) if isinstance(x, ast.Assign)):
            values = step.value.elts if isinstance(step.value, ast.Tuple) else [step.value]
            none = any(isinstance(x, ast.Constant) and x.value is None for x in values)
            if none or len(step.targets) > 1:
                found.append(ast.unparse(step))
    return found


def test_norm_kernels_have_nothing_that_triton_33_refuses() -> None:
    spec = find_spec("slipstream.kernels.norm.triton_kernels")
    assert spec is not None and spec.origin is not None
    assert refused(Path(spec.origin).read_text()) == []


def test_refused_patterns_are_found() -> None:
    for step in ("b = None", "b, c = (None, load(x))", "b = c = load(x)"):
        assert refused(f"for i in range(3):\n    {step}") == [step]
    assert refused("b = None\nfor i in range(3):\n    b, c = load(x), load(y)") == []
