"""The checks of doctor: the installation, and operators against float64 on fresh random inputs."""

import json
import math
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from slipstream import __version__
from slipstream.compiler import compiler_state, support_matrix, toolchain
from slipstream.compiler.compile_worker import child_python
from slipstream.compiler.known_bugs import INTERPRETER, applying, blocking
from slipstream.runtime import backends, dispatch, guarded_launch, kernel_pair
from slipstream.tools.backend_query import IMPLS, find_kernels, recording_selections
from slipstream.tools.catalog import SAMPLES, Sample, Shape, chosen, flat
from slipstream.tools.precompile_cache import stale


@dataclass(frozen=True)
class Check:
    """output, gradient: the largest relative errors; gradients: how many were compared; worst: the
    tensor with the largest error against its bar."""

    operator: str
    impl: str
    shape: str
    ok: bool
    output: float = 0.0
    gradient: float = 0.0
    gradients: int = 0
    bars: tuple[float, float] = (0.0, 0.0)
    worst: str = ""
    error: str = ""


_ERRORS = ("output", "gradient")


def as_json(check: Check) -> dict[str, Any]:
    """A check as JSON, with null for infinity."""
    row = dict(check.__dict__)
    return row | {k: row[k] if math.isfinite(row[k]) else None for k in _ERRORS}


def from_json(row: Mapping[str, Any]) -> Check:
    errors = {k: math.inf if row[k] is None else row[k] for k in _ERRORS}
    return Check(**{**row, **errors, "bars": tuple(row["bars"])})


def about() -> dict[str, Any]:
    """Versions, device, compilers, faults that apply, places."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else None
    here = guarded_launch.compiler_state(device) if device is not None else None
    triton = toolchain.triton_version()
    return {
        "slipstream": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton,
        "cuda": torch.version.cuda,
        "device": None if device is None else _device(device),
        "ptxas": None if here is None else _ptxas(here),
        "verified": None if here is None else not here.unverified,
        "trust": None if here is None else here.trust,
        "faults": [x.__dict__ for x in _faults(here, triton)],
        "remembered": {} if here is None else here.remembered,
        "places": _places(),
        "precompiled": None if here is None else stale(Path(_places()["triton cache"]), here.arch),
    }


def _device(device: torch.device) -> dict[str, Any]:
    free, total = torch.cuda.mem_get_info(device)
    return {
        "name": torch.cuda.get_device_name(device),
        "arch": compiler_state.arch_of_device(device).name,
        "driver": _driver(),
        "memory": {"free": free, "total": total},
    }


def _driver() -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    out = subprocess.run(query, capture_output=True, text=True).stdout.split()
    return out[0] if out else None


def _ptxas(here: compiler_state.CompilerState) -> dict[str, Any]:
    path = toolchain.ptxas_path(here.arch)
    return {"path": path, "version": here.ptxas, "whose": toolchain.selected(here.arch)}


def _faults(here: compiler_state.CompilerState | None, triton: str | None) -> Sequence[Any]:
    if triton is None:
        return ()
    if here is None:
        return applying(INTERPRETER, triton)
    return applying(here.arch, triton, here.ptxas or None)


def _places() -> dict[str, str]:
    return {
        "triton cache": str(compiler_state.triton_cache()),
        "slipstream cache": str(compiler_state.cache_dir()),
    }


def examine(
    samples: Sequence[Sample],
    full: bool,
    shown: Callable[[Check], None] | None = None,
    thorough: bool = False,
    progress: Progress | None = None,
) -> Iterator[Check]:
    """Every operator whose results are not random, forward and backward, as it runs here.

    Args:
        shown: called with each check.
        thorough: on a GPU every implementation that takes a call, not only the one that is chosen.
        progress: gets a bar.
    """
    gpu = torch.cuda.is_available() and not backends.INTERPRETED
    device = torch.device("cuda" if gpu else "cpu")
    impls: list[str | None] = ["triton"] if backends.INTERPRETED else ["eager"]
    shapes, progress = _shapes(gpu, full), progress or Progress(disable=True)
    checks = sum(not x.random for x in samples) * len(shapes)
    task = progress.add_task("operators checked", total=checks)
    if gpu:
        impls = ["eager", *IMPLS] if thorough else [None]
        first = progress.add_task("compiling their kernels on every core", total=None)
        _compile_first(samples, full, compiler_state.arch_of_device(device).name, thorough)
        progress.remove_task(first)
    threads = torch.get_num_threads()
    if not gpu:  # with inputs so small, threads only wait for one another
        torch.set_num_threads(1)
    try:
        for sample in samples:
            for shape in () if sample.random else shapes:
                for check in examine_one(sample, shape, device, impls):
                    if shown is not None:
                        shown(check)
                    yield check
                progress.advance(task)
    finally:
        torch.set_num_threads(threads)


def _compile_first(samples: Sequence[Sample], full: bool, arch: str, thorough: bool) -> None:
    """Their kernels into Triton's cache with every core there is; a child that sees no GPU does,
    and if it dies the calls compile for themselves."""
    names = [x.op for x in samples]
    code = "from slipstream.tools.doctor_checks import compile_all; "
    code += f"compile_all({names}, {full}, {arch!r}, {thorough})"
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(child_python(code), env=env, capture_output=True)


def compile_all(names: list[str], full: bool, arch: str, thorough: bool) -> None:
    samples = chosen(list(dict.fromkeys(names)))
    impls = (None, *IMPLS) if thorough else (None,)
    found = find_kernels(samples, _shapes(True, full), arch, impls=impls)
    support_matrix.run(found.tasks, processes=len(os.sched_getaffinity(0)))


def _shapes(gpu: bool, full: bool) -> list[Shape]:
    rich: dict[str, Any] = {"grouped": True, "packed": True, "state": True}
    if not gpu:
        small = Shape(T=24 if backends.INTERPRETED else 70, K=16, V=24, dtype=torch.float32, **rich)
        return [small]
    found = [Shape(T=80, K=64, V=64, **rich)]
    if full:
        found += [
            Shape(T=150, K=128, V=128),
            Shape(T=150, K=100, V=60, dtype=torch.float32, **rich),
            Shape(T=150, K=256, V=256, dtype=torch.float16, state=True),
            Shape(T=1, K=128, V=128, state=True),
        ]
    return found


def examine_one(
    sample: Sample, shape: Shape, device: torch.device, impls: Sequence[str | None]
) -> Iterator[Check]:
    """A comparison of each implementation that the operator has for this; None: what is chosen."""
    blank = Check(sample.name, "-", str(shape), ok=False, bars=kernel_pair.BARS[shape.dtype])
    try:
        args = sample.inputs(shape, device)
        fixed = sample.of_one_dtype
        wide = {k: _each(x, Tensor.cpu if k in fixed else _widened) for k, x in args.items()}
        want = _oracle(sample, wide, shape.dtype)
    except Exception as error:  # a checkup reports, whatever it meets
        yield replace(blank, impl="reference", error=f"{type(error).__name__}: {error}"[:200])
        return
    for impl in impls if "impl" in sample.takes else [None]:
        plans: list[dispatch.Selection] = []
        with recording_selections(plans) if impl is None else nullcontext():
            check = _compared(blank, sample, args, impl, want)
        if check is not None:
            yield replace(check, impl=impl or (plans[0].impl if plans else "-"))


def _oracle(sample: Sample, args: Mapping[str, Any], dtype: torch.dtype) -> "_Result":
    try:
        return _run(sample, args, "reference", dtype)
    except ValueError as error:
        if not str(error).startswith("impl: want"):
            raise
    return _run(sample, args, "eager", dtype)  # plain torch in float64 is all it has


def _compared(
    check: Check, sample: Sample, args: Mapping[str, Any], impl: str | None, want: "_Result"
) -> Check | None:
    try:
        got = _run(sample, args, impl, want.given)
    except NotImplementedError:
        return None
    except ValueError as error:
        if str(error).startswith("impl: want"):
            return None  # it has no implementation of that name
        return replace(check, error=str(error))
    except Exception as error:  # a checkup reports, whatever it meets
        return replace(check, error=f"{type(error).__name__}: {str(error)[:200]}")
    return _judged(check, got, want)


@dataclass(frozen=True)
class _Result:
    """given: gradients of the outputs, by their place. grads: by the name of the argument."""

    outputs: list[Tensor]
    given: dict[int, Tensor]
    grads: dict[str, Tensor]


def _run(
    sample: Sample,
    args: Mapping[str, Any],
    impl: str | None,
    given: dict[int, Tensor] | torch.dtype,
) -> _Result:
    """Outputs and gradients; those of the outputs are `given`, or random ones of that dtype."""
    args = {name: _each(x, _leaf) for name, x in args.items()}
    leaves = {
        f"{name}{i or ''}": x
        for name, value in args.items()
        for i, x in enumerate(flat(value))
        if x.requires_grad
    }
    outputs = sample.call(args, impl)
    wanted = {i: x for i, x in enumerate(outputs) if x.requires_grad}
    if isinstance(given, torch.dtype):
        given = {i: torch.randn_like(x).to(given).to(x.dtype) for i, x in wanted.items()}
    wanted = {i: x for i, x in wanted.items() if i in given}
    outs, douts = list(wanted.values()), [given[i].to(x) for i, x in wanted.items()]
    ins = list(leaves.values())
    grads = torch.autograd.grad(outs, ins, douts, allow_unused=True) if outs else ()
    found = {name: x for name, x in zip(leaves, grads) if x is not None}
    return _Result([x.detach() for x in outputs], given, found)


def _each(x: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return tuple(change(y) for y in x) if isinstance(x, tuple) else change(x)


def _widened(x: Tensor) -> Tensor:
    return x.cpu().double() if x.is_floating_point() else x.cpu()


def _leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_() if x.is_floating_point() else x


def _judged(check: Check, got: _Result, want: _Result) -> Check:
    if len(got.outputs) != len(want.outputs):
        counts = f"{len(got.outputs)} outputs instead of {len(want.outputs)}"
        return replace(check, ok=False, error=counts)
    pairs = enumerate(zip(got.outputs, want.outputs))
    outputs = {f"output {i}": _error(x, y) for i, (x, y) in pairs}
    shared = [k for k in want.grads if k in got.grads]
    grads = {f"grad of {k}": _error(got.grads[k], want.grads[k]) for k in shared}
    missing = set(want.grads) - set(got.grads)
    parts = zip((outputs, grads), check.bars)
    shares = {name: error / bar for part, bar in parts for name, error in part.items()}
    worst = max(shares, key=lambda k: shares[k])
    return replace(
        check,
        ok=shares[worst] <= 1 and not missing,
        output=max(outputs.values(), default=0.0),
        gradient=max(grads.values(), default=0.0),
        gradients=len(grads),
        worst=worst,
        error=f"no gradient of {', '.join(sorted(missing))}" if missing else "",
    )


def _error(got: Tensor, want: Tensor) -> float:
    """Relative, root mean square; infinite where one of them is not finite."""
    got, want = got.detach().cpu().double(), want.double()  # lists of blocks are integers
    if got.shape != want.shape or not bool((got - want).isfinite().all()):
        return float("inf")
    size = want.square().mean().sqrt().item() if want.numel() else 0.0
    error = (got - want).square().mean().sqrt().item() if want.numel() else 0.0
    return error / max(size, 1e-30) if error > 0 else 0.0


def interpreted(
    samples: Sequence[Sample],
    shown: Callable[[Check], None] | None = None,
    progress: Progress | None = None,
) -> Iterator[Check]:
    """The kernels in Triton's interpreter, in a child: it has to be chosen before the import.

    The child writes a line for each check as soon as it has it. None where the interpreter of this
    release of Triton cannot run them.
    """
    triton = toolchain.triton_version()
    if backends.INTERPRETED or triton is None or blocking(INTERPRETER, triton, None, ()):
        return
    numbers, progress = [SAMPLES.index(x) for x in samples], progress or Progress(disable=True)
    task = progress.add_task("operators in Triton's interpreter", total=len(samples))
    code = f"from slipstream.tools.doctor_checks import stream; stream({numbers})"
    # the interpreter's arrays are NumPy's, which has threads of its own
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            child_python(code), stdout=subprocess.PIPE, stderr=errors, text=True, env=env
        ) as child,
    ):
        assert child.stdout is not None
        lines = iter(child.stdout.readline, "")
        found = (replace(from_json(json.loads(x)), impl="interpreted") for x in lines)
        for check in found:
            if shown is not None:
                shown(check)
            yield check
            progress.advance(task)
        if child.wait() != 0:
            errors.seek(0)
            words = (errors.read().strip().splitlines() or [f"exit status {child.returncode}"])[-1]
            check = Check("interpreter", "triton", "", ok=False, error=words)
            if shown is not None:
                shown(check)
            yield check


def stream(numbers: Sequence[int]) -> None:
    """The work of the child process."""
    for check in examine([SAMPLES[i] for i in numbers], full=False):
        print(json.dumps(as_json(check), allow_nan=False), flush=True)


def show(about: Mapping[str, Any]) -> None:
    """Prints the report without its checks."""
    for key in ("slipstream", "python", "torch", "triton", "cuda"):
        print(f"{key:11} {about[key] or 'none'}", flush=True)
    device, ptxas = about["device"], about["ptxas"]
    if device is None:
        triton = about["triton"]
        runs = triton is not None and not blocking(INTERPRETER, triton, None, ())
        also = ", and the kernels in Triton's interpreter" if runs else ""
        print(f"device      none: plain torch{also}")
    else:
        free, total = (x / 2**30 for x in device["memory"].values())
        print(f"device      {device['name']}, {device['arch']}, driver {device['driver']}")
        print(f"memory      {free:.1f} of {total:.1f} GiB free")
    if ptxas is not None:
        print(f"ptxas       {ptxas['version']} ({ptxas['whose']}, {ptxas['path']})")
        how = "" if about["verified"] else ": the rest is compiled in a child process first"
        print(f"compilers   {about['trust']}{how}")
    for name, place in about["places"].items():
        print(f"{name:16} {place}")
    if about["precompiled"]:
        print(f"warning     {about['precompiled']}")
    for fault in about["faults"]:
        what = "avoided by how kernels are written" if fault["avoided"] else fault["way_out"]
        print(f"fault       {fault['name']} ({fault['effect']}): {fault['pattern']}; {what}")
    for kind, entries in about["remembered"].items():
        for key, reason in entries.items():
            print(f"{kind:11} {key}: {reason}")


def show_headings() -> None:
    """Prints the headings of show_check."""
    print("\nRelative errors against float64 (root mean square), and the most that is allowed:\n")
    print(f"     {'operator':35} {'back end':11} {'outputs':16} gradients")


def show_check(check: Check) -> None:
    verdict = "ok  " if check.ok else "FAIL"
    pairs = zip((check.output, check.gradient), check.bars)
    errors = [f"{error:.1e} of {bar:.0e}" for error, bar in pairs]
    if not check.gradients:
        errors[1] = "none"
    what = check.error or f"{errors[0]:16} {errors[1]}"
    what += "" if check.ok or check.error else f", worst: {check.worst}"
    print(f"{verdict} {check.operator:35} {check.impl:11} {what}", flush=True)
