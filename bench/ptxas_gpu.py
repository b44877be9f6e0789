"""Every operator that multiplies, on this GPU, compiled by one ptxas: does that compiler make them
wrong? Faults of ptxas on sm_90 (compiler/known_bugs.py) show in numbers alone.

    python bench/ptxas_gpu.py                    Triton's own ptxas
    python bench/ptxas_gpu.py /path/to/ptxas     another
    python bench/ptxas_gpu.py --seconds 90       what is not done by then is left out

Forward and backward by each implementation against float64, as `slipstream doctor` does it, in a
process for each operator and dtype: an illegal access ends only that one. A line for each failure,
and a row of CSV for each check in $OUT/ptxas_gpu.csv, with relative errors.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

OPERATORS = (
    "chunk_kda",
    "chunk_rwkv7",
    "chunk_dplr_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_comba",
    "chunk_gla",
    "chunk_simple_gla",
    "chunk_gsa",
    "attention",
    "flash_attn_with_kvcache",
    "matmul",
)


def part(name: str, dtype: str, log: str) -> None:
    import torch

    from slipstream.tools.catalog import Shape, chosen
    from slipstream.tools.doctor_checks import examine_one

    shape = Shape(T=150, K=128, V=128)
    if dtype == "fp32":
        shape = Shape(
            T=150, K=100, V=60, dtype=torch.float32, grouped=True, packed=True, state=True
        )
    with Path(log).open("a") as file:
        for sample in chosen([name]):
            device = torch.device("cuda")
            for check in examine_one(sample, shape, device, ["triton", "sm90"]):
                torch.cuda.synchronize()
                verdict = "agrees" if check.ok else check.error.replace(",", ";") or check.worst
                errors = f"{check.output:.1e},{check.gradient:.1e}"
                row = f"{check.operator},{check.impl},{check.shape},{errors},{verdict}"
                print(row, file=file, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ptxas", nargs="?")
    parser.add_argument("--seconds", type=float, default=1e6)
    parser.add_argument("--part", nargs=3)
    given = parser.parse_args()
    if given.part:
        part(*given.part)
        return
    from slipstream.compiler import toolchain

    own, out = toolchain._bundled(), Path(os.environ.get("OUT", "."))
    assert own is not None
    path, until = given.ptxas or str(own / "ptxas"), time.time() + given.seconds
    env = {**os.environ, toolchain.VARIABLE: path}
    logs, running = [], []
    for name in OPERATORS:
        for dtype in ("fp32", "bf16"):
            logs.append(out / f"ptxas_{name}_{dtype}.txt")
            logs[-1].unlink(missing_ok=True)
            command = [sys.executable, __file__, "--part", name, dtype, str(logs[-1])]
            running.append(subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL))
    for child in running:
        try:
            child.wait(max(until - time.time(), 0.1))
        except subprocess.TimeoutExpired:
            child.kill()
    release, version = toolchain.triton_version(), toolchain.ptxas_version(path)
    said = [y for x in logs if x.exists() for y in x.read_text().splitlines()]
    rows = [f"{release},{version},{x}" for x in said]
    wrong = [x for x in rows if not x.endswith(",agrees")]
    died = [x.stem for x, p in zip(logs, running) if p.wait() not in (0, -9)]
    late = [x.stem for x, p in zip(logs, running) if p.wait() == -9]
    head = "triton,ptxas,operator,impl,shape,output,gradient,verdict"
    (out / "ptxas_gpu.csv").write_text("\n".join([head, *rows]) + "\n")
    print(*wrong, sep="\n")
    print(f"{version}: {len(rows)} checks, {len(wrong)} wrong; died: {died}; out of time: {late}")


if __name__ == "__main__":
    main()
