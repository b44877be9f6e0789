"""Which triggers of compiler/known_bugs.py a kernel has, read from its Triton IR.

    patterns(kernel_ir(job), job.warps) ->  {"dot", "dot16", "transposed_dot", ...}

The IR is read as lines of `%x = op %a, %b ... : types`; where a value comes from is followed
backwards through everything but loads, and through loops by what they begin with and yield.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from slipstream.compiler import aot

_DOTS = ("tt.dot", "ttng.warp_group_dot", "tt.dot_scaled")
_LOADS = ("tt.load", "tt.descriptor_load", "ttg.local_load", "tt.addptr", "ttg.memdesc_index")
# what keeps the layout of its operands
_EACH = ("arith.", "math.", "scf.")
_LINE = re.compile(r'^\s*(?:(%[\w.#-]+)(?::\d+)? = )?"?([a-z_]+\.[\w.]+)"?')
_NAME = re.compile(r"%[\w.-]+(?:#\d+)?")
_OPERANDS = re.compile(
    r"<(?P<M>\d+)x(?P<K>\d+)x(?P<left>\w+)[^*]*\*[^<]*<\d+x(?P<N>\d+)x(?P<right>\w+)"
)


class Product(NamedTuple):
    M: int
    N: int
    K: int
    dtype: str
    gluon: bool


@dataclass(frozen=True)
class Op:
    """name: of what it does. operands: values it reads."""

    name: str
    text: str
    operands: tuple[str, ...]


def kernel_ir(job: aot.Job, gpu_too: bool = False) -> str:
    """Triton's IR after its first passes, Gluon's as it is written; or that for GPUs after it."""
    from triton._C.libtriton import ir
    from triton.compiler.compiler import make_backend

    source, gpu = aot.source_of(job), aot.gpu_target(job.arch)
    backend: Any = make_backend(gpu)
    options = backend.parse_options(aot.options_of(job) | source.parse_options())
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    module = source.make_ir(gpu, options, functions, backend.get_module_map(), context)
    about = {"target": gpu, **options.__dict__}
    for name in ("ttir", "ttgir") if gpu_too else ("ttir",):
        if name in stages:
            module = stages[name](module, about)
    return str(module)


def products(text: str) -> list[Product]:
    return [_product(x) for x in _ops(text).values() if x.name in _DOTS]


def _product(op: Op) -> Product:
    found = _OPERANDS.search(op.text)
    assert found, op.text
    M, N, K = (int(found[x]) for x in "MNK")
    return Product(M, N, K, found["left"], op.name.startswith("ttng"))


def patterns(text: str, warps: int) -> frozenset[str]:
    ops = _ops(text)
    dots = {name: _product(x) for name, x in ops.items() if x.name in _DOTS}
    found = {"dot"} if dots else set()
    for dot in dots.values():
        found |= {"dot16"} if dot.dtype in ("f16", "bf16") else set()
        found |= {"fp8_dot"} if dot.dtype.startswith("f8") else set()
    if "inputPrecision = tf32x3" in text:
        found.add("tf32x3")
    wgmma = [x for x in dots.values() if x.gluon or (x.M >= 64 and warps % 4 == 0)]
    if len(dots) > 1 and any(x.N in (16, 32) for x in wgmma):
        found.add("narrow_dot")
    if any(_transposed(ops, name) for name in dots):
        found.add("transposed_dot")
    chained = any(_from(ops, ops[x].operands[:2], _DOTS) for x in dots)
    if chained and any(min(x.M, x.N) >= 64 for x in wgmma) and warps % 4 == 0:
        found.add("chained_64_dots")
    return frozenset(found)


def _transposed(ops: dict[str, Op], dot: str) -> bool:
    """Whether the left operand is the transposed of what a product made, still in its layout."""
    near = [ops[x] for x in _sources(ops, ops[dot].operands[:1], _EACH)]
    turned = [y for x in near if x.name == "tt.trans" for y in x.operands]
    return any(ops[x].name in _DOTS for x in _sources(ops, turned, _EACH))


def _from(ops: dict[str, Op], names: Iterable[str], wanted: tuple[str, ...]) -> bool:
    return any(ops[x].name in wanted for x in _sources(ops, names))


def _sources(
    ops: dict[str, Op], names: Iterable[str], through: tuple[str, ...] = ("",)
) -> Iterator[str]:
    """Everything that values are computed from, up to loads and products.

    Args:
        through: how the names of operations begin beyond which it looks further.
    """
    waiting, seen = list(names), set()
    while waiting:
        name = waiting.pop()
        if name in seen or name not in ops:
            continue
        seen.add(name)
        yield name
        kind = ops[name].name
        if kind.startswith(through) and kind not in _LOADS and kind not in _DOTS:
            waiting += ops[name].operands


def _ops(text: str) -> dict[str, Op]:
    """By what they define; what defines nothing (stores) by a number."""
    ops: dict[str, Op] = {}
    blocks: list[tuple[str, str, list[str]]] = []  # kind, name, what it carries
    for number, line in enumerate(text.splitlines()):
        line = line.partition(" loc(")[0]
        if (found := _LINE.match(line)) is not None:
            name, kind = found[1] or f"%line.{number}", found[2]
            rest = line[found.end() :]
            if kind == "scf.yield":
                _, owner, carried = blocks[-1]
                values = _NAME.findall(rest.partition(" : ")[0])
                for i, value in enumerate(values):
                    part = [value, *_operands(ops, f"{owner}#{i}")]
                    ops[f"{owner}#{i}"] = Op("scf.result", line, tuple(part))
                    if i < len(carried):
                        part = [value, *_operands(ops, carried[i])]
                        ops[carried[i]] = Op("scf.carried", line, tuple(part))
                if len(values) == 1:
                    ops[owner] = ops[f"{owner}#0"]
                continue
            carried = _carried(ops, rest, name) if kind == "scf.for" else []
            if kind not in ("scf.for", "scf.if", "scf.while"):
                read = tuple(x for x in _NAME.findall(_plain(rest)))
                ops[name] = Op(kind, line, read)
            if line.rstrip().endswith("{"):
                blocks.append((kind, name, carried))
        elif line.strip().startswith("}") and blocks and not line.rstrip().endswith("{"):
            blocks.pop()
    return ops


def _plain(rest: str) -> str:
    """Without types, but with `%x#1`, a part of what a loop gives."""
    return rest.partition(" : ")[0]


def _carried(ops: dict[str, Op], rest: str, name: str) -> list[str]:
    """A loop's own names of what it carries; each begins as something outside."""
    found = re.search(r"iter_args\((.*?)\) ->", rest)
    pairs = re.findall(r"(%[\w.-]+) = (%[\w.#-]+)", found[1]) if found else []
    for i, (own, first) in enumerate(pairs):
        ops[own] = Op("scf.carried", rest, (first,))
        ops[f"{name}#{i}"] = Op("scf.result", rest, (first,))
    return [own for own, _ in pairs]


def _operands(ops: dict[str, Op], name: str) -> tuple[str, ...]:
    return ops[name].operands if name in ops else ()
