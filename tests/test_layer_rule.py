"""Which part of the package may import which: docs/architecture.md, "Layer rule"."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import slipstream

ROOT = Path(str(slipstream.__file__)).parent
# from the top; a part may import its own level and those below
LEVELS = (
    {"cli"},
    {"tools", "training", "integrations", "compat"},
    {"models"},
    {"layers"},
    {"nn"},
    {"ops", "parallel"},
    {"kernels"},
    {"runtime"},
    {"compiler"},
    {"common"},
)
LEVEL = {part: i for i, parts in enumerate(LEVELS) for part in parts}
EXCEPTIONS = {
    # atomic writes, which verdicts about compilers and digests of sources need
    ("compiler/compiler_state.py", "slipstream.runtime.files"),
    ("compiler/source_digest.py", "slipstream.runtime.files"),
    ("compiler/triton_cache_key.py", "slipstream.runtime.files"),
    # calls operators to see what they would launch
    ("compiler/trace.py", "slipstream.runtime.backends"),
    ("compiler/trace.py", "slipstream.runtime.compile_ahead"),
    ("compiler/trace.py", "slipstream.runtime.custom_op"),
    ("compiler/trace.py", "slipstream.runtime.guarded_launch"),
}

# plain torch, where a kernel fails, of what is a scan inside
FAMILY_EXCEPTIONS = {
    ("running_mean/op.py", "slipstream.kernels.gated_scan.op"),
    ("running_mean/op.py", "slipstream.kernels.elementwise.token_shift"),
    # the rotation before attention, and after those of its kernels that do not rotate gradients
    ("attention/rotary.py", "slipstream.kernels.elementwise.rotary"),
    ("attention/rotary.py", "slipstream.kernels.elementwise.triton.rotary"),
    # attention too, whose inputs, reference, tiles and sums before the backward it has
    *(
        (f"selected_attention/{file}.py", f"slipstream.kernels.attention.{module}")
        for file, modules in (
            ("inputs", "inputs reference"),
            ("eager", "reference"),
            ("op", "inputs plan probe reference"),
            ("triton_kernels", "triton.scores"),
            ("triton_lists", "triton.scores"),
            ("triton_entries", "triton.scores"),
            ("launch", "triton.launch triton.sums triton.tiles"),
            ("sm90_kernels", "sm90.common sm90.forward"),
            ("sm90_launch", "sm90.launch triton.tiles"),
        )
        for module in modules.split()
    ),
}


@cache
def imports(path: Path) -> list[str]:
    """Names of our modules that a file imports, wherever the statement stands."""
    return [*_imports(path)]


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            if node.module.partition(".")[0] == "slipstream":
                yield from (_module_of(f"{node.module}.{x.name}") for x in node.names)
        elif isinstance(node, ast.Import):
            yield from (x.name for x in node.names if x.name.startswith("slipstream."))


def _module_of(name: str) -> str:
    """Of a name that is imported: itself if it is a module or slipstream's own, or else the module
    that has it."""
    place, (package, _, _) = ROOT.parent.joinpath(*name.split(".")), name.rpartition(".")
    is_module = place.with_suffix(".py").exists() or place.is_dir()
    return name if is_module or package == "slipstream" else package


def test_parts_import_only_what_is_below() -> None:
    above = set()
    for path in ROOT.rglob("*.py"):
        name = path.relative_to(ROOT).as_posix()
        level = LEVEL.get(name.partition("/")[0], -1)
        for module in imports(path):
            if level > LEVEL.get(module.split(".")[1], len(LEVELS)):
                above.add((name, module))
    assert above == EXCEPTIONS


def test_families_do_not_import_each_other() -> None:
    others = set()
    for path in (ROOT / "kernels").rglob("*.py"):
        name = path.relative_to(ROOT / "kernels")
        family = name.parts[0]
        for module in imports(path):
            parts = module.split(".")
            if parts[1] == "kernels" and len(parts) > 2 and parts[2] not in (family, "primitives"):
                others.add((name.as_posix(), module))
    assert others == FAMILY_EXCEPTIONS


def test_every_part_has_a_level() -> None:
    parts = {x.name for x in ROOT.iterdir() if x.is_dir() and (x / "__init__.py").exists()}
    assert parts == set(LEVEL)


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import one another, directly or by others."""
    reached: dict[str, set[str]] = {}
    for start in edges:
        found, todo = set(), [*edges[start]]
        while todo:
            name = todo.pop()
            if name not in found:
                found.add(name)
                todo += edges.get(name, ())
        reached[start] = found
    together = {
        tuple(sorted(y for y in edges if y in reached[x] and x in reached.get(y, ())))
        for x in edges
        if x in reached[x]
    }
    return [[*x] for x in sorted(together)]


def test_circle_is_found() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "d2"}}
    assert circles(edges) == [["b", "c"]]


def test_kernels_do_not_import_in_circles() -> None:
    """Wherever the statement stands, and by the names of launches that a KernelOp is given."""
    files = {
        ".".join(("slipstream", *path.relative_to(ROOT).with_suffix("").parts)): path
        for path in (ROOT / "kernels").rglob("*.py")
    }
    edges = {}
    for name, path in files.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        named = [x.value for x in ast.walk(tree) if isinstance(x, ast.Constant)]
        given = {x.partition(":")[0] for x in named if isinstance(x, str)}
        from_packages = {
            f"{node.module}.{x.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for x in node.names
        }
        edges[name] = (given | from_packages | {*imports(path)}) & {*files}
    assert sum(map(len, edges.values())) > 400
    assert circles(edges) == []
