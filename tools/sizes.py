"""Fails when a file or a function has grown past what a reader can hold, or when kernels lack the
comments and diagrams that CONTRIBUTING.md asks for.

python tools/sizes.py            the worst offenders; exit status 1 if any limit is passed
"""

import ast
import io
import subprocess
import sys
import tokenize
from pathlib import Path

DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
FILE_LINES = 500
# of a file with one kernel whose partitions are warps: they stand side by side
SM90_LINES = 1000
FUNCTION_LINES = 110
# the loop of a kernel cannot be cut without handing on a score of values
KERNEL_LINES = 130
# from here on a device function has many parameters, and how many such functions there may be:
# aggregates take their place (NamedTuple). Kernels have them flat, as launches read them.
MANY_PARAMETERS = 15
FUNCTIONS_WITH_MANY = 22
# of the lines of a file's kernels and device functions, those with a comment
COMMENT_SHARE = 0.05
# of the package's lines, those of import statements: what has been reached, rounded up to 0.1%. A
# module in place of names that stand one a line saves lines.
IMPORT_SHARE = 0.04
# lines of host code for each of device code: what has been reached, rounded up to 0.01. Small are
# the families beside the linear one and attention, without what families share.
HOST_PER_DEVICE = {"kernels": 0.97, "small families": 1.65}
LARGE_FAMILIES = ("linear", "attention", "primitives")
# no code, where a line has nothing else
NO_CODE = (
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    tokenize.ENDMARKER,
)
# the package's lines, and its module-level constants with numbers: what has been reached, with 1%
# of room, to be lowered wherever code goes
PACKAGE_LINES = 98_095
CONSTANTS = 325
# the tests' lines, likewise: a test that says less than another goes when one is added
TEST_LINES = 62_062
# statements that the formatter leaves as they are, such as tables whose columns line up: a limit on
# lines is no reason for one
UNFORMATTED = {"slipstream": 459, "tests": 130}
# comments for tools
DIRECTIVES = ("# fmt:", "# noqa", "# pyright:")


def tracked() -> list[Path]:
    out = subprocess.run(["git", "ls-files", "*.py"], capture_output=True, text=True, check=True)
    return [Path(line) for line in out.stdout.splitlines() if Path(line).exists()]


def is_kernel(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")


def too_long(path: Path) -> list[str]:
    source = path.read_text()
    lines, tree = source.count("\n"), ast.parse(source)
    one_kernel = "gl.warp_specialize(" in source and sum(map(is_kernel, ast.walk(tree))) == 1
    most = SM90_LINES if one_kernel else FILE_LINES
    found = [f"{path}: {lines} lines, at most {most}"] if lines > most else []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body
            # a docstring is as long as its arguments are many
            doc = body[0].end_lineno if ast.get_docstring(node) else node.body[0].lineno - 1
            length = (node.end_lineno or 0) - (doc or 0)
            limit = KERNEL_LINES if is_kernel(node) else FUNCTION_LINES
            if length > limit:
                found.append(f"{path}:{node.lineno} {node.name}: {length} lines, at most {limit}")
    return found


def with_many_parameters(path: Path) -> list[str]:
    """Device functions of a file with MANY_PARAMETERS or more."""
    return [
        f"{path}:{node.lineno} {node.name}: {len(node.args.args)} parameters"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and not is_kernel(node)
        and _is_jitted(node)
        and len(node.args.args) >= MANY_PARAMETERS
    ]


def numbers(path: Path) -> int:
    """The module-level capitals of a file whose value has a number in it, tables of them too."""
    count = 0
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            values = [getattr(x, "value", None) for x in ast.walk(node.value)]
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [x.id for y in targets for x in ast.walk(y) if isinstance(x, ast.Name)]
            if any(type(x) in (int, float) for x in values):
                count += sum(x.isupper() for x in names)
    return count


def import_lines(path: Path) -> int:
    """The lines of a file's import statements, wherever they stand."""
    return len(_lines_of_imports(ast.parse(path.read_text())))


def _lines_of_imports(tree: ast.AST) -> set[int]:
    found = [x for x in ast.walk(tree) if isinstance(x, ast.Import | ast.ImportFrom)]
    return {n for x in found for n in _lines_of(x)}


def _lines_of(node: ast.stmt) -> range:
    first = min(x.lineno for x in (node, *getattr(node, "decorator_list", ())))
    return range(first, (node.end_lineno or 0) + 1)


def _is_jitted(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any(
        ".jit" in ast.unparse(x) for x in node.decorator_list
    )


def code_lines(path: Path) -> tuple[int, int]:
    """The lines of a file's host code and of its kernels and device functions, without blank ones,
    comments, docstrings and imports."""
    source = path.read_text()
    tree = ast.parse(source)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = {n for x in tokens if x.type not in NO_CODE for n in range(x.start[0], x.end[0] + 1)}
    device = set()
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            code.difference_update(_lines_of(node.body[0]))
        if isinstance(node, ast.FunctionDef) and _is_jitted(node):
            device.update(_lines_of(node))
    code -= _lines_of_imports(tree)
    return len(code - device), len(code & device)


def host_per_device(paths: list[Path]) -> dict[str, float]:
    """Lines of host code for each of device code of the keys of HOST_PER_DEVICE, then by family."""
    counts: dict[str, tuple[int, int]] = dict.fromkeys(HOST_PER_DEVICE, (0, 0))
    for path in paths:
        family = path.relative_to("slipstream/kernels").parts[0]
        groups = ["kernels", family] + ["small families"] * (family not in LARGE_FAMILIES)
        host, device = code_lines(path)
        for group in groups:
            all_host, all_device = counts.get(group, (0, 0))
            counts[group] = all_host + host, all_device + device
    return {x: host / device for x, (host, device) in counts.items() if device}


def import_share(paths: list[Path]) -> float:
    return sum(map(import_lines, paths)) / sum(x.read_text().count("\n") for x in paths)


def unformatted(paths: list[Path], folder: str) -> int:
    """How many statements of a folder's files the formatter is told to skip."""
    own = [x.read_text() for x in paths if x.is_relative_to(folder)]
    return sum(line.endswith("# fmt: skip") for x in own for line in x.splitlines())


def unexplained(path: Path) -> list[str]:
    """Of a file with kernels: too few comments, or partitions without a diagram."""
    if not path.is_relative_to("slipstream/kernels"):
        return []
    source = path.read_text()
    tree = ast.parse(source)
    jitted = [x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef) and _is_jitted(x)]
    if not any(map(is_kernel, jitted)):
        return []
    lines = {n for x in jitted for n in range(x.lineno, (x.end_lineno or 0) + 1)}
    commented = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and not token.string.startswith(DIRECTIVES)
    }
    share = len(lines & commented) / len(lines)
    found = []
    if share < COMMENT_SHARE:
        found.append(f"{path}: comments in {share:.1%} of its kernels' lines, want 5%")
    head = ast.get_docstring(tree) or ""
    if "gl.warp_specialize(" in source and not ("-->" in head and "arrival" in head):
        found.append(f"{path}: no diagram of its partitions and barriers at its head")
    return found


def main() -> int:
    paths = tracked()
    found = [line for path in paths for line in (*too_long(path), *unexplained(path))]
    kernels = [x for x in paths if x.is_relative_to("slipstream/kernels")]
    many = [line for path in kernels for line in with_many_parameters(path)]
    if len(many) > FUNCTIONS_WITH_MANY:
        found += [*many, f"device functions with many parameters: at most {FUNCTIONS_WITH_MANY}"]
    package = [x for x in paths if x.is_relative_to("slipstream")]
    share = import_share(package)
    if share > IMPORT_SHARE:
        found.append(
            f"slipstream: imports take {share:.2%} of its lines, at most {IMPORT_SHARE:.1%}"
        )
    lines = sum(x.read_text().count("\n") for x in package)
    if lines > PACKAGE_LINES:
        found.append(f"slipstream: {lines} lines, at most {PACKAGE_LINES}")
    tests = sum(x.read_text().count("\n") for x in paths if x.is_relative_to("tests"))
    if tests > TEST_LINES:
        found.append(f"tests: {tests} lines, at most {TEST_LINES}")
    constants = sum(map(numbers, package))
    if constants > CONSTANTS:
        found.append(f"slipstream: {constants} constants with numbers, at most {CONSTANTS}")
    ratios = host_per_device(kernels)
    for name, most in HOST_PER_DEVICE.items():
        if ratios.get(name, 0) > most:
            found.append(f"{name}: {ratios[name]:.3f} host lines a device line, at most {most}")
    for folder, most in UNFORMATTED.items():
        if (count := unformatted(paths, folder)) > most:
            found.append(f"{folder}: {count} statements with # fmt: skip, at most {most}")
    print("\n".join(found) or "sizes: all files, functions and comments within limits")
    print(f"sizes: {len(many)} device functions with {MANY_PARAMETERS} or more parameters")
    print(f"sizes: imports take {share:.2%} of the package's lines")
    print(
        f"sizes: host lines a device line: {', '.join(f'{x} {n:.2f}' for x, n in ratios.items())}"
    )
    print(f"sizes: {lines} lines and {constants} constants with numbers in the package")
    print(f"sizes: {tests} lines of tests")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
