"""What explain prints about one operator."""

from collections.abc import Iterator, Mapping
from typing import Any

from slipstream.compiler import toolchain
from slipstream.compiler.aot import Job
from slipstream.compiler.arch import named
from slipstream.compiler.compiler_state import CompilerState
from slipstream.compiler.known_bugs import applying
from slipstream.tools.backend_query import IMPLS, trace_operator
from slipstream.tools.catalog import Sample, Shape
from slipstream.tools.precompile_cache import DTYPES

# Compile-time arguments that make a tile; the rest are flags.
_TILE = ("C", "BT", "BC", "BX", "BD", "BK", "BV", "BM", "BN", "BLOCK")


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


def lines(sample: Sample, shape: Shape, arch: str) -> Iterator[str]:
    yield f"{sample.op}  {shape}  {arch}"
    if arch == "cpu":
        yield "  eager: plain torch; kernels run on GPUs"
        return
    row = named(arch)
    toolchain.select_ptxas((arch,))
    got = trace_operator(sample, shape, arch, remembers=True)
    default = got.jobs.get(None)
    chosen = got.plan.impl if got.plan else "GPU kernels" if default else "plain torch"
    if None in got.refused:
        yield f"  refused: {got.refused[None]}"
    else:
        yield f"  chosen: {chosen}" + (f", {got.plan.why}" if got.plan else "")
    yield from (f"    {_describe(job)}" for job in default or ())
    rejected = dict(got.plan.rejected) if got.plan else {}
    for name, reason in rejected.items():
        yield f"  rejected: {name}, {reason}"
    for plan in got.besides:
        yield f"  besides: {plan.impl}, {plan.why}"
        yield from (f"    rejected: {name}, {reason}" for name, reason in plan.rejected)
    for impl in IMPLS:
        reason = got.refused.get(impl, "impl: want").removeprefix(f"impl={impl!r}: ")
        if impl in got.jobs and got.jobs[impl] != default:
            yield f"  by name (impl={impl!r}):"
            yield from (f"    {_describe(job)}" for job in got.jobs[impl])
        elif not reason.startswith("impl: want") and impl not in rejected:
            yield f"  by name (impl={impl!r}): no, {reason}"
    yield from _compilers(arch)
    yield f"  {arch}: {row.shared} bytes of shared memory, {row.instruction or 'no tensor cores'}"


def _describe(job: Job) -> str:
    tile = " ".join(f"{x}={job.constants[x]}" for x in _TILE if x in job.constants)
    flags = [k for k, v in job.constants.items() if v is True]
    return f"{job.name} [{tile} warps={job.warps} stages={job.stages}] {' '.join(flags)}".rstrip()


def _compilers(arch: str) -> Iterator[str]:
    triton = toolchain.triton_version()
    if triton is None:
        return
    path = toolchain.ptxas_path(arch)
    ptxas = (path and toolchain.ptxas_version(path)) or ""
    how = CompilerState(arch, triton, ptxas, passive=True, remembers=False).trust
    whose = f" ({toolchain.selected()})" if ptxas else ""
    yield f"  Triton {triton}, ptxas {ptxas or 'none'}{whose}: {how}"
    for fault in applying(arch, triton, ptxas or None):
        what = "avoided by how kernels are written" if fault.avoided else fault.way_out
        yield f"    known fault {fault.name} ({fault.effect}): {fault.pattern}; {what}"
