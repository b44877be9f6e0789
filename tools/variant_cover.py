"""A few of many variants of a kernel that between them have every value of every flag.

A variant is a set of features: (parameter, value) for what it is compiled for (compile-time
arguments, warps, stages, options; the first tensor's type, and of the others whether they are
there, and their type if it is another) and the operators that want it. Of a kernel the fewest
variants are taken that have every feature that any of them has ("flags"), or every two features
that occur together, too ("pairs"), or only every operator and every type of a tensor ("few").
"""

import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import combinations

import own_checkout  # noqa: F401

from slipstream.compiler.aot import Job
from slipstream.compiler.arch import ARCHS
from slipstream.compiler.support_matrix import Task

VARIANTS = ("auto", "few", "flags", "pairs", "all")
# Of the search for fewer of a kernel's variants than the greedy choice, for each number of them.
_STEPS = 3000


def resolved(variants: str, arch: str) -> str:
    """The variants to compile for an architecture. "auto" is "flags" for the first architecture
    with its matrix instruction, "few" for those that share it.

    Raises:
        ValueError: `variants` is none of VARIANTS.
    """
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
    """The fewest, in an order that runs repeat."""
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
    return [tasks[i] for i in (*taken, *smallest_cover([x & left for x in wanted]))]


def smallest_cover(sets: list[set[Hashable]]) -> list[int]:
    """Indices of those that together have everything: what adds most each time, or, if a search
    finds them, fewer."""
    everything = set[Hashable]().union(*sets)
    holders = {x: [i for i, s in enumerate(sets) if x in s] for x in everything}
    rarest = sorted(everything, key=lambda x: (len(holders[x]), repr(x)))
    bits = [sum(1 << n for n, x in enumerate(rarest) if x in s) for s in sets]
    chosen: list[int] = []
    left = (1 << len(rarest)) - 1
    while left:
        chosen.append(max(range(len(sets)), key=lambda i: (bits[i] & left).bit_count()))
        left &= ~bits[chosen[-1]]
    by_rarity = [holders[x] for x in rarest]
    for most in range(1, len(chosen)):
        steps = iter(range(_STEPS))
        found = _within(most, (1 << len(rarest)) - 1, bits, by_rarity, steps)
        if found is not None:
            return found
    return chosen


def _within(
    most: int, left: int, bits: list[int], holders: list[list[int]], steps: Iterator[int]
) -> list[int] | None:
    """At most so many that have all of `left`, of which the rarest is the lowest bit."""
    if not left:
        return []
    if most == 0 or next(steps, None) is None:
        return None
    for i in holders[(left & -left).bit_length() - 1]:
        rest = _within(most - 1, left & ~bits[i], bits, holders, steps)
        if rest is not None:
            return [i, *rest]
    return None


def _features(job: Job, few: bool) -> set[Hashable]:
    if few:
        return {kind.partition("[")[0] for kind in job.tensors.values()}
    parts = (job.constants, job.scalars, job.options)
    found: set[Hashable] = {(name, str(value)) for part in parts for name, value in part.items()}
    found |= {("num_warps", job.warps), ("num_stages", job.stages)}
    return found | _types(job)


def _types(job: Job) -> set[Hashable]:
    """The first tensor's, and of every tensor whether it is of that or which other."""
    kinds = iter(job.tensors.values())
    first = next((x[0] for kind in kinds if (x := re.findall(r"[a-z]+\d+\w*", kind))), "none")
    same = re.compile(rf"\b{first}\b")
    return {("dtype", first), *((name, same.sub("", kind)) for name, kind in job.tensors.items())}
