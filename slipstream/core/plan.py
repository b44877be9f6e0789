"""The choice of an implementation: one pure function over a list of candidates, each with a reason.

A family lists its candidates in order of preference; a candidate looks at the call and says why it
can't take it, or None. Nothing is ever replaced silently: an implementation asked for by name is
used or refused.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

OR_PLAIN = "triton|eager"


@dataclass(frozen=True)
class Candidate:
    """name: what `impl` calls it. refuses: call -> reason, or None if it takes the call.

    by_name_only: never chosen unless asked for.
    """

    name: str
    why: str
    refuses: Callable[[Any], str | None] = lambda call: None
    by_name_only: bool = False


@dataclass(frozen=True)
class Plan:
    """impl: the one chosen; why; rejected: those preferred to it, each with its reason.

    rest: those after it that take the call, for when the machine's compilers turn out to fail at
    its kernels (core/guard.py); none if it was asked for by name.
    """

    impl: str
    why: str
    rejected: tuple[tuple[str, str], ...] = ()
    rest: tuple[str, ...] = ()

    @property
    def tries(self) -> str:
        """What an operator is told: "triton|eager" is the first of them that works."""
        return "|".join((self.impl, *self.rest))


def choose(candidates: Sequence[Candidate], call: Any, impl: str | None) -> Plan:
    """Picks the first candidate that takes the call, or the one named.

    Raises:
        ValueError: no candidate has that name.
        NotImplementedError: the one named, or every one, refuses the call.
    """
    if impl is not None:
        named = next((c for c in candidates if c.name == impl), None)
        if named is None:
            names = ", ".join(repr(c.name) for c in candidates)
            raise ValueError(f"impl: want None or one of {names}, got {impl!r}")
        if reason := named.refuses(call):
            raise NotImplementedError(f"impl={impl!r}: {reason}; impl=None chooses another")
        return Plan(impl, "asked for by name")
    rejected = []
    by_itself = [c for c in candidates if not c.by_name_only]
    for i, candidate in enumerate(by_itself):
        reason = candidate.refuses(call)
        if reason is None:
            rest = tuple(c.name for c in by_itself[i + 1 :] if c.refuses(call) is None)
            return Plan(candidate.name, candidate.why, tuple(rejected), rest)
        rejected.append((candidate.name, reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected)
    raise NotImplementedError(f"no implementation takes this call ({reasons})")
