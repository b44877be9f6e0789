"""The choice of an implementation: first that takes the call, or the named one, never silently."""

import pytest

from slipstream.core.plan import Candidate, choose

CANDIDATES = (
    Candidate("fast", "quick", refuses=lambda n: "n is odd" if n % 2 else None),
    Candidate("plain", "takes all"),
    Candidate("oracle", "slow", by_name_only=True),
)


def test_choose_takes_the_first_that_does_not_refuse() -> None:
    assert choose(CANDIDATES, 2, None).impl == "fast"
    plan = choose(CANDIDATES, 3, None)
    assert (plan.impl, plan.why, plan.rejected) == ("plain", "takes all", (("fast", "n is odd"),))


def test_choose_uses_or_refuses_the_named_one() -> None:
    assert choose(CANDIDATES, 3, "oracle").impl == "oracle"
    with pytest.raises(NotImplementedError, match="n is odd"):
        choose(CANDIDATES, 3, "fast")
    with pytest.raises(ValueError, match=r"want None or one of 'fast', 'plain', 'oracle'"):
        choose(CANDIDATES, 3, "fastest")


def test_choose_says_why_nothing_takes_the_call() -> None:
    with pytest.raises(NotImplementedError, match="fast: n is odd"):
        choose(CANDIDATES[:1], 3, None)
