"""Hashes of every kernel's compiler input or PTX, to show that a change to the source is harmless.

    python tools/kernel_hashes.py write before.json
    ... rename, move, reformat ...
    python tools/kernel_hashes.py write after.json
    python tools/kernel_hashes.py compare before.json after.json

A hash is of text without names: kernels, functions and parameters may be renamed and moved. Equal
multisets of hashes mean equal machine code, so equal numbers and equal speed, without a GPU. A file
has a line for each as they are made; `compare` refuses one whose run did not end.

--level ir    Triton's IR as its front end makes it, with the compiler's options: every compilation
              that the catalog's rows trigger at their sample shapes, in about a minute. A rule by a
              size that no row has is not seen: "0 new" says nothing of it. No line numbers.
--level inlined
              the same once calls of device functions are inlined and what is computed twice is
              not: for kernels that are split into functions, or whose functions are taken apart.
--level call  which kernels are compiled for which arguments, with the text of their modules: enough
              where kernels stay as they are and only what launches them changes. Seconds.
--level ptx   the PTX of a covering set of those (`--variants`), as `tools/matrix.py` chooses it.

With operators named, rows of tools/layer_samples.py are left out: their flags are not
seen. A line of `compare` names all that had a lost or new hash, also an architecture that keeps it.
"""

import argparse
import ast
import hashlib
import importlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import own_checkout  # noqa: F401
from layer_samples import LAYER_SAMPLES
from variant_cover import cover, resolved

from slipstream.compiler.aot import Job, gpu_target, options_of, source_of
from slipstream.tools.backend_query import find_kernels
from slipstream.tools.catalog import FURTHER, REPRESENTATIVE, chosen

T = TypeVar("T")
U = TypeVar("U")
COMPLETE = "complete"  # the last line of a file
_SYMBOL = re.compile(r'@"[^"]*"|@[\w.$]+')
_CONSTANT = re.compile(r"^\s*(%\w+) = (arith\.constant .*)$", re.MULTILINE)
_LOCATION = re.compile(r"\s*loc\((?:[^()]|\([^()]*\))*\)|^#loc.*$", re.MULTILINE)


def without_names(text: str) -> str:
    """MLIR text with its symbols numbered in order of appearance and its locations removed."""
    numbers: dict[str, str] = {}

    def numbered(found: re.Match) -> str:
        return numbers.setdefault(found[0], f"@f{len(numbers)}")

    return _SYMBOL.sub(numbered, _LOCATION.sub("", text))


def with_constants(text: str) -> str:
    """MLIR text with constants where they are used, since their order may be any."""
    values = dict(_CONSTANT.findall(text))
    return re.sub(r"%\w+", lambda name: values.get(name[0], name[0]), _CONSTANT.sub("", text))


def ir_text(job: Job, inline: bool = False) -> str:
    """The input of the compiler: the front end's module, and the options that it is compiled
    with. inline: after its first pass, which inlines calls of device functions."""
    from triton._C.libtriton import ir, passes
    from triton.compiler.code_generator import CodeGenerator
    from triton.compiler.compiler import make_backend

    # else MLIR prints values under the names of the source's variables
    generator: Any = CodeGenerator
    generator._maybe_set_loc_to_name = lambda *args: None
    generator._name_loc_prefix = lambda *args: nullcontext()
    source, target = source_of(job), gpu_target(job.arch)
    backend: Any = make_backend(target)
    given = {"num_warps": job.warps, "num_stages": job.stages, **job.options}
    options = backend.parse_options(options_of(job) | source.parse_options())
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    codegen, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    module = source.make_ir(target, options, codegen, modules, context)
    if inline:
        manager = ir.pass_manager(context)
        for name in ("inliner", "canonicalizer", "cse"):
            getattr(passes.common, f"add_{name}")(manager)
        manager.run(module, "inline")
    text = without_names(str(module))
    return f"{with_constants(text) if inline else text}\n{sorted(given.items())}"


def ptx_text(job: Job) -> str:
    """PTX, or AMD's assembly, without comments, debug sections and the kernel's name."""
    text = job.compile().text.replace(job.name, "kernel")
    lines = (x.partition("//")[0].rstrip() for x in text.splitlines())
    return "\n".join(x for x in lines if x and not x.lstrip().startswith((".loc", ".file")))


def call_text(job: Job) -> str:
    """The compilation, and the code of the module that the kernel is in, without comments."""
    module = importlib.import_module(job.kernel.partition(":")[0])
    return f"{job.key}\n{ast.unparse(ast.parse(Path(str(module.__file__)).read_text()))}"


LEVELS = {
    "ir": ir_text,
    "inlined": partial(ir_text, inline=True),
    "call": call_text,
    "ptx": ptx_text,
}


def digest(task: tuple[Job, str]) -> tuple[str, str]:
    """A kernel's name and architecture, and its hash. What the compiler refuses has a hash too."""
    job, level = task
    try:
        text = LEVELS[level](job)
    except Exception as error:
        text = f"refused: {type(error).__name__}"
        print(f"{job.arch} {job.name}: {text}: {str(error)[:300]}", file=sys.stderr)
    return f"{job.arch} {job.name}", hashlib.sha256(text.encode()).hexdigest()[:16]


def counted(what: str, items: Sequence[T], found: Iterable[U]) -> Iterator[U]:
    """What is found for each of the items, with how many there are on stderr as they come."""
    end = "\r" if sys.stderr.isatty() else "\n"
    step = 1 if end == "\r" else max(1, len(items) // 20)
    for n, x in enumerate(found, 1):
        if n % step == 0 or n == len(items):
            line = f"{what}: {n} of {len(items)}"
            print(line, end="\n" if n == len(items) else end, file=sys.stderr, flush=True)
        yield x


def write(args: argparse.Namespace) -> None:
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    shapes = (*REPRESENTATIVE, *FURTHER)[: args.shapes]
    # as `tools/matrix.py`: parts of layers besides, which are no operators
    samples = [*chosen(args.operators), *([] if args.operators else LAYER_SAMPLES)]
    tasks: list[tuple[Job, str]] = []
    for arch in args.arch.split(","):
        found = find_kernels(counted(f"{arch}, operators traced", samples, samples), shapes, arch)
        for failure in found.failures:
            print(failure, file=sys.stderr)
        variants = resolved(args.variants, arch) if args.level == "ptx" else "all"
        tasks += [(job, args.level) for job, _ in cover(found.tasks, variants)]
    names = set()
    with ProcessPoolExecutor(args.jobs) as pool, args.file.open("w") as file:
        for row in counted("hashes", tasks, pool.map(digest, tasks, chunksize=8)):
            names.add(row[0])
            print(json.dumps(row), file=file, flush=True)
        print(json.dumps(COMPLETE), file=file)
    print(f"{len(tasks)} hashes of {len(names)} kernels -> {args.file}")


def rows_of(file: Path) -> list[tuple[str, str]]:
    rows = [json.loads(x) for x in file.read_text().splitlines()]
    if COMPLETE not in rows[-1:]:
        sys.exit(f"{file}: is not complete ({len(rows)} hashes): its run was ended")
    return rows[:-1]


def compare(args: argparse.Namespace) -> None:
    before, after = rows_of(args.file), rows_of(args.other)
    lost = Counter(x for _, x in before) - Counter(x for _, x in after)
    new = Counter(x for _, x in after) - Counter(x for _, x in before)
    for sign, rows, differing in (("-", before, lost), ("+", after, new)):
        names = Counter(name for name, x in rows if x in differing)
        for name, count in sorted(names.items()):
            print(f"{sign} {name}: {count}")
    print(f"{len(before)} before, {len(after)} after, {lost.total()} lost, {new.total()} new")
    if lost or new:
        sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("write", help="hash the kernels of this tree")
    one.add_argument("file", type=Path)
    one.add_argument("operators", nargs="*", help="such as chunk_kda; all of them if none")
    one.add_argument("--level", choices=tuple(LEVELS), default="ir")
    one.add_argument("--arch", default="sm_90", help="architectures, separated by commas")
    one.add_argument("--variants", default="auto", help="of --level ptx: auto, few, flags or all")
    one.add_argument("--shapes", type=int, default=7, help="sample shapes, of 12")
    one.add_argument("--jobs", type=int, default=2, help="processes")
    one.set_defaults(run=write)
    two = commands.add_parser("compare", help="exit status 1 if two files differ")
    two.add_argument("file", type=Path)
    two.add_argument("other", type=Path)
    two.set_defaults(run=compare)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
