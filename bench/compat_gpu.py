"""The sm_90 kernels as other Triton releases compile them, run under the one that is here.

    python bench/compat_gpu.py compile compat 3.8.0 3.9.0    anywhere, with pip
    python bench/compat_gpu.py run compat                    on an H100, without a network

`compile` traces the calls below and compiles their kernels into the folder, by release. `run` makes
each call as it is and, in a process for each release, with its cubins in place of Triton's. A line
each: the worst relative error of results and gradients against float64 at T 300, the greatest
difference among 30 calls at T 4096 (0 unless something races), milliseconds, and what was replaced.
"""

import hashlib
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))
ABOUT = "shared", "num_warps", "global_scratch_size", "profile_scratch_size"
CASES = ("gated_delta_rule", "kda", "attention", "matmul")


def call(case: str, T: int, device: Any, double: bool = False) -> list[Tensor]:
    """The result and, of tensors that are there, the gradients."""
    from slipstream import ops

    B, H, D = (4, 16, 128) if T > 2000 else (2, 4, 128)
    fake = isinstance(torch.empty(0, device=device), torch._subclasses.FakeTensor)
    make = None if fake else torch.Generator(device).manual_seed(0)

    def some(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        x = torch.empty(shape, device=device)
        return (x if fake else x.normal_(generator=make)).to(dtype)

    q, k, v = (some(B, T, H, D) for _ in range(3))
    q, k = (torch.nn.functional.normalize(x, dim=-1) if case != "attention" else x for x in (q, k))
    beta = some(B, T, H, dtype=torch.float32).sigmoid()
    g = -some(B, T, H, *[D] * (case == "kda"), dtype=torch.float32).abs() / 10
    given = [some(T, 2048), some(2048, 1024)] if case == "matmul" else [q, k, v]
    given += [g, beta] if case in ("gated_delta_rule", "kda") else []
    given = [(x.double() if double else x).requires_grad_(not fake) for x in given]
    found = getattr(ops, case if case in ("attention", "matmul") else f"chunk_{case}")
    out = found(*given, impl="reference") if double else found(*given)
    out = out[0] if isinstance(out, tuple) else out
    if fake or case == "matmul":
        return [out.detach()]
    return [out.detach(), *torch.autograd.grad(out, given, some(*out.shape).to(out.dtype))]


def parameters(ptx: str) -> list[str]:
    return re.findall(r"^\s*\.param (.*?) \w+_param_\d+", ptx, re.M)


def compile_all(folder: Path, *releases: str) -> None:
    from slipstream.compiler.compiler_state import cache_dir
    from slipstream.compiler.trace import trace
    from slipstream.compiler.triton_releases import install

    jobs = {}
    for case in CASES:
        for T in (300, 4096):
            made = trace(lambda device, case=case, T=T: call(case, T, device)[0], "sm_90")
            jobs |= {x.key: x for x in made if "sm90" in x.kernel}
    folder.mkdir(exist_ok=True)
    (folder / "jobs.pkl").write_bytes(pickle.dumps(list(jobs.values())))
    for release in releases:
        env = {**os.environ, "PYTHONPATH": str(install(release, cache_dir() / "releases"))}
        command = [sys.executable, __file__, "child", str(folder), release]
        subprocess.run(command, env=env, check=True)


def compile_here(folder: Path, release: str) -> None:
    import triton

    from slipstream.compiler.aot import gpu_target, source_of

    assert triton.__version__ == release
    (folder / release).mkdir(exist_ok=True)
    for job in pickle.loads((folder / "jobs.pkl").read_bytes()):
        options = {"num_warps": job.warps, "num_stages": job.stages, **job.options}
        made: Any = triton.compile(source_of(job), target=gpu_target("sm_90"), options=options)
        about = {x: getattr(made.metadata, x) for x in ABOUT}
        file = folder / release / hashlib.sha256(job.key.encode()).hexdigest()
        file.with_suffix(".cubin").write_bytes(made.asm["cubin"])
        file.with_suffix(".json").write_text(json.dumps([about, parameters(made.asm["ptx"])]))
        print(release, job.name, about, flush=True)


def replacing(folder: Path) -> list[str]:
    """From here on Triton launches what is in the folder, where it has a kernel; their names."""
    from triton.compiler.compiler import CompiledKernel, make_backend

    from slipstream.compiler.aot import job_of
    from slipstream.compiler.triton_hooks import before_compiling

    keys: list[str] = []
    replaced: list[str] = []
    first = CompiledKernel.__init__

    def note(*, fn: Any, compile: Any, **_: Any) -> None:
        keys[:] = [job_of(fn.module, fn.name, compile, "sm_90").key]

    def made(kernel: Any, *args: Any) -> None:
        first(kernel, *args)
        file = folder / hashlib.sha256(keys[0].encode()).hexdigest()
        if not file.with_suffix(".json").exists():
            return
        about, wanted = json.loads(file.with_suffix(".json").read_text())
        mine = [kernel.metadata.num_warps, parameters(kernel.asm["ptx"])]
        assert mine == [about["num_warps"], wanted], kernel.name
        kernel.metadata = kernel.metadata._replace(**about)
        backend: Any = make_backend(kernel.metadata.target)
        kernel.packed_metadata = backend.pack_metadata(kernel.metadata)
        kernel.kernel = file.with_suffix(".cubin").read_bytes()
        replaced.append(kernel.name)

    before_compiling(note)
    setattr(CompiledKernel, "__init__", made)  # noqa: B010
    return replaced


def measure(folder: Path, case: str, release: str) -> None:
    from triton.testing import do_bench

    replaced = replacing(folder / release) if release else []
    device = torch.device("cuda")
    want, got = call(case, 300, device, True), call(case, 300, device)
    errors = [float((x.double() - y).norm() / y.norm()) for x, y in zip(got, want)]
    first, races = call(case, 4096, device), 0.0
    for _ in range(30):
        now = call(case, 4096, device)
        races = max(races, *(float((x - y).abs().max()) for x, y in zip(now, first)))
    time = do_bench(lambda: call(case, 4096, device), warmup=100, rep=500)
    print(f"{release or 'here':6} {case:17} error {max(errors):.2e} races {races:.1e}", end=" ")
    print(f"{time:.3f} ms", len(replaced), *sorted(set(replaced)), flush=True)


def main() -> None:
    what, folder, *rest = sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]
    if what != "run":
        {"compile": compile_all, "child": compile_here, "measure": measure}[what](folder, *rest)
        return
    for case in CASES:
        for release in ("", *sorted(x.name for x in folder.iterdir() if x.is_dir())):
            command = [sys.executable, __file__, "measure", str(folder), case, release]
            subprocess.run(command, check=False)


if __name__ == "__main__":
    main()
