"""An operator's implementations on an architecture, and their kernels."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch

from slipstream.compiler import aot, compiler_state, known_bugs, support_matrix
from slipstream.compiler.trace import PlainTorch, trace
from slipstream.runtime import backends, dispatch
from slipstream.tools.catalog import Sample, Shape

# Asked for by name: kernels that are not chosen by themselves are compiled, too.
IMPLS = ("triton", "sm90")

_FAILED = "not traced:"


@dataclass(frozen=True)
class TracedKernels:
    """jobs: by implementation, None for the one that is chosen. refused: why the others are not.

    plan: of the choice, where the operator has one to make. besides: others that it makes, such as
    for its gradients.
    """

    jobs: dict[str | None, list[aot.Job]]
    refused: dict[str | None, str]
    plan: dispatch.Selection | None
    besides: tuple[dispatch.Selection, ...] = ()

    @property
    def all(self) -> list[aot.Job]:
        return list({job.key: job for jobs in self.jobs.values() for job in jobs}.values())


def trace_operator(
    sample: Sample,
    shape: Shape,
    arch: str,
    backward: bool = True,
    remembers: bool = False,
    compilers: Mapping[str, str] | None = None,
    impls: Sequence[str | None] = (None, *IMPLS),
    any_size: bool = False,
) -> TracedKernels:
    """The kernels of one operator for one shape, on an architecture that need not be there.

    Args:
        remembers: what guarded compilation has learnt here counts.
        compilers: others than those that are here, as toolchain.versions names them.
        impls: implementations to trace; None, the one that is chosen, first.
        any_size: what such calls of any size compile.
    """
    jobs: dict[str | None, list[aot.Job]] = {}
    refused: dict[str | None, str] = {}
    plans: list[dispatch.Selection] = []
    for impl in impls if "impl" in sample.takes else (None,):
        if impl is not None and {x.impl for x in plans} == {impl}:
            continue  # what was chosen, by its name

        def call(device: torch.device, impl: str | None = impl) -> Any:
            return sample.call(sample.inputs(shape, device, blank=True), impl)

        try:
            with (
                recording_selections(plans) if impl is None else nullcontext(),
                _release(compilers),
                warnings.catch_warnings(),
            ):
                # what is not used there is told by what is traced instead
                warnings.simplefilter("ignore", compiler_state.KernelDisabledWarning)
                jobs[impl] = trace(call, arch, backward, remembers, compilers, any_size)
        except PlainTorch:
            jobs[impl] = []
        except (NotImplementedError, ValueError) as error:
            refused[impl] = str(error)
        except Exception as error:  # what cannot be traced must not hide the rest
            refused[impl] = f"{_FAILED} {type(error).__name__}: {error}"
    first, *others = dict.fromkeys(plans) or (None,)
    return TracedKernels(jobs, refused, first, tuple(others))


@contextmanager
def _release(compilers: Mapping[str, str] | None) -> Iterator[None]:
    """Makes plans for the Triton release of these compilers."""
    if compilers is None:
        yield
        return
    with mock.patch.object(backends, "RELEASE", known_bugs.version(compilers["triton"])[:2]):
        yield


@contextmanager
def recording_selections(plans: list[dispatch.Selection]) -> Iterator[None]:
    """Every plan that is made is added to `plans`."""
    plain = dispatch.Selection

    def record_selection(*args: Any) -> dispatch.Selection:
        plans.append(plain(*args))
        return plans[-1]

    with mock.patch.object(dispatch, "Selection", record_selection):
        yield


class KernelsFound(NamedTuple):
    """tasks: jobs with the operators that want them, each once. without: why an operator has none.

    failures: calls that raised what no call should, in words.
    """

    tasks: list[support_matrix.Task]
    without: dict[str, str]
    failures: list[str]


def find_kernels(
    samples: Iterable[Sample],
    shapes: Sequence[Shape],
    arch: str,
    backward: bool = True,
    compilers: Mapping[str, str] | None = None,
    impls: Sequence[str | None] = (None, *IMPLS),
    any_size: bool = False,
) -> KernelsFound:
    """The kernels of these operators for these shapes, under these compilers; any_size: and for
    calls like them of any size."""
    jobs: dict[str, aot.Job] = {}
    wanted: dict[str, list[str]] = {}
    found = KernelsFound([], {}, [])
    for sample in samples:
        reasons: dict[str | None, str] = {}
        printed: set[str] = set()
        for shape in shapes:
            got = trace_operator(sample, shape, arch, backward, False, compilers, impls, any_size)
            reasons |= got.refused
            for reason in {x for x in got.refused.values() if x.startswith(_FAILED)} - printed:
                printed.add(reason)
                found.failures.append(f"{sample.op} {shape} {arch}: {reason}")
            for job in got.all:
                jobs[job.key] = job
                if sample.op not in wanted.setdefault(job.key, []):
                    wanted[job.key].append(sample.op)
        if not any(sample.op in x for x in wanted.values()):
            reason = reasons.get("triton", "plain torch").removeprefix("impl='triton': ")
            why = _blocking_bug(arch, compilers) or reason.partition("; impl=None")[0]
            found.without[sample.op] = why
    found.tasks.extend((job, tuple(wanted[key])) for key, job in jobs.items())
    return found


def _blocking_bug(arch: str, compilers: Mapping[str, str] | None) -> str:
    """Why no kernel at all compiles there, if none does."""
    here = compiler_state.state_for(arch, compilers=compilers)
    fault = known_bugs.blocking(arch, here.triton, here.ptxas or None, ())
    return f"{fault.pattern}: {fault.name}; {fault.way_out}" if fault else ""
