"""Modules of a peer that are loaded from its own files: fla.layers, fla.models, and two of
fla.modules that are plain torch around names that Slipstream has.

The __init__ of layers and models imports one module for every layer, and Slipstream does not have
the operators of all of them. So its imports are run one by one, and the names of those that fail
raise that error when they are asked for.
"""

import ast
import importlib
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

# and the distribution that has them
PEER_FILES = {
    "fla.layers": "flash-linear-attention",
    "fla.models": "flash-linear-attention",
    "fla.modules.feature_map": "fla-core",
    "fla.modules.long_conv": "fla-core",
}


def peer_spec(name: str, path: Sequence[str] | None, finders: Sequence[Any]) -> ModuleSpec | None:
    """Where a module is, if it is one of the peer's own.

    Args:
        name: of the module, such as fla.layers.gla.
        path: __path__ of its parent.
        finders: those of the import system, except for ours.

    Raises:
        ModuleNotFoundError: it is one of PEER_FILES, and the peer is not there.
    """
    if name.rpartition(".")[0].startswith(tuple(PEER_FILES)):
        return PathFinder.find_spec(name, path)
    if name not in PEER_FILES:
        return None
    package, *between, _ = name.split(".")
    specs = (finder.find_spec(package, None) for finder in finders)
    for spec in specs:
        if spec is None or spec.submodule_search_locations is None:
            continue
        folders = [str(Path(x, *between)) for x in spec.submodule_search_locations]
        own = PathFinder.find_spec(name, folders)
        if own is not None and own.origin is not None:
            if own.submodule_search_locations is not None:
                own.loader = _EachImport(name, own.origin)
            return own
    raise ModuleNotFoundError(
        f"{name} is loaded from the files of {PEER_FILES[name]}, which is not there: "
        f"pip install --no-deps {PEER_FILES[name]}",
        name=name,
    )


class _EachImport(SourceFileLoader):
    """Runs the imports of an __init__.py one by one, and goes on after one that fails."""

    def exec_module(self, module: ModuleType) -> None:
        failed: dict[str, ImportError] = {}
        source = self.get_source(module.__name__) or ""
        for node in ast.parse(source).body:
            if not isinstance(node, ast.ImportFrom):
                continue
            origin = "." * node.level + (node.module or "")
            names = [x.asname or x.name for x in node.names]
            try:
                found = importlib.import_module(origin, module.__package__)
                values = [getattr(found, x.name) for x in node.names]
            except ImportError as error:
                failed |= dict.fromkeys(names, error)
            else:
                vars(module).update(zip(names, values))

        def missing(name: str) -> Any:
            if name in failed:
                raise ImportError(f"{module.__name__}.{name}: {failed[name]}", name=name)
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        public = [
            x
            for x, value in vars(module).items()
            if not x.startswith("_") and not isinstance(value, ModuleType)
        ]
        vars(module).update(__getattr__=missing, __all__=sorted(public))
