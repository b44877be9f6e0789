"""The work of precompile: the calls to prepare for, and Triton's cache with their kernels."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.markup import escape

from slipstream import __version__
from slipstream.compiler import compiler_state, support_matrix, toolchain
from slipstream.runtime.files import write_text
from slipstream.tools.backend_query import KernelsFound, find_kernels
from slipstream.tools.catalog import LONG_TOKENS, SAMPLES, Sample, Shape, family
from slipstream.tools.terminal import bar

MANIFEST = "slipstream.json"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _size(text: str) -> bool:
    return text.isdecimal() and int(text) > 0


def is_model(name: str) -> bool:
    """Whether an argument names a model's configuration and not an operator."""
    path = Path(name)
    if path.suffix in (".json", ".yaml", ".yml"):
        return True
    # a folder here may have an operator's name by chance
    return path.is_dir() and not any(name in (x.op, family(x.op)) for x in SAMPLES)


def batch(text: str) -> tuple[int, int]:
    """Rows and tokens of "8x4096".

    Raises:
        ValueError: it is something else.
    """
    rows, _, tokens = text.partition("x")
    if not (_size(rows) and _size(tokens)) or int(tokens) < 2:
        raise ValueError(f"--batch: want rows and tokens, as 8x4096, got {text!r}")
    return int(rows), int(tokens)


def dtypes(text: str) -> list[torch.dtype]:
    """The dtypes of a list such as "bf16,fp32".

    Raises:
        ValueError: one is unknown.
    """
    for name in text.split(","):
        if name not in DTYPES:
            raise ValueError(f"--dtype: want one of {', '.join(DTYPES)}, got {name!r}")
    return [DTYPES[name] for name in text.split(",")]


class Flags(NamedTuple):
    """True: only such calls. None: with and without."""

    packed: bool | None = None
    state: bool | None = None
    grouped: bool | None = None


def shapes(dtypes: Sequence[torch.dtype], widths: Sequence[str], flags: Flags) -> list[Shape]:
    """Every combination, each for one token, for many, and for a long sequence.

    Raises:
        ValueError: a width that is none.
    """
    found = []
    either = [(False, True) if x is None else (x,) for x in flags]
    for dtype, width, chosen, T in product(dtypes, widths, product(*either), (1, 100, LONG_TOKENS)):
        K, _, V = width.partition("x")
        if not (_size(K) and _size(V or K)):
            raise ValueError(f"--head-dim: want K or KxV, as 128 or 128x256, got {width!r}")
        packed, state, grouped = chosen
        found.append(
            Shape(
                B=1 if T == LONG_TOKENS else 2,
                T=T,
                K=int(K),
                V=int(V or K),
                dtype=dtype,
                packed=packed,
                state=state,
                grouped=grouped,
            )
        )
    return found


def find_operators(
    samples: Sequence[Sample], shapes: Sequence[Shape], arch: str, backward: bool
) -> KernelsFound:
    """The kernels of these operators, by every implementation for these shapes, and by the one that
    is chosen for any sizes."""
    found = find_kernels(samples, shapes, arch, backward)
    alike = dict.fromkeys(replace(x, B=2, T=100) for x in shapes)
    more = find_kernels(samples, [*alike], arch, backward, impls=(None,), any_size=True)
    known = {job.key for job, _ in found.tasks}
    tasks = [*found.tasks, *(task for task in more.tasks if task[0].key not in known)]
    return KernelsFound(tasks, found.without, [*found.failures, *more.failures])


def fill(
    find: Callable[[], KernelsFound], what: str, arch: str, cache: Path | None, jobs: int
) -> bool:
    """Compiles what `find` returns into `cache`; whether all of it compiled. Says where it is and
    who can read it.

    Args:
        what: kernels are wanted for, in words.
    """
    console = Console()
    place = cache or compiler_state.triton_cache()
    place.mkdir(parents=True, exist_ok=True)
    selected = toolchain.select_ptxas((arch,))
    if cache is not None:
        os.environ["TRITON_CACHE_DIR"] = str(cache)
    with console.status(f"finding the kernels of {what}"):
        found = find()
    with bar() as progress:
        task = progress.add_task(f"kernels for {arch}", total=len(found.tasks))
        rows = support_matrix.run(
            found.tasks, processes=jobs, done=lambda job, row: progress.advance(task)
        )
    failed = [x for x in rows if x.status not in ("ok", "slow")]
    for row in failed:
        console.print(f"[red]{row.status}[/] {row.kernel}: {escape(row.reason)}")
    for failure in found.failures:
        console.print(f"[red]failed[/] {escape(failure)}")
    for name, reason in found.without.items():
        console.print(f"[dim]{name}: nothing to compile ({reason})[/]")
    made = made_by(arch, place)
    write_text(place / MANIFEST, json.dumps(made, indent=1) + "\n")
    console.print(
        f"{len(rows) - len(failed)} kernels for {arch} in {place}. Triton finds them under the"
        f" same wheel only: {', '.join(f'{k} {v}' for k, v in made.items())}"
        + (f" ({selected})" if selected else "")
    )
    return not failed and not found.failures


def made_by(arch: str, place: Path) -> dict[str, str]:
    """The versions that make a cache, and that have to read it, and its path: Triton's entries name
    their files by it."""
    path = toolchain.ptxas_path(arch)
    return {
        "arch": arch,
        "triton": toolchain.triton_version() or "",
        "ptxas": (path and toolchain.ptxas_version(path)) or "",
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "slipstream": __version__,
        "path": str(place.resolve()),
    }


def stale(place: Path, arch: str) -> str | None:
    """Why Triton would not find here what precompile left in a cache; None if it would."""
    try:
        made = json.loads((place / MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    here = made_by(arch, place)
    if not isinstance(made, dict):
        return None
    here["path"] = here["path"] if "path" in made else ""
    differ = [f"{k} {made.get(k)} there, {v} here" for k, v in here.items() if made.get(k, "") != v]
    return f"precompiled by others: {'; '.join(differ)}" if differ else None
