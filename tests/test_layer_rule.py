"""Which part of the package may import which: docs/architecture.md, "Layer rule"."""

import ast
from collections.abc import Iterator
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
    ("compiler/trace.py", "slipstream.runtime"),
    ("compiler/trace.py", "slipstream.runtime.custom_op"),
}


# plain torch, where a kernel fails, of what is a scan inside
FAMILY_EXCEPTIONS = {
    ("running_mean/eager.py", "slipstream.kernels.gated_scan.op"),
    ("running_mean/eager.py", "slipstream.kernels.elementwise.token_shift"),
    ("elementwise/preconditioner.py", "slipstream.kernels.gated_scan.op"),
    # the rotation before attention, and after those of its kernels that do not rotate gradients
    ("attention/rotary.py", "slipstream.kernels.elementwise"),
    ("attention/rotary.py", "slipstream.kernels.elementwise.triton.rotary"),
}


def imports(path: Path) -> Iterator[str]:
    """Names of our modules that a file imports, wherever the statement stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            if node.module == "slipstream":
                yield from (f"slipstream.{x.name}" for x in node.names)
            elif node.module.startswith("slipstream."):
                yield node.module
        elif isinstance(node, ast.Import):
            yield from (x.name for x in node.names if x.name.startswith("slipstream."))


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
