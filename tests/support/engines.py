"""The engines' own files, which `make engines` unpacks, as modules of the names they have there. A
test names the files that it is about; these are run as they are. Whatever else they import of the
engine, and of packages that are not installed, is an `Absent`: a module whose every member is a
class that takes any call, is false, and hands a decorated function back. A member that an answer
hangs on is given."""

import ast
import importlib
import inspect
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2] / ".engines"
# set by the job of CI that has them
REQUIRED = "REQUIRE_ENGINES" in os.environ
# what engines import besides themselves
OTHERS = ("einops", "msgspec", "pydantic", "packaging", "orjson", "spmd_types", "tyro")


def folder(release: str) -> Path:
    """Of a release such as vllm-0.33.0; the test is skipped where it is not there."""
    found = ROOT / release
    if not found.is_dir():
        reason = f"{release} is not in .engines: make engines"
        pytest.fail(reason) if REQUIRED else pytest.skip(reason)
    return found


class _AbsentType(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Absent,), {}) if name[:1].isupper() else Absent()

    def __bool__(cls) -> bool:
        return False


class Absent(metaclass=_AbsentType):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], (type, FunctionType, classmethod)):
            return args[0]
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Absent(*args, **kwargs)

    def __bool__(self) -> bool:
        return False

    def __or__(self, other: Any) -> Any:
        return other

    __ror__ = __or__


class _Finder(MetaPathFinder, Loader):
    def __init__(self, root: Path, files: Sequence[str], given: dict[str, dict[str, Any]]) -> None:
        self.root, self.files, self.given = root, files, given
        engine = root.name.rpartition("-")[0]
        self.names = {engine, *(x for x in OTHERS if find_spec(x) is None)}

    def find_spec(self, name: str, _: Any, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in self.names:
            return None
        file = self.root / (name.replace(".", "/") + ".py")
        if any(name == x or name.startswith(f"{x}.") for x in self.files):
            package = file.with_suffix("") / "__init__.py"
            for path in (package, file):
                if path.is_file():
                    return spec_from_file_location(name, path)
            assert package.parent.is_dir(), f"{file} is not among the files of tools/engines.py"
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(self.given.get(module.__name__, {}))


class _AbsentModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # one class for each name, so that isinstance tells them apart
        value = type(name, (Absent,), {})
        setattr(self, name, value)
        return value


@contextmanager
def loaded(release: str, *files: str, **given: dict[str, Any]) -> Iterator[list[ModuleType]]:
    """The modules of these names; all of the engine is forgotten at the end.

    Args:
        files: names of modules to run as they are, or of packages, with all below them.
        given: members of a module that is not run; __ stands for a dot.
    """
    members = {name.replace("__", "."): values for name, values in given.items()}
    finder = _Finder(folder(release), files, members)
    sys.meta_path.insert(0, finder)
    try:
        yield [importlib.import_module(x) for x in files]
    finally:
        sys.meta_path.remove(finder)
        for name in [x for x in sys.modules if x.partition(".")[0] in finder.names]:
            del sys.modules[name]


def calls(release: str, folder_name: str, names: set[str]) -> list[tuple[str, ast.Call]]:
    """Calls of functions or methods of these names below a folder, by file and line."""
    found = []
    root = folder(release) / folder_name
    for file in sorted(root.rglob("*.py") if root.is_dir() else [root]):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", None))
                if name in names:
                    found.append((f"{file.name}:{node.lineno}", node))
    return found


def signatures(release: str, name: str) -> dict[str, inspect.Signature]:
    """Of the functions of this name in a release's files, without defaults' values."""
    found = {}
    for file in sorted(folder(release).rglob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                a, kind = node.args, inspect.Parameter
                kinds = [(x, kind.POSITIONAL_OR_KEYWORD) for x in (*a.posonlyargs, *a.args)]
                kinds += [(x, kind.KEYWORD_ONLY) for x in a.kwonlyargs]
                parameters = [kind(x.arg, k) for x, k in kinds]
                found[str(file.relative_to(folder(release)))] = inspect.Signature(parameters)
    return found


def imports(release: str, package: str) -> dict[tuple[str, str | None], str]:
    """What a release's files import of a package: module and name, and a file that does."""
    found: dict[tuple[str, str | None], str] = {}
    for file in sorted(folder(release).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level:
                pairs = [(node.module or "", x.name) for x in node.names]
            elif isinstance(node, ast.Import):
                pairs = [(x.name, None) for x in node.names]
            else:
                continue
            for module, name in pairs:
                if module.partition(".")[0] == package:
                    found.setdefault((module, name), file.name)
    return found
