"""Digests of the kernels' code that comments, docstrings, formatting and moves do not change.

`tools/matrix.py --record` writes a digest beside each family of kernels that it has verified, and
the guard trusts the family as long as the digest is the same. So the digest is of what the code
says: the syntax trees of a family's top-level definitions, without docstrings and imports, in an
order that does not depend on the files that hold them. It is equal under every Python release.

To parse all kernels takes a second or two. What is found is remembered by the files' bytes: on
disk, and in source_digests.json, which is written beside verified.json.
"""

import ast
import contextlib
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from slipstream.runtime.files import write_text

# Fields that say nothing, or that not every Python release fills.
_SKIPPED = frozenset(("ctx", "kind", "type_comment", "type_params", "type_ignores"))
_HAS_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
PACKAGED = Path(__file__).with_name("source_digests.json")


def digests(families: Mapping[str, Collection[Path]], remembered: Path) -> dict[str, str]:
    """A digest of each family's files.

    Args:
        families: name -> the modules that decide what its kernels are and how they are launched.
        remembered: a JSON file with results of earlier calls; it is written if it can be.
    """
    keys = contents_of(families)
    known = _read(PACKAGED)
    if {*keys.values()} - known.keys():
        on_disk = _read(remembered)
        known |= on_disk
        new = {
            key: _digest(definitions(x.read_bytes().decode()) for x in families[name])
            for name, key in keys.items()
            if key not in known
        }
        if new:
            # of families: enough for a few installed versions
            _write(remembered, {**dict(list(on_disk.items())[-400:]), **new})
        known |= new
    return {name: known[key] for name, key in keys.items()}


def contents_of(families: Mapping[str, Collection[Path]]) -> dict[str, str]:
    """What each family's digest is remembered by: the bytes of its files."""
    of_file = {
        x: hashlib.sha1(x.read_bytes(), usedforsecurity=False).hexdigest()
        for x in {p for paths in families.values() for p in paths}
    }
    return {
        name: _sha1("\n".join(sorted(of_file[x] for x in paths)))
        for name, paths in families.items()
    }


@cache
def definitions(source: str) -> list[str]:
    """A digest of each top-level statement of a module that is neither import nor docstring."""
    tree = ast.parse(source)
    statements = [x for x in _body(tree) if not isinstance(x, (ast.Import, ast.ImportFrom))]
    return [_sha1(_normal(x)) for x in statements]


def _body(node: Any) -> list[ast.stmt]:
    """The statements of a module, class or function, without its docstring."""
    first = node.body[0] if node.body else None
    has_docstring = (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    )
    return node.body[1:] if has_docstring else node.body


def _normal(node: Any) -> str:
    """A syntax tree as text; what is absent is left out, as releases of Python differ in it."""
    if isinstance(node, list):
        return f"[{','.join(map(_normal, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = []
    for name in node._fields:
        value = getattr(node, name, None)
        if name == "body" and isinstance(node, _HAS_DOCSTRING):
            value = _body(node)
        if name not in _SKIPPED and value is not None and value != []:
            fields.append(f"{name}={_normal(value)}")
    return f"{type(node).__name__}({','.join(fields)})"


def _digest(files: Iterable[list[str]]) -> str:
    return _sha1("\n".join(sorted(x for file in files for x in file)))[:12]


def _sha1(text: str) -> str:
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def _read(path: Path) -> dict[str, str]:
    try:
        stored = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}


def _write(path: Path, cached: dict[str, str]) -> None:
    # a read-only home costs each process the time again
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(cached))
