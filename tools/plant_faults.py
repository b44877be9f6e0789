"""Plants one small fault at a time in the package, to see whether a test finds it.

python tools/plant_faults.py draw [SEED]   what a seed draws, as rows of tests/planted_faults.csv
python tools/plant_faults.py apply N       plants the fault of row N
python tools/plant_faults.py revert        removes it

A draw shuffles the sites of all kinds and takes the first of each kind, at most one a file, of
functions that no row of another seed names; where these are used up, what is left of those. Kinds
of the fewest sites choose first, as few files have any. A row names its site by file, function and
line of text, which the function has once. A row whose result is "equivalent" changes nothing that a
caller could see, as its note explains; the draw passes over.
"""

import ast
import csv
import random
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests/planted_faults.csv"
SAVED = ".before_fault"
SEED, OF_A_KIND = 40, 5
# had faults planted by hand before, for which tests were written
LEFT_OUT = {
    "slipstream/compat/mamba_ssm/ops/triton/ssd_combined.py",
    "slipstream/kernels/norm/triton_kernels.py",
    "slipstream/models/cache.py",
    "slipstream/ops/conv.py",
    "slipstream/runtime/launch_cache.py",
}
KINDS = "mask", "bound", "flag", "index", "scale", "barrier", "key's field", "carried state"
OTHER_BOUND = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
FACTOR = re.compile(r"(^|_)(scale|factor|rate|weight|beta|decay|ln2|log2e|inv\w*)s?$", re.I)
STATE = re.compile(r"(^|_)(d?states?|carry|cache|past|memory|previous)$|^(b_)?(d?h|s|ds)\d?$")
KEY = re.compile(r"(^|_)(key|kind|signature)$")
BARRIER = re.compile(r"barrier|wait|fence|arrive|synchronize|record_stream")


class Fault(NamedTuple):
    file: str
    function: str
    kind: str
    before: str
    after: str
    result: str = ""  # found, equivalent, or survived: not found before `test` was written
    test: str = ""
    note: str = ""
    seed: str = str(SEED)


def name_of(node: ast.AST) -> str:
    """The last name of what an expression reads: state of self.state[i]."""
    while isinstance(node, ast.Subscript | ast.Starred):
        node = node.value
    return getattr(node, "attr", "") or getattr(node, "id", "")


def text(node: ast.AST) -> str:
    atom = not isinstance(node, ast.BinOp | ast.BoolOp | ast.Compare | ast.IfExp | ast.UnaryOp)
    return ast.unparse(node) if atom else f"({ast.unparse(node)})"


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
    """Kind, what is replaced, and by what, of the node itself."""
    match node:
        # one of two conditions on which lanes or tokens count
        case ast.BinOp(left, ast.BitAnd(), right):
            if not isinstance(right, ast.Constant):
                yield "mask", node, text(left)
                yield "mask", node, text(right)
        case ast.Compare(left, [op], [right]) if type(op) in OTHER_BOUND:
            yield "bound", node, f"{text(left)} {OTHER_BOUND[type(op)]} {text(right)}"
        case ast.BinOp(left, ast.Mult(), right):
            for factor, rest in ((left, right), (right, left)):
                number = isinstance(factor, ast.Constant) and isinstance(factor.value, float)
                if number or FACTOR.search(name_of(factor)):
                    yield "scale", node, text(rest)
        case ast.If(test) | ast.IfExp(test) if isinstance(test, ast.Name | ast.Attribute):
            yield "flag", test, f"(not {text(test)})"
        case ast.Constant(bool(value)):
            yield "flag", node, str(not value)
        # the neighbour in a subscript, of an axis, of a program
        case ast.Subscript(_, index):
            parts = index.elts if isinstance(index, ast.Tuple) else [index]
            ends = [(x.lower, x.upper) if isinstance(x, ast.Slice) else (x,) for x in parts]
            yield from neighbours(y for x in ends for y in x)
        case ast.Call(func, args) if name_of(func) in ("program_id", "size", "unsqueeze"):
            yield from neighbours(args)
        case ast.Call(ast.Name("KernelKey" | "signature"), args):
            yield from (("key's field", x, "None") for x in args)
        case ast.Call(ast.Attribute(x, "clone" | "detach" | "copy_")) if STATE.search(name_of(x)):
            yield "carried state", node, text(x)
        case ast.keyword(str(name), ast.Name() | ast.Attribute() | ast.Subscript() as value):
            if STATE.search(name):
                yield "carried state", value, "None"
        case ast.For(body=body) | ast.While(body=body):
            for x in body:
                if isinstance(x, ast.Assign) and STATE.search(name_of(x.targets[0])):
                    yield "carried state", x, "pass"
        case ast.Expr(ast.Call(func)) if BARRIER.search(text(func)):
            yield "barrier", node, "pass"
        case ast.With(items=[ast.withitem(x)]) if re.search(r"lock\b", text(x), re.I):
            yield "barrier", x, '__import__("contextlib").nullcontext()'
        # what a cache or a record of kernels is looked up by
        case ast.Assign([target], ast.Tuple(fields)) if KEY.search(name_of(target)):
            yield from (("key's field", x, "None") for x in fields)
        case ast.FunctionDef(name, body=[*_, ast.Return(ast.Tuple(fields))]) if KEY.search(name):
            yield from (("key's field", x, "None") for x in fields)


def neighbours(parts: Iterable[ast.AST | None]) -> Iterator[tuple[str, ast.AST, str]]:
    for part in parts:
        match part:
            case ast.Constant(int(value)) if not isinstance(value, bool):
                yield "index", part, str(value + 1)
            case ast.UnaryOp(ast.USub(), ast.Constant(int(value))):
                yield "index", part, f"-{value + 1}"


@lru_cache(maxsize=1)
def functions(source: str) -> list[str]:
    """Of each line the function that it is in, with the classes and functions around that."""
    names = [""] * (source.count("\n") + 1)
    for node in ast.walk(ast.parse(source)):  # the outer ones first
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            for n in range(node.lineno - 1, node.end_lineno or 0):
                names[n] += f".{node.name}"
    return names


@lru_cache(maxsize=1)
def numbers(source: str) -> dict[str, list[int]]:
    """Where each text of a line stands."""
    found: dict[str, list[int]] = {}
    for n, line in enumerate(source.split("\n")):
        found.setdefault(line.strip(), []).append(n)
    return found


def place(source: str, fault: Fault) -> int | None:
    """The number of its line; None if the source has no such line, or several."""
    names, inside = functions(source), f".{fault.function}.".replace("..", ".")
    places = [n for n in numbers(source).get(fault.before, ()) if f"{names[n]}.".startswith(inside)]
    return places[0] if len(places) == 1 else None


def planted(source: str, fault: Fault) -> str | None:
    """The source with the fault; None where that has no place."""
    lines = source.split("\n")
    if (n := place(source, fault)) is None:
        return None
    lines[n] = lines[n].replace(fault.before, fault.after)
    return "\n".join(lines)


def sites(file: str, source: str) -> Iterator[Fault]:
    """Every fault of one line."""
    lines, names = source.split("\n"), functions(source)
    for node in ast.walk(ast.parse(source)):
        for kind, x, after in changes(node):
            assert isinstance(x, ast.expr | ast.stmt)
            line, n = lines[x.lineno - 1], x.lineno - 1
            changed = line[: x.col_offset] + after + line[x.end_col_offset :]
            fault = Fault(file, names[n][1:], kind, line.strip(), changed.strip())
            constant = isinstance(x, ast.Constant) and kind == "key's field"
            if x.lineno == x.end_lineno and not constant and place(source, fault) is not None:
                yield fault


def draw(seed: int) -> list[Fault]:
    files = {x.relative_to(ROOT).as_posix() for x in ROOT.glob("slipstream/**/*.py")} - LEFT_OUT
    every = [x for file in sorted(files) for x in sites(file, (ROOT / file).read_text())]
    others = [x for x in listed() if x.seed != str(seed) or x.result == "equivalent"]
    used, named = {x[:5] for x in others}, {x[:2] for x in others if x.result != "equivalent"}
    every = [x for x in dict.fromkeys(every) if x[:5] not in used]
    random.Random(seed).shuffle(every)
    every.sort(key=lambda x: x[:2] in named)
    taken: list[Fault] = []
    count = Counter(x.kind for x in every)
    for kind in sorted(KINDS, key=count.__getitem__):
        some = (x for x in every if x.kind == kind)
        for _ in range(OF_A_KIND):
            taken.append(next(x for x in some if x.file not in {y.file for y in taken}))
    return taken


def listed() -> list[Fault]:
    with LIST.open(newline="") as file:
        return [Fault(**row) for row in csv.DictReader(file)]


def main(command: str, number: str = str(SEED)) -> None:
    if command == "draw":
        csv.writer(sys.stdout, lineterminator="\n").writerows(x[:5] for x in draw(int(number)))
    elif command == "apply":
        fault = listed()[int(number)]
        path = ROOT / fault.file
        changed = planted(source := path.read_text(), fault)
        assert changed, f"{fault}: its place is gone"
        path.with_suffix(SAVED).write_text(source)
        path.write_text(changed)
    else:
        assert command == "revert", __doc__
        for saved in ROOT.glob(f"slipstream/**/*{SAVED}"):
            # as old as the fault: Python would take the fault's bytecode, of a file as long
            saved.touch()
            saved.replace(saved.with_suffix(".py"))


if __name__ == "__main__":
    main(*sys.argv[1:])
