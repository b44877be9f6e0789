"""Fails when a file or a function has grown past what a reader can hold (CONTRIBUTING.md).

python tools/sizes.py            the worst offenders; exit status 1 if any limit is passed
"""

import ast
import subprocess
import sys
from pathlib import Path

FILE_LINES = 500
FUNCTION_LINES = 110
# the loop of a kernel cannot be cut without handing on a score of values
KERNEL_LINES = 130


def tracked() -> list[Path]:
    out = subprocess.run(["git", "ls-files", "*.py"], capture_output=True, text=True, check=True)
    return [Path(line) for line in out.stdout.splitlines() if Path(line).exists()]


def too_long(path: Path) -> list[str]:
    source = path.read_text()
    lines = source.count("\n")
    found = [f"{path}: {lines} lines, at most {FILE_LINES}"] if lines > FILE_LINES else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body
            # a docstring is as long as its arguments are many
            doc = body[0].end_lineno if ast.get_docstring(node) else node.body[0].lineno - 1
            length = (node.end_lineno or 0) - (doc or 0)
            limit = KERNEL_LINES if node.name.endswith("_kernel") else FUNCTION_LINES
            if length > limit:
                found.append(f"{path}:{node.lineno} {node.name}: {length} lines, at most {limit}")
    return found


def main() -> int:
    found = [line for path in tracked() for line in too_long(path)]
    print("\n".join(found) or "sizes: all files and functions within limits")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
