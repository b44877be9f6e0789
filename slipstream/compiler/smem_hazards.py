"""Data that shared memory loses, by Triton's GPU IR: tiles, and what is kept where barriers were.

A loop that Triton pipelines copies the tile of a later turn while products (wgmma) of this turn and
of earlier ones go on. Then the tile has to have a slot more. Triton does not always give it one:
where a product and registers read the same load (triton-lang/triton#6691), in some releases where
two products do (#8554). Results are wrong then now and then, by little, and differ from run to run.

A GPU keeps what it knows of a barrier (mbarrier) until that is invalidated, and when it turns to
another process it writes that where the barrier was. Whatever has that memory by then is lost: up
to 15% of a kernel's calls beside 15 processes, none alone (delta_solve on an H200). Triton gives
a barrier's memory away after its last use. What warp_specialize takes is used until that ends, and
no kernel here allocates anything after it; any other barrier has to be invalidated. Each is
counted, but not where: that nobody waits at it later the tests that emulate the kernels see.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

_LINE = re.compile(r'^\s*(?:(%[\w.-]+)(?::\d+)? = )?"?([a-z_]+\.[\w.]+)"?(.*)')
_NAME = re.compile(r"%[\w.-]+(?:#\d+)?")
_STAGES = re.compile(r"memdesc<(\d+)x\d+x\d+")
_PENDING = re.compile(r"pendings = (\d+)")
_VIEWS = ("ttg.memdesc_", "ttng.warp_group_dot_wait")
_COPIES = ("ttg.async_copy_global_to_local", "ttng.async_tma_copy_global_to_local")
_DOT = "ttng.warp_group_dot"


class _Op(NamedTuple):
    name: str  # with its line: loops one after the other may use the same
    kind: str
    text: str  # without its location
    operands: list[str]
    loop: int  # which loop, by the line that begins it; -1: none


def find_hazard(text: str) -> list[str]:
    """The writes that may be lost, in words. text: Triton's GPU IR of a kernel."""
    ops = list(_ops(text))
    by_name = {x.name: x for x in ops if x.name}
    return [*_races(ops, by_name), *_barriers(ops, by_name)]


def _barriers(ops: list[_Op], by_name: dict[str, _Op]) -> Iterator[str]:
    """Those that are neither invalidated nor taken by warp_specialize."""
    begun: dict[str | None, list[str]] = {}
    ended, owned = Counter[str | None](), set[str | None]()
    for op in ops:
        tiles = [_tile(by_name, x) for x in op.operands]
        if op.kind == "ttng.init_barrier":
            begun.setdefault(tiles[0], []).append(op.operands[0])
        elif op.kind == "ttng.inval_barrier":
            ended[tiles[0]] += 1
        elif op.kind == "ttg.warp_specialize":
            owned.update(tiles)
    for tile, names in begun.items():
        if tile is None or (tile not in owned and ended[tile] < len(names)):
            name = _short(names[0])
            yield f"the memory of barrier {name}, which is not invalidated, is given away"


def _races(ops: list[_Op], by_name: dict[str, _Op]) -> Iterator[str]:
    """Tiles that loops overwrite.

    In turn i a loop copies the tile of turn i + d, where d copies come before the loop, to slot
    (i + d) mod n of n. A product of turn i - j that has not been waited for reads slot (i - j) mod
    n: it loses its tile where n divides d + j.
    """
    for loop in sorted({x.loop for x in ops if x.kind == _DOT and x.loop >= 0}):
        yield from _of_loop(ops, by_name, loop)


def _of_loop(ops: list[_Op], by_name: dict[str, _Op], loop: int) -> Iterator[str]:
    body = [x for x in ops if x.loop == loop]
    in_flight: list[tuple[int, _Op]] = []  # products that have not been waited for, and their turns
    iterations = 4
    for iteration in range(iterations):
        for op in body:
            if op.kind == _DOT:
                in_flight = [*in_flight, (iteration, op)] if "isAsync = true" in op.text else []
            elif op.kind == f"{_DOT}_wait":
                match = _PENDING.search(op.text)
                pending = int(match[1]) if match else 0
                in_flight = in_flight[-pending:] if pending else []
            elif (tile := _written(op, by_name)) is not None and iteration == iterations - 1:
                early = sum(
                    x.loop != loop and _written(x, by_name) == tile
                    for x in ops
                    if x.kind in _COPIES
                )
                stages = _num_stages(by_name[tile])
                for when, dot in in_flight:
                    reads = {_tile(by_name, x) for x in dot.operands[:2]}
                    if tile in reads and (early + iteration - when) % stages == 0:
                        tile_of = f"{_short(tile)}, of {stages} stages,"
                        yield f"a loop overwrites {tile_of} while {_short(dot.name)} reads it"


def _short(name: str) -> str:
    return name.partition("@")[0]


def _written(op: _Op, by_name: dict[str, _Op]) -> str | None:
    """The tile that a copy goes to, if it is one."""
    if op.kind not in _COPIES:
        return None
    tiles = [y for x in op.operands if (y := _tile(by_name, x)) is not None]
    return next((x for x in tiles if "xi64" not in by_name[x].text), None)  # barriers


def _tile(by_name: dict[str, _Op], name: str) -> str | None:
    """The allocation that a value is a view of."""
    base, _, number = name.partition("#")
    op = by_name.get(base)
    if op is None:
        return None
    if op.kind == "ttg.local_alloc":
        return base
    if op.kind.startswith(_VIEWS) and op.operands:
        return _tile(by_name, op.operands[int(number or 0)])
    return None


def _num_stages(op: _Op) -> int:
    match = _STAGES.search(op.text)
    return int(match[1]) if match else 1


def _named(name: str, last: dict[str, str]) -> str:
    base, separator, number = name.partition("#")
    return last.get(base, base) + separator + number


def _ops(text: str) -> Iterator[_Op]:
    loops: list[tuple[int, int]] = []  # the line that begins it, and the braces open before it
    opened, last = 0, dict[str, str]()
    for number, line in enumerate(text.splitlines()):
        line = line.partition(" loc(")[0]
        match = _LINE.match(line)
        if match is not None:
            name, kind, arguments = match.groups()
            operands = [_named(x, last) for x in _NAME.findall(arguments.partition(" : ")[0])]
            if name:
                last[name] = f"{name}@{number}"
            yield _Op(last.get(name or "", ""), kind, line, operands, loops[-1][0] if loops else -1)
            if kind in ("scf.for", "scf.while"):
                loops.append((number, opened))
        opened += line.count("{") - line.count("}")
        while loops and number > loops[-1][0] and opened <= loops[-1][1]:
            loops.pop()
