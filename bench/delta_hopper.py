"""The delta rule on sm_90 in Gluon: right at odd sizes, then how fast beside the portable kernels.

python bench/delta_hopper.py            # --check, then --times
python bench/delta_hopper.py --check    # against float64, the simplest first
python bench/delta_hopper.py --times    # each kernel, the portable path
python bench/delta_hopper.py --check "wide"   # of those with this in their names

FlashQLA is in bench/delta_peers.py. Everything runs in a child: where it dies or hangs, that is the
line, and the next child goes on.
"""

import argparse
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from delta_cases import CHECKS, CHUNK, TIMES, Calls, error, inputs, met, only_used, oracle
from record import record

PATIENCE = 90  # seconds without a line, after which a child hangs
COPY_BYTES_PER_MS = 4.28e9  # device copy on an H200
LIMIT = 0.008


def check(name: str) -> str:
    from slipstream.kernels.linear.sm90 import plan

    kind, case = CHECKS[name]
    terms = inputs(case)
    refused = plan.unsupported_reason(terms)
    if refused:
        return f"REFUSED: {refused}"
    calls = Calls(terms, case)
    want = oracle(terms, calls.scale, calls.do, calls.dfinal)
    if calls.segment is not None:
        calls.s_in = met(terms, want["states"], *calls.segment)
        calls.dfinal = met(terms, want["dstates"], *calls.segment, after=True)
    fn = getattr(calls, kind)
    start = time.perf_counter()
    got = only_used(terms, fn())
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    again = only_used(terms, fn())
    same = all(torch.equal(*(y[n].nan_to_num() for y in (got, again))) for n in got)
    found = {n: error(x, want[n]) if n in want else x.item() for n, x in got.items()}
    ok = same and all(e <= LIMIT for e in found.values())
    text = ", ".join(f"{n} {e:.1e}" for n, e in found.items())
    return f"{'ok   ' if ok else 'WRONG'} {text}, first {first:.1f} s" + (
        "" if same else ", NOT THE SAME TWICE"
    )


def bench(fn: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    timed: Any = do_bench
    return timed(fn, warmup=15, rep=60, return_mode="median")


def host(fn: Callable[[], Any]) -> float:
    """Microseconds until a call returns."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(50):
        fn()
    took = (time.perf_counter() - start) * 2e4
    torch.cuda.synchronize()
    return took


def times(name: str, only: str) -> str:
    case = TIMES[name]
    terms = inputs(case)
    calls = Calls(terms, case)
    portable, solved, scale = calls.portable, calls.solved, calls.scale
    from slipstream.kernels.linear.sm90.delta import backend

    like = torch.empty_like(terms.v)

    def portable_back() -> None:
        given = {"s_in": calls.dfinal, "s_out": None}
        portable._walk_back(calls.terms, calls.do, solved, scale, like, calls.states, **given)

    fns: dict[str, Callable[[], Any]] = {
        "p_solve": calls.solve,
        "solve": calls.solve90,
        "walk": calls.o,
        "wide": calls.wide,
        "wide_keep": calls.wide_keep,
        "keep": calls.keep,
        "back": calls.back,
        "forward": calls.forward,
        "p_keep": lambda: portable._walk(
            calls.terms, solved, scale, like, states=calls.states, s_in=calls.s_in
        ),
        "p_back": portable_back,
        "grads": lambda: calls.grads(backend._BACKEND),
        "p_grads": lambda: calls.grads(None),
        "op": lambda: backend.forward(calls.terms, scale),
        "op_back": lambda: backend.backward(calls.terms, calls.do, None, scale),
        "both": calls.both,
        "p_forward": lambda: portable.forward(calls.terms, scale),
        "p_backward": lambda: portable.backward(calls.terms, calls.do, None, scale),
    }
    if (split := backend._segments(calls.terms)) is not None:
        solved90 = calls.solve90()
        fns["meet"] = lambda: backend._state_passing(calls.terms, solved90, split)
    row: dict[str, Any] = {"shape": name}
    for label, fn in fns.items():
        if only and label not in only.split(","):
            continue
        try:
            fn()
            row[label] = round(bench(fn), 4)
        except Exception as e:
            if "CUDA" in str(e):
                raise
            row[label] = f"{type(e).__name__}: {e}"[:60]
    moved = sum(x.numel() * x.element_size() for x in (terms.q, terms.k, terms.v, terms.v))
    row["floor"] = round(moved / COPY_BYTES_PER_MS, 4)
    row["us_a_chunk"] = ""
    if isinstance(row.get("walk"), float):
        longest = case.T if case.lengths is None else max(case.lengths)
        row["us_a_chunk"] = round(row["walk"] * 1e3 / -(-longest // CHUNK), 3)
    row["host_us"] = round(host(fns["forward"]))
    record("delta_hopper", [row])
    return ", ".join(f"{n} {x}" for n, x in row.items() if n != "shape")


def items(options: argparse.Namespace) -> list[tuple[str, Callable[[], str]]]:
    every = not (options.check or options.times)
    found: list[tuple[str, Callable[[], str]]] = []
    if options.check or every:
        found += [(name, lambda name=name: check(name)) for name in CHECKS]
    if options.times or every:
        found += [(name, lambda name=name: times(name, options.only)) for name in TIMES]
    return [(name, fn) for name, fn in found if not options.names or wanted(name, options.names)]


def wanted(name: str, parts: list[str]) -> bool:
    return any(part in name for part in parts)


def child(todo: list[tuple[str, Callable[[], str]]], begin: int) -> None:
    """One line an item, with its number first."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty is NaN then
    for i, (name, fn) in enumerate(todo[begin:], begin):
        if name in TIMES:
            torch.use_deterministic_algorithms(False)
        torch.manual_seed(i)
        try:
            text = fn()
        except Exception as e:
            text = f"FAILED {type(e).__name__}: {' '.join(str(e).split())[:160]}"
            if "CUDA" in str(e):
                print(f"{i}\t{text}", flush=True)
                raise SystemExit(1) from None  # nothing runs in this process any more
        print(f"{i}\t{text}", flush=True)


def lines_of(process: subprocess.Popen) -> "queue.Queue[str | None]":
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


def parent(todo: list[tuple[str, Callable[[], str]]], patience: float) -> bool:
    done, fine, deaths = 0, True, 0
    while done < len(todo) and deaths < 4:
        command = [sys.executable, str(Path(__file__)), *sys.argv[1:], "--child", str(done)]
        environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        lines, last, before = lines_of(process), "", done
        while done < len(todo):
            try:
                line = lines.get(timeout=patience)
            except queue.Empty:
                line, last = None, f"HANGS: no result in {patience:.0f} s"
            if line is None:
                break
            number, tab, text = line.partition("\t")
            if tab and number == str(done):
                print(f"{todo[done][0]:16} {text.rstrip()}", flush=True)
                fine &= not text.startswith(("WRONG", "FAILED", "REFUSED"))
                done += 1
            elif line.strip():
                last = line.strip()
        process.kill()
        process.wait()
        if done < len(todo) and (done == before or "HANGS" in last or process.returncode != 1):
            print(f"{todo[done][0]:16} DIED: {last[:200]}", flush=True)
            deaths = deaths + 1 if done == before else 0
            done, fine = done + 1, False
    return fine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--only", default="", help="of the times, these, with commas")
    for name in ("check", "times"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--child", type=int)
    options = parser.parse_args()
    todo = items(options)
    if options.child is not None:
        child(todo, options.child)
        return
    fine = parent(todo, PATIENCE)
    raise SystemExit(0 if fine else "see above")


if __name__ == "__main__":
    main()
