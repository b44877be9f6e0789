"""Launches of the linear family with their kernels as numpy, Gluon's and Triton's: a back end does
what it does on a GPU, in float64, or rounded, and in memory that is NaN until it is written."""

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gluon_emulator import rounding, threads
from tests.gluon_emulator.linear import Descriptor, Pointer, emulated, halves

COMPILERS = ("num_warps", "maxnreg", "num_stages", "enable_fp_fusion")  # no kernel's arguments
FAMILY = "slipstream.kernels.linear."


@functools.cache
def module(path: str, rounds: bool) -> Any:
    """With functions for threads.launch. float64 has no halves of 16 bits, nor float32's bits."""
    with emulated():
        gl = sys.modules["slipstream.kernels.primitives.sm90"].gl
        vars(gl).update(rounding.language() if rounds else {})
        made, exp2 = importlib.import_module(path), gl.exp2
        wide: dict[str, Any] = {"halves": halves, "known_uniform": lambda n: n}
        if not rounds:
            wide |= dict.fromkeys(("exp2_by_parts", "exp2_or_least", "exp2_of_whole"), exp2)
            wide["exp2_and_inverse"] = lambda b: (exp2(b), exp2(-b))
        for name, x in sys.modules.items():
            if name.startswith(FAMILY + "sm90."):
                vars(x).update({n: f for n, f in wide.items() if hasattr(x, n)})
        return made


def run(kernel: Any, programs: int, given: dict[str, Any], together: bool = False) -> None:
    """together: programs that wait for one another."""
    for name, x in given.items():
        if isinstance(x, Tensor):  # in bfloat16 are constants alone, as those that add up
            x = x.double() if x.dtype == torch.bfloat16 else x
            given = given | {name: Pointer(x)}
        elif isinstance(x, int | float) and name not in kernel.__annotations__:
            given = given | {name: threads.tensor(x)}
    given = {n: x for n, x in given.items() if n not in COMPILERS}
    (threads.launch_together if together else threads.launch)(kernel, programs, (), **given)


def as_numpy(
    monkeypatch: pytest.MonkeyPatch,
    like: torch.dtype = torch.bfloat16,
    rounds: bool = False,
    together: str = "",
) -> list[str]:
    """Has launches run the kernels as numpy; names of those that ran, by and by.

    Args:
        like: 16 bits whose limits of gates hold for float64.
        together: the kernel whose programs run at once.
    """
    ran: list[str] = []
    for folder in ("delta", "scalar_decay", "vector_decay", "dplr"):
        importlib.import_module(f"{FAMILY}sm90.{folder}.backend")

    def cached(jitted: Any) -> Any:
        def on(grid: tuple[int, ...]) -> Callable[..., None]:
            def call(**given: Any) -> None:
                ran.append(jitted.__name__)
                made = getattr(module(jitted.fn.__module__, rounds), jitted.__name__)
                run(made, grid[0], given, jitted.__name__ == together)

            return call

        return type("Launch", (), {"__getitem__": lambda self, grid: on(grid)})()

    def wide(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def empty(*args: Any, **options: Any) -> Tensor:
            made = make(*args, **options)
            return made.double().fill_(torch.nan) if made.is_floating_point() else made

        return empty

    def descriptor(x: Tensor | None, *sizes: Any) -> Descriptor | None:
        return None if x is None else Descriptor(x, *sizes[:3])

    for owner, name in ((Tensor, "new_empty"), (torch, "empty"), (torch, "empty_like")):
        monkeypatch.setattr(owner, name, wide(getattr(owner, name)))
    size, finfo = Tensor.element_size, torch.finfo
    monkeypatch.setattr(
        Tensor, "element_size", lambda x: 2 if x.dtype == torch.float64 else size(x)
    )
    if rounds:
        monkeypatch.setattr(torch, "finfo", lambda x: finfo(like if x == torch.float64 else x))
    others = {"cached": cached, "tma_descriptor": descriptor, "family_of": lambda _: "sm_90"}
    others |= {"sm_count": lambda _: 2, "supports_dqkg": lambda terms, do: terms.g is not None}
    for path, part in [*sys.modules.items()]:
        if path.startswith(FAMILY) or path == "slipstream.runtime.launch_cache":
            for name, x in [*vars(part).items()]:
                if name in others:
                    monkeypatch.setattr(part, name, others[name])
                elif isinstance(x, dict) and like in x:
                    monkeypatch.setitem(x, torch.float64, x[like])
    return ran
