"""The table of compiler faults: which apply where, and which stop a kernel."""

import pytest

from slipstream.compiler.arch import ARCHS
from slipstream.compiler.known_bugs import INTERPRETER, KNOWN_BUGS, applying, blocking, version
from tests.support.planted_fault import FAULT, plant


def names(*where: str) -> set[str]:
    return {x.name for x in applying(*where)}


def test_every_fault_is_complete() -> None:
    assert len({x.name for x in KNOWN_BUGS}) == len(KNOWN_BUGS)
    for x in KNOWN_BUGS:
        assert x.effect in ("crash", "wrong result", "refusal", "slow")
        assert set(x.archs) <= {*ARCHS, INTERPRETER}
        assert x.pattern and x.source and x.way_out
        for bounds in (x.triton, x.ptxas):
            assert bounds is None or version(bounds[0]) <= version(bounds[1])


@pytest.mark.parametrize(
    ("where", "name", "applies"),
    [
        (("sm_90", "3.6.0", "12.8.93"), "narrow-dot", True),
        (("sm_90", "3.6.0", "13.1.80"), "narrow-dot", False),
        (("sm_80", "3.6.0", "12.8.93"), "narrow-dot", False),
        (("sm_90", "3.7.0", "12.8.93"), "transposed-dot", True),
        (("sm_90", "3.7.1", "12.8.93"), "transposed-dot", False),
        (("sm_75", "3.7.1", "12.8.93"), "planted-fault", True),
        (("sm_75", "3.8.0", "12.8.93"), "planted-fault", False),
        (("sm_80", "3.6.0", "12.8.93"), "planted-fault", False),
        (("sm_90", "3.8.0", "12.9.86"), "fp8-scaled-mm", True),
        (("sm_70", "3.6.0", "13.0.88"), "ptxas13-volta", True),
    ],
)
def test_faults_apply_where_they_are(
    where: tuple, name: str, applies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert (name in names(*where)) is applies


def test_blocking_stops_only_kernels_with_the_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    assert blocking("sm_75", "3.6.0", "12.8.93", {"dot16"}) is None
    plant(monkeypatch)
    assert blocking("sm_75", "3.6.0", "12.8.93", {"dot16"}) is FAULT
    assert blocking("sm_75", "3.6.0", "12.8.93", {"dot32"}) is None
    assert blocking("sm_75", "3.8.0", "12.8.93", {"dot16"}) is None
    assert blocking("sm_90", "3.6.0", "12.8.93", {"narrow_dot"}) is None  # probed
