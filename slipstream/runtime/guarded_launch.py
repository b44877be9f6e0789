"""A compiler that is not verified for a GPU may kill the process: here it only kills a child.

Every operator runs its kernels inside of a Guard. For an (architecture, Triton, ptxas) that is not
in verified.json, the first compilation of each kernel happens in a child process, which leaves it
in Triton's cache; and the first use of each kind of kernel compares a small fresh problem with
plain torch. If the child dies, hangs or refuses, or the results differ, the other implementation
runs, a warning says so once, and it is remembered on disk (compiler/compiler_state.py).
"""

import json
import subprocess
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from slipstream.compiler import compiler_state as machines
from slipstream.compiler.compiler_state import (
    CompilerState,
    KernelDisabledWarning,
    KernelKey,
    Unusable,
    compiler_state,
    describe,
)
from slipstream.compiler.known_bugs import applying
from slipstream.runtime import dispatch, launch_cache
from slipstream.runtime.recording import use_recorder
from slipstream.runtime.token_ids import WrongId, raise_pending

T = TypeVar("T")


def known_failure(kind_of: Callable[[], KernelKey], device: torch.device) -> str | None:
    """Why the kernels of a kind are known not to work on a device: for plans. Cheap."""
    if is_compiling():
        return None  # Guard looks when the graph runs
    here = compiler_state(device)
    if here is None:
        return machines.interpreter_failure(kind_of)
    return None if here.unguarded else here.unusable(kind_of())


class Guard:
    """Stands around a call of kernels, before the plain torch that takes over where they fail.

        with Guard(impl, x.device, lambda: ("glu.triton", x.dtype), lambda: mismatch(x)) as usable:
            if usable:
                return kernels(x)
        return eager(x)

    usable is False where impl begins with plain torch, and where this machine's compilers are known
    to fail at the kernels. If they turn out to fail inside of it, the block is left, a warning says
    why, and later processes on this machine know it (compiler/compiler_state.py).

    Args:
        impl: implementations to try in order, "sm90|triton|eager". Kernels that come last were
            asked for by name, and nothing takes over.
        kind_of: what a verdict holds for, and is remembered by; asked only where one is wanted.
        probe: compares a small fresh problem of the kind with plain torch; says what differs.

    Raises:
        NotImplementedError: they failed, and nothing takes over, or SLIPSTREAM_FALLBACK=error, or
            other ranks would not know of it.
        ValueError: on entering, for a wrong token id that an earlier call's kernel has found.
    """

    __slots__ = ("_device", "_here", "_impl", "_kind", "_kind_of", "_probe")

    def __init__(
        self,
        impl: str,
        device: torch.device,
        kind_of: Callable[[], KernelKey],
        probe: Callable[[], str | None] | None = None,
    ) -> None:
        self._impl, self._device = impl, device
        self._kind_of, self._probe = kind_of, probe
        self._here: CompilerState | None = None
        self._kind: KernelKey = ()

    def __enter__(self) -> bool:
        if self._impl.startswith(dispatch.PLAIN):
            return False
        raise_pending()
        here = self._here = compiler_state(self._device)
        if here is None or here.unguarded:
            return True
        kind = self._kind = self._kind_of()
        if launch_cache.of_thread.ahead:
            return here.unusable(kind) is None
        if kind not in here.accepted and kind not in here.probing:
            try:
                _verify(here, kind, self._device, self._probe)
            except Exception as error:
                if self._takes_over(error):
                    return False
                raise
        return True

    def __exit__(self, _: object, error: BaseException | None, traceback: object) -> bool:
        return error is not None and isinstance(error, Exception) and self._takes_over(error)

    def _takes_over(self, error: Exception) -> bool:
        """Whether something else runs after this error, of which the user and the next hear."""
        here = self._here
        if here is None or launch_cache.of_thread.ahead:
            return False
        reason = _compiler_error(error)
        kind = self._kind or self._kind_of()
        if reason is None or kind in here.probing:
            return False
        is_new = here.unusable(kind) is None
        if is_new:
            lasting = getattr(error, "lasting", _of_machine(error) is None)
            here.mark_unusable(kind, reason, lasting)
        if "|" not in self._impl:
            raise NotImplementedError(f"{describe(kind)}: {reason}; impl=None chooses another")
        if dispatch.fallback_is_error():
            raise NotImplementedError(f"{describe(kind)}: {reason}; {dispatch.FALLBACK}=error")
        if is_new and (rank := _rank_of_several()) is not None:
            raise NotImplementedError(
                f"rank {rank}: {describe(kind)}: {reason}; all ranks have to compute alike, so "
                "this one ends the run; the next one uses other kernels on this machine"
            )
        here.warn_fallback(kind, reason)
        dispatch.reported[describe(kind), reason] = None
        dispatch.forget_choice()
        return True


def _rank_of_several() -> int | None:
    """None where this process works alone."""
    dist = torch.distributed
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.get_rank()


def _compiler_error(error: Exception) -> str | None:
    """Description of a compiler's failure; None if the error is not a compiler's."""
    if isinstance(error, Unusable):
        return str(error)
    if reason := _of_machine(error):
        return reason
    own = type(error).__module__.partition(".")[0] == "triton"
    if own or (type(error) is RuntimeError and "PassManager" in str(error)):
        words = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {words[-1].strip()[:300]}"
    return None


def _of_machine(error: Exception) -> str | None:
    """Why the machine, and not a kernel, caused an error; None for other errors.

    A folder cannot be written, a child process did not start, a file in Triton's cache is damaged,
    or the C compiler or a library for Triton's launchers is missing.
    """
    words = f"{type(error).__name__}: {error}"
    if isinstance(error, subprocess.CalledProcessError):
        program = error.cmd[0] if isinstance(error.cmd, list | tuple) else error.cmd
        return f"{program}, which makes Triton's launchers, ended with {error.returncode}"
    if isinstance(error, OSError | subprocess.SubprocessError):  # nothing else here has files
        return words
    if isinstance(error, ImportError):
        return words if str(error.path).endswith(".so") else None
    missing = type(error) is RuntimeError and "C compiler" in words
    missing |= type(error) is AssertionError and "libcuda.so" in words
    damaged = isinstance(error, json.JSONDecodeError)
    damaged |= type(error) is RuntimeError and "Triton Error" in words and "image" in words
    if damaged:
        words = f"{words}; a file of Triton's cache {machines.triton_cache()} is damaged: delete it"
    return words if missing or damaged else None


def _verify(
    here: CompilerState,
    kind: KernelKey,
    device: torch.device,
    probe: Callable[[], str | None] | None,
) -> None:
    """Unusable if something is known against a kind, or found out now; else never looks again."""
    if reason := here.unusable(kind):
        raise Unusable(reason)
    if probe is not None and here.should_probe(kind):
        if is_capturing(device):
            return
        here.probing.add(kind)
        try:
            found = run_isolated(probe, device)
        except WrongId:
            raise  # of an earlier call, found meanwhile
        except Exception as error:
            if reason := _compiler_error(error):
                lasting = getattr(error, "lasting", _of_machine(error) is None)
                raise Unusable(reason, lasting) from error
            found = None  # no memory for it, say: the call itself may still run
            text = f"{describe(kind)} could not be probed: {type(error).__name__}: {error}"
            warnings.warn(text, KernelDisabledWarning, stacklevel=4)
        else:
            if found is None:
                here.probed(kind)
        finally:
            here.probing.discard(kind)
        if found is not None:
            raise Unusable(f"wrong result: {found}{_suspected_bugs(here)}")
    here.accepted.add(kind)


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph records what the current stream does."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def run_isolated(run: Callable[[], T], device: torch.device) -> T:
    """run() in a thread of its own, where none of the caller's modes reach: it may be below
    autograd, in inference mode, under autocast. Random numbers go on as if it had not been.

    The caller may be autograd's one thread of the device, which waits here for what run() computes:
    gradients are computed in the new thread itself, or they would never be.
    """
    done: list[Any] = []
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def work() -> None:
        try:
            with (
                torch.cuda.stream(stream),
                torch.enable_grad(),
                torch.autograd.set_multithreading_enabled(False),
            ):
                done.append((run(), None))
        except Exception as error:
            done.append((None, error))

    with torch.random.fork_rng([] if stream is None else [device]):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    result, error = done[0]
    if error is not None:
        raise error
    return result


def plain_gradients(
    run: Callable[..., Any], inputs: Sequence[Tensor | None], douts: Sequence[Tensor | None]
) -> list[Tensor]:
    """The gradients of run(*inputs) by autograd, for a backward whose kernels do not run.

    Args:
        run: in plain torch; returns a tensor, or as many as douts.
        douts: gradients of what it returns; of what has none, nothing comes.

    Returns:
        A contiguous gradient of each input that is no None.
    """
    detached = [None if x is None else x.detach() for x in inputs]
    given = [d for d in douts if d is not None]
    if not given:
        return [
            torch.zeros_like(x, memory_format=torch.contiguous_format)
            for x in detached
            if x is not None
        ]

    recorder: Any = launch_cache.of_thread.recorder
    if recorder is not None:
        recorder.launched(None, ())  # autograd's results would be constants to it

    def work() -> list[Tensor]:
        # copies: tensors of inference mode take no gradients
        leaves = [None if x is None else x.clone().requires_grad_() for x in detached]
        with use_recorder(recorder), recorder or nullcontext():  # which knows its sizes
            results = run(*leaves)
        results = (results,) if isinstance(results, Tensor) else results
        pairs = [(y, d.to(y.dtype)) for y, d in zip(results, douts) if d is not None]
        outputs, grads = [y for y, _ in pairs], [d for _, d in pairs]
        wanted = [x for x in leaves if x is not None]
        found = torch.autograd.grad(outputs, wanted, grads, allow_unused=True)
        return [torch.zeros_like(x) if y is None else y.contiguous() for x, y in zip(wanted, found)]

    return run_isolated(work, given[0].device)


def _suspected_bugs(here: CompilerState) -> str:
    found = applying(here.arch, here.triton, here.ptxas or None)
    names = [f"{x.name} ({x.way_out})" for x in found if x.effect == "wrong result"]
    return f"; known of these compilers: {', '.join(names)}" if names else ""


def clear_verdicts() -> None:
    """Forgets all verdicts of this computer."""
    machines.verdicts_file().unlink(missing_ok=True)
    machines.compiler_state.cache_clear()
    machines._of_arch.cache_clear()
