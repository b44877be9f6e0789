"""A few of many variants of a kernel that between them have every value of every flag.

A variant is a set of features: (parameter, value) for what it is compiled for (compile-time
arguments, types, warps, stages, options) and the operators that want it. Variants of a kernel are
taken until every feature that any of them has is there ("flags"), or every two features that
occur together, too ("pairs"), or only every operator and every type of a tensor ("few").
"""

from collections.abc import Callable, Hashable, Iterable
from itertools import combinations

from slipstream.core.aot import Job
from slipstream.core.arch import ARCHS
from slipstream.core.matrix import Task

VARIANTS = ("auto", "few", "flags", "pairs", "all")


def resolved(variants: str, arch: str) -> str:
    """What "auto" is for an architecture: flags for the first with its matrix instruction, few for
    those that share it. Raises ValueError if `variants` is none of VARIANTS."""
    if variants not in VARIANTS:
        raise ValueError(f"--variants: want one of {', '.join(VARIANTS)}, got {variants!r}")
    if variants != "auto":
        return variants
    like = [x.name for x in ARCHS.values() if x.instruction == ARCHS[arch].instruction]
    return "flags" if like[0] == arch else "few"


def cover(
    tasks: Iterable[Task], variants: str, known: Callable[[Job], bool] = lambda job: False
) -> list[Task]:
    """The tasks to compile for one architecture; `variants` are not "auto".

    Args:
        known: those whose rows are there already: all of them are taken, and are part of the cover.
    """
    tasks = list(tasks)
    if variants == "all":
        return tasks
    of_kernel: dict[str, list[Task]] = {}
    for task in tasks:
        of_kernel.setdefault(task[0].kernel, []).append(task)
    return [x for group in of_kernel.values() for x in _of_kernel(group, variants, known)]


def _of_kernel(tasks: list[Task], variants: str, known: Callable[[Job], bool]) -> list[Task]:
    """The greedy choice, in an order that runs repeat: the most new features each time."""
    has = [_features(job, variants == "few") for job, _ in tasks]
    everywhere = set.intersection(*has)
    wanted: list[set[Hashable]] = []
    for features, (_, operators) in zip(has, tasks):
        own: set[Hashable] = {"compiles", *operators, *(features - everywhere)}
        if variants == "pairs":
            own.update(combinations(sorted(features - everywhere, key=repr), 2))
        wanted.append(own)
    taken = [i for i, (job, _) in enumerate(tasks) if known(job)]
    left = set[Hashable]().union(*wanted).difference(*(wanted[i] for i in taken))
    chosen = [tasks[i] for i in taken]
    while left:
        best = max(range(len(tasks)), key=lambda i: len(wanted[i] & left))
        chosen.append(tasks[best])
        left -= wanted[best]
    return chosen


def _features(job: Job, few: bool) -> set[Hashable]:
    if few:
        return {kind.partition("[")[0] for kind in job.tensors.values()}
    parts = (job.constants, job.tensors, job.scalars, job.options)
    found: set[Hashable] = {(name, str(value)) for part in parts for name, value in part.items()}
    return found | {("num_warps", job.warps), ("num_stages", job.stages)}
