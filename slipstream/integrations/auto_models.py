"""transformers' AutoConfig knows the language model after `import slipstream`, at no cost.

`import slipstream` imports neither transformers nor slipstream.models. It puts a finder in front
of Python's, which waits for transformers' module of AutoConfig and, once that has been imported,
adds one entry to its table. slipstream.models is imported when that entry is read, which is when a
checkpoint of the model is loaded; importing it registers the classes as usual.
"""

import importlib
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_AUTO_CONFIG = "transformers.models.auto.configuration_auto"
_MODEL_TYPE, _CONFIG = "slipstream", "SlipstreamConfig"


class _Models:
    """Stands for slipstream.models in transformers' table of modules."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("slipstream.models"), name)


def _add_entry(module: ModuleType) -> None:
    mapping = module.CONFIG_MAPPING
    if _MODEL_TYPE not in mapping:
        mapping._mapping[_MODEL_TYPE] = _CONFIG
        mapping._modules[_MODEL_TYPE] = _Models()


class ThenCall(Loader):
    """Loads a module as another loader does, then calls a function with it."""

    def __init__(self, loader: Loader, function: Callable[[ModuleType], object]) -> None:
        self.loader, self.function = loader, function

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        self.function(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)  # inspect asks it for the source


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name != _AUTO_CONFIG:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = ThenCall(spec.loader, _add_entry)
        return spec


def register() -> None:
    """Adds the entry, or has it added once AutoConfig is imported."""
    if _AUTO_CONFIG in sys.modules:
        _add_entry(sys.modules[_AUTO_CONFIG])
    else:
        sys.meta_path.insert(0, _Finder())
