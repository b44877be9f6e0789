"""The sm_90 attention kernels: right, feature by feature, then how fast; each group in a child.

bench/attention_gpu.py --impl sm90 runs this. A child that hangs or dies costs its own lines only,
and says which case it was in. Checks run side by side, times one after another.
"""

import functools
import os
import subprocess
import sys
import time
from typing import Any

import torch
from attention_gpu import LIMITS, PLAIN, SHAPES, bench, both_ways, error, oracle, peer, terms_of
from record import record
from torch.nn.attention import SDPBackend

from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from slipstream.kernels.attention.sm90.tiles import TILES, TUNING_TILES

PEERS = "flash fwd", "flash bwd", "cudnn fwd", "cudnn bwd"
WORK = {"forward": 1.0, "dq": 1.5, "dkv": 2.0}
CHECK_SECONDS, TIMES_SECONDS = 80, 60
SMALL = {**PLAIN, "H": 1, "HKV": 1, "T": 128, "S": 128}
# by name, the simplest first: one run tells which feature is at fault
FEATURES: dict[str, dict[str, Any]] = {
    "one tile": {},
    "full": {"B": 2, "H": 2, "HKV": 2, "T": 1024, "S": 1024},
    "odd": {"B": 2, "H": 2, "HKV": 2, "T": 333, "S": 517},
    "causal": {"B": 2, "H": 3, "HKV": 3, "T": 1001, "S": 1001, "right": 0},
    "heads": {"B": 2, "H": 4, "HKV": 2, "T": 517, "S": 333, "right": 0},
    "many": {"B": 4, "H": 16, "HKV": 4, "T": 1500, "S": 1500, "right": 0},
    "packed": {"H": 4, "HKV": 2, "T": 900, "S": 900, "lengths": (5, 0, 400, 1, 494), "right": 0},
    "window": {"H": 2, "HKV": 1, "T": 700, "S": 900, "left": 200, "right": 0},
    "apart": {"H": 4, "HKV": 2, "T": 900, "S": 700, "lengths": (5, 0, 400, 1, 494),
              "k_lengths": (0, 7, 500, 1, 192), "left": 100, "right": 30},
    "softcap": {"H": 2, "HKV": 2, "T": 400, "S": 400, "right": 0, "softcap": 20.0},
    "used": {"B": 3, "H": 4, "HKV": 2, "T": 200, "S": 450, "used": (450, 9, 0), "right": 0},
}  # fmt: skip
GROUPS = {
    "plain": ("one tile", "full", "odd"),
    "causal": ("causal", "heads", "many"),
    "packed": ("packed", "used"),
    "window": ("window", "apart", "softcap"),
}


def check_group(D: int, group: str, dtype: torch.dtype = torch.bfloat16) -> None:
    from slipstream.kernels.attention.sm90 import launch

    limits = LIMITS["fp16" if dtype == torch.float16 else "bf16"]
    for name in GROUPS[group]:
        print(f"D{D} {name}:", end=" ", flush=True)
        terms, options = terms_of({**SMALL, "D": D, "DV": D, **FEATURES[name]}, dtype)
        do = torch.randn_like(terms.q)
        dlse = torch.randn(terms.q.shape[0], terms.q.shape[2], terms.q.shape[1], device="cuda")
        want = oracle(terms, options, do, dlse)
        start = time.perf_counter()
        o, lse = launch.forward(terms, options)
        torch.cuda.synchronize()
        print(f"o {error(o, want['o']):.1e} lse {error(lse, want['lse']):.1e}", end=" ", flush=True)
        got = {"o": o, "lse": lse, **launch.backward(terms, options, o, lse, do, dlse)}
        torch.cuda.synchronize()
        first = time.perf_counter() - start
        print(" ".join(f"d{n} {error(got[n], want[n]):.1e}" for n in "qkv"), end=" ")
        o, lse = launch.forward(terms, options)
        again = {"o": o, "lse": lse, **launch.backward(terms, options, o, lse, do, dlse)}
        same = all(torch.equal(got[n], again[n]) for n in again)
        fine = all(error(got[n], want[n]) <= limits[n in "qkv"] for n in again)
        print(f"{first:.1f} s", "" if fine and same else "WRONG", "" if same else "DIFFERS", ";")


def times_group(D: int, peers: bool) -> None:
    rows = []
    for shape in SHAPES:
        if shape[3] == D:
            rows.append(timed(*shape, peers))
            print(" ".join(f"{n} {v}" for n, v in rows[-1].items()), flush=True)
    record("attention_hopper", rows)


def timed(B: int, T: int, H: int, D: int, causal: bool, peers: bool) -> dict[str, object]:
    """TFLOP/s: of a whole way, and of the products that dq's and dk and dv's kernels need."""
    from slipstream.kernels.attention.sm90 import launch

    x = [torch.randn(B, T, H, D, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    terms, do = AttentionInputs(*x[:3]), x[3]
    options = AttentionOptions(D**-0.5, -1, 0 if causal else -1)
    flops = 4 * B * H * T * T * D / (2 if causal else 1)
    o, lse = launch.forward(terms, options)
    named: dict[str, Any] = {
        "fwd": (lambda: launch.forward(terms, options), 1.0),
        "bwd": (lambda: launch.backward(terms, options, o, lse, do, None), 2.5),
    }
    if TILES[D].dq:  # in kernels of their own
        dq, dk, dv, base, delta = _room(terms, o, lse, do)
        named |= {
            "dq": (lambda: launch._dq(terms, options, do, dq, base, delta), 1.5),
            "dkv": (lambda: launch._dkv(terms, options, do, dk, dv, base, delta), 2.0),
        }
    row: dict[str, object] = {"shape": f"{B},{T},{H},{D}", "causal": causal}
    row |= dict.fromkeys(("fwd", "bwd", "dq", "dkv", *PEERS), 0)
    for name, (fn, work) in named.items():
        row[name] = round(work * flops / bench(fn) / 1e9)
    for name, backend in (
        ("flash", SDPBackend.FLASH_ATTENTION),
        ("cudnn", SDPBackend.CUDNN_ATTENTION),
    ):
        if peers:
            forward, backward = both_ways(peer(backend, causal), *x[:3])
            row[f"{name} fwd"] = round(flops / forward / 1e9)
            row[f"{name} bwd"] = round(2.5 * flops / backward / 1e9)
    return {**row, "unit": "TFLOP/s"}


def _room(terms: AttentionInputs, o: Any, lse: Any, do: Any) -> tuple:
    from slipstream.kernels.attention.triton import launch as portable

    B, T, H, _ = terms.q.shape
    base, delta = torch.empty(2, B, H, -(-T // 4) * 4, device="cuda")
    portable.launch_row_sums(o, do, lse, None, base, delta)
    return *(torch.empty_like(x) for x in terms[:3]), base, delta


def tried_group(D: int) -> None:
    """Other tiles and grids of each kernel, at the first shape, causal and full; TFLOP/s."""
    from slipstream.kernels.attention.sm90 import launch

    B, T, H = next(s for s in SHAPES if s[3] == D)[:3]
    x = [torch.randn(B, T, H, D, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    terms, do = AttentionInputs(*x[:3]), x[3]
    kept, first = launch.TILES[D], {}
    for part, tile in ((p, t) for p, row in TUNING_TILES[D].items() for t in row):
        launch.TILES[D] = kept._replace(**{part: tile})
        line = []
        for causal in (True, False):
            options = AttentionOptions(D**-0.5, -1, 0 if causal else -1)
            flops = WORK[part] * 4 * B * H * T * T * D / (2 if causal else 1)
            try:
                fn = tried(part, terms, options, do)
                out = [x.clone() for x in fn()]
                same = all(torch.equal(x, y) for x, y in zip(out, fn()))
                off = [error(x, y.double()) for x, y in zip(out, first.setdefault(causal, out))]
                word = f"(off {max(off):.0e}{'' if same else ' DIFFERS'})"
                line.append(f"{flops / bench(fn) / 1e9:.0f} {word}")
            except Exception as e:
                line.append(f"{type(e).__name__} {str(e)[:80]}")
        if tile == TUNING_TILES[D][part][-1]:
            first.clear()
        launch.TILES[D] = kept
        print(f"D{D} {part} {tuple(tile)}: {' / '.join(line)}", flush=True)


def tried(part: str, terms: AttentionInputs, options: AttentionOptions, do: Any) -> Any:
    """What runs a part and returns its results."""
    from slipstream.kernels.attention.sm90 import launch

    if part == "forward":
        return lambda: launch.forward(terms, options)
    o, lse = launch.forward(terms, options)
    dq, dk, dv, base, delta = _room(terms, o, lse, do)
    out = [dq] if part == "dq" else [dk, dv]

    def run() -> list[Any]:
        getattr(launch, f"_{part}")(terms, options, do, *out, base, delta)
        return out

    return run


def warm_group(D: int, causal: bool) -> None:
    """Compiles what tried_group times."""
    from slipstream.kernels.attention.sm90 import launch

    x = [torch.randn(1, 256, 2, D, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    kept, options = launch.TILES[D], AttentionOptions(D**-0.5, -1, 0 if causal else -1)
    for part, tile in ((p, t) for p in TUNING_TILES[D] for t in TUNING_TILES[D][p]):
        launch.TILES[D] = kept._replace(**{part: tile})
        try:
            tried(part, AttentionInputs(*x[:3]), options, x[3])()
            torch.cuda.synchronize()
        except Exception as e:
            print(f"D{D} {part} {tile}: {type(e).__name__} {str(e)[:80]}", flush=True)
        launch.TILES[D] = kept


def host_group() -> None:
    from slipstream.kernels.attention.sm90 import launch

    x = [torch.randn(1, 512, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    terms, options = AttentionInputs(*x[:3]), AttentionOptions(0.1, -1, 0)
    o, lse = launch.forward(terms, options)
    backward = functools.partial(launch.backward, terms, options, o, lse, x[3], None)
    for name, fn in (("forward", lambda: launch.forward(terms, options)), ("backward", backward)):
        fn()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            fn()
        print(f"host {name} {(time.perf_counter() - start) * 5e3:.0f} us a call", flush=True)
        torch.cuda.synchronize()


def child(task: str) -> None:
    torch.manual_seed(0)
    kind, _, rest = task.partition(":")
    if kind == "check":
        D, group, dtype = rest.split(",")
        check_group(int(D), group, getattr(torch, dtype))
    elif kind == "times":
        times_group(int(rest), True)
    elif kind == "ours":
        times_group(int(rest), False)
    elif kind == "tried":
        tried_group(int(rest))
    elif kind == "warm":
        warm_group(int(rest.split(",")[0]), rest.endswith("causal"))
    else:
        host_group()


def _start(task: str) -> subprocess.Popen:
    command = [sys.executable, __file__, task]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )


def _end(task: str, process: subprocess.Popen, limit: float) -> str:
    """What it printed, and in a line why it did not end well."""
    try:
        out, problem = process.communicate(timeout=max(limit, 1.0))
        why = problem.strip().splitlines()[-1][:200] if process.returncode and problem else ""
        if process.returncode:
            why = f" DIED {process.returncode}: {why}"
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
        why = f" HANGS after {limit:.0f} s"
    return f"[{task}] {out.strip().replace(chr(10), ' | ')}{why}"


def main(check: bool, times: bool, peers: bool, tried: bool) -> None:
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    if check:
        tasks = [f"check:{D},{g},bfloat16" for g in GROUPS for D in (128, 64, 256)]
        tasks.append("check:128,causal,float16")
        start = time.perf_counter()
        running = [(task, _start(task)) for task in tasks]
        for task, process in running:
            print(_end(task, process, CHECK_SECONDS - (time.perf_counter() - start)), flush=True)
        print(f"checks {time.perf_counter() - start:.0f} s", flush=True)
    if tried:
        tasks = [f"warm:{D},{n}" for D in (64, 128) for n in ("causal", "full")]
        running = [(task, _start(task)) for task in tasks]
        start = time.perf_counter()
        for task, process in running:
            left = TIMES_SECONDS - (time.perf_counter() - start)
            print(_end(task, process, left), flush=True)
    tasks = ["host:"] * times
    tasks += [f"{'times' if peers else 'ours'}:{D}" for D in (128, 64, 256)] * times
    tasks += [f"tried:{D}" for D in (128, 64)] * tried
    for task in tasks:
        line = _end(task, _start(task), TIMES_SECONDS)
        print(line.replace(" | ", "\n") if line.count(" | ") else line, flush=True)


if __name__ == "__main__":
    child(sys.argv[1])
