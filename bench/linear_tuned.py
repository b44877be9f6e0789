"""fla's tuning in two steps, since it takes minutes an operator.

    python bench/linear_tuned.py survey DIR   each operator of linear_peers.py, side by side
    python bench/linear_tuned.py survey DIR --only gsa,hgrn --seconds 90 --most 8 --threads 3
    python bench/linear_tuned.py pack DIR     it, and of Triton's cache what fla used: DIR.tar.xz

survey: configurations of a kernel, at most MOST drawn from all, are compiled in threads and timed
roughly, by the least of a few runs, which other work on the GPU disturbs little; the best go to
DIR/ROW.jsonl. What is there already is not tried again. choose(DIR): from then on fla's kernels are
tuned, by Triton's own do_bench, among these alone: of the same key, or else of the same name.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("FLA_CACHE_RESULTS", "0")  # of a tuning among others, or beside others

BEST, WITHIN = 3, 1.2  # of the configurations of a kernel: so many, within so much of the best
MOST, UNKNOWN = 16, 4  # tried of a kernel's: by the survey, and where it has not come
RUNS, THREADS = 5, 3
SHORTER = 4  # a survey's sequences: no configuration depends on the length
FLUSHED = 1 << 28
USED = "used.txt"
# as linear_attn's and dplr_delta_rule's: their kernels
SAME = ("retention", "lightning_attn", "rwkv7")

Known = dict[tuple[str, str], set[str]]


def _tuner() -> Any:
    from triton.runtime.autotuner import Autotuner

    return Autotuner


def _key(tuner: Any, kwargs: dict[str, Any]) -> str:
    given = {n: x for n, x in {**tuner.nargs, **kwargs}.items() if n in tuner.arg_names}
    return str([given.get(name) for name in tuner.keys])


def _name(tuner: Any) -> str:
    return tuner.base_fn.__name__


def _compile(
    tuner: Any, configs: list[Any], kwargs: dict[str, Any], threads: int = THREADS
) -> None:
    """Each configuration, in threads; what fails fails again when it is timed."""
    from triton.runtime._async_compile import AsyncCompileMode

    given = {**tuner.nargs, **kwargs, "warmup": True}
    with ThreadPoolExecutor(threads) as pool, AsyncCompileMode(pool, ignore_errors=True):
        for config in configs:
            tuner.fn.run(**{**given, **config.all_kwargs()})


@cache
def _flushed() -> torch.Tensor:
    return torch.empty(FLUSHED // 4, dtype=torch.int32, device="cuda")


def _least(call: Callable[[], Any], quantiles: Any = None) -> list[float]:
    call()
    times = []
    for _ in range(RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        _flushed().zero_()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return [min(times)] * 3


def _median(call: Callable[[], Any], quantiles: Any = None) -> Any:
    from triton.testing import do_bench

    return do_bench(call, warmup=5, rep=20, quantiles=quantiles)


def _drawn(configs: list[Any], most: int) -> list[Any]:
    return random.Random(0).sample(configs, most) if len(configs) > most else configs


def _known(folder: Path, most: int = BEST) -> Known:
    """The best by (kernel, key), and by (kernel, "")."""
    found: Known = {}
    for file in folder.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            for key in (row["key"], ""):
                found.setdefault((row["kernel"], key), set()).update(row["best"][:most])
    return found


def survey(path: Path, most: int = MOST, threads: int = THREADS) -> None:
    """Each kernel that is tuned from here on adds a line to path."""
    tuner, known = _tuner(), _known(path.parent)
    prune, run = tuner.prune_configs, tuner.run
    tried: dict[int, str] = {}

    def pruned(self: Any, kwargs: dict[str, Any]) -> list[Any]:
        configs, key = prune(self, kwargs), _key(self, kwargs)
        if best := known.get((_name(self), key)):
            return [c for c in configs if str(c) in best]
        configs = _drawn(configs, most)
        _compile(self, configs, kwargs, threads)
        tried[id(self)] = key
        return configs

    def ran(self: Any, *args: Any, **kwargs: Any) -> Any:
        before, start = len(self.cache), time.perf_counter()
        result = run(self, *args, **kwargs)
        if len(self.cache) > before and id(self) in tried:
            _note(path, self, tried.pop(id(self)), time.perf_counter() - start)
        return result

    tuner.prune_configs, tuner.run = pruned, ran
    tuner.do_bench = property(lambda self: _least)


def _note(path: Path, tuner: Any, key: str, seconds: float) -> None:
    times = {str(c): t[0] for c, t in tuner.configs_timings.items()}
    order = sorted(times, key=lambda x: times[x])
    best = [c for c in order[:BEST] if times[c] <= WITHIN * times[order[0]]]
    ms = [times[c] for c in best]
    row = {"kernel": _name(tuner), "key": key, "best": best, "ms": ms, "tried": len(times)}
    with path.open("a") as file:
        file.write(json.dumps(row | {"seconds": round(seconds, 1)}) + "\n")


def choose(folder: Path, most: int = BEST) -> None:
    """Kernels are tuned among so many that the survey found best; others among a few."""
    tuner, known = _tuner(), _known(folder, most)
    _note_used(folder / USED)
    prune = tuner.prune_configs

    def pruned(self: Any, kwargs: dict[str, Any]) -> list[Any]:
        configs, name = prune(self, kwargs), _name(self)
        best = known.get((name, _key(self, kwargs))) or known.get((name, ""), set())
        few = [c for c in configs if str(c) in best]
        if not few:
            few = _drawn(configs, UNKNOWN)
            print(f"{name}: {len(few)} of {len(configs)} configurations, drawn", flush=True)
        if len(few) > 1:
            _compile(self, few, kwargs)
        return few

    tuner.prune_configs = pruned
    tuner.do_bench = property(lambda self: _median)


def _one(index: int, folder: Path, most: int, threads: int) -> None:
    """A row's first call, forward and backward, in a process of its own."""
    from linear_peers import ROWS, Provider, inputs, peer_of

    row = ROWS[index]
    peer = peer_of(row)
    assert not isinstance(peer, str), peer
    survey(folder / f"{row.op}_{row.label}.jsonl", most, threads)
    print(row.op, row.label, f"{Provider(peer, inputs(row, False, SHORTER), row).first():.0f} s")


def _all(folder: Path, only: list[str], seconds: float, options: list[str]) -> None:
    from linear_peers import ROWS

    folder.mkdir(parents=True, exist_ok=True)
    first = {row.op: i for i, row in reversed(list(enumerate(ROWS))) if row.peer}
    named = {op: i for op, i in first.items() if any(x in op for x in only)}
    wanted = [i for op, i in named.items() if op not in SAME]

    def run(i: int) -> str:
        call = [sys.executable, __file__, "one", str(folder), "--row", str(i), *options]
        try:
            done = subprocess.run(call, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"{ROWS[i].op} {ROWS[i].label}: over {seconds:.0f} s"
        lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
        return f"{ROWS[i].op} {ROWS[i].label}: {lines[-1] if lines else done.returncode}"[:150]

    with ThreadPoolExecutor(len(wanted) or 1) as pool:
        for done in as_completed([pool.submit(run, i) for i in wanted]):
            print(done.result(), flush=True)


def _note_used(path: Path) -> None:
    """The folder in Triton's cache of each of fla's kernels that is compiled, or found there."""
    from triton import knobs

    def compiled(*, src: Any, metadata_group: dict[str, str], **_: Any) -> None:
        if src.fn.__module__.startswith("fla.") and metadata_group:
            with path.open("a") as file:
                file.write(Path(next(iter(metadata_group.values()))).parent.name + "\n")

    listening: Any = compiled
    knobs.compilation.listener = listening


def _pack(folder: Path) -> None:
    """What choose has used, and what launches it, which is named by its source alone."""
    cached = Path(os.environ["TRITON_CACHE_DIR"])
    used = sorted(set((folder / USED).read_text().split())) if (folder / USED).exists() else []
    with tarfile.open(folder.with_suffix(".tar.xz"), "w:xz", preset=2) as tar:
        for file in sorted(folder.glob("*.jsonl")):
            tar.add(file, f"{folder.name}/{file.name}")
        paths = [p for n in used for k in ("*.cubin", "*.json") for p in (cached / n).glob(k)]
        for path in [*paths, *sorted(cached.glob("*/*.so"))]:
            tar.add(path, f"cache/{path.parent.name}/{path.name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("do", choices=("survey", "one", "pack"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--row", type=int, default=0)
    parser.add_argument("--only", default="", help="operators with one of these in their names")
    parser.add_argument("--seconds", type=float, default=600.0, help="of an operator, at most")
    parser.add_argument("--most", type=int, default=MOST, help="configurations of a kernel")
    parser.add_argument("--threads", type=int, default=THREADS, help="of an operator's compiler")
    args = parser.parse_args()
    if args.do == "survey":
        options = ["--most", str(args.most), "--threads", str(args.threads)]
        _all(args.folder, args.only.split(","), args.seconds, options)
    elif args.do == "one":
        _one(args.row, args.folder, args.most, args.threads)
    else:
        _pack(args.folder)


if __name__ == "__main__":
    main()
