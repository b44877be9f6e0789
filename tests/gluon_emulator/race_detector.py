"""Whether what the parts of a kernel do with shared memory is ordered, whoever comes first.

Vector clocks, as race detectors have them, of kernels run by threads. Of what is asynchronous, a
part's products, its copies out and a barrier's copies in are agents of their own, with a clock that
counts them: what they read or write is over once the part has waited for so many of them, or the
barrier's phase is.

    arrive        what the part has seen goes to the barrier, and by its phase's end to who waits
    fence         of what the part has seen, plain stores become what products and copies see
    copy in       sees what its issuer has seen, and is seen by who waits at its barrier

A read that has not seen the last write, a write that has not seen the last write and all reads
since, and a product or copy out of what was stored without a fence are errors. Within a part there
is one order: barriers between its threads are Triton's, which puts them where they are wanted.
compute-sanitizer's racecheck has an arrival speak for the thread that arrives alone
(docs/dev/facts.md), ours speak for their part, whose threads have met before.
"""

import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from types import FrameType

import numpy as np

# A function of attention's kernels that every partition calls for itself, with one outcome.
SAME = ("attention/sm90/common.py", "zero_tail_rows")
MAX_AGENTS = 160  # agents of a program
CLOCK = 32  # bits of a clock; an agent is above


class Race(AssertionError):
    pass


class Program:
    """agents: by number what each is called. copies: of each barrier of copies that nothing has
    waited for the last one's phase."""

    def __init__(self) -> None:
        self.copies: dict[object, int] = {}
        self.lock = threading.RLock()
        self.agents: list[str] = []
        self.tiles: dict[int, Tile] = {}
        self.places: defaultdict[int, set[str]] = defaultdict(set)

    def agent(self, name: str) -> int:
        with self.lock:
            assert len(self.agents) < MAX_AGENTS
            self.agents.append(name)
            return len(self.agents) - 1


class Tile:
    """The last access to each element of an allocation: the agent and its clock, of reads by
    agent."""

    def __init__(self, root: np.ndarray) -> None:
        assert root.itemsize == 8 and root.flags.c_contiguous
        self.root, self.size = root, root.size  # kept, or its address is another's
        self.wrote = np.zeros(root.size, np.int64)
        self.plain = np.zeros(root.size, np.int64)  # whether by a store
        self.reads: dict[int, np.ndarray] = {}

    def of(self, kept: np.ndarray, view: np.ndarray) -> np.ndarray:
        """The elements of a view."""
        first = view.ctypes.data - self.root.ctypes.data
        return np.ndarray(view.shape, np.int64, kept, first, view.strides)

    def read_by(self, agent: int) -> np.ndarray:
        return self.reads.setdefault(agent, np.zeros(self.size, np.int64))


class Bar:
    """The clocks that a barrier hands on."""

    def __init__(self) -> None:
        self.gathered = np.zeros((2, MAX_AGENTS), np.int64)
        self.passed = self.gathered
        self.copies = -1
        self.begun = 0

    def ends_phase(self) -> None:
        self.passed = self.gathered.copy()


class Part:
    """seen: by agent, up to when; and of the plain stores among that, which a fence came after."""

    def __init__(self, program: Program, name: str) -> None:
        self.program, self.name = program, name
        self.id, self.products, self.copies = (
            program.agent(name + what) for what in ("", "'s products", "'s copies")
        )
        self.seen = np.zeros((2, MAX_AGENTS), np.int64)
        self.seen[0, self.id] = 1
        self.begun = {self.products: 0, self.copies: 0}
        self.unfenced: np.ndarray | None = None  # what it stored last of what is the same for all

    def child(self, name: str) -> "Part":
        made = Part(self.program, name)
        np.maximum(made.seen, self.seen, made.seen)
        self._moves_on()
        return made

    def joins(self, other: "Part") -> None:
        np.maximum(self.seen, other.seen, self.seen)

    def loads(self, view: np.ndarray) -> None:
        if _within(SAME):
            return
        self._reads(view, self.id, int(self.seen[0, self.id]))

    def stores(self, view: np.ndarray) -> None:
        if _within(SAME):
            self.unfenced = view
            return
        self._writes(view, self.id, int(self.seen[0, self.id]), True)

    def begins(self, agent: int, *views: np.ndarray) -> None:
        """A product or a copy out."""
        if self.unfenced is not None:
            raise Race(f"{self.name}: {SAME[1]} has stored without a fence")
        self.begun[agent] += 1
        for view in views:
            self._reads(view, agent, self.begun[agent], True)

    def waits(self, agent: int, left: int) -> None:
        now = max(self.begun[agent] - left, 0)
        self.seen[0, agent] = max(now, self.seen[0, agent])

    def fences(self) -> None:
        self.unfenced = None
        np.maximum(self.seen[1], self.seen[0], self.seen[1])
        self._moves_on()

    def arrives(self, bar: Bar) -> None:
        with self.program.lock:  # others' copies in come to it meanwhile
            np.maximum(bar.gathered, self.seen, bar.gathered)
        self._moves_on()

    def met(self, bar: Bar) -> None:
        np.maximum(self.seen, bar.passed, self.seen)

    def copies_in(self, bar: Bar, view: np.ndarray) -> None:
        with self.program.lock:
            if bar.copies < 0:
                bar.copies = self.program.agent("a copy into shared memory")
            bar.begun += 1
            self._writes(view, bar.copies, bar.begun, False)
            bar.gathered[0, bar.copies] = bar.begun

    def _moves_on(self) -> None:
        self.seen[0, self.id] += 1

    def _tile(self, view: np.ndarray) -> Tile:
        root = view
        while isinstance(root.base, np.ndarray):
            root = root.base
        tile = self.program.tiles.get(root.ctypes.data)
        if tile is None:
            tile = self.program.tiles[root.ctypes.data] = Tile(root)
        return tile

    def _reads(self, view: np.ndarray, agent: int, now: int, fenced: bool = False) -> None:
        with self.program.lock:
            tile, here = self._tile(view), _here()
            wrote = tile.of(tile.wrote, view)
            self._after(wrote, self.seen[0], agent, here, "is read", "written")
            if fenced:
                stored = np.where(tile.of(tile.plain, view) > 0, wrote, 0)
                self._after(stored, self.seen[1], agent, here, "is read", "stored without a fence")
            tile.of(tile.read_by(agent), view)[...] = now
            self.program.places[agent << CLOCK | now].add(here)

    def _writes(self, view: np.ndarray, agent: int, now: int, plain: bool) -> None:
        with self.program.lock:
            tile, here = self._tile(view), _here()
            wrote = tile.of(tile.wrote, view)
            self._after(wrote, self.seen[0], agent, here, "is written", "written")
            for reader, kept in tile.reads.items():
                read = tile.of(kept, view)
                told = np.where(read > 0, reader << CLOCK | read, 0)
                self._after(told, self.seen[0], agent, here, "is written", "read")
                read[...] = 0
            wrote[...] = agent << CLOCK | now
            tile.of(tile.plain, view)[...] = plain
            self.program.places[agent << CLOCK | now].add(here)

    def _after(
        self, told: np.ndarray, seen: np.ndarray, agent: int, here: str, is_what: str, was: str
    ) -> None:
        late = (told & (1 << CLOCK) - 1) > seen[told >> CLOCK]
        if late.any():
            first = int(told[late].flat[0])
            names, there = self.program.agents, sorted(self.program.places[first])
            raise Race(
                f"{int(late.sum())} of {late.size} elements: what {is_what} by {names[agent]} at "
                f"{here} may still be {was} by {names[first >> CLOCK]} at {', '.join(there)}"
            )


def _frames() -> Iterator[FrameType]:
    """Frames of the kernel, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if "/slipstream/kernels/" in frame.f_code.co_filename:
            yield frame
        frame = frame.f_back


def _within(function: tuple[str, str]) -> bool:
    """function: the end of its file's path, and its name."""
    codes = (frame.f_code for frame in _frames())
    return any(x.co_name == function[1] and x.co_filename.endswith(function[0]) for x in codes)


def _here() -> str:
    """The line of the kernel."""
    for frame in _frames():
        return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"
    return "no kernel"
