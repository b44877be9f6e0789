"""How winding the way of a call is through this package's own code.

    python tools/road.py            the branches of each function on the way
    python tools/road.py --check    exit status 1 if one has more than MAX_BRANCHES, or if before
                                    Linear.apply is called more than MAX_STAYS functions take beta
                                    or more than MAX_CLIMBS calls go to a higher layer's module

The way is that of the first calls of a shape in tools/call_path.py, forward and backward, as far as
it goes through PLACES: checks, choice, modes and operators. Launches of back ends are not on it.
A call goes to a higher layer if its module is of a level above that of the module that calls
(tests/test_layer_rule.py). Branches are each if, if-else expression, and, or, loop and
comprehension.
"""

import argparse
import ast
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import call_path
import own_checkout
import torch
from torch import Tensor

from slipstream.compiler.trace import trace
from slipstream.kernels.linear.op import Linear

sys.path.append(str(own_checkout.ROOT))
from tests.test_layer_rule import LEVEL

PACKAGE = Path(call_path.PACKAGE)
PLACES = (
    *("ops", "kernels/linear", "kernels/linear/modes", "kernels/attention", "kernels/norm"),
    *("runtime/dispatch.py", "runtime/custom_op.py", "runtime/autograd.py"),
)
MAX_BRANCHES = 12
MAX_STAYS = 18
MAX_CLIMBS = 4
BRANCHES = (
    *(ast.If, ast.IfExp, ast.For, ast.While, ast.ListComp, ast.SetComp, ast.DictComp),
    *(ast.GeneratorExp, ast.Match),
)
INNER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def branches(function: ast.AST) -> int:
    """Those of a function's body, not of functions within it."""
    found, left = 0, [*ast.iter_child_nodes(function)]
    while left:
        node = left.pop()
        if isinstance(node, INNER):
            continue
        found += isinstance(node, BRANCHES)
        found += len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
        left += ast.iter_child_nodes(node)
    return found


def functions(path: Path) -> dict[int, ast.FunctionDef]:
    """The functions of a file by the line at which their code begins."""
    found = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            found[min([node.lineno, *(x.lineno for x in node.decorator_list)])] = node
    return found


def holds(value: Any, tensor: Tensor) -> bool:
    """Whether an argument is the tensor, or a tuple, list or dictionary with it."""
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        return any(holds(x, tensor) for x in value)
    return value is tensor


class Way:
    """The code that a call runs in PLACES, and what of it takes a tensor before Linear.apply."""

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()
        self.stays: set[CodeType] = set()
        self.climbs: list[str] = []
        self.watched: Tensor | None = None
        self.arrived = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """As sys.setprofile calls it."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(PACKAGE)):
            return
        self.arrived |= code is Linear.forward.__code__
        path = Path(code.co_filename)
        is_launch = path.name.startswith(("triton_", "sm90_"))
        if not is_launch and {path, path.parent} & {PACKAGE / x for x in PLACES}:
            self.codes.add(code)
        if self.watched is None or self.arrived:
            return
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(str(PACKAGE)):
            caller = caller.f_back
        if caller is not None and level(caller.f_code) > level(code):
            self.climbs.append(f"{place_of(caller.f_code)} to {place_of(code)}")
        if not code.co_name.startswith("<"):
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + 2]
            if any(holds(frame.f_locals.get(x), self.watched) for x in names):
                self.stays.add(code)


def level(code: CodeType) -> int:
    """How many levels are above that of a function of the package."""
    return LEVEL.get(Path(code.co_filename).relative_to(PACKAGE).parts[0], -1)


def place_of(code: CodeType) -> str:
    return f"{Path(code.co_filename).relative_to(PACKAGE)}:{code.co_firstlineno} {code.co_name}"


def walk(call: Callable[[torch.device], Any]) -> Way:
    way = Way()

    def watched(device: torch.device) -> None:
        sys.setprofile(way)
        call(device)

    with call_path.as_plain_calls():
        trace(call, call_path.ARCH, backward=True)
        try:
            trace(watched, call_path.ARCH, backward=True)
        finally:
            sys.setprofile(None)
    return way


def until_apply() -> Way:
    """What is between chunk_gated_delta_rule and Linear.apply, in a call like an earlier one, whose
    checks and choice are known."""
    way = Way()
    q, k, v = (torch.randn(1, 8, 2, 4) for _ in range(3))
    g, beta = -torch.rand(1, 8, 2), torch.rand(1, 8, 2, requires_grad=True)
    call_path.ops.chunk_gated_delta_rule(q, k, v, g, beta)
    way.watched = beta
    sys.setprofile(way)
    try:
        call_path.ops.chunk_gated_delta_rule(q, k, v, g, beta)
    finally:
        sys.setprofile(None)
    assert way.arrived, "the call has not come to Linear.apply"
    return way


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    check, found = parser.parse_args().check, {}
    for call in call_path.CALLS.values():
        for code in walk(call).codes:
            node = functions(Path(code.co_filename)).get(code.co_firstlineno)
            if node is not None:
                found[place_of(code)] = branches(node)
    for place, count in sorted(found.items(), key=lambda x: -x[1]):
        if count > 5 or not check:
            print(f"{count:4} {place}")
    way = until_apply()
    taking = sorted(map(place_of, way.stays))
    print(f"{len(taking):4} functions take beta before Linear.apply: {', '.join(taking)}")
    print(f"{len(way.climbs):4} calls before it go to a higher layer: {', '.join(way.climbs)}")
    over = [f"{x}: {n} branches, at most {MAX_BRANCHES}" for x, n in found.items()]
    over = [x for x, n in zip(over, found.values()) if n > MAX_BRANCHES]
    if len(taking) > MAX_STAYS:
        over.append(f"{len(taking)} functions take beta, at most {MAX_STAYS}")
    if len(way.climbs) > MAX_CLIMBS:
        over.append(f"{len(way.climbs)} calls go to a higher layer, at most {MAX_CLIMBS}")
    if check and over:
        sys.exit("\n".join(over))


if __name__ == "__main__":
    main()
