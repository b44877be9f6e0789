"""The signatures that fla's functions and modules have, of those that slipstream.compat.fla has,
and those of the configs of the models that convert reads.

    python tools/fla_signatures.py FOLDER > tests/compat/fla_signatures.json

FOLDER is where fla-core is installed. Its files are read, not imported.
tests/compat/test_signatures.py compares slipstream.compat.fla with the result, and
tests/models/test_convert.py the defaults of slipstream.models.convert.
"""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import own_checkout  # noqa: F401

import slipstream.compat.fla as compat
from slipstream.models.convert import FAMILIES

METHODS = ("__init__", "forward", "step")


def parameters(node: ast.FunctionDef) -> str:
    """The parameters without annotations, as str(inspect.signature()) has them."""
    args = node.args
    for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg):
        if arg is not None:
            arg.annotation = None
    return f"({ast.unparse(args)})"


def signatures(path: Path, names: set[str]) -> Iterator[tuple[str, str]]:
    """Functions of a file, and methods of its classes, of some names."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            yield node.name, parameters(node)
        elif isinstance(node, ast.ClassDef) and node.name in names:
            for method in node.body:
                if not isinstance(method, ast.FunctionDef) or method.name not in METHODS:
                    continue
                # one that takes nothing need not be written down
                if (signature := parameters(method)) != "(self)":
                    yield f"{node.name}.{method.name}", signature


def found(folder: Path) -> dict[str, str]:
    prefix = f"{compat.__name__}."
    modules = {x: m for x, m in sys.modules.items() if x.startswith(prefix) and m is not None}
    result = {}
    for name, module in sorted(modules.items()):
        relative = name.removeprefix(prefix)
        path = folder / "fla" / relative.replace(".", "/")
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.exists():
                names = set(vars(module))
                for member, signature in signatures(file, names):
                    result[f"{relative}.{member}"] = signature
    return result


def configs(folder: Path) -> dict[str, str]:
    """model_type -> the signature of the config's class."""
    types, result, model_type = {x.model_type for x in FAMILIES.values()}, {}, ""
    for path in sorted((folder / "fla/models").glob("*/configuration_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Assign([ast.Name("model_type")], ast.Constant(str(name))):
                    model_type = name
                case ast.FunctionDef("__init__") if model_type in types:
                    result[model_type] = parameters(node)
    return result


if __name__ == "__main__":
    of_fla = {"fla": compat.__version__, "configs": configs(Path(sys.argv[1]))}
    print(json.dumps({**of_fla, **found(Path(sys.argv[1]))}, indent=1))
