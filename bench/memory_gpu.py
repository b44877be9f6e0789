"""Peaks of memory of the linear family's operators, beyond inputs, results and gradients.

    python bench/memory_gpu.py              a line an operator
    python bench/memory_gpu.py gla gsa      these
    python bench/memory_gpu.py --peer       fla's beside them, in processes side by side
    python bench/memory_gpu.py --packed     of 4 packed sequences
    python bench/memory_gpu.py --shapes "4x8192 16/64" Q1   the gated delta rule, of delta_peers.py
    ... --shapes ... --peer                 FlashQLA's beside it, whose kernels take minutes anew

T8192, 32 heads, K = V = 128, bf16; B1, or 4 sequences. "forward": without gradients, in percent of
inputs and outputs; "both": of a forward and its backward, in percent of inputs, outputs and all
gradients. Promised: 25, and no more than fla. What fla takes does not depend on its tiles: it is
not tuned.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from delta_peers import SHAPES, inputs
from record import record, table

from slipstream.tools.catalog import Sample, Shape, chosen, flat

os.environ.setdefault("FLA_FLASH_QLA", "0")  # which fla calls where it is installed
SHAPE = Shape(B=1, T=8192, H=32)
PACKED = Shape(B=4, T=8192, H=32, packed=True)
MIB = 2**20
SIDE_BY_SIDE = 8
# Where fla has it, if not in a module of its own.
MODULES = {"iplr_delta_rule": "generalized_delta_rule", "dplr_delta_rule": "generalized_delta_rule"}

Call = Callable[[dict[str, Any]], list[torch.Tensor]]


def size(tensors: list[torch.Tensor]) -> int:
    return sum(x.nbytes for x in tensors)


def measure(call: Call, args: dict[str, Any]) -> dict[str, object]:
    given = [x for x in args.values() if isinstance(x, torch.Tensor)]
    leaves = [x.requires_grad_() for x in given if x.is_floating_point()]
    found: dict[str, object] = {}
    for name in ("forward", "both"):
        for _ in range(3):  # the first compiles, the second is recorded
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with torch.set_grad_enabled(name == "both"):
                outs = call(args)
            results = size(outs)
            if name == "both":
                do = torch.randn_like(outs[0])
                results += do.nbytes
                grads = torch.autograd.grad(outs[0], leaves, do, allow_unused=True)
                results += size([x for x in grads if x is not None])
                del grads, do
            beyond = torch.cuda.max_memory_allocated() - before - results
            del outs
        found[f"{name} MiB"] = round(beyond / MIB)
        found[f"{name} %"] = round(100 * beyond / (size(given) + results), 1)
    return found


def peer(sample: Sample) -> Call:
    """fla's, its kernels with the first of their configurations."""
    from triton.runtime.autotuner import Autotuner

    pruned = Autotuner.prune_configs

    def first(self: Any, kwargs: Any) -> list[Any]:
        return sorted(pruned(self, kwargs), key=lambda x: (x.num_stages, x.num_warps))[:1]

    Autotuner.prune_configs = first
    name = sample.op.removeprefix("chunk_")
    fn = getattr(importlib.import_module(f"fla.ops.{MODULES.get(name, name)}"), sample.op)
    return lambda args: flat(fn(**args, **sample.options, output_final_state=True))


def shape_of(name: str, beside: bool) -> dict[str, object]:
    """The gated delta rule's, and FlashQLA's."""
    from slipstream.ops import chunk_gated_delta_rule

    row: dict[str, object] = {"operator": "gated_delta_rule", "shape": name}
    row |= measure(lambda args: flat(chunk_gated_delta_rule(**args)), inputs(*SHAPES[name]))
    print(json.dumps(row), flush=True)
    if beside:
        import flash_qla  # pyright: ignore[reportMissingImports]

        fn = flash_qla.chunk_gated_delta_rule
        found = measure(lambda args: flat(fn(**args)[0]), inputs(*SHAPES[name]))
        row |= {f"FlashQLA {part}": x for part, x in found.items()}
        print(json.dumps(row), flush=True)
    return row


def row_of(sample: Sample, beside: bool, shape: Shape = SHAPE) -> dict[str, object]:
    args = sample.inputs(shape, torch.device("cuda"))
    row = {"operator": sample.op, **measure(sample.call, args)}
    if shape is not SHAPE:
        heads = args["v"].shape[2] if "v" in args else shape.H  # some samples have more
        row["shape"] = str(replace(shape, H=heads))
    if beside:
        print(json.dumps(row), flush=True)
        try:
            found = measure(peer(sample), args)
        except Exception as e:
            row["fla"] = f"{type(e).__name__}: {e}"[:100].replace("\n", " ")
        else:
            row |= {f"fla {name}": x for name, x in found.items()}
    return row


def apart(name: str, limit: float, options: Sequence[str] = ()) -> dict[str, object]:
    """In a process of its own: what it has printed last when it ends, or is ended."""
    command = [sys.executable, __file__, "--one", *options, name]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, errors = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        child.kill()
        out, errors = child.communicate()
    lines = [x for x in out.splitlines() if x.startswith("{")]
    if not lines:
        return {"operator": name, "fla": errors.strip()[-100:].replace("\n", " ")}
    return json.loads(lines[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("operators", nargs="*")
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--one", action="store_true", help="with the peer, in this process")
    parser.add_argument("--limit", type=float, default=600, help="seconds of a process")
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--shapes", action="store_true", help="of delta_peers.py, not operators")
    given = parser.parse_args()
    if given.shapes and given.one:
        shape_of(given.operators[0], True)
        return
    if given.shapes:
        names = given.operators or list(SHAPES)
        one = partial(apart, limit=given.limit, options=("--shapes",))
        show([one(x) if given.peer else shape_of(x, False) for x in names])
        return
    samples = [x for x in chosen(given.operators) if x.op.startswith("chunk_")]
    if given.one:
        print(json.dumps(row_of(samples[0], True)), flush=True)
        return
    if given.peer:
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            rows = list(pool.map(lambda x: apart(x.op, given.limit), samples))
    else:
        rows = []
        for sample in samples:
            try:
                rows.append(row_of(sample, False, PACKED if given.packed else SHAPE))
            except Exception as e:
                rows.append({"operator": sample.op, "raised": str(e)[:100].replace("\n", " ")})
            print(*rows[-1].values(), flush=True)
            torch.cuda.empty_cache()
    show(rows)


def show(rows: list[dict[str, object]]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    print(table([{name: row.get(name, "") for name in names} for row in rows]))
    print("recorded in", record("memory_gpu", rows))


if __name__ == "__main__":
    main()
