"""Host time of a call: until it returns, not until the device is done.

    python bench/host.py                         every operator of the catalogue
    python bench/host.py --only 'chunk_|rms_norm'
    python bench/host.py --before DIR --name X   beside an earlier state of the sources, on a GPU
                                                 or a CPU: git archive X | tar x -C DIR, and today's
                                                 tools/catalog.py and what that imports, if missing

Tensors are small, so that the device never makes the host wait. us: of a forward without gradients,
the least of some rounds; both_us: of a forward with backward; launches: kernels of the forward.
torch's own rms_norm comes last and says how fast this host is.

--before starts two processes, one on each state, which take turns call by call, a few times, since
where memory happens to lie makes a tenth of a process's speed. On a CPU, which may be shared, the
processor's time counts, in rounds of a millisecond. Of all rounds the least counts. ratio is
earlier over now: above 1 is faster now.
"""

import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from harness import DEVICE, Call, Measurement, Provider, Report, first, host_us, kernels, parser
from processes import Child, tell

from slipstream.tools.catalog import SAMPLES, Sample, Shape

SCALE = "torch's rms_norm"
SMALL = Shape(B=1, T=256, H=4, K=64, V=64, state=True, Z=512)
# of --before on a CPU
SMALLER = Shape(B=1, T=64, H=2, K=32, V=32, dtype=torch.float32, Z=256)
# a row that earlier states have as well
STEP = Sample("recurrent_step", "q=B1HK k=B1HK v=B1GV state=BGKV:state", fixed="q k v state")


def samples() -> dict[str, Sample]:
    """The first of each operator's rows."""
    found: dict[str, Sample] = {STEP.op: STEP}
    for sample in SAMPLES:
        found.setdefault(sample.op, sample)
    return found


def calls(sample: Sample, shape: Shape) -> dict[str, Call]:
    """A forward, and a forward with backward where there is a gradient."""
    args = sample.inputs(shape, DEVICE)
    provider = Provider(lambda **given: sample(given), args, sample.fixed)

    def forward() -> Any:
        with torch.no_grad():
            return sample(provider.args)

    found: dict[str, Call] = {"us": forward}
    if provider.live and provider.outputs()[0].requires_grad:
        found["both_us"] = provider.gradients
    return found


def scale() -> dict[str, Call]:
    x = torch.randn(256, 1024, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.randn(1024, device=DEVICE, dtype=torch.bfloat16)
    return {"us": lambda: torch.nn.functional.rms_norm(x, weight.shape, weight)}


def row(name: str, found: dict[str, Call], report: Report) -> dict[str, object]:
    cells: dict[str, object] = {"operator": name, "first_s": round(first(found["us"]), 1)}
    for column, call in found.items():
        first(call)
        if not report.options.once:
            cells[column] = round(host_us(call, report.runs(20), report.runs(20)), 1)
    return {**cells, "launches": len(kernels(found["us"]))}


def child(only: re.Pattern) -> None:
    """Says what calls it has; then, for each number on stdin, times that call once."""
    torch.set_num_threads(1)
    found: dict[str, Call] = {}
    for name, sample in samples().items():
        if not only.search(name) and not only.search(f"{name} both"):
            continue
        try:
            made = calls(sample, SMALL if DEVICE.type == "cuda" else SMALLER)
        except Exception as e:
            print(f"{name}: {e}", file=sys.stderr)
            continue
        found |= {f"{name}{' both' if way == 'both_us' else ''}": x for way, x in made.items()}
    tell(calls=list(found))
    every, counts = list(found.values()), dict[int, int]()
    for line in sys.stdin:
        call = every[n := int(line)]
        if DEVICE.type == "cuda":
            tell(us=host_us(call, 1, 20))
            continue
        count = counts.get(n) or int(1000 / host_us(call, 3, 2)) + 1  # a millisecond
        start, counts[n] = time.process_time(), count
        for _ in range(count):
            call()
        tell(us=1e6 * (time.process_time() - start) / count)


class State(Child):
    """A process on the sources in a directory, with this script."""

    def __init__(self, sources: Path, only: re.Pattern) -> None:
        variables = {"PYTHONPATH": str(sources.resolve()), "OMP_NUM_THREADS": "1"}
        super().__init__(__file__, ("--only", only.pattern), 0, **variables)
        self.calls = self.answer()["calls"]

    def run(self, call: str) -> float:
        """Microseconds."""
        self.say(str(self.calls.index(call)))
        return self.answer()["us"]

    def answer(self) -> dict[str, Any]:
        if (told := self.next()) is None:
            raise SystemExit(self.failure())
        return told


def beside(before: Path, name: str, starts: int, report: Report) -> None:
    found: dict[str, list[list[float]]] = {}
    for _ in range(starts):
        states = [State(x, report.options.only) for x in (before, Path(__file__).parents[1])]
        for call in states[1].calls:
            if report.wants(call) and call in states[0].calls:
                for state in states:
                    state.run(call)
                turns = [[x.run(call) for x in states] for _ in range(report.runs(40))]
                found.setdefault(call, []).append([min(us) for us in zip(*turns)])
        for state in states:
            state.end()
    for call, runs in found.items():
        earlier, now = map(min, zip(*runs))
        ratios = [f"{x / y:.3f}" for x, y in ((earlier, now), *runs)]
        cells = {"operator": call, "before": name, "before_us": f"{earlier:.1f}"}
        cells |= {"us": f"{now:.1f}", "ratio": ratios[0], "each_start": " ".join(ratios[1:])}
        report.row("host_before", cells)


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--before", type=Path, metavar="DIR", help="earlier sources")
    options.add_argument("--name", default="", help="of the earlier state, for the rows")
    options.add_argument("--starts", type=int, default=3, help="of both processes")
    options.add_argument("--child", action="store_true", help="for --before")
    given = options.parse_args(argv)
    if given.child:
        child(given.only)
        return
    report = Report(given, needs_gpu=given.before is None)
    if given.before is not None:
        beside(given.before, given.name, given.starts, report)
        return
    works: list[Measurement] = [
        (name, "host_gpu", lambda n=name, x=sample: row(n, calls(x, report.shape(SMALL)), report))
        for name, sample in samples().items()
    ]
    report.measure([*works, (SCALE, "host_gpu", lambda: row(SCALE, scale(), report))])


if __name__ == "__main__":
    main()
