"""The text of explain for an operator: the device's facts once, then each way to call it."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slipstream.compiler import aot, compiler_state, known_bugs, toolchain
from slipstream.compiler.arch import named
from slipstream.tools import backend_query, terminal
from slipstream.tools.catalog import Sample, Shape
from slipstream.tools.precompile_cache import DTYPES

# Compile-time arguments that make a tile; the rest are flags.
_TILE = ("C", "BT", "BC", "BX", "BD", "BR", "BK", "BV", "BM", "BN", "BLOCK")
_HEADINGS = ("kernel", "launches", "tile", "warps", "stages", "file")
_LEGEND = (
    "tile: what one program of a kernel works on at a time; C, BT: tokens of a chunk, B and other",
    "letters: rows or columns of that dimension. warps: of 32 threads each (64 on AMD). stages:",
    "loads in flight ahead of their use. file: in slipstream/kernels. In the order of their first",
    "launch, forward and backward. of any size: all that calls of other numbers of tokens, rows",
    "and sequences compile.",
)
_FLAGS = ("flags: options compiled into the kernel that are on; its source says what each does.",)


def parse_shape(text: str, dtype: str, flags: Mapping[str, bool]) -> Shape:
    """Raises ValueError for a letter or a dtype that is none."""
    if dtype not in DTYPES:
        raise ValueError(f"--dtype: want one of {', '.join(DTYPES)}, got {dtype!r}")
    sizes: dict[str, Any] = dict(flags)
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in ("B", "T", "H", "K", "V") or not value.isdecimal():
            raise ValueError(
                f"--shape: want B=2,T=4096,H=8,K=128,V=128 or some of it, got {part!r}"
            )
        sizes[name] = int(value)
    return Shape(dtype=DTYPES[dtype], **sizes)


def lines(samples: Sequence[Sample], shape: Shape, arch: str, flags: bool = False) -> Iterator[str]:
    """The lines of explain. A way to call an operator that has the kernels of an earlier one refers
    to it.

    Args:
        flags: name the compile-time options of each kernel too.
    """
    row = None if arch == "cpu" else named(arch)
    yield f"{', '.join(dict.fromkeys(x.op for x in samples))}  {shape}  {arch}"
    if row is None:
        yield "  chosen: eager, plain torch; kernels run on GPUs"
        return
    toolchain.select_ptxas((arch,))
    yield f"  {arch}: {row.shared} bytes of shared memory, {row.instruction or 'no tensor cores'}"
    yield from _compilers(arch)
    said: dict[tuple[str, ...], str] = {}
    for sample in samples:
        way = tuple(_way(backend_query.trace_operator(sample, shape, arch, remembers=True), flags))
        yield ""
        if way in said:
            yield f"{_called(sample)}: as {said[way]}"
            continue
        said[way] = _called(sample)
        yield said[way]
        yield from way
        yield from _variants(sample, shape, arch)
    if any("_kernel " in line for way in said for line in way):
        yield ""
        yield from _LEGEND
        yield from _FLAGS if flags else ()


def _variants(sample: Sample, shape: Shape, arch: str) -> Iterator[str]:
    """The closed list: what is compiled at most, with gradients, for calls of any sizes."""
    got = backend_query.trace_operator(sample, shape, arch, impls=(None,), any_size=True)
    found = Counter(job.name for job in got.all)
    if found:
        of_kernels = ", ".join(f"{count} {name}" for name, count in found.items())
        yield f"  of any size: {found.total()} variants, {of_kernels}"


def _called(sample: Sample) -> str:
    """The operator and what tells this way to call it from others."""
    return f"{sample.op} ({sample.variant})" if sample.variant else sample.op


def _way(got: backend_query.TracedKernels, flags: bool) -> Iterator[str]:
    default = got.jobs.get(None)
    plans = (got.plan, *got.besides) if got.plan else ()
    several = len({x.family for x in plans}) > 1
    if None in got.refused:
        yield f"  refused: {got.refused[None]}"
    elif not plans:
        yield f"  chosen: {'triton, the only one with kernels' if default else 'plain torch'}"
    said: set[str] = set()
    for plan in plans:
        word = "besides" if plan.family in said else "chosen"
        part = f" for {plan.family}" if several else ""
        yield f"  {word}{part}: {plan.impl}, {plan.why}"
        yield from (f"    rejected: {name}, {reason}" for name, reason in plan.rejected)
        said.add(plan.family)
    rejected = {name for plan in plans for name, _ in plan.rejected}
    yield from _kernels(default or (), flags)
    for impl in backend_query.IMPLS:
        reason = got.refused.get(impl, "impl: want").removeprefix(f"impl={impl!r}: ")
        if impl in got.jobs and got.jobs[impl] != default:
            yield f"  with impl={impl!r} instead:"
            yield from _kernels(got.jobs[impl], flags)
        elif not reason.startswith("impl: want") and impl not in rejected:
            yield f"  with impl={impl!r}: not possible, {reason}"


def _kernels(jobs: Sequence[aot.Job], flags: bool) -> Iterator[str]:
    """A table with a line for each; those that differ in nothing that is shown are counted."""
    found: dict[tuple[str, ...], int] = {}
    for job in jobs:
        tile = " ".join(f"{x}={job.constants[x]}" for x in _TILE if x in job.constants)
        row = (job.name, tile, str(job.warps), str(job.stages), _file(job))
        if flags:
            row += (" ".join(k for k, v in job.constants.items() if v is True),)
        found[row] = found.get(row, 0) + 1
    rows = [(name, str(count), *rest) for (name, *rest), count in found.items()]
    headings = (*_HEADINGS, "flags") if flags else _HEADINGS
    yield from terminal.columns([headings, *rows], "    ") if rows else ()


def _file(job: aot.Job) -> str:
    """Where a kernel is, below slipstream/kernels, or below slipstream for those of runtime."""
    module = job.kernel.partition(":")[0].removeprefix("slipstream.").removeprefix("kernels.")
    return f"{module.replace('.', '/')}.py"


def _compilers(arch: str) -> Iterator[str]:
    triton = toolchain.triton_version()
    if triton is None:
        return
    path = toolchain.ptxas_path(arch)
    ptxas = (path and toolchain.ptxas_version(path)) or ""
    how = compiler_state.CompilerState(arch, triton, ptxas, passive=True, remembers=False).trust
    whose = f" ({toolchain.selected(arch)})" if ptxas else ""
    yield f"  Triton {triton}, ptxas {ptxas or 'none'}{whose}: {how}"
    for fault in known_bugs.applying(arch, triton, ptxas or None):
        what = "avoided by how kernels are written" if fault.avoided else fault.way_out
        yield f"    known fault {fault.name} ({fault.effect}): {fault.pattern}; {what}"
