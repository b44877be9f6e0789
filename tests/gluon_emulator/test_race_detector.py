"""Faults that tests/gluon_emulator/race_detector.py finds in small kernels; without the fault it
finds none. In each a part fills two stages and another has products of them, whose results go
out."""

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.gluon_emulator import threads
from tests.gluon_emulator.race_detector import Race

gl, mbarrier = threads._language(), threads._mbarrier()
N = 4
FAULTS = {
    "none": None,
    "a stage is filled that is not free": "is written by a copy into shared memory",
    "a product does not wait for its stage": "may still be written by a copy into shared memory",
    "a stage is given away while a product reads it": "may still be read by read 1's products",
    "a store has no fence": "may still be stored without a fence by read 1",
    "a store does not wait for what goes out": "may still be read by read 1's copies",
    "a part reads what another is about to store": "may still be written by read 1",
}


def fill(desc: Any, tiles: Any, full: Any, empty: Any, out: Any, done: Any, fault: str) -> None:
    for i in range(N):
        s = i % 2
        if fault != "a stage is filled that is not free":
            mbarrier.wait(empty.index(s), (i // 2 & 1) ^ 1)
        mbarrier.expect(full.index(s), desc.block_type.nbytes)
        threads._copy_in(desc, [i * 2, 0], full.index(s), tiles.index(s))
    if fault != "a part reads what another is about to store":
        mbarrier.wait(done.index(0), 0)
    out.load(None)


def read(
    desc: Any, tiles: Any, full: Any, empty: Any, out: Any, done: Any, fault: str, to: Any
) -> None:
    acc = threads.tensor(np.zeros((2, 2)))
    for i in range(N):
        s = i % 2
        if fault != "a product does not wait for its stage":
            mbarrier.wait(full.index(s), i // 2 & 1)
        acc = threads._mma(tiles.index(s), tiles.index(s), acc, is_async=True)
        if fault == "a stage is given away while a product reads it":
            mbarrier.arrive(empty.index(s))
        acc = threads._mma_wait(0, (acc,))
        if fault != "a stage is given away while a product reads it":
            mbarrier.arrive(empty.index(s))
        if fault != "a store does not wait for what goes out":
            threads._store_wait(0)
        out.store(acc)
        if fault != "a store has no fence":
            threads._fence()
        threads._copy_out(to, [i * 2, 0], out)
    threads._store_wait(0)
    mbarrier.arrive(done.index(0))


def program(given: Any, to: Any, fault: str) -> None:
    tiles = gl.allocate_shared_memory("16-bit", [2, 2, 2], None)
    out = gl.allocate_shared_memory("16-bit", [2, 2], None)
    full, empty, done = (gl.allocate_shared_memory("int64", [n, 1], None) for n in (2, 2, 1))
    for bars in (full, empty, done):
        for i in range(bars.shape[0]):
            mbarrier.init(bars.index(i), 1)
    rest = (tiles, full, empty, out, done, fault)
    gl.warp_specialize([(fill, (given, *rest)), (read, (given, *rest, to))], [4], [24])


@pytest.mark.parametrize("fault", FAULTS)
def test_detector_finds_unordered_accesses(fault: str) -> None:
    x, y = np.arange(4.0 * N).reshape(2 * N, 2), np.zeros((2 * N, 2))
    given, to = (threads.Descriptor(z, (2, 2)) for z in (x, y))
    told = FAULTS[fault]
    if told is None:
        threads.launch(program, 1, (given, to, fault))
        want = np.cumsum([x[2 * i : 2 * i + 2] @ x[2 * i : 2 * i + 2] for i in range(N)], 0)
        np.testing.assert_array_equal(y, want.reshape(2 * N, 2))
        return
    found = []
    for _ in range(20):  # a phase may also end before it is waited for, an error of its own
        try:
            threads.launch(program, 1, (given, to, fault))
        except AssertionError as e:
            found.append(e)
    assert len(found) == 20
    races = [str(e) for e in found if isinstance(e, Race)]
    assert races
    assert all(told in x for x in races)


@pytest.mark.parametrize("arrives", [True, False])
def test_partitions_that_wait_for_each_other_are_found(arrives: bool) -> None:
    def first(bars: Any) -> None:
        if arrives:
            mbarrier.arrive(bars.index(1))
        mbarrier.wait(bars.index(0), 0)

    def second(bars: Any) -> None:
        mbarrier.wait(bars.index(1), 0)
        mbarrier.arrive(bars.index(0))

    def both() -> None:
        bars = gl.allocate_shared_memory("int64", [2, 1], None)
        for i in range(2):
            mbarrier.init(bars.index(i), 1)
        gl.warp_specialize([(first, (bars,)), (second, (bars,))], [4], [24])

    if arrives:
        return threads.launch(both, 1, ())
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="wait for each other"):
        threads.launch(both, 1, ())
    assert time.monotonic() - start < threads._WAIT / 2  # found, not waited for
    return None


def test_places_are_those_of_the_memory_itself() -> None:
    """However it is looked at: turned, in part."""
    tile = threads.Buffer(np.full((2, 4, 6), np.nan))

    def stores(at: SimpleNamespace) -> None:
        at.tile.index(1).permute((1, 0)).slice(2, 3).store(np.zeros((3, 4)))

    def loads(at: SimpleNamespace) -> None:
        at.tile.index(1).slice(at.first, 1, 1).load(None)

    def both(at: SimpleNamespace) -> None:
        gl.warp_specialize([(stores, (at,)), (loads, (at,))], [4], [24])

    for first in range(6):
        at = SimpleNamespace(tile=tile, first=first)
        if 2 <= first < 5:
            with pytest.raises(Race):
                threads.launch(both, 1, (at,))
        else:
            threads.launch(both, 1, (at,))
