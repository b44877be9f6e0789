"""The choice of an implementation: one pure function over a list of candidates, each with a reason.

A family lists its candidates in order of preference; a candidate looks at the call and says why it
can't take it, or None. Nothing is ever replaced silently: an implementation asked for by name is
used or refused, and a call on a GPU that no kernel takes is reported.

Checks and choices read only the shape, dtype and device of a tensor. So ValidationCache gives what
they found for an earlier call with the same ones, in a fifth of the time.

    SLIPSTREAM_FALLBACK   warn (once for each family and reason, where a call on a GPU runs in plain
                          torch), or error (such a call raises NotImplementedError)
"""

import os
import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Size, Tensor
from torch.compiler import is_compiling
from torch.nn import Parameter

from slipstream.runtime import autograd, backends, call_replay, launch_cache

FALLBACK = "SLIPSTREAM_FALLBACK"
PLAIN = ("eager", "reference")
TRITON_OR_EAGER = "triton|eager"
# Entries of a cache. Calls that differ in shapes are few, but a server's lengths are not: past this
# it starts empty again.
_MAX_ENTRIES = 4096


@dataclass(frozen=True)
class Candidate:
    """name: what `impl` calls it. unsupported_reason: of a call, or None if it takes the call.

    by_name_only: never chosen unless asked for. elsewhere: of the first, for kernels of CUDA
    devices, what is chosen on others, without asking: for calls that take some microseconds.
    """

    name: str
    why: str
    unsupported_reason: Callable[[Any], str | None] = lambda call: None
    by_name_only: bool = False
    elsewhere: "Selection | None" = None


class Selection(NamedTuple):
    """impl: the one chosen; why; rejected: those preferred to it, each with its reason.

    fallbacks: those after it that take the call, for when the machine's compilers turn out to fail
    at its kernels (runtime/guarded_launch.py); none if it was asked for by name. family: of the
    operators that choose so, for `slipstream explain`.
    """

    impl: str
    why: str
    rejected: tuple[tuple[str, str], ...] = ()
    fallbacks: tuple[str, ...] = ()
    family: str = ""

    @property
    def impls(self) -> str:
        """The `impl` for an operator: "triton|eager" is the first of them that works."""
        return "|".join((self.impl, *self.fallbacks)) if self.fallbacks else self.impl


class FallbackWarning(RuntimeWarning):
    """A call on a GPU runs in plain torch, since no kernel takes it."""


# what ran in plain torch instead of kernels, and why: reasons may have sizes of a call in them
reported: dict[tuple[str, str], None] = {}
_fallbacks = 0  # how many calls have fallen back


def fallback_is_error() -> bool:
    """
    Raises:
        ValueError: SLIPSTREAM_FALLBACK is neither warn nor error.
    """
    value = os.environ.get(FALLBACK, "warn")
    if value not in ("warn", "error"):
        raise ValueError(f"{FALLBACK}: want warn or error, got {value!r}")
    return value == "error"


def forget_choice() -> None:
    """Nothing of the call that runs is remembered: the next looks at SLIPSTREAM_FALLBACK again."""
    global _fallbacks
    _fallbacks += 1
    if launch_cache.of_thread.recorder is not None:
        launch_cache.of_thread.recorder.launched(None, ())


def report_fallback(plan: Selection, family: str, x: Any) -> None:
    """Warns, once for each family and reason, if a plan for a call on a GPU is plain torch.

    Not where x is empty, or stands for another tensor, as while a graph is traced.

    Raises:
        NotImplementedError: it is, and SLIPSTREAM_FALLBACK=error.
    """
    if plan.impl not in PLAIN or not plan.rejected:
        return
    if not backends.is_plain_call(x) or x.numel() == 0:
        return
    reasons = "; ".join(f"{name}: {reason}" for name, reason in plan.rejected)
    if fallback_is_error():
        raise NotImplementedError(f"{family}: no kernel takes this call ({reasons})")
    forget_choice()
    if (family, reasons) not in reported:
        call_replay.remember(reported, (family, reasons), None, _MAX_ENTRIES)
        text = f"{family} runs in plain torch on the GPU, which is slow ({reasons})"
        warnings.warn(f"{text}; {FALLBACK}=error raises instead", FallbackWarning, stacklevel=4)


def current_name(impl: str) -> str:
    """The implementation's name today: "hopper" was what "sm90" is."""
    if impl != "hopper":
        return impl
    warnings.warn('impl="hopper" is called "sm90" now', DeprecationWarning, stacklevel=4)
    return "sm90"


def choose(
    candidates: Sequence[Candidate], call: Any, impl: str | None, family: str = "", x: Any = None
) -> Selection:
    """Picks the first candidate that takes the call, or the one named.

    Args:
        family, x: the operators' name and a tensor of the call, for report_fallback.

    Raises:
        ValueError: no candidate has that name.
        NotImplementedError: the one named, or every one, refuses the call.
    """
    if autograd.is_tracing():
        with autograd.untraced():
            return choose(candidates, call, impl, family, x)
    if impl is not None:
        return _named(candidates, call, current_name(impl))
    elsewhere = candidates[0].elsewhere
    if elsewhere is not None and x is not None and not x.is_cuda:
        return elsewhere
    plan = _preferred(candidates, call, family)
    if plan.rejected and x is not None and x.is_cuda:
        report_fallback(plan, family, x)
    return plan


def _named(candidates: Sequence[Candidate], call: Any, impl: str) -> Selection:
    named = next((c for c in candidates if c.name == impl), None)
    if named is None:
        names = ", ".join(repr(c.name) for c in candidates)
        raise ValueError(f"impl: want None or one of {names}, got {impl!r}")
    if reason := named.unsupported_reason(call):
        raise NotImplementedError(f"impl={impl!r}: {reason}; impl=None chooses another")
    return Selection(impl, "asked for by name")


def _preferred(candidates: Sequence[Candidate], call: Any, family: str) -> Selection:
    first, rejected, fallbacks = None, (), ()
    for candidate in candidates:
        if candidate.by_name_only:
            continue
        reason = candidate.unsupported_reason(call)
        if reason is not None:
            rejected += ((candidate.name, reason),) if first is None else ()
        elif first is None:
            first = candidate
        else:
            fallbacks += (candidate.name,)
    if first is None:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected)
        raise NotImplementedError(f"no implementation takes this call ({reasons})")
    return Selection(first.name, first.why, rejected, fallbacks, family)


def plain_impl(impl: str | None) -> str | None:
    """The impl of an operation within a call: plain torch if that was asked for, else its own."""
    return PLAIN[0] if impl in PLAIN else None


def triton_or_eager(
    kernel_reason: Callable[..., str | None], asks_interpreter: bool = False
) -> tuple[Candidate, ...]:
    """The candidates of an operator that has kernels in Triton alone, and a reference.

    A call is a tuple (x, ...), of which x, or the first of a tuple x, decides about device and
    dtype.

    Args:
        kernel_reason: given all of the call, why the kernels can't take it, or None if they can.
        asks_interpreter: whether Triton's interpreter, which runs on a CPU, is asked too.
    """

    def unsupported_reason(call: tuple) -> str | None:
        x = first_of(call)
        if backends.is_fake(x):
            return "the tensors are fake"
        return backends.triton_unsupported(x, "the input") or kernel_reason(*call)

    plain = Candidate("eager", "plain torch, on any device")
    elsewhere = Selection(plain.name, plain.why, (("triton", "it runs on CUDA devices"),))
    elsewhere = None if asks_interpreter else elsewhere
    return (
        Candidate("triton", "Triton kernels, on CUDA", unsupported_reason, elsewhere=elsewhere),
        plain,
        Candidate("reference", "the formula, the oracle of the tests", by_name_only=True),
    )


def first_of(call: tuple) -> Tensor:
    """The tensor that decides about device and dtype."""
    return call[0] if isinstance(call[0], Tensor) else call[0][0]


def is_triton(impl: str) -> bool:
    """Whether the first of Selection.impls is Triton's."""
    return impl.startswith("triton")


def signature(tensors: Iterable[Tensor | None], *rest: Hashable) -> tuple | None:
    """The shape of each, and their kind: rank, dtype and device, the rest and their types, as 64 is
    not 64.0; None where shapes may be symbols."""
    if is_compiling():
        return None
    shapes: list[Size] = []
    kind: list[Any] = [*rest, *map(type, rest)]
    for x in tensors:
        if x is None:
            kind.append(None)
        elif type(x) is Tensor or type(x) is Parameter:
            shapes.append(x.shape)
            kind += (x.dim(), x.dtype, x.device)
        else:
            return None
    return tuple(shapes), tuple(kind)


class _Results:
    """Results of calls of a kind by their shapes, and what makes them for other shapes: None for
    each attempt that is no record, by how many tensors there are, fewer where one is given twice.
    """

    def __init__(self) -> None:
        self.by_shapes: dict[tuple, Any] = {}
        self._records: dict[int, list[call_replay.RecordedCall | None]] = {}

    def make(self, shapes: tuple, make: Callable[[], Any], tensors: Sequence[Tensor | None]) -> Any:
        """make() for new shapes."""
        before = _fallbacks
        # to torch.jit.trace sizes are tensors
        first = next((x for x in tensors if x is not None), None)
        decides = first is not None and call_replay.is_enabled(first) and not autograd.is_tracing()
        found = self._decided(make, (*tensors,)) if decides else make()
        if before == _fallbacks:
            call_replay.remember(self.by_shapes, shapes, found, _MAX_ENTRIES)
        return found

    def _decided(self, make: Callable[[], Any], tensors: tuple) -> Any:
        records = self._records.setdefault(len({*map(id, tensors)}), [])
        for record in records:
            if record and (found := record.play(tensors, ())) is not call_replay.MISS:
                return found
        if len(records) >= call_replay.MAX_RECORDS:
            return make()
        found, record = call_replay.record_decision(make, tensors)
        records.append(record)
        return found


class ValidationCache:
    """Results by signature, and for sizes not seen before by what an earlier result followed from
    (call_replay.record_decision)."""

    def __init__(self) -> None:
        self._by_kind: dict[tuple, _Results] = {}

    def clear(self) -> None:
        self._by_kind.clear()

    def get(
        self, key: tuple | None, make: Callable[[], Any], tensors: Sequence[Tensor | None] = ()
    ) -> Any:
        """make(), or what it returned for the same key. Not remembered is what it raises, and which
        calls on a GPU run in plain torch. tensors: those of the key, all that make looks at."""
        if key is None or launch_cache.of_thread.recorder is not None:
            return make()
        shapes, kind = key[0], key[1:]
        results = self._by_kind.get(kind)
        if results is None:
            results = call_replay.remember(self._by_kind, kind, _Results(), call_replay.MAX_KEYS)
        found = results.by_shapes.get(shapes)
        return results.make(shapes, make, tensors) if found is None else found
