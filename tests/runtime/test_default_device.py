"""Tensors that the package makes for itself name a device: torch.set_default_device moves the
user's, not ours. It is set for all of tests/ops/test_user_inputs.py and of
tests/nn/test_module_settings.py."""

import ast
from pathlib import Path

import slipstream

ROOT = Path(slipstream.__file__).parent
FACTORIES = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn"}
FACTORIES |= {"scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"}
# samples for tools, which a device may be the default of
ELSEWHERE = ("tools", "cli")
# makes parameters, which go where the user wants them
CONSTRUCTORS = {"__init__", "__call__"}


def unplaced(path: Path) -> list[str]:
    found: list[str] = []

    def visit(node: ast.AST, of_parameters: bool) -> None:
        if isinstance(node, ast.FunctionDef):
            of_parameters = node.name in CONSTRUCTORS
        if isinstance(node, ast.Call) and not of_parameters:
            name = ast.unparse(node.func)
            given = {x.arg for x in node.keywords}
            is_factory = name.removeprefix("torch.") in FACTORIES and name.startswith("torch.")
            if is_factory and not given & {"device", None}:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} {name}")
            of_parameters = name.endswith("nn.Parameter")
        for child in ast.iter_child_nodes(node):
            visit(child, of_parameters)

    visit(ast.parse(path.read_text()), False)
    return found


def test_tensors_are_made_on_a_device_by_name() -> None:
    files = [x for x in ROOT.rglob("*.py") if x.relative_to(ROOT).parts[0] not in ELSEWHERE]
    assert [line for path in files for line in unplaced(path)] == []
